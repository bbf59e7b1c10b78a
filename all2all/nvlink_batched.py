"""The NVLink all-to-all for experts that want the batched format: `(e, T, K)` with counts on the device.

A token still crosses the link once for each rank. The receiving rank lays its rows out expert by expert, and weights and
sums the results before the combine, so the bytes on the wire are those of `nvlink`.
"""

from __future__ import annotations

import dataclasses

import torch

from epserve.errors import Incompatible
from epserve.modular_kernel import (
    DispatchHandle,
    FusedMoEActivationFormat,
    LayerSpec,
    Prepared,
    PrepareFinalizeOptions,
    RankContext,
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
)
from epserve.modular_kernel.quantization import BLOCK

from .nvlink import Flight, NvlinkAll2AllManager, NvlinkPrepareAndFinalize
from .transport.nvlink_heap import dispatches_fp8

COLUMNS = 1024  # columns of a row that one program moves
SCANNED = 256  # rows that an expert's program looks at together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Holds the blocks of one slot. T is R times the cap in every step, so the experts' buffers and variants do not change."""

    x: torch.Tensor
    """`(e, T, K)`, e4m3 where rows travel so."""
    scales: torch.Tensor | None
    """float32 `(e, T, K/128)`."""
    places: torch.Tensor
    """int32 `(R * cap, t)`: the row of each local slot within its expert's block."""
    counts: torch.Tensor
    """int32 `(e,)`."""


class NvlinkBatchedPrepareAndFinalize(NvlinkPrepareAndFinalize):
    """Prepares in the BatchedExperts format. Rows of an expert lie in the order of their source ranks and tokens. An expert
    that a token names twice has its row once. `Prepared.x` is valid until its handle is finalised. The blocks take
    e x R x cap rows, so they suit small caps."""

    capability = dataclasses.replace(
        NvlinkPrepareAndFinalize.capability, activation_format=FusedMoEActivationFormat.BatchedExperts
    )

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions):
        rows, local = spec.layout.num_ranks * options.max_tokens_per_rank, spec.layout.counts[ranks.rank]
        hidden, top_k, device = spec.shape.hidden, spec.shape.top_k, ranks.device
        fp8 = dispatches_fp8(spec, options)

        def blocks() -> Blocks:
            kind = torch.float8_e4m3fn if fp8 else spec.shape.dtype
            scales = torch.empty((local, rows, hidden // BLOCK), device=device) if fp8 else None
            return Blocks(
                x=torch.empty((local, rows, hidden), dtype=kind, device=device),
                scales=scales,
                places=torch.zeros((rows, top_k), dtype=torch.int32, device=device),
                counts=torch.zeros(local, dtype=torch.int32, device=device),
            )

        self.blocks = tuple(blocks() for _ in range(options.batches_in_flight))
        super().__init__(ranks, spec, options)

    def why_not_reduce(self, reduce: TopKWeightAndReduce) -> str | None:
        if isinstance(reduce, TopKWeightAndReduceDelegate | TopKWeightAndReduceNaiveBatched):
            return None
        return f"results must come as (e, T, K) for finalize to weight and add, these have {type(reduce).__name__}"

    def _prepared(self, flight: Flight) -> Prepared:
        from .kernels import batched as kernels

        slot, made, rows = flight.slot, self.blocks[flight.slot.index], flight.num_rows
        local, capacity, hidden = made.x.shape
        top_k, ids = self.spec.shape.top_k, flight.local.ids_Mt
        if local:
            kernels.place[(local,)](ids, made.places, made.counts, rows, K=top_k, BLOCK=SCANNED)
        if local and rows:
            x, blocks = slot.x, made.x
            if x.dtype is torch.float8_e4m3fn:  # only moved
                x, blocks = x.view(torch.uint8), blocks.view(torch.uint8)
            kernels.spread[(rows, -(-hidden // COLUMNS))](
                x, slot.scales, ids, made.places, blocks, made.scales,
                H=hidden, K=top_k, T=capacity, SCALED=made.scales is not None, BLOCK=COLUMNS,
            )  # fmt: skip
        handle = DispatchHandle(self.book, flight)
        return Prepared(x=made.x, scales=made.scales, expert_num_tokens=made.counts, handle=handle)

    def _place(self, flight: Flight, y: torch.Tensor, reduce: TopKWeightAndReduce) -> None:
        """Writes each row's partial sum to the memory that peers read."""
        from .kernels import batched as kernels

        reason, made = self.why_not_reduce(reduce), self.blocks[flight.slot.index]
        if reason:
            raise Incompatible(reason)
        if y.shape != made.x.shape or not y.is_contiguous():
            raise Incompatible(f"nvlink_batched: the experts returned {tuple(y.shape)} for {tuple(made.x.shape)}")
        if y.shape[0] and flight.num_rows:
            kernels.weigh[(flight.num_rows, -(-y.shape[2] // COLUMNS))](
                y, flight.local.ids_Mt, flight.local.weights_Mt, made.places, flight.slot.y,
                H=y.shape[2], K=self.spec.shape.top_k, T=y.shape[1], BLOCK=COLUMNS,
            )  # fmt: skip


class NvlinkBatchedAll2AllManager(NvlinkAll2AllManager):
    prepare_finalize = NvlinkBatchedPrepareAndFinalize

    @classmethod
    def buffer_bytes(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
        """Returns the bytes of the heap of `nvlink` and of the blocks of the rank with the most experts."""
        rows, hidden = spec.layout.num_ranks * options.max_tokens_per_rank, spec.shape.hidden
        fp8 = dispatches_fp8(spec, options)
        row = hidden + hidden // BLOCK * 4 if fp8 else hidden * spec.shape.dtype.itemsize
        blocks = max(spec.layout.counts) * (rows * row + 4) + rows * spec.shape.top_k * 4
        return super().buffer_bytes(spec, options) + options.batches_in_flight * blocks
