"""Tiles that are measured on the machine that serves: what is tried and kept, which files are believed, what launches get."""

import dataclasses
import json
from typing import ClassVar

import pytest
import torch

import all2all
from epserve.config import parse_config
from epserve.errors import ConfigError
from epserve.modular_kernel import (
    Backends,
    DispatchHandle,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    HandleBook,
    LayerSpec,
    Prepared,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Registry,
    Routing,
    Tuning,
    UnquantizedFusedMoEMethod,
    Workspaces,
)
from epserve.modular_kernel.selection import MeasuredExperts
from epserve.rank_plan import tuning
from experts import tile_tuning
from experts.grouped_mm import GroupedMMExperts
from experts.tile_cache import Layer, Machine, Times, Tuned, path_of, read_folder, read_named, write
from experts.tile_candidates import MOST, First, Options, candidates, joined, token_tiles
from experts.tile_limits import Limits
from experts.tile_memory import BLOCKS, HOPPER, Gpu, programs_at_once
from experts.tile_search import GAIN, search
from experts.triton_experts import TritonExperts
from experts.triton_tiles import BUCKETS, GemmTiles, Problem, Tiles, default_tiles, shipped
from tests.own_process import run_checks

torch.set_num_threads(1)


def spec_of(problem: Problem, **options) -> LayerSpec:
    shape = ExpertShape(hidden=problem.hidden, intermediate=problem.intermediate, num_experts=problem.num_experts,
                        top_k=problem.top_k, dtype=torch.bfloat16)  # fmt: skip
    layout = ExpertLayout.even(problem.num_experts, problem.num_experts // problem.local_experts)
    quant = QuantConfig(scheme=problem.scheme, **({"group": 128} if problem.scheme == "int4" else {}))
    return LayerSpec(shape=shape, layout=layout, device="cpu", quant=quant, **options)


SMALL = Problem(scheme="none", hidden=256, intermediate=256, local_experts=4, num_experts=4, top_k=2)
BLOCK = dataclasses.replace(SMALL, scheme="fp8_block", hidden=512)
LARGE = [
    Problem(scheme=scheme, hidden=7168, intermediate=2048, local_experts=32, num_experts=256, top_k=8)
    for scheme in ("none", "fp8_tensor", "fp8_block", "fp8_channel", "int8_channel", "int4", "mxfp4", "nvfp4")
]
HERE = Machine(gpu="cpu", driver="1.0", triton="3.6.0", epserve="1")
PLAIN = Tiles(bm=64, gate_up=GemmTiles(bn=64, bk=64), down=GemmTiles(bn=64, bk=64))
OTHER = Tiles(
    bm=16, gate_up=GemmTiles(bn=64, bk=128, swap=True, split=2, stages=3), down=GemmTiles(bn=128, bk=64, swap=True)
)


# What kernels can take


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


# The search


class FakeBench:
    """Times from a table; a clock that runs one second a measurement."""

    def __init__(self, us=None, layers=(100.0, 90.0, None), fails=()):
        self.us, self.layers, self.fails, self.now = us or {}, layers, fails, 0.0
        self.seen: list[tuple] = []
        self.compared: list[tuple[Tiles, Tiles]] = []

    def clock(self) -> float:
        return self.now

    def compile(self, options: Options, deadline: float) -> Options:
        return options

    def time(self, which, bm, option, partner):
        self.now += 1.0
        self.seen.append((which, bm, option, partner))
        later = 50.0 - 1e-3 * len(self.seen)  # a little faster each time, so that what would serve does not win
        return None if option in self.fails else self.us.get((bm, option), later)

    def compare(self, old, new):
        self.compared.append((old, new))
        before, us, wrong = self.layers
        return (before, before, None) if old == new else (before, us, wrong)


FIRSTS = tuple(First(GemmTiles(bn=bn, bk=64)) for bn in (32, 64, 128))
SECONDS = tuple(GemmTiles(bn=bn, bk=128) for bn in (32, 64, 128))
CHOICE = [Options(bm=16, first=FIRSTS, second=SECONDS), Options(bm=32, first=FIRSTS, second=SECONDS)]
CURRENT = joined(16, First(GemmTiles(bn=16, bk=64), expand=True), GemmTiles(bn=16, bk=64))


def test_each_gemm_is_chosen_by_itself_and_the_token_tile_by_both():
    bench = FakeBench({(16, FIRSTS[1]): 10.0, (16, SECONDS[2]): 11.0, (32, FIRSTS[2]): 1.0, (32, SECONDS[0]): 15.0})
    found = search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock)
    assert found is not None and found.tiles == joined(32, FIRSTS[2], SECONDS[0])
    assert found.times == Times(us=90.0, before_us=100.0) and bench.compared == [(CURRENT, found.tiles)]
    assert bench.seen[0][2] == First(CURRENT.gate_up, expand=True), "what would serve is timed first"
    assert found.timed == 4 + 4 + 3 + 3
    partners = {partner for which, bm, _, partner in bench.seen if (which, bm) == ("down", 32)}
    assert partners == {FIRSTS[2]}, "the second GEMM reads the winner's rows"


@pytest.mark.parametrize(
    ("layers", "note"),
    [((100.0, 100.0 * (1 - GAIN / 2), None), ""), ((100.0, 10.0, "results differ by 0.5"), "results differ by 0.5")],
)
def test_what_would_serve_stays(layers, note):
    """Noise does not decide, and what is wrong is not taken however fast."""
    bench = FakeBench({(32, FIRSTS[0]): 1.0}, layers)
    found = search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock)
    assert found is not None and (found.tiles, found.note) == (CURRENT, note)
    assert found.times == Times(us=100.0, before_us=100.0)


def test_candidates_that_fail_are_dropped():
    bench = FakeBench(fails=(FIRSTS[0], SECONDS[0]))
    found = search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock)
    assert found is not None and FIRSTS[0].tiles not in (found.tiles.gate_up, found.tiles.down)
    bench = FakeBench(fails=(*FIRSTS, *SECONDS, First(CURRENT.gate_up, expand=True), CURRENT.down))
    assert search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock) is None and not bench.compared


def test_the_deadline_ends_the_search():
    bench = FakeBench()
    found = search(bench, CURRENT, CHOICE, deadline=6.0, clock=bench.clock)
    assert found is not None and bench.now <= 8.0 and {which for which, *_ in bench.seen} == {"gate_up", "down"}


# Files


def tuned_cells(problem: Problem, tiles: Tiles = OTHER, buckets=(16, 64)) -> Tuned:
    tuned = Tuned()
    for bucket in buckets:
        tuned.add(problem.key, bucket, tiles, "tuned here on 2026-01-02", Times(us=9.0, before_us=10.0))
    return tuned


def saved(folder, problem=SMALL, machine=HERE, **change):
    layer = Layer.of(spec_of(problem), problem.local_experts, every_row=True)
    path = path_of(folder, machine, layer)
    assert write(path, machine, layer, tuned_cells(problem)) is None
    if change:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return path


def read(folder, problem=SMALL, machine=HERE, every_row=True) -> Tuned:
    spec = spec_of(problem)
    return read_folder(folder, machine, spec, Limits.of(spec), every_row=every_row)


def test_a_table_comes_back_as_it_was_written(tmp_path):
    path = saved(tmp_path / "new")
    found = read(tmp_path / "new")
    assert found.table == {SMALL.key: {16: OTHER, 64: OTHER}} and not found.notes
    assert found.times[SMALL.key, 16] == Times(us=9.0, before_us=10.0)
    assert found.origins[SMALL.key, 64].startswith("tuned here on 20")
    assert [each.name for each in (tmp_path / "new").iterdir()] == [path.name] and path.name.startswith(
        "cpu_none_k256_n256_e4of4"
    )
    assert read_named(path, spec_of(SMALL), Limits.of(spec_of(SMALL))).table == found.table
    assert json.loads(path.read_text())["cells"][SMALL.key]["16"] == OTHER.to_json(), "as in the shipped table"


@pytest.mark.parametrize("field", ["gpu", "driver", "triton", "epserve"])
def test_another_machines_table_is_left_aside(tmp_path, field):
    path = saved(tmp_path, machine=dataclasses.replace(HERE, **{field: "another"}))
    found = read(tmp_path)
    assert not found.table and len(found.notes) == 1
    assert (
        str(path) in found.notes[0]
        and f"made with {field} another" in found.notes[0]
        and "epserve tune" in found.notes[0]
    )
    saved(tmp_path)
    assert read(tmp_path).table and not read(tmp_path).notes, "with a new one nobody asks for the old one"


BAD = {
    "truncated": (lambda text: text[:-40], "cannot be read"),
    "not text": (lambda text: "\x00\x00", "cannot be read"),
    "a list": (lambda text: "[]", "it is not a table of tiles"),
    "no cells": (lambda text: text.replace('"cells"', '"cell"'), "it is not a table of tiles"),
    "a layer that is none": (lambda text: text.replace(SMALL.key, "none K1"), "'none K1' is not a layer"),
    "a bucket that is none": (lambda text: text.replace('"16": {\n', '"17": {\n'), "17 is not a bucket of tokens"),
    "a field that is none": (lambda text: text.replace('"split"', '"splits"'), "is not a configuration of tiles"),
    "a number that is none": (lambda text: text.replace('"stages": 3', '"stages": null'), "stages None is not an integer"),
    "tiles that no kernel takes": (lambda text: text.replace('"bn": 64', '"bn": 100'), "gate_up: bn 100, one of"),
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_a_bad_file_is_left_aside_with_one_line_and_an_error_where_it_was_named(tmp_path, why):
    spoil, reason = BAD[why]
    path = saved(tmp_path)
    before = path.read_text()
    path.write_text(spoil(before))
    assert path.read_text() != before
    found = read(tmp_path)
    assert not found.table and len(found.notes) == 1 and reason in found.notes[0] and "\n" not in found.notes[0]
    with pytest.raises(ConfigError, match=r"engine\.experts_tiles: ") as raised:
        read_named(path, spec_of(SMALL), Limits.of(spec_of(SMALL)))
    assert reason in str(raised.value)


def test_what_is_about_another_layer_says_nothing(tmp_path):
    saved(tmp_path, BLOCK)
    saved(tmp_path, dtype="float16")
    assert read(tmp_path, every_row=False) == Tuned() == read(tmp_path) == read(tmp_path / "none")
    assert path_of(tmp_path, HERE, Layer.of(spec_of(SMALL), 4, every_row=True)) != path_of(
        tmp_path, HERE, Layer.of(spec_of(SMALL), 4, every_row=False)
    )
    with pytest.raises(ConfigError, match="has no cell for none with hidden 256 and intermediate 256"):
        read_named(saved(tmp_path, BLOCK), spec_of(SMALL), Limits.of(spec_of(SMALL)))
    with pytest.raises(ConfigError, match="no such file"):
        read_named(tmp_path / "none.json", spec_of(SMALL), Limits.of(spec_of(SMALL)))


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    layer = Layer.of(spec_of(SMALL), 4, every_row=True)
    assert "cannot be written" in (write(tmp_path / "file" / "a.json", HERE, layer, tuned_cells(SMALL)) or "")


# The experts


def weights_of(problem: Problem) -> ExpertWeights:
    e, n, k = problem.local_experts, problem.intermediate, problem.hidden
    generator = torch.Generator().manual_seed(1)
    w13, w2 = (torch.randn(size, generator=generator).bfloat16() / 16 for size in ((e, 2 * n, k), (e, k, n)))
    return ExpertWeights(w13_eNK=w13, w2_eKN=w2)


def experts_for(folder, **options) -> TritonExperts:
    experts = TritonExperts(spec_of(SMALL))
    experts.use(Tuning(folder=folder, **options))
    return experts


def tuned(experts: TritonExperts, bench: FakeBench, max_rows=64) -> bool:
    return tile_tuning.tune(experts, weights_of(SMALL), max_rows, make_bench=lambda _: bench, clock=bench.clock)


def test_tuned_tiles_serve_and_are_there_at_the_next_start(tmp_path):
    split = First(GemmTiles(bn=128, bk=64, swap=True, split=4, stages=6))
    first, bench = experts_for(tmp_path, budget_s=1e6, thorough=True), FakeBench({(16, split): 1.0})
    ready = first.workspace_shapes(64, 2, 4)
    assert first.tiles(16, 4, 2)[1].startswith("the rule") and first.variant() == ""
    assert tuned(first, bench) and len(bench.compared) == 4, "1, 4, 16 and 64 tokens"
    assert not tuned(first, bench) and len(bench.compared) == 4, "once"
    second = experts_for(tmp_path)
    for rows in (1, 16, 64):
        assert (
            second.tiles(rows, 4, 2) == first.tiles(rows, 4, 2)
            and "measured for this shape" in second.tiles(rows, 4, 2)[1]
        )
        assert second.tiles(rows, 4, 2)[0] != default_tiles(SMALL, rows)
    assert second.variant() == first.variant() != ""
    assert first.workspace_shapes(64, 2, 4).nbytes > ready.nbytes, "sums of four parts"
    assert second.workspace_shapes(64, 2, 4) == first.workspace_shapes(64, 2, 4)
    (line,) = second.explain()
    assert line.startswith("triton tiles for 1 (90.0 us, 100.0 before), 4 (") and ": tuned here on 20" in line
    without = TritonExperts(spec_of(SMALL))
    without.use(Tuning())
    without.workspace_shapes(64, 2, 4)
    assert without.explain() == ["triton tiles for 1, 4, 16, 64 tokens: the rule for shapes that were not measured"]


def test_a_start_takes_a_short_look_and_tune_a_thorough_one(tmp_path):
    start, bench = experts_for(tmp_path, budget_s=1e6), FakeBench()
    assert tuned(start, bench)
    assert max(len({o for w, _, o, _ in bench.seen if w == which}) for which in ("gate_up", "down")) <= 4 * (
        tile_tuning.FEW + 1
    )
    again, bench = experts_for(tmp_path, budget_s=1e6), FakeBench()
    assert not tuned(again, bench) and not bench.seen, "the file has it"
    again.workspace_shapes(64, 2, 4)
    short = len(bench.seen)
    thorough, bench = experts_for(tmp_path, budget_s=1e6, thorough=True), FakeBench()
    tuned(thorough, bench)
    assert len(bench.seen) > short and len(bench.compared) == 4
    thorough, bench = experts_for(tmp_path, budget_s=1e6, thorough=True), FakeBench()
    assert not tuned(thorough, bench) and not bench.seen
    anew, bench = experts_for(tmp_path, budget_s=1e6, thorough=True, again=True), FakeBench()
    tuned(anew, bench)
    assert len(bench.compared) == 4


def test_the_budget_ends_the_tuning_and_the_log_says_so(tmp_path):
    experts, bench = experts_for(tmp_path, budget_s=8.0), FakeBench()
    assert tuned(experts, bench, max_rows=16384) and bench.now < 14.0
    assert 1 < len(bench.compared) < 8
    experts.workspace_shapes(16384, 2, 4)
    assert (
        f"tiles: {len(bench.compared)} of 8 token sizes were timed in {bench.now:.0f} s; the others as before"
        in experts.explain()
    )
    sizes = [line for line in experts.explain() if "triton tiles" in line]
    assert any("tuned here on" in line and line.startswith("triton tiles for 1 (") for line in sizes)
    assert any("16384 tokens: " in line and "the rule" in line for line in sizes), (
        "not what was tuned for thinner batches"
    )
    none, bench = experts_for(tmp_path / "b", budget_s=0.0), FakeBench()
    assert not tuned(none, bench) and not bench.seen and not (tmp_path / "b").exists()


def test_a_bench_that_has_no_room_leaves_what_would_serve(tmp_path, caplog):
    class Full(FakeBench):
        def time(self, *_):
            raise torch.OutOfMemoryError("no room")

    experts = experts_for(tmp_path, budget_s=1e6)
    assert not tuned(experts, Full())
    assert "tiles for 1 tokens and more are not timed" in caplog.text and "no room" in caplog.text
    assert experts.tiles(16, 4, 2)[1].startswith("the rule")


def test_a_named_table_is_taken_and_not_added_to(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"cells": {SMALL.key: {"16": OTHER.to_json()}}}))
    experts, bench = TritonExperts(spec_of(SMALL)), FakeBench()
    experts.use(Tuning(file=path, budget_s=100.0))
    assert not tuned(experts, bench) and experts.tiles(16, 4, 2)[0] == OTHER
    experts.workspace_shapes(16, 2, 4)
    assert any(f"16 tokens: from {path}" in line for line in experts.explain())
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"engine\.experts_tiles: .*mine\.json: it cannot be read"):
        TritonExperts(spec_of(SMALL)).use(Tuning(file=path))


def test_launches_get_the_tuned_tiles(tmp_path):
    """Recorded at the launch: every size of a batch that a bucket serves."""
    machine = Machine.here("cpu")
    saved(tmp_path, machine=machine)
    experts, launched = experts_for(tmp_path), {}
    experts.launcher().launch = lambda kernel, programs, *args, **constants: launched.update(
        {kernel.fn.__name__: constants}
    )
    weights, spaces = weights_of(SMALL), Workspaces("cpu")
    for rows in (9, 32, 33, 128):
        launched.clear()
        ids = (torch.arange(2 * rows, dtype=torch.int32) % 4).view(rows, 2)
        routing = Routing(ids_Mt=ids, weights_Mt=torch.full((rows, 2), 0.5))
        prepared = Prepared(
            x=torch.ones((rows, 256)).bfloat16(), routing=routing, handle=DispatchHandle(HandleBook("test"), None)
        )
        workspace = spaces.carve(experts.workspace_shapes(rows, 2, 4))
        experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)
        names = {"BM": 16, "BN": 64, "BK": 128, "SWAP": True, "SPLIT": 2, "num_stages": 3}
        assert {name: launched["gate_up"][name] for name in names} == names
        names = {"BM": 16, "BN": 128, "BK": 64, "SWAP": True, "SPLIT": 1, "num_stages": 4}
        assert {name: launched["down"][name] for name in names} == names
    assert set(launched) >= {"gate_up", "down", "weighted_sum"}


def test_times_of_backends_hold_for_the_tiles_that_they_were_measured_with(tmp_path):
    without = MeasuredExperts(spec_of(SMALL), {"triton": TritonExperts(spec_of(SMALL))})
    saved(tmp_path, machine=Machine.here("cpu"))
    tuned_one = experts_for(tmp_path)
    measured = MeasuredExperts(spec_of(SMALL), {"triton": tuned_one})
    weights = weights_of(SMALL)
    assert measured.key(weights) == f"{without.key(weights)} | triton {tuned_one.variant()}"
    measured.workspace_shapes(64, 2, 4)
    assert any("tuned here on" in line for line in measured.explain())


def test_what_the_configuration_says(tmp_path):
    def of(**engine) -> Tuning:
        return tuning(parse_config({"model": {"path": "."}, "engine": engine}))

    assert of().folder is not None and of().file is None and of().budget_s == 0
    assert of(experts_tiles="shipped") == Tuning()
    assert of(experts_tiles=str(tmp_path / "t.json")) == Tuning(file=tmp_path / "t.json")
    assert of(experts_tiles_timing_s=5, experts_tiles_folder=str(tmp_path)) == Tuning(folder=tmp_path, budget_s=5.0)
    with pytest.raises(ConfigError, match="experts_tiles_timing_s 5 is for experts_tiles auto, which is 'shipped'"):
        of(experts_tiles_timing_s=5, experts_tiles="shipped")


class Recording(GroupedMMExperts):
    """Says what reaches an experts class, and when."""

    seen: ClassVar[list[str]] = []

    def use(self, tuning):
        self.tuning = tuning

    def tune(self, weights, max_rows):
        self.seen.append(f"tune {max_rows}")

    def workspace_shapes(self, *sizes, **more):
        self.seen.append("workspaces")
        return super().workspace_shapes(*sizes, **more)

    def warm_up(self, weights, max_rows):
        self.seen.append(f"warm-up {max_rows}")

    def explain(self):
        return ["tiles for all sizes: recorded"]


@pytest.mark.parametrize("name", ["local", "all_to_all"])
def test_the_configuration_reaches_the_experts_and_tiles_are_chosen_before_memory_is_reserved(name, tmp_path):
    spec = dataclasses.replace(spec_of(SMALL), layout=ExpertLayout.even(4, 1 if name == "local" else 2))
    registry: Registry = Registry("experts")
    registry.register("recording", "for this test", lambda: Recording)
    backends = Backends(all2all=all2all.REGISTRY, experts=registry, tuning=Tuning(folder=tmp_path, budget_s=3.0))
    method = UnquantizedFusedMoEMethod(spec, backends)
    experts = method.make_experts(all2all.REGISTRY.get(name).prepare_finalize)
    assert experts.tuning == Tuning(folder=tmp_path, budget_s=3.0, every_row=name == "local")
    if name == "local":
        kernel = method.init_prepare_finalize(RankContext(), PrepareFinalizeOptions(max_tokens_per_rank=32))
        Recording.seen.clear()
        kernel.warm_up(weights_of(SMALL))
        assert Recording.seen == ["tune 32", "workspaces", "warm-up 32"]
        measured = MeasuredExperts(spec, {"one": kernel.fused_experts})
        measured.tune(weights_of(SMALL), 7)
        assert Recording.seen[-1] == "tune 7" and measured.explain() == ["tiles for all sizes: recorded"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("checks", "env"),
    [("triton_interpreter/check_tiles.py", {"TRITON_INTERPRET": "1"}), ("triton_aot/check_tuned_tiles.py", {})],
)
def test_in_a_process_of_its_own(checks, env):
    run_checks(f"tests/{checks}", timeout=800, **env)
