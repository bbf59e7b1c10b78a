"""What `tune_experts` tries: token tiles of a cell, and for each the tiles of both GEMMs, the likely best first."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.expert_inputs import Shape
from experts.triton_launch import DIRECT_SLOTS
from experts.triton_tiles import SHARED_MEMORY, GemmTiles

SPECIALISED = True
"""Whether the warp-specialised kernels are tried."""


@dataclass(frozen=True, slots=True)
class First:
    """A candidate of the first GEMM, and whether rows are expanded for it."""

    tiles: GemmTiles
    expand: bool = False


def shared_memory(c: GemmTiles, bm: int, *, gated: bool, size: int) -> int:
    """Bytes of the pipeline's buffers: a rough guess that only drops hopeless candidates."""
    return c.stages * c.bk * (bm * (2 if c.fly else size) + (2 if gated else 1) * c.bn * size)


def token_tiles(dtype: str, shape: Shape, m: int) -> list[int]:
    """Around the expected rows per active expert."""
    slots = m * shape.topk
    rows = max(1.0, slots / shape.global_experts)
    if (slots <= DIRECT_SLOTS and m <= 16) or rows <= 4:
        return [16]
    if rows <= 12:
        return [16, 32]
    if rows <= 40:
        return [32, 64]
    if rows <= 80:
        return [64, 128]
    thick = [128] if dtype == "fp8_block" or not SPECIALISED else [128, 192]
    return thick if rows > 300 else [*thick, 64]


def candidates(dtype: str, shape: Shape, m: int, bm: int) -> tuple[list[First], list[GemmTiles]]:
    size = 2 if dtype == "bf16" else 1
    block = dtype == "fp8_block"
    firsts: list[First] = []
    seconds: list[GemmTiles] = []

    def first(*, expand: bool = False, **options) -> None:
        option = First(GemmTiles(**options), expand)
        if option not in firsts and shared_memory(option.tiles, bm, gated=True, size=size) <= SHARED_MEMORY - 2048:
            firsts.append(option)

    def second(**options) -> None:
        option = GemmTiles(**options)
        if option not in seconds and shared_memory(option, bm, gated=False, size=size) <= SHARED_MEMORY - 2048:
            seconds.append(option)

    if bm <= 32:
        _thin(first, second, shape, m, size=size, block=block)
    elif bm == 64:
        _medium(first, second, size=size, block=block)
    else:
        _thick(first, second, bm=bm, size=size, block=block)
    return firsts, seconds


def _thin(first, second, shape: Shape, m: int, *, size: int, block: bool) -> None:
    few = m * shape.topk * shape.local_experts / shape.global_experts <= 16
    for split in (1, 2, 4, 8) if few else (1, 2):
        for fly in [False] if size == 2 else [True, False] if m <= 64 else [False]:
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


def _medium(first, second, *, size: int, block: bool) -> None:
    bk = 64 if size == 2 else 128
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


def _thick(first, second, *, bm: int, size: int, block: bool) -> None:
    """Groups that end with the expert first: they read weights once."""
    bk = 64 if size == 2 else 128
    for group, by_expert in ((16, True), (8, True), (4, True), (8, False)):
        options = {"bk": bk, "group": group, "by_expert": by_expert}
        if SPECIALISED:
            special = {"bn": 128, "specialised": True, "stages": 4 if bm == 128 else 3, **options}
            for narrow in (True, False) if block else (False,):
                for lag in (2, 0, 1) if by_expert and group > 4 else (0,):
                    first(expand=True, narrow=narrow, lag=lag, **special)
                    second(narrow=narrow, lag=lag, **special)
                if group == 16:
                    second(split=2, narrow=narrow, **special)
        if bm == 192 or block:
            continue
        first(bn=128, warps=8, stages=4, wide=True, **options)
        first(bn=64, warps=4, stages=3, wide=True, **options)
        if group == 8:
            first(bn=128, warps=8, stages=4, wide=True, expand=True, flat=True, **options)
        second(bn=256, warps=8, stages=4, flat=True, **options)
        second(bn=128, warps=4, stages=3, **options)
        second(swap=True, bn=128, warps=8, stages=4, **options)
    if block:
        first(bn=128, bk=bk, group=8, warps=8, stages=4)
        second(bn=128, bk=bk, group=8, warps=8, stages=4, flat=True)
