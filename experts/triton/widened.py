"""Thick batches of 4-bit experts: the weights become bf16 in scratch, once a batch, and the bf16 kernels multiply them.

The 4-bit kernels widen a weight once for each tile of tokens, on the ordinary cores, while the tensor cores wait. With more
than some 200 rows an expert it is faster to write the widened weights out, which moves 2.5 bytes a weight through memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from epserve.experts.kernels import widen
from epserve.experts.tiles.table import Problem
from epserve.modular_kernel import ExpertWeights, QuantConfig

from .launch import Carver, cdiv, regions
from .tiled import TiledExperts

ROWS_PER_EXPERT = 192
"""Expected rows of an expert from which on a batch takes wide weights. On an H200 it was 5 % slower at 128 (mxfp4) and 20 to 30 %
faster at 256."""
SHARE = 32
"""One part in so many of the device's memory is the most that scratch may take."""
ROWS, COLUMNS = 8, 512
"""Weights that one program widens."""


class Widened:
    """Computes thick batches for one experts object `owner` of 4-bit weights."""

    def __init__(self, owner: TiledExperts):
        self.owner = owner
        wide = replace(owner.spec, quant=QuantConfig(scheme="none"))
        self.experts = type(owner)(wide)
        run, launcher = owner.launcher(), self.experts.launcher()
        launcher.launch = lambda *args, **constants: run.launch(*args, **constants)  # at warm-up it only compiles
        self._memory = torch.cuda.get_device_properties(run.device).total_memory if run.device.type == "cuda" else None

    def serves(self, num_rows: int, top_k: int, num_experts: int) -> bool:
        """Returns whether a batch of `num_rows` rows is computed with widened weights."""
        problem = replace(Problem.of(self.owner.spec, num_experts), top_k=top_k)
        if problem.rows_per_expert(num_rows) < ROWS_PER_EXPERT:
            return False
        return self._memory is None or self.scratch_bytes(num_experts) <= self._memory // SHARE

    def scratch_bytes(self, num_experts: int) -> int:
        """Returns the bytes of the widened W13. The widened W2 takes its place after the first product."""
        shape = self.owner.spec.shape
        return num_experts * 2 * shape.intermediate * shape.hidden * shape.dtype.itemsize

    def explain(self, served: Mapping[int, int]) -> list[str]:
        """Returns lines for the log. served: local experts -> most rows of a batch."""
        lines, spec = [], self.owner.spec
        for num_experts, most in served.items():
            if self.serves(most, spec.shape.top_k, num_experts):
                first = math.ceil(ROWS_PER_EXPERT * spec.shape.num_experts / spec.shape.top_k)
                mib = self.scratch_bytes(num_experts) >> 20
                lines.append(
                    f"triton: batches of {first} rows and more widen {spec.quant.scheme} weights into {mib} MiB of scratch"
                )
        return lines

    def measure(self, num_rows: int, top_k: int, num_experts: int) -> tuple[int, int]:
        """Returns the bytes of both regions of the workspace."""
        r13, r2 = regions(None)
        self._carve(r13, r2, num_rows, top_k, num_experts)
        return r13.most, r2.most

    def apply(self, output, prepared, *, weights: ExpertWeights, workspace) -> torch.Tensor:
        num_rows, top_k = prepared.routing.ids_Mt.shape
        experts = self.experts
        scratch, b, direct, tiles = self._carve(*regions(workspace), num_rows, top_k, weights.num_experts)
        wide = replace(weights, w13_eNK=scratch[0], w2_eKN=scratch[1], s13=None, s2=None, derived={})
        experts.route(b, prepared, tiles, weights.num_experts, direct)
        self._widen(weights.w13_eNK, weights.s13, wide.w13_eNK)
        experts.first_half(b, prepared, wide, tiles, direct)
        self._widen(weights.w2_eKN, weights.s2, wide.w2_eKN)
        experts.second_half(b, prepared, wide, tiles, direct, output)
        return output

    def _widen(self, packed_eRC: torch.Tensor, scales: torch.Tensor | None, out_eRC: torch.Tensor) -> None:
        run, (e, rows, columns) = self.owner.launcher(), out_eRC.shape
        run.launch(widen.widen, (cdiv(e * rows, ROWS), cdiv(columns, COLUMNS)), packed_eRC, scales, out_eRC, e * rows,
                   K=columns, PACKED=run.numerics.packed, GROUP=run.numerics.group, BN=ROWS, BK=COLUMNS,
                   num_warps=4)  # fmt: skip

    def _carve(self, r13: Carver, r2: Carver, num_rows: int, top_k: int, num_experts: int):
        shape = self.owner.spec.shape
        start = r13.used
        w13 = r13.take((num_experts, 2 * shape.intermediate, shape.hidden), shape.dtype)
        after, r13.used = r13.used, start
        w2 = r13.take((num_experts, shape.hidden, shape.intermediate), shape.dtype)
        r13.used = after
        tiles, _ = self.experts.tiles(num_rows, num_experts, top_k)
        b, direct = self.experts.carve(r13, r2, num_rows, top_k, num_experts, tiles)
        return (w13, w2), b, direct, tiles
