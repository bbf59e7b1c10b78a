"""Tiles that are worth timing: token tiles of a cell, and for each the tiles of both GEMMs, the likely best first.

A cell is one (shape, quantisation, bucket of tokens). The two GEMMs are timed apart, so their candidates add up instead of
multiplying.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .limits import Limits
from .sizes import GemmTiles, Tiles
from .table import Problem

MOST = 64
"""Candidates of one GEMM with one token tile."""
DIRECT_SLOTS = 128
"""Slots up to which tiles come from the ids themselves. `experts/triton/launch.py`, which needs Triton, has the same number."""


@dataclass(frozen=True, slots=True)
class First:
    """Holds a candidate of the first GEMM, and whether rows are expanded for it."""

    tiles: GemmTiles
    expand: bool = False


Option = First | GemmTiles
Add = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Holds the candidates of both GEMMs with one token tile `bm`."""

    bm: int
    first: tuple[First, ...]
    second: tuple[GemmTiles, ...]

    def of(self, which: str) -> tuple[Option, ...]:
        return self.first if which == "gate_up" else self.second


def joined(bm: int, first: Option, second: Option) -> Tiles:
    """Returns a candidate of each GEMM as one configuration."""
    assert isinstance(first, First) and isinstance(second, GemmTiles)
    return Tiles(bm=bm, gate_up=first.tiles, down=second, expand=first.expand)


def token_tiles(problem: Problem, bucket: int, limits: Limits) -> list[int]:
    """Returns token tiles around the expected rows of an active expert."""
    slots = bucket * problem.top_k
    rows = max(1.0, problem.rows_per_expert(bucket))
    if (slots <= DIRECT_SLOTS and bucket <= 16) or rows <= 4:
        return [16]
    if rows <= 12:
        return [16, 32]
    if rows <= 40:
        return [32, 64]
    if limits.packed:
        return [64] if rows <= 300 else [64, 128]
    if rows <= 80:
        return [64, 128]
    thick = [128] if limits.block or not limits.specialised else [128, 192]
    return thick if rows > 300 else [*thick, 64]


def candidates(problem: Problem, bucket: int, bm: int, limits: Limits, *, most: int = MOST) -> Options:
    """Returns at most `most` candidates of each GEMM, and only candidates that the kernels can take."""
    firsts: dict[First, None] = {}
    seconds: dict[GemmTiles, None] = {}
    # These tiles stand for the other GEMM while one is checked. Any tiles fit beside any others, except with 192 rows.
    beside = GemmTiles(bn=128, bk=128 // limits.size, specialised=True, stages=3) if bm == 192 else None

    def first(*, expand: bool = False, **options) -> None:
        c = GemmTiles(**options)
        tiles = Tiles(bm=bm, gate_up=c, down=beside or _plainest(limits), expand=expand)
        if limits.why_not(tiles, problem, bucket) is None:
            firsts[First(c, expand)] = None

    def second(**options) -> None:
        c = GemmTiles(**options)
        tiles = Tiles(bm=bm, gate_up=beside or _plainest(limits), down=c, expand=beside is not None)
        if limits.why_not(tiles, problem, bucket) is None:
            seconds[c] = None

    if limits.packed:
        _widened(first, second, thin=bm <= 32)
    elif bm <= 32:
        _thin(first, second, problem, bucket, limits)
    elif bm == 64:
        _medium(first, second, limits)
    else:
        _thick(first, second, bm, limits)
    return Options(bm=bm, first=tuple(firsts)[:most], second=tuple(seconds)[:most])


def _plainest(limits: Limits) -> GemmTiles:
    return GemmTiles(bn=128 if limits.block else 16, bk=128, stages=1)


def _thin(first: Add, second: Add, problem: Problem, bucket: int, limits: Limits) -> None:
    """Adds candidates for thin tiles. Weights take the wide side of the tensor core, and few tiles split the inner dimension."""
    size, block = limits.size, limits.block
    few = bucket * problem.top_k * problem.local_experts / problem.num_experts <= 16
    for split in (1, 2, 4, 8) if few else (1, 2):
        for fly in [False] if not limits.fly else [True, False] if bucket <= 64 else [False]:
            for bn in [128] if block else [64, 128]:
                for stages in [3, 4] if size * bn >= 256 else [4, 6]:
                    first(swap=True, bn=bn, bk=128, split=split, fly=fly, stages=stages)
                if size == 2:
                    first(swap=True, bn=bn, bk=64, split=split, stages=6)
                if block:
                    first(swap=True, bn=bn, bk=128, split=split, fly=fly, warps=8, stages=4)
                elif size == 1 and not fly:
                    first(swap=True, bn=bn, bk=256, split=split, stages=3)
            first(swap=True, bn=128 if block else 64, bk=128, split=split, fly=fly, full_grid=True, stages=4)
        for bn in (64, 128):
            for stages in (4, 6):
                second(swap=True, bn=bn, bk=128, split=split, stages=stages)
            if size == 2:
                second(swap=True, bn=bn, bk=64, split=split, stages=6)
            elif not block:
                second(swap=True, bn=bn, bk=256, split=split, stages=3)
        second(swap=True, bn=64, bk=128, split=split, full_grid=True, stages=4)


def _medium(first: Add, second: Add, limits: Limits) -> None:
    bk, block = 128 // limits.size, limits.block
    for group, by_expert in ((8, True), (2, False), (8, False)):
        options = {"bk": bk, "group": group, "by_expert": by_expert}
        for swap in (True, False):
            for stages in (4, 3):
                if block or not swap:
                    first(swap=swap, bn=128, warps=8, stages=stages, **options)
                second(swap=swap, bn=128, warps=8 if block else 4, stages=stages, **options)
        if block:
            first(bn=128, warps=8, stages=4, expand=True, **options)
            second(swap=True, bn=128, warps=4, stages=4, **options)
            second(bn=64, warps=4, stages=4, **options)
        else:
            first(bn=64, warps=4, stages=4, **options)
            first(swap=True, bn=64, warps=4, stages=4, **options)
            for expand in (False, True):
                first(bn=64, warps=4, stages=4, wide=True, expand=expand, **options)
                first(bn=128, warps=4, stages=4, wide=True, expand=expand, **options)
            second(bn=256, warps=8, stages=4, **options)
            second(bn=256, warps=4, stages=4, **options)


def _thick(first: Add, second: Add, bm: int, limits: Limits) -> None:
    """Adds candidates for thick tiles, first the groups that end with the expert, which read weights once. The specialised
    kernel is among them where it can run."""
    bk, block = 128 // limits.size, limits.block
    groups = [
        {"bk": bk, "group": group, "by_expert": by_expert}
        for group, by_expert in ((16, True), (8, True), (4, True), (8, False))
    ]
    for narrow in (False, True) if block else (False,):
        for options in groups:
            special = {"bn": 128, "specialised": True, "stages": 4 if bm == 128 else 3, "narrow": narrow, **options}
            for lag in (2, 0, 1) if options["by_expert"] and options["group"] > 4 else (0,):
                first(expand=True, lag=lag, **special)
                second(lag=lag, **special)
            if options["group"] == 16:
                second(split=2, **special)
    for options in groups if bm != 192 and not block else []:
        first(bn=128, warps=8, stages=4, wide=True, **options)
        first(bn=64, warps=4, stages=3, wide=True, **options)
        if options["group"] == 8:
            first(bn=128, warps=8, stages=4, wide=True, expand=True, flat=True, **options)
        second(bn=256, warps=8, stages=4, flat=True, **options)
        second(bn=128, warps=4, stages=3, **options)
        second(swap=True, bn=128, warps=8, stages=4, **options)
    if block:
        first(bn=128, bk=bk, group=8, warps=8, stages=4)
        second(bn=128, bk=bk, group=8, warps=8, stages=4, flat=True)


def _widened(first: Add, second: Add, *, thin: bool) -> None:
    """Adds candidates for 4-bit weights, widened in registers by small tiles. Thin tiles have the weights on the wide side."""
    for group in (1,) if thin else (4, 8):
        for swap in (True,) if thin else (False, True):
            for bn, warps in ((64, 4), (128, 4), (128, 8), (32, 4)):
                for bk, stages in ((128, 3), (64, 4), (128, 2)):
                    for split in (1, 2) if thin else (1,):
                        options = {"bn": bn, "bk": bk, "swap": swap, "warps": warps, "stages": stages, "group": group}
                        first(split=split, **options)
                        second(split=split, **options)
