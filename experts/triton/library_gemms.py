"""Experts whose two grouped products a library computes. The kernels here route, quantise, activate and sum around them.

The steps: count and place the local slots -> copy (and quantise) their rows expert by expert -> product -> act(gate) * up (and
quantise) -> product -> weighted sum. No host sync: buffers have room for every slot, and rows without a slot are never read
back. These experts pay in thick batches, where a product takes longer than the passes around it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from epserve.experts.kernels import routing, separate
from epserve.modular_kernel import (
    ExpertWeights,
    FusedMoEExpertsModular,
    TopKWeightAndReduceNoOP,
    Workspaces,
    WorkspaceShapes,
)

from . import warmup as triton_warmup
from .compiles import COUNTER
from .launch import BLOCK, FLOAT, ROW, TENSOR, Buffers, Carver, Launcher, cdiv, regions

CHUNK = 8
"""Groups of 128 columns that one program of the non-linearity takes, unless a row has a single scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Holds rows that lie expert by expert, with `ends` (e,) int32 or `owner` (rows,) int32 (-1: no expert) if asked for.

    `scales` is float32: (rows,) for a scale a row, (rows, columns/128) for blocks. It is None in the model's dtype.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ends: torch.Tensor | None
    owner: torch.Tensor | None


class LibraryGemmExperts(FusedMoEExpertsModular):
    """Turns `(M, K)` rows and local slots into the weighted and reduced `(M, K)`. Keeps no state of a batch."""

    align = 1
    """The first row of an expert is a multiple of this."""
    fills_out = False
    """Whether the library writes into given memory. Other libraries return memory of their own."""

    def __init__(self, spec):
        super().__init__(spec)
        self._launcher: Launcher | None = None

    @property
    def wants_owner(self) -> bool:
        """Returns whether the library takes the expert of each row. Other libraries take the experts' ends."""
        return False

    @abstractmethod
    def multiply(self, x: Operand, weights: ExpertWeights, *, first: bool, out: torch.Tensor | None) -> torch.Tensor:
        """Returns x w13^T (first) or x w2^T: `(rows, 2N)` or `(rows, K)` in the model's dtype. `fills_out`: it is in `out`."""

    def launcher(self) -> Launcher:
        if self._launcher is None:
            self._launcher = Launcher(self.spec, triton_warmup.current_device(self.spec.device))
        return self._launcher

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        r13, r2 = regions(None)
        self._carve(r13, r2, num_rows, top_k, num_experts)
        return WorkspaceShapes(
            workspace13=(r13.most,), workspace2=(r2.most,), output=(num_rows, self.spec.shape.hidden), dtype=torch.uint8,
            output_dtype=self.spec.shape.dtype,
        )  # fmt: skip

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def apply(self, output, prepared, *, weights, workspace):
        x, ids, topk_weights = prepared.x, prepared.routing.ids_Mt, prepared.routing.weights_Mt
        if x.shape[0] == 0 or weights.num_experts == 0:
            return output.zero_()
        run = self.launcher()
        num_rows, top_k = ids.shape
        b, ends, owner, h, y = self._carve(*regions(workspace), num_rows, top_k, weights.num_experts)
        assert b.counts is not None and b.h is not None, "carved from real memory"
        self._place(b, ids, ends, owner, weights.num_experts)
        run.quantise_tokens(b, x, prepared.scales, ids, weights, expand=True)
        rows = Operand(rows=b.xq, scales=_filled(b.xs, weights.a1, run), ends=ends, owner=owner)  # type: ignore[arg-type]
        h = self.multiply(rows, weights, first=True, out=h)
        self._activate(b, h, weights)
        rows = Operand(rows=b.h, scales=_filled(b.hs, weights.a2, run), ends=ends, owner=owner)
        b.y = self.multiply(rows, weights, first=False, out=y)
        b.num_rows = b.y.shape[0]
        run.reduce(b, ids, topk_weights, output, split=1, in_slots=False)
        return output

    def warm_up(self, weights, max_rows):
        """Runs both sides of every threshold, and sizes between them for libraries that compile by size."""
        COUNTER.install()
        spaces, top_k = Workspaces(weights.w13_eNK.device), self.spec.shape.top_k
        with COUNTER.warming():
            for size in reversed(triton_warmup.sizes_to_warm(max_rows, top_k)):
                for prepared in triton_warmup.example_batches(self.spec, size, weights):
                    workspace = spaces.carve(self.workspace_shapes(size, top_k, weights.num_experts))
                    self.apply(workspace.output, prepared, weights=weights, workspace=workspace)

    def _place(self, b: Buffers, ids: torch.Tensor, ends, owner, num_experts: int) -> None:
        run, slots = self.launcher(), ids.numel()
        assert b.counts is not None
        b.counts.zero_()
        if owner is not None:
            owner.fill_(-1)
        run.launch(routing.count_slots, cdiv(slots, 1024), ids, b.counts[0], slots, BINS=run.bins(num_experts), B=1024)
        run.launch(separate.place_rows, cdiv(slots, 512), ids, b.counts[0], b.counts[1], b.inv, owner, ends, slots,
                   ALIGN=self.align, E=num_experts, BINS=run.bins(num_experts), B=512)  # fmt: skip

    def _activate(self, b: Buffers, h: torch.Tensor, weights: ExpertWeights) -> None:
        run, mode, groups = self.launcher(), self.launcher().numerics.mode, cdiv(self.spec.shape.intermediate, 128)
        assert b.inv is not None
        per = 1 << (groups - 1).bit_length() if mode == ROW else min(CHUNK, 1 << (groups - 1).bit_length())
        slots = b.inv.numel()
        run.launch(separate.activate_rows, (min(slots, 16 * run.num_sms), cdiv(groups, per)), h, b.inv, b.h, b.hs, weights.a2,
                   slots, N=self.spec.shape.intermediate, MODE=mode, B=per, num_warps=4 if per <= 8 else 8 if per <= 32 else 16,
                   **run.act)  # fmt: skip

    def _carve(self, r13: Carver, r2: Carver, num_rows: int, top_k: int, num_experts: int):
        """Carves the buffers: both products in region 13, tables and operands in region 2, the second operand over the first."""
        run, slots, K, N = self.launcher(), num_rows * top_k, self.spec.shape.hidden, self.spec.shape.intermediate
        mode, dtype = run.numerics.mode, self.spec.shape.dtype
        rows = cdiv(slots + min(num_experts, slots) * (self.align - 1), self.align) * self.align
        inv, counts = r2.take((slots,), torch.int32), r2.take((2, run.bins(num_experts)), torch.int32)
        owner = r2.take((rows,), torch.int32) if self.wants_owner else None
        ends = None if self.wants_owner else r2.take((num_experts,), torch.int32)
        operands = []
        for columns in (K, N):
            start = r2.used
            operands.append(r2.take((rows, columns), run.stored))
            shape = (rows, cdiv(columns, 128)) if mode == BLOCK else (rows,)
            operands.append(None if mode == FLOAT else r2.take(shape, torch.float32))
            r2.used = start  # the first product has read its rows before the second's are written
        xq, xs, hq, hs = operands
        results = [r13.take((rows, columns), dtype) if self.fills_out else None for columns in (2 * N, K)]
        b = Buffers(
            num_rows=rows, max_tiles=0, xq=xq, xs=xs, h=hq, hs=hs, hq=hq, part=None, y=None, inv=inv, counts=counts
        )
        return b, ends, owner, *results


def _filled(scales: torch.Tensor | None, static: torch.Tensor | None, run: Launcher) -> torch.Tensor | None:
    """Returns the scales, with a static scale repeated for each row."""
    if scales is not None and run.numerics.mode == TENSOR:
        assert static is not None
        scales.copy_(static.expand(scales.shape[0]))
    return scales
