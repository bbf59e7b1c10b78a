"""Tuned tiles on their way to launches: what experts take and say, what the configuration says."""

import dataclasses
import json
from typing import ClassVar

import pytest
import torch

from epserve import all2all
from epserve.config import parse_config
from epserve.errors import ConfigError
from epserve.experts.grouped_mm import GroupedMMExperts
from epserve.experts.tiles.cache import Machine
from epserve.experts.tiles.candidates import First
from epserve.experts.tiles.sizes import GemmTiles
from epserve.experts.tiles.table import Problem, default_tiles
from epserve.experts.triton import tile_tuning
from epserve.experts.triton.experts import TritonExperts
from epserve.modular_kernel import (
    Backends,
    DispatchHandle,
    ExpertLayout,
    ExpertWeights,
    HandleBook,
    Prepared,
    PrepareFinalizeOptions,
    RankContext,
    Registry,
    Routing,
    Tuning,
    UnquantizedFusedMoEMethod,
    Workspaces,
)
from epserve.modular_kernel.measured.selection import MeasuredExperts
from epserve.rank.setup.plan import tuning
from tests.experts.tiles import OTHER, SMALL, FakeBench, saved, spec_of
from tests.support.own_process import run_checks

torch.set_num_threads(1)


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
    [
        ("experts/triton_interpreter/check_tiles.py", {"TRITON_INTERPRET": "1"}),
        ("experts/triton_aot/check_tuned_tiles.py", {}),
    ],
)
def test_in_a_process_of_its_own(checks, env):
    run_checks(f"tests/{checks}", timeout=800, **env)
