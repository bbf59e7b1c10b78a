"""NVSHMEM through nvshmem4py, plainly: each rank lays its batch out in the symmetric heap, the others read it there.

This backend uses torch copies between tensors and the library's barrier, and `nvlink` uses kernels of its own. It is the
short path to read, and the reference for the fast one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epserve.errors import ConfigError, HandleError, TooLarge
from epserve.modular_kernel import (
    All2AllManager,
    DispatchHandle,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalizeModular,
    LayerSpec,
    Prepared,
    PrepareFinalizeCapability,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
)

from .transport.deepep_library import check_memory
from .transport.symmetric import NvshmemHeap, Provider, Region, allocate


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Holds the memory that other ranks read: this rank's batch `(cap, ...)`, and partial sums for each rank `(R, cap, K)`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    y: torch.Tensor


class NvshmemPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Prepares in Standard format by an all-gather. Finalize reads partial sums back and adds them in rank order.

    Only one batch may be in flight, because the next batch overwrites the stage. Rows behind a rank's last token have ids
    of -1.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        devices=frozenset({"cuda"}),
        cuda_graph=True,
        reach="nvlink",
        combine_orders=frozenset({"rank"}),
    )
    provider: type[Provider] = NvshmemHeap

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions):
        super().__init__(ranks, spec, options)
        if options.combine_order != "rank":
            raise ConfigError("nvshmem adds partial sums in rank order: set combine_order to 'rank'")
        self.region: Region = allocate(ranks, stage_bytes(spec, options), (self.provider,))
        self.stages = [self._stage(rank) for rank in range(ranks.world_size)]
        self._broken = False

    def _stage(self, rank: int) -> Stage:
        shape, cap, size = self.spec.shape, self.options.max_tokens_per_rank, self.ranks.world_size
        memory, start = self.region.parts[rank], 0

        def take(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            nonlocal start
            length = torch.Size(sizes).numel() * dtype.itemsize
            part = memory[start : start + length].view(dtype).view(sizes)
            start += _round(length)
            return part

        return Stage(
            x=take(shape.dtype, cap, shape.hidden),
            ids=take(torch.int32, cap, shape.top_k),
            weights=take(torch.float32, cap, shape.top_k),
            y=take(shape.dtype, size, cap, shape.hidden),
        )

    def barrier(self) -> None:
        """Orders the current streams: all work before the barrier, on every rank, comes before all work after it."""
        import nvshmem.core as nvshmem

        nvshmem.barrier_all(stream=_TorchStream())

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        cap, num_tokens = self.options.max_tokens_per_rank, x_MK.shape[0]
        if num_tokens > cap:
            raise TooLarge(f"{num_tokens} tokens in one round, max_tokens_per_rank is {cap}")
        if len(self.book):
            raise HandleError("nvshmem: a batch is in flight and not finalised, and this backend holds one")
        mine = self.stages[self.ranks.rank]
        mine.x[:num_tokens] = x_MK
        mine.ids[:num_tokens], mine.ids[num_tokens:] = routing.ids_Mt, -1
        mine.weights[:num_tokens] = routing.weights_Mt
        self.barrier()  # every batch is laid out
        x, ids, weights = (torch.cat([getattr(s, name) for s in self.stages]) for name in ("x", "ids", "weights"))
        first, end = self.spec.layout.offsets[self.ranks.rank : self.ranks.rank + 2]
        here = (ids >= first) & (ids < end)
        local = Routing(ids_Mt=torch.where(here, ids - first, -1), weights_Mt=weights)
        return Prepared(x=x, routing=local, handle=DispatchHandle(self.book, local))

    def finalize(self, handle, y, *, reduce, out_MK):
        local: Routing = handle.take(self.book)
        mine, rank = self.stages[self.ranks.rank], self.ranks.rank
        partial = reduce.apply(y, local, mine.x.new_empty((local.ids_Mt.shape[0], out_MK.shape[1])))
        partial = torch.where(
            (local.ids_Mt >= 0).any(1, keepdim=True), partial, 0.0
        )  # rows without experts are undefined
        mine.y.copy_(partial.view(mine.y.shape))
        self.barrier()  # every partial sum is laid out, and every batch has been read
        total = torch.zeros(out_MK.shape, dtype=torch.float32, device=out_MK.device)
        for stage in self.stages:
            total += stage.y[rank, : out_MK.shape[0]].float()
        self.barrier()  # every partial sum has been read: the next batch may overwrite them
        return out_MK.copy_(total)

    def abandon(self) -> None:
        super().abandon()
        self._broken = True

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.stages.clear()
            self.region.release(not self._broken)


class _TorchStream:
    """Shows torch's current stream by the protocol that the library asks for."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def stage_bytes(spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
    cap, shape = options.max_tokens_per_rank, spec.shape
    row = shape.hidden * shape.dtype.itemsize
    parts = (cap * row, cap * shape.top_k * 4, cap * shape.top_k * 4, spec.layout.num_ranks * cap * row)
    return sum(_round(part) for part in parts)


def _round(size: int) -> int:
    return -(-size // 1024) * 1024


class NvshmemAll2AllManager(All2AllManager):
    """Sets NVSHMEM up for the process group: the unique id travels through it."""

    prepare_finalize = NvshmemPrepareAndFinalize

    @classmethod
    def unavailable(cls) -> str | None:
        return cls.prepare_finalize.provider.unavailable()

    @classmethod
    def buffer_bytes(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
        return stage_bytes(spec, options)

    def make(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> NvshmemPrepareAndFinalize:
        if self.ranks.device.type == "cuda":
            check_memory(self.ranks, self.buffer_bytes(spec, options), "nvshmem")
        return self.prepare_finalize(self.ranks, spec, options)
