"""Limits of the tiles that the Triton kernels can take for one layer on one GPU. They check tables from outside and bound the
candidates of a search.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from epserve.modular_kernel import LayerSpec
from epserve.modular_kernel.measured.buckets import BUCKETS

from .memory import HOPPER, SPARE, Gpu, bytes_of
from .sizes import GemmTiles, Tiles
from .table import PACKED, Problem, all_have_steps

COUNTERS = 1 << 16
"""Tiles whose split sums can be counted at once."""
COLUMNS = (16, 32, 64, 128, 256)  # a TMA box has at most 256 elements a side
LARGEST = {"split": 16, "group": 1 << 20, "stages": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Holds the limits of the kernels for one layer on one GPU. `size`: bytes of an element in the product."""

    scheme: str
    hidden: int
    intermediate: int
    size: int
    fly: bool
    """The first GEMM can quantise its rows: a static scale, or blocks."""
    group: int = 1
    """Number of 4-bit weights that share a scale."""
    specialised: bool = True
    gpu: Gpu = HOPPER

    @classmethod
    def of(cls, spec: LayerSpec, *, specialised: bool = True, gpu: Gpu = HOPPER) -> Limits:
        """Returns the limits for a layer. By default the GPU is the most capable one."""
        scheme, shape = spec.quant.scheme, spec.shape
        act = spec.activation
        plain = act.kind == "silu" and act.gated and not act.limit and not spec.bias
        fits = shape.intermediate % 128 == 0 and shape.hidden % 256 == 0
        static = scheme == "fp8_tensor" and not spec.quant.dynamic
        known = scheme in ("none", "fp8_block") or static
        group = {"int4": spec.quant.group, "mxfp4": 32, "nvfp4": 16}.get(scheme, 1)
        return cls(
            scheme=scheme, hidden=shape.hidden, intermediate=shape.intermediate,
            size=2 if scheme == "none" or scheme in PACKED else 1, fly=static or scheme == "fp8_block", group=group,
            specialised=specialised and plain and fits and known, gpu=gpu,
        )  # fmt: skip

    @property
    def block(self) -> bool:
        return self.scheme == "fp8_block"

    @property
    def packed(self) -> bool:
        return self.scheme in PACKED

    def bytes_of(self, c: GemmTiles, bm: int, *, gated: bool) -> int:
        """Returns about the bytes of shared memory of the pipeline's buffers."""
        return bytes_of(c, bm, scheme=self.scheme, gated=gated, gpu=self.gpu, group=self.group if self.packed else 0)

    def why_not(self, tiles: Tiles, problem: Problem, bucket: int) -> str | None:
        """Returns why these tiles cannot serve batches of this bucket, with field, value and allowed values, or None."""
        for name, c in (("gate_up", tiles.gate_up), ("down", tiles.down)):
            if reason := _wrong_type(c) or self._why_not_gemm(c, tiles, gated=name == "gate_up"):
                return f"{name}: {reason}"
        allowed = (16, 32, 64, 128, 192)
        if not _is_int(tiles.bm) or tiles.bm not in allowed:
            return f"bm {tiles.bm!r}, one of {_list(allowed)}"
        if not isinstance(tiles.expand, bool):
            return f"expand {tiles.expand!r} is not true or false"
        if tiles.bm == 192 and (self.block or not (tiles.gate_up.specialised and tiles.down.specialised)):
            return "bm 192 is for two specialised GEMMs without block scales"
        if tiles.gate_up.specialised and not tiles.expand:
            return "gate_up: specialised needs expand: its rows lie expert by expert"
        return self._why_not_split(tiles, problem, bucket)

    def _why_not_gemm(self, c: GemmTiles, tiles: Tiles, *, gated: bool) -> str | None:
        one = 128 // self.size
        scaled = self.block
        checks = [
            (c.bn in COLUMNS, f"bn {c.bn}, one of {_list(COLUMNS)}"),
            (c.bk in COLUMNS, f"bk {c.bk}, one of {_list(COLUMNS)}"),
            (c.warps in (1, 2, 4, 8, 16), f"warps {c.warps}, a power of two up to 16"),
            *((1 <= getattr(c, field) <= most, f"{field} {getattr(c, field)}, 1 to {most}") for field, most in LARGEST.items()),
            (c.bk % self.group == 0, f"bk {c.bk} is not a multiple of the {self.group} weights of a scale"),
            (not scaled or c.bk == 128, f"bk {c.bk}: a step is one block of 128 scales"),
            (not (scaled and gated) or c.bn == 128, f"bn {c.bn}: the first GEMM quantises blocks of 128 columns"),
            (not scaled or c.bn <= 128, f"bn {c.bn} spans several block scales; at most 128"),
            (not c.fly or (gated and self.fly), f"fly: not with {self.scheme}" if gated else "fly is for the first GEMM"),
            (not c.wide or (gated and not scaled and not c.swap and not self.packed),
             "wide is for a first GEMM without swap, block scales and 4-bit weights"),
            (not c.flat or c.split == 1, f"flat with split {c.split}; split 1"),
            (not c.narrow or (c.specialised and scaled), "narrow is for specialised GEMMs with block scales"),
            (c.lag == 0 or (c.specialised and 0 < c.lag < c.stages),
             f"lag {c.lag}: of specialised GEMMs, below stages {c.stages}"),
            (not c.specialised or self.specialised, "specialised kernels are for compute capability 9.0, silu without bias,"
             f" hidden a multiple of 256 and intermediate of 128 (they are {self.hidden} and {self.intermediate})"),
            (not c.specialised or (c.bn == 128 and c.bk == one), f"bn {c.bn}, bk {c.bk}: specialised takes 128 and {one}"),
            (not c.specialised or tiles.bm in (128, 192), f"bm {tiles.bm}: specialised takes 128 or 192"),
            (not (c.specialised and gated) or c.split == 1, f"split {c.split}: a specialised first GEMM takes 1"),
            (self.gpu.fits(self.bytes_of(c, tiles.bm, gated=gated)),
             f"about {self.bytes_of(c, tiles.bm, gated=gated)} bytes of shared memory,"
             f" {self.gpu.shared_memory - SPARE} are there"),
        ]  # fmt: skip
        return next((text for ok, text in checks if not ok), None)

    def _why_not_split(self, tiles: Tiles, problem: Problem, bucket: int) -> str | None:
        for name, c, inner in (("gate_up", tiles.gate_up, self.hidden), ("down", tiles.down, self.intermediate)):
            steps = -(-inner // c.bk)
            if not all_have_steps(c.split, steps):
                return f"{name}: split {c.split} leaves a program without one of {steps} steps"
        if tiles.gate_up.split == 1:
            return None
        if bucket == BUCKETS[-1]:
            return f"gate_up: split {tiles.gate_up.split} is for few tiles; this bucket has no upper end"
        slots = 2 * bucket * problem.top_k
        blocks = min(slots, problem.local_experts + slots // tiles.bm) * -(-self.intermediate // tiles.gate_up.bn)
        if blocks > COUNTERS:
            return f"gate_up: split {tiles.gate_up.split} with {blocks} blocks of results, at most {COUNTERS} can be counted"
        return None


def _wrong_type(c: GemmTiles) -> str | None:
    for field in dataclasses.fields(c):
        value, flag = getattr(c, field.name), isinstance(field.default, bool)
        if flag and not isinstance(value, bool):
            return f"{field.name} {value!r} is not true or false"
        if not flag and not _is_int(value):
            return f"{field.name} {value!r} is not an integer"
    return None


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list(values) -> str:
    return ", ".join(map(str, values))
