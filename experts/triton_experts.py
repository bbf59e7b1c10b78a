"""Fused Triton experts in Standard format: sort the local slots, two grouped GEMMs, weighted sum. Everything on the device.

Up to 128 slots there is no sort: each program finds its tile in the ids. Above, a counting sort of the local slots only;
slots of other ranks cost nothing. No host sync, no float atomics: graph-safe, and the same bits on every run.
"""

from __future__ import annotations

import dataclasses

import torch

from epserve.modular_kernel import (
    ExpertsCapability,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceNoOP,
    Workspaces,
    WorkspaceShapes,
)

from . import triton_warmup
from .triton_launch import (
    BLOCK,
    DIRECT,
    DIRECT_SLOTS,
    FLOAT,
    GATHER,
    ROW,
    ROWS,
    SMALL_SORT,
    TABLE,
    Buffers,
    Launcher,
    regions,
)
from .triton_tiles import BUCKETS, PACKED, Problem, Tiles, choose, shipped

CAPABILITY = ExpertsCapability(
    activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    quant_schemes=frozenset({"none", "fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", *PACKED}),
    ungated=False,
    hidden_multiple_of=16,  # a TMA row is a multiple of 16 bytes
    intermediate_multiple_of=16,
    block_aligned=True,
    cuda_graph=True,
    min_compute_capability=80,
)


class TritonExperts(FusedMoEExpertsModular):
    """`(M, K)` rows and local slots in, the weighted and reduced `(M, K)` out.

    NOTE: one object serves one batch at a time, since split sums count in a buffer of its own.
    """

    capability = CAPABILITY

    def __init__(self, spec):
        super().__init__(spec)
        self.table = None
        """Problem key -> bucket -> Tiles. None: what is shipped for the device."""
        self._launcher: Launcher | None = None
        self._shapes: dict[tuple, WorkspaceShapes] = {}

    @classmethod
    def unavailable(cls):
        return triton_warmup.unavailable()

    def launcher(self) -> Launcher:
        if self._launcher is None:
            device = triton_warmup.current_device(self.spec.device)
            self._launcher = Launcher(self.spec, device)
            if self.table is None:
                self.table = shipped(triton_warmup.device_name(device))
        return self._launcher

    def tiles(self, num_tokens: int, num_experts: int, top_k: int) -> tuple[Tiles, str]:
        problem = dataclasses.replace(Problem.of(self.spec, num_experts), top_k=top_k)
        specialised = self.launcher().specialises
        return choose(problem, num_tokens, self.table or {}, specialised=specialised)

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        """The most that any batch of up to `num_rows` rows takes: smaller ones may split more."""
        key = (num_rows, top_k, num_experts)
        if key not in self._shapes:
            sizes = {min(size, num_rows) for bucket in BUCKETS for size in (bucket, 2 * bucket)} | {num_rows}
            both = [self._measure(size, top_k, num_experts) for size in sizes]
            self._shapes[key] = WorkspaceShapes(
                workspace13=(max(a for a, _ in both),), workspace2=(max(b for _, b in both),),
                output=(num_rows, self.spec.shape.hidden), dtype=torch.uint8, output_dtype=self.spec.shape.dtype,
            )  # fmt: skip
        return self._shapes[key]

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def apply(self, output, prepared, *, weights, workspace):
        x, ids, topk_weights = prepared.x, prepared.routing.ids_Mt, prepared.routing.weights_Mt
        if x.shape[0] == 0 or weights.num_experts == 0:
            return output.zero_()
        run = self.launcher()
        mode = run.numerics.mode
        tiles, _ = self.tiles(x.shape[0], weights.num_experts, ids.shape[1])
        b, direct = self._buffers(x.shape[0], ids.shape[1], weights.num_experts, tiles, workspace)
        ready = prepared.scales is not None
        assert b.h is not None and b.y is not None, "carved from real memory"
        assert not ready or mode == BLOCK, "rows come quantised in 1x128 blocks only"
        expand = tiles.expand and not direct
        fly = tiles.gate_up.fly and not ready and not expand and mode not in (FLOAT, ROW)
        if not direct:
            run.sort(b, ids, bm=tiles.bm, num_experts=weights.num_experts)
        xs = prepared.scales
        if expand or (mode != FLOAT and not ready and not fly):
            run.quantise_tokens(b, x, xs, ids, weights, expand=expand)
            x, xs = b.xq, b.xs
        source = DIRECT if direct else ROWS if expand else GATHER
        run.gate_up(b, x, xs, weights, tiles, source=source, ids=ids, fly=fly)
        if mode == ROW:
            run.quantise_rows(b.h, b.hq, b.hs, None, ids=ids if direct else None, tiles=b.tiles, num_rows=b.num_rows,
                              max_tiles=b.max_tiles, bm=tiles.bm, columns=self.spec.shape.intermediate)  # fmt: skip
        run.down(b, weights, tiles, b.y, source=DIRECT if direct else ROWS if tiles.bm >= 64 else GATHER, ids=ids)
        run.reduce(b, ids, topk_weights, output, split=tiles.down.split, in_slots=direct)
        return output

    def warm_up(self, weights, max_rows):
        """Compile every variant for up to `max_rows` rows in parallel, then run each bucket once."""
        triton_warmup.warm_up(self, weights, max_rows, Workspaces(weights.w13_eNK.device))

    def _measure(self, num_rows: int, top_k: int, num_experts: int) -> tuple[int, int]:
        r13, r2 = regions(None)
        tiles, _ = self.tiles(num_rows, num_experts, top_k)
        self._carve(r13, r2, num_rows, top_k, num_experts, tiles)
        return r13.most, r2.most

    def _buffers(self, num_rows, top_k, num_experts, tiles, workspace) -> tuple[Buffers, bool]:
        return self._carve(*regions(workspace), num_rows, top_k, num_experts, tiles)

    def _carve(self, r13, r2, num_rows, top_k, num_experts, tiles) -> tuple[Buffers, bool]:
        slots = num_rows * top_k
        direct = slots <= DIRECT_SLOTS and tiles.bm <= 32
        max_tiles = min(slots, num_experts + slots // tiles.bm)
        order = inv = table = counts = None
        if not direct:
            order, inv = r2.take((slots,), torch.int32), r2.take((slots,), torch.int32)
            table = r2.take((TABLE * max_tiles + 1,), torch.int32)
            if slots > SMALL_SORT:
                counts = r2.take((2, Launcher.bins(num_experts)), torch.int32)
        run = self.launcher()
        x_rows = slots if tiles.expand and not direct else num_rows if run.numerics.mode != FLOAT else 0
        b = run.gemm_buffers(r13, r2, num_rows=slots, max_tiles=max_tiles, tiles=tiles, x_rows=x_rows, y=True)
        b.order, b.inv, b.tiles, b.counts = order, inv, table, counts
        return b, direct
