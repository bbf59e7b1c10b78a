"""Tiles that kernels can take on a GPU, and which of them are candidates."""

import dataclasses

import pytest
import torch

from epserve.experts.tiles.candidates import MOST, candidates, joined, token_tiles
from epserve.experts.tiles.limits import Limits
from epserve.experts.tiles.memory import BLOCKS, HOPPER, Gpu, programs_at_once
from epserve.experts.tiles.sizes import GemmTiles, Tiles
from epserve.experts.tiles.table import Problem, default_tiles, shipped
from epserve.modular_kernel.measured.buckets import BUCKETS
from tests.experts.tiles import BLOCK, LARGE, PLAIN, SMALL, spec_of

torch.set_num_threads(1)


def test_what_is_shipped_and_what_the_rule_says_can_be_taken():
    for key, cells in shipped("NVIDIA H200").items():
        problem = Problem.parse(key)
        limits = Limits.of(spec_of(problem))
        assert {b: limits.why_not(tiles, problem, b) for b, tiles in cells.items()} == dict.fromkeys(BUCKETS)
    for problem in (*LARGE, SMALL, BLOCK):
        limits = Limits.of(spec_of(problem))
        rule = {b: default_tiles(problem, b, specialised=limits.specialised) for b in BUCKETS}
        assert {b: limits.why_not(tiles, problem, b) for b, tiles in rule.items()} == dict.fromkeys(BUCKETS)


@pytest.mark.parametrize("capability", BLOCKS, ids=str)
def test_the_rule_fits_into_the_shared_memory_of_every_gpu(capability):
    gpu = Gpu.like(capability)
    for problem in (*LARGE, SMALL, BLOCK):
        limits = Limits.of(spec_of(problem), specialised=capability == (9, 0), gpu=gpu)
        for b in BUCKETS:
            tiles = default_tiles(problem, b, specialised=limits.specialised, gpu=gpu)
            assert limits.why_not(tiles, problem, b) is None
            roomy = dataclasses.replace(gpu, shared_memory=1 << 20)
            if gpu.shared_memory >= 163 * 1024:
                assert tiles == default_tiles(problem, b, specialised=limits.specialised, gpu=roomy), (
                    "nothing was wrong"
                )


def test_where_memory_is_short_stages_go_before_columns():
    half, _, block, *_ = LARGE
    workstation, tiny = Gpu.like((12, 0)), Gpu(capability=(0, 0), shared_memory=64 * 1024)
    before, after = default_tiles(half, 4096), default_tiles(half, 4096, gpu=workstation)
    assert (before.gate_up.stages, after.gate_up.stages, after.down.stages) == (4, 3, 3)
    assert after == change(change(before, stages=3), "down", stages=3), "columns and steps stay"
    assert default_tiles(half, 4096, gpu=Gpu.like((8, 9))) == before, "weights are not loaded ahead there"
    assert "bytes of shared memory, 99328 are there" in (
        Limits.of(spec_of(half), specialised=False, gpu=workstation).why_not(before, half, 4096) or "it was taken"
    )
    for problem in (half, block, *LARGE):
        for b in BUCKETS:
            limits = Limits.of(spec_of(problem), specialised=False, gpu=tiny)
            assert limits.why_not(default_tiles(problem, b, gpu=tiny), problem, b) is None
    assert (
        default_tiles(half, 4096, gpu=tiny).gate_up.bk == 64 and default_tiles(half, 4096, gpu=tiny).gate_up.stages == 2
    )


def test_programs_at_once_count_4_bit_weights_as_they_lie():
    def programs(scheme: str, bm: int, gated: bool, gpu: Gpu = HOPPER) -> int:
        c = GemmTiles(bn=64, bk=128, swap=bm <= 32, stages=3)
        return programs_at_once(c, bm, scheme=scheme, gated=gated, gpu=gpu)

    assert [programs("mxfp4", bm, True) for bm in (16, 32, 64)] == [2, 2, 2], "as many as registers allow"
    assert [programs("mxfp4", bm, False) for bm in (16, 32, 64)] == [3, 3, 3]
    assert [programs("none", bm, True) for bm in (16, 32, 64)] == [2, 1, 1], (
        "by memory: as in the tables that were measured"
    )
    assert programs("none", 16, False, Gpu.like((8, 0))) == 2, "operands take registers"


@pytest.mark.parametrize("problem", LARGE, ids=str)
def test_candidates_are_few_and_can_be_taken(problem):
    limits = Limits.of(spec_of(problem))
    for bucket in BUCKETS:
        for bm in token_tiles(problem, bucket, limits):
            options = candidates(problem, bucket, bm, limits)
            assert 4 <= len(options.first) <= MOST and 4 <= len(options.second) <= MOST
            assert len(set(options.first)) == len(options.first) and len(set(options.second)) == len(options.second)
            pairs = [(each, options.second[0]) for each in options.first] + [
                (options.first[0], o) for o in options.second
            ]
            assert not [why for pair in pairs if (why := limits.why_not(joined(bm, *pair), problem, bucket))]
            few = candidates(problem, bucket, bm, limits, most=2)
            assert few.first == options.first[:2] and few.second == options.second[:2], "the likely best first"


def test_kinds_of_candidates_follow_the_gpu():
    def kinds(problem, bucket, **device) -> set[str]:
        limits = Limits.of(spec_of(problem), **device)
        found = [candidates(problem, bucket, bm, limits) for bm in token_tiles(problem, bucket, limits)]
        tiles = [each.tiles for options in found for each in options.first] + [o for each in found for o in each.second]
        names = ("swap", "split", "narrow", "specialised", "wide", "by_expert", "full_grid", "lag", "fly")
        return {name for name in names for each in tiles if getattr(each, name) != getattr(GemmTiles(bn=1, bk=1), name)}

    half, _, block, *_ = LARGE
    assert kinds(half, 1) == {"swap", "split", "full_grid"} and kinds(block, 1) == {"swap", "split", "full_grid", "fly"}
    assert kinds(half, 16384) >= {"specialised", "wide", "by_expert", "lag", "split"}
    assert "narrow" in kinds(block, 16384)
    assert "specialised" not in kinds(half, 16384, specialised=False) | kinds(block, 16384, specialised=False)
    small = Limits.of(spec_of(half), gpu=Gpu.like((8, 9)))
    for each in candidates(half, 16384, 128, small).first:
        assert small.bytes_of(each.tiles, 128, gated=True) < 99 * 1024


def change(tiles: Tiles, gemm: str = "gate_up", **options) -> Tiles:
    return dataclasses.replace(tiles, **{gemm: dataclasses.replace(getattr(tiles, gemm), **options)})


SPECIAL = GemmTiles(bn=128, bk=64, specialised=True)
THICK = Tiles(bm=128, expand=True, gate_up=SPECIAL, down=SPECIAL)


@pytest.mark.parametrize(
    ("problem", "tiles", "reason"),
    [
        (SMALL, dataclasses.replace(PLAIN, bm=48), "bm 48, one of 16, 32"),
        (SMALL, change(PLAIN, bn=96), "gate_up: bn 96, one of"),
        (SMALL, change(PLAIN, "down", bk=512), "down: bk 512, one of"),
        (SMALL, change(PLAIN, warps=3), "warps 3, a power of two"),
        (SMALL, change(PLAIN, stages=0), "stages 0, 1 to 8"),
        (SMALL, change(PLAIN, stages="4"), "stages '4' is not an integer"),
        (SMALL, change(PLAIN, swap=1), "swap 1 is not true or false"),
        (SMALL, change(PLAIN, group=0), "group 0, 1 to"),
        (SMALL, change(PLAIN, fly=True), "fly: not with none"),
        (SMALL, change(PLAIN, "down", wide=True), "down: wide is for a first GEMM"),
        (SMALL, change(PLAIN, wide=True, swap=True), "wide is for a first GEMM without swap"),
        (SMALL, change(PLAIN, split=2, flat=True), "flat with split 2"),
        (SMALL, change(PLAIN, split=3, bk=128), "split 3 leaves a program without one of 2 steps"),
        (SMALL, change(PLAIN, bn=256, bk=256, stages=8), "bytes of shared memory, 230400 are there"),
        (SMALL, dataclasses.replace(THICK, expand=False), "specialised needs expand"),
        (SMALL, dataclasses.replace(THICK, bm=64), "bm 64: specialised takes 128 or 192"),
        (SMALL, dataclasses.replace(THICK, bm=192, down=GemmTiles(bn=128, bk=64)), "bm 192 is for two specialised"),
        (SMALL, change(THICK, lag=4), "lag 4: of specialised GEMMs, below stages 4"),
        (SMALL, change(THICK, narrow=True), "narrow is for specialised GEMMs with block scales"),
        (SMALL, change(THICK, split=2), "a specialised first GEMM takes 1"),
        (dataclasses.replace(SMALL, hidden=384), THICK, "hidden a multiple of 256 and intermediate of 128 (they are 384"),
        (BLOCK, PLAIN, "bk 64: a step is one block"),
        (BLOCK, change(change(PLAIN, bk=128), "down", bk=128), "bn 64: the first GEMM quantises blocks of 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_kernels_cannot_take_is_named(problem, tiles, reason):
    assert reason in (Limits.of(spec_of(problem)).why_not(tiles, problem, 64) or "it was taken")


def test_split_sums_are_for_few_tiles():
    tiles, problem = change(PLAIN, split=2), LARGE[0]
    limits = Limits.of(spec_of(problem))
    assert limits.why_not(tiles, problem, 1024) is None
    assert "has no upper end" in (limits.why_not(tiles, problem, 16384) or "")
    wide = dataclasses.replace(problem, intermediate=1 << 20)
    assert "at most 65536 can be counted" in (Limits.of(spec_of(wide)).why_not(tiles, wide, 1024) or "")
