"""Which all-to-all serves a step: the agreed table, its limits, and a rank that holds several kernels over the same weights."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epserve.config import parse_config
from epserve.errors import ConfigError, Incompatible
from epserve.models import open_checkpoint
from epserve.models.demo import reference_block
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.measured.crossover import Crossover, agree, check_budget, slowest
from epserve.rank.setup import backends as backend_choice
from epserve.rank.setup import plan as rank_plan
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from tests.support.cases import CASES
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks

CANDIDATES = ["all_to_all", "allgather_reducescatter", "all_to_all_batched"]
CAP = 4  # of the batched candidate


def table() -> Crossover:
    times = {1: {"low": 1e-5, "high": 3e-5}, 16: {"low": 4e-5, "high": 4e-5}, 64: {"low": 9e-5, "high": 5e-5}}
    return Crossover(caps={"high": None, "low": 40}, times=times)


@pytest.mark.parametrize(
    ("counts", "chosen", "why"),
    [
        ((1, 0), "low", "fastest in the bucket of the busiest rank"),
        ((0, 0), "low", "nobody has a token"),
        ((0, 16), "high", "a tie goes to the first candidate"),
        ((40, 0), "high", "bucket 64"),
        ((41, 2), "high", "above the other one's cap"),
        ((100_000, 2), "high", "far above what was measured"),
    ],
)
def test_the_busiest_rank_decides(counts, chosen, why):
    assert table().choice(counts) == chosen, why
    assert table().choice(tuple(reversed(counts))) == chosen, "ranks must agree whatever their own share is"


def test_a_step_is_as_slow_as_its_slowest_rank():
    ranks = [{4: {"a": 1.0, "b": 2.0}}, {4: {"a": 3.0, "b": 2.5}}]
    assert slowest(ranks) == {4: {"a": 3.0, "b": 2.5}}
    agreed = Crossover(caps={"a": None, "b": None}, times=slowest(ranks))
    assert agreed.choice((4, 4)) == "b"
    assert agreed.explain() == ["about 4 tokens on the busiest rank: b (b 2500000 us, a 3000000 us)"]


def test_explanations_name_caps_and_times():
    lines = table().explain()
    assert lines[0] == "about 1 tokens on the busiest rank: low (low 10 us, high 30 us)"
    assert lines[-1] == "low never above 40 tokens a rank: its blocks hold no more"


def test_somebody_must_take_any_size():
    with pytest.raises(ConfigError, match="batches of any size"):
        Crossover(caps={"low": 40})


def test_the_budget_names_what_was_asked_and_the_limit():
    asked = {"a": 3 << 20, "b": 5 << 20, "workspaces": 1 << 20}
    check_budget(asked, 0, setting="x")
    check_budget(asked, 9 << 20, setting="x")
    with pytest.raises(
        ConfigError, match=r"x: .* ask for 9 MiB .*\(a 3 MiB, b 5 MiB, workspaces 1 MiB\), the limit is 8 MiB"
    ):
        check_budget(asked, 8 << 20, setting="x")


def newcomer(ranks: RankContext) -> Crossover | None:
    """Rank 1 has lost its table; rank 0's counts for both, unless it is for other candidates."""
    mine = table() if ranks.rank == 0 else None
    assert agree(ranks, mine, {"high": None, "other": 40}) is None
    return agree(ranks, mine, table().caps)


def test_a_newcomer_takes_the_survivors_table():
    assert run_ranks(newcomer, 2) == [table(), table()]


# --- on a rank ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("crossover") / "deepseek", dtype=torch.float32)


def config_of(path, **engine):
    engine = {
        "device": "cpu",
        "all2all": "measured",
        "all2all_candidates": CANDIDATES,
        "max_tokens_per_rank": 16,
        **engine,
    }
    return parse_config({"model": {"path": str(path)}, "engine": {"low_latency_max_tokens": CAP, **engine}})


def tokens(count: int) -> torch.Tensor:
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(count))


def serve(ranks: RankContext, path, sizes, changes) -> list[tuple[str, torch.Tensor]]:
    """Steps of several sizes: the path that each took on this rank, and this rank's rows."""
    worker = Worker(config_of(path, ranks=ranks.world_size, **changes), ranks)
    worker.load()
    worker.warm_up()
    agreed = worker.kernels.first.crossover
    assert agreed is not None and agreed.caps == {
        "all_to_all": None,
        "allgather_reducescatter": None,
        "all_to_all_batched": CAP,
    }
    assert set(agreed.times) == {1, 4, 16}, "measured up to the cap"
    assert all(seconds > 0 for times in agreed.times.values() for seconds in times.values())
    assert "all_to_all_batched" not in agreed.times[16]
    # From here on times of our own: the two sizes below must take different ways, on every rank.
    times = {1: {"all_to_all_batched": 1.0, "all_to_all": 2.0}, 4: {"allgather_reducescatter": 1.0, "all_to_all": 2.0}}
    worker.kernels.first.crossover = Crossover(caps=agreed.caps, times=times)
    results = []
    for step, counts in enumerate(sizes):
        first = sum(counts[: ranks.rank])
        x = tokens(sum(counts))[first : first + counts[ranks.rank]]
        plan = StepPlan(step=step, layer=LAYER, mode="block", tokens_per_rank=tuple(counts))
        y = worker.step(plan, x, None, None)
        results.append((worker.kernels.first.crossover.choice(counts), y))
    before = results[-1][1]
    worker.regroup(ranks)
    worker.warm_up()
    assert worker.kernels.first.crossover == Crossover(caps=agreed.caps, times=times), "kept over a regroup"
    assert torch.equal(worker.step(plan, x, None, None), before)
    assert any("tokens on the busiest rank" in line for line in worker.explain())
    worker.close()
    return results


@pytest.mark.parametrize("changes", [{}, {"combine_order": "slot"}, {"batches_in_flight": 2, "overlap_min_tokens": 2}])
def test_steps_take_different_ways_to_the_same_sums(checkpoint, changes):
    sizes = [(1, 1), (1, 0), (3, 4), (40, 2)]
    ranks = run_ranks(serve, 2, checkpoint, sizes, changes)
    for index, counts in enumerate(sizes):
        ways = {results[index][0] for results in ranks}
        assert len(ways) == 1, "ranks took different ways"
        assert ways == {["all_to_all_batched", "all_to_all_batched", "allgather_reducescatter", "all_to_all"][index]}
        got = torch.cat([results[index][1] for results in ranks])
        want = reference_block(checkpoint, LAYER)(tokens(sum(counts)))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def plan_for(checkpoint, **engine) -> rank_plan.RankPlan:
    info = open_checkpoint(checkpoint).info
    return rank_plan.plan_ranks(config_of(checkpoint, **engine), info, device="cpu")


def test_candidates_share_workspaces_and_the_capped_one_comes_last(checkpoint):
    plan = plan_for(checkpoint, ranks=2, all2all_candidates=["all_to_all_batched", "all_to_all"])
    assert [(path.chosen.all2all, path.cap, path.options.max_tokens_per_rank) for path in plan.paths] == [
        ("all_to_all", None, 16),
        ("all_to_all_batched", CAP, CAP),
    ]
    assert plan.chosen.names == ("all_to_all/all_to_all_batched", "grouped_mm/batched_loop")
    asked = rank_plan.memory_asked(plan.paths, 0)
    each = [rank_plan.workspaces(path, 0).nbytes for path in plan.paths]
    assert asked == {"all_to_all": 0, "all_to_all_batched": 0, "workspaces": max(each)} and min(each) > 0


def test_unnamed_candidates_are_those_that_can_run(checkpoint):
    assert plan_for(checkpoint, ranks=2, all2all_candidates=[]).chosen.names[0] == "all_to_all/allgather_reducescatter"
    alone = plan_for(checkpoint, ranks=1, all2all_candidates=[])
    assert [path.chosen.all2all for path in alone.paths] == ["local"]


def test_another_number_of_ranks_drops_candidates_that_do_not_know_it(checkpoint):
    config = config_of(checkpoint, ranks=2, all2all_candidates=["all_to_all", "deepep_ht", "nvlink"])
    for counts, kept in (((4, 4), ("all_to_all", "deepep_ht", "nvlink")), ((3, 3, 2), ("all_to_all", "nvlink"))):
        engine = rank_plan.resized(config, counts, 8).engine
        assert (engine.ranks, engine.all2all, engine.all2all_candidates) == (len(counts), "measured", kept)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"all2all_candidates": ["all_to_al"]}, ConfigError, "did you mean 'all_to_all'"),
        ({"all2all_candidates": ["nvlink", "all_to_all"]}, Incompatible, "nvlink"),
        ({"all2all_candidates": ["all_to_all_batched"]}, ConfigError, "all have a cap on a step's tokens"),
        ({"all2all_budget_mib": 1, "max_tokens_per_rank": 8192}, ConfigError, "all2all_budget_mib.*the limit is 1 MiB"),
        ({"all2all": "auto"}, ConfigError, "all2all_candidates are for all2all measured"),
        ({"cuda_graph_tokens": [8, 1]}, ConfigError, "ascending"),
    ],
)
def test_wrong_candidates_are_refused_before_weights_are_read(checkpoint, changes, error, text):
    with pytest.raises(error, match=text):
        Worker(config_of(checkpoint, **{"ranks": 2, **changes}), RankContext(world_size=2))


def test_the_low_latency_cap_is_checked_against_the_library():
    chosen = backend_choice.Chosen(all2all="deepep_ll", experts="triton_batched")
    options = rank_plan.PrepareFinalizeOptions(max_tokens_per_rank=4096)
    with pytest.raises(ConfigError, match="low_latency_max_tokens 600: deepep_ll takes at most 508"):
        rank_plan._candidate(chosen, CASES["bf16"].spec(2), options, 600)
    spec = CASES["bf16"].spec(2)
    shared = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, slices=2))
    text = r"max_tokens_per_rank 400: deepep_ll .* 508 tokens a rank of all 2 ranks that share"
    with pytest.raises(ConfigError, match=text):
        rank_plan._check_cap(chosen, shared, 400, "max_tokens_per_rank")
    path = rank_plan._candidate(chosen, CASES["bf16"].spec(2), options, 128)
    assert (path.cap, path.options) == (128, dataclasses.replace(options, max_tokens_per_rank=128))


@pytest.mark.slow
def test_the_benchmark_of_steps_compares_bits_and_writes_every_way(tmp_path):
    arguments = "--cpu --hidden 64 --intermediate 32 --experts 8 --top-k 2 --tokens 1 4 --shared --json"
    command = [sys.executable, "-m", "benchmarks.steps", *arguments.split(), str(tmp_path / "steps.json")]
    subprocess.run(command, cwd=Path(__file__).parent.parent.parent, check=True, timeout=200)
    found = json.loads((tmp_path / "steps.json").read_text())
    ways = {(cell["path"], cell["tokens"]): set(cell["us"]) for cell in found["cells"]}
    for name in ("all_to_all", "allgather_reducescatter"):
        assert ways[name, 1] == {"eager"} and ways[name, 4] == {"eager", "halves", "in flight"}
        assert set(found["crossover_us"][name]) == {"1", "4"}
    assert found["meta"]["world"] == 2 and found["left_out"] == {}
