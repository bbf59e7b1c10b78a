"""Fused Triton experts in Standard format: sort the local slots, two grouped GEMMs, weighted sum. Everything on the device.

Up to 128 slots there is no sort: each program finds its tile in the ids. Above it, a counting sort takes the local slots only,
so slots of other ranks cost nothing. No host sync, no float atomics: graph-safe, and the same bits on every run.
"""

from __future__ import annotations

import dataclasses

import torch

from epserve.experts.tiles.cache import read_named
from epserve.experts.tiles.limits import Limits
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import PACKED, Problem, Table, choose
from epserve.modular_kernel import (
    ExpertsCapability,
    ExpertWeights,
    FusedMoEActivationFormat,
    Prepared,
    TopKWeightAndReduceNoOP,
    Workspaces,
    WorkspaceShapes,
)
from epserve.modular_kernel.measured.buckets import BUCKETS

from . import tile_tuning
from . import warmup as triton_warmup
from .launch import (
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
    Carver,
    Launcher,
    regions,
)
from .tiled import TiledExperts
from .widened import Widened

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
)


class TritonExperts(TiledExperts):
    """Turns `(M, K)` rows and local slots into the weighted and reduced `(M, K)`.

    NOTE: one object serves one batch at a time, since split sums count in a buffer of its own.
    """

    capability = CAPABILITY
    tunes = True

    def __init__(self, spec):
        super().__init__(spec)
        self._launcher: Launcher | None = None
        self._widened: Widened | None = None
        self._shapes: dict[tuple, WorkspaceShapes] = {}

    @classmethod
    def unavailable(cls):
        return triton_warmup.unavailable()

    def launcher(self) -> Launcher:
        if self._launcher is None:
            device = triton_warmup.current_device(self.spec.device)
            self._launcher = Launcher(self.spec, device)
            if self.table is None:
                self.table = tile_tuning.table_for(self, device)
        return self._launcher

    def widened(self) -> Widened | None:
        """Returns the computation for thick batches of 4-bit weights, or None if they run like thin ones."""
        if self._widened is None and self.spec.quant.scheme in PACKED and self.spec.shape.dtype == torch.bfloat16:
            self._widened = Widened(self)
        return self._widened

    def use(self, tuning):
        self.tuning = tuning
        if tuning.file is not None:  # before anything is loaded; once more when the device is known
            read_named(tuning.file, self.spec, Limits.of(self.spec))

    def tune(self, weights, max_rows):
        """Measures tiles for cells that no table of this machine has, within the budget, and keeps them in its folder."""
        tile_tuning.tune(self, weights, max_rows)

    def take(self, table: Table) -> None:
        self.table = table
        self._shapes.clear()

    def variant(self):
        return tile_tuning.variant(self)

    def explain(self):
        wide = [] if self._widened is None else self._widened.explain(self.served)
        return tile_tuning.explain(self) + wide

    def tiles(self, num_tokens: int, num_experts: int, top_k: int) -> tuple[Tiles, str]:
        problem = dataclasses.replace(Problem.of(self.spec, num_experts), top_k=top_k)
        run = self.launcher()
        return choose(problem, num_tokens, self.table or {}, specialised=run.specialises, gpu=run.gpu)

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        """Returns the largest workspaces of any batch of up to `num_rows` rows, because smaller batches may split more."""
        key = (num_rows, top_k, num_experts)
        self.served[num_experts] = max(num_rows, self.served.get(num_experts, 0))
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
        x, ids = prepared.x, prepared.routing.ids_Mt
        if x.shape[0] == 0 or weights.num_experts == 0:
            return output.zero_()
        if (wide := self.widened()) is not None and wide.serves(x.shape[0], ids.shape[1], weights.num_experts):
            return wide.apply(output, prepared, weights=weights, workspace=workspace)
        tiles, _ = self.tiles(x.shape[0], weights.num_experts, ids.shape[1])
        b, direct = self.carve(*regions(workspace), x.shape[0], ids.shape[1], weights.num_experts, tiles)
        self.route(b, prepared, tiles, weights.num_experts, direct)
        self.first_half(b, prepared, weights, tiles, direct)
        self.second_half(b, prepared, weights, tiles, direct, output)
        return output

    def route(self, b: Buffers, prepared: Prepared, tiles: Tiles, num_experts: int, direct: bool) -> None:
        if not direct:
            assert prepared.routing is not None
            self.launcher().sort(b, prepared.routing.ids_Mt, bm=tiles.bm, num_experts=num_experts)

    def first_half(self, b: Buffers, prepared: Prepared, weights: ExpertWeights, tiles: Tiles, direct: bool) -> None:
        assert prepared.routing is not None
        x, xs, ids, ready = prepared.x, prepared.scales, prepared.routing.ids_Mt, prepared.scales is not None
        run = self.launcher()
        mode = run.numerics.mode
        assert b.h is not None and b.y is not None, "carved from real memory"
        assert not ready or mode == BLOCK, "rows come quantised in 1x128 blocks only"
        expand = tiles.expand and not direct
        fly = tiles.gate_up.fly and not ready and not expand and mode not in (FLOAT, ROW)
        if expand or (mode != FLOAT and not ready and not fly):
            run.quantise_tokens(b, x, xs, ids, weights, expand=expand)
            assert b.xq is not None
            x, xs = b.xq, b.xs
        source = DIRECT if direct else ROWS if expand else GATHER
        run.gate_up(b, x, xs, weights, tiles, source=source, ids=ids, fly=fly)
        if mode == ROW:
            run.quantise_rows(b.h, b.hq, b.hs, None, ids=ids if direct else None, tiles=b.tiles, num_rows=b.num_rows,
                              max_tiles=b.max_tiles, bm=tiles.bm, columns=self.spec.shape.intermediate)  # fmt: skip

    def second_half(
        self, b: Buffers, prepared: Prepared, weights: ExpertWeights, tiles: Tiles, direct: bool, output: torch.Tensor
    ) -> None:
        assert prepared.routing is not None
        run, ids = self.launcher(), prepared.routing.ids_Mt
        assert b.y is not None, "carved from real memory"
        run.down(b, weights, tiles, b.y, source=DIRECT if direct else ROWS if tiles.bm >= 64 else GATHER, ids=ids)
        run.reduce(b, ids, prepared.routing.weights_Mt, output, split=tiles.down.split, in_slots=direct)

    def warm_up(self, weights, max_rows):
        """Compiles every variant for up to `max_rows` rows in parallel, then runs each bucket once."""
        triton_warmup.warm_up(self, weights, max_rows, Workspaces(weights.w13_eNK.device))

    def _measure(self, num_rows: int, top_k: int, num_experts: int) -> tuple[int, int]:
        if (wide := self.widened()) is not None and wide.serves(num_rows, top_k, num_experts):
            return wide.measure(num_rows, top_k, num_experts)
        r13, r2 = regions(None)
        tiles, _ = self.tiles(num_rows, num_experts, top_k)
        self.carve(r13, r2, num_rows, top_k, num_experts, tiles)
        return r13.most, r2.most

    def carve(
        self, r13: Carver, r2: Carver, num_rows: int, top_k: int, num_experts: int, tiles: Tiles
    ) -> tuple[Buffers, bool]:
        """Returns scratch of one batch with these tiles, and whether tiles come from the ids themselves, without a table."""
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
