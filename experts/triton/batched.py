"""Fused Triton experts in the batched format: `(e, T, K)` with counts on the device. Work follows the counts, never the capacity.

The best tile depends on counts that the host does not know. The plan kernel fills the table of thin or of thick tiles, both
sets of GEMMs are launched, and the GEMMs with the empty table end at once.
"""

from __future__ import annotations

import dataclasses

import torch

from epserve.experts.kernels import routing
from epserve.experts.tiles.sizes import GemmTiles, Tiles
from epserve.experts.tiles.table import Problem, choose, shipped
from epserve.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceDelegate,
    Workspaces,
    WorkspaceShapes,
)

from . import warmup as triton_warmup
from .experts import CAPABILITY
from .launch import BLOCK, FLOAT, ROW, ROWS, TABLE, Buffers, Launcher, cdiv, regions, scale_strides

THIN_ROWS = 24
"""Mean rows of an active expert up to which the thin tiles run."""


class BatchedTritonExperts(FusedMoEExpertsModular):
    """Turns `(e, T, K)` into `(e, T, K)`, not weighted. Rows past the count stay undefined and are not read.

    The kernels read scales `(e, T, K/128)` of the rows in place, with any strides and without a copy.

    NOTE: one object serves one batch at a time.
    """

    capability = dataclasses.replace(
        CAPABILITY, activation_formats=frozenset({FusedMoEActivationFormat.BatchedExperts})
    )

    def __init__(self, spec):
        super().__init__(spec)
        self.table: dict | None = None
        self._launcher: Launcher | None = None

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

    def tiles(self, num_experts: int, capacity: int) -> tuple[Tiles, Tiles]:
        """Returns the tiles for thin and for thick batches. Both have no splits and no quantisation inside the GEMMs."""
        run = self.launcher()
        problem = Problem.of(self.spec, num_experts)
        tokens = [
            max(1, round(rows * problem.num_experts / problem.top_k)) for rows in (THIN_ROWS // 2, min(capacity, 256))
        ]
        thin, thick = (
            choose(problem, count, self.table or {}, specialised=run.specialises, gpu=run.gpu)[0] for count in tokens
        )
        return _plain(thin), _plain(thick)

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        r13, r2 = regions(None)
        self._carve(r13, r2, num_experts, capacity)
        return WorkspaceShapes(
            workspace13=(r13.most,), workspace2=(r2.most,), output=(num_experts, capacity, self.spec.shape.hidden),
            dtype=torch.uint8, output_dtype=self.spec.shape.dtype,
        )  # fmt: skip

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate()

    def apply(self, output, prepared, *, weights, workspace):
        num_experts, capacity, K = prepared.x.shape
        if num_experts * capacity == 0:
            return output
        run, ready = self.launcher(), prepared.scales is not None
        mode, columns = run.numerics.mode, self.spec.shape.intermediate
        assert not ready or mode == BLOCK, "rows come quantised in 1x128 blocks only"
        sets = self._carve(*regions(workspace), num_experts, capacity)
        (thin, a), (thick, b) = sets
        run.launch(routing.plan_batched, cdiv(max(a.max_tiles, b.max_tiles), 128), prepared.expert_num_tokens, a.tiles,
                   b.tiles, capacity, a.max_tiles, b.max_tiles, thin.bm, thick.bm, THIN_ROWS, E=num_experts,
                   BINS=run.bins(num_experts), B=128, PDL=run.pdl)  # fmt: skip
        x, xs = prepared.x.view(-1, K), prepared.scales
        strides = scale_strides(xs)
        if mode != FLOAT and not ready:
            for tiles, buffers in sets:
                _quantise(run, buffers, x, buffers.xq, buffers.xs, weights.a1, tiles.bm, K)
            x, xs = a.xq, a.xs
        for tiles, buffers in sets:
            run.gate_up(buffers, x, xs, weights, tiles, source=ROWS, strides=strides)
        if mode == ROW:
            for tiles, buffers in sets:
                _quantise(run, buffers, buffers.h, buffers.hq, buffers.hs, None, tiles.bm, columns)
        for tiles, buffers in sets:
            run.down(buffers, weights, tiles, output, source=ROWS)
        return output

    def warm_up(self, weights, max_rows):
        triton_warmup.warm_up_batched(self, weights, max_rows, Workspaces(weights.w13_eNK.device))

    def _carve(self, r13, r2, num_experts, capacity) -> tuple[tuple[Tiles, Buffers], tuple[Tiles, Buffers]]:
        """Carves both sets of buffers. They share all rows, and only the tables differ."""
        run, rows = self.launcher(), num_experts * capacity
        thin, thick = self.tiles(num_experts, capacity)
        most_thin = min(num_experts * cdiv(capacity, thin.bm), num_experts + num_experts * THIN_ROWS // thin.bm)
        most_thick = num_experts * cdiv(capacity, thick.bm)
        tables = [r2.take((TABLE * count + 1,), torch.int32) for count in (most_thin, most_thick)]
        x_rows = rows if run.numerics.mode != FLOAT else 0
        shared = run.gemm_buffers(r13, r2, num_rows=rows, max_tiles=most_thick, tiles=thick, x_rows=x_rows, y=False)
        a = dataclasses.replace(shared, max_tiles=most_thin, tiles=tables[0])
        return (thin, a), (thick, dataclasses.replace(shared, tiles=tables[1]))


def _plain(tiles: Tiles) -> Tiles:
    def one(part: GemmTiles) -> GemmTiles:
        return dataclasses.replace(part, split=1, fly=False, group=max(part.group, 4))

    return dataclasses.replace(tiles, gate_up=one(tiles.gate_up), down=one(tiles.down))


def _quantise(run: Launcher, b: Buffers, rows, xq, xs, scale, bm: int, columns: int) -> None:
    run.quantise_rows(rows, xq, xs, scale, tiles=b.tiles, num_rows=b.num_rows, max_tiles=b.max_tiles, bm=bm,
                      columns=columns)  # fmt: skip
