"""A recovery, or another number of ranks, does not time again what is known: requests wait meanwhile."""

import dataclasses
import os
import signal

import pytest
import torch

from epserve.config import parse_config
from epserve.experts.grouped_mm import GroupedMMExperts
from epserve.models.demo import reference_block
from epserve.modular_kernel import ExpertLayout, RankContext
from epserve.modular_kernel.measured.crossover import Crossover
from epserve.modular_kernel.measured.known_times import KnownTable, KnownTimes
from epserve.modular_kernel.measured.selection import MeasuredExperts, Measuring
from epserve.rank.placement import Placement
from epserve.rank.setup import plan as rank_plan
from epserve.rank.step import Arrangement, StepPlan
from epserve.rank.worker import Worker
from tests.kernel.test_selection import LONG, SPEC, Clock, OtherGroupedMM, WrongExperts, measured, weights
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks
from tests.support.recovering import BACK_S, pids, running, until

MORE = dataclasses.replace(
    SPEC, shape=dataclasses.replace(SPEC.shape, num_experts=6), layout=ExpertLayout(counts=(4, 2))
)


def after(known, spec=MORE, other=OtherGroupedMM, **options):
    """As `measured`, of a rank whose arrangement has changed, and the clock that it may use."""
    clock, candidates = Clock(), {"a": GroupedMMExperts(spec), "b": other(spec)}
    measuring = Measuring(**{"budget_s": LONG, "known": known, **options})
    return MeasuredExperts(spec, candidates, timer=clock, measuring=measuring), clock


def known_after_a_start():
    first = measured(Clock())
    first.warm_up(weights(), 300)
    known = KnownTimes()
    known.add([first.table(weights())])
    return first, known


def test_other_numbers_of_experts_take_the_times_that_there_are():
    first, known = known_after_a_start()
    experts, clock = after(known)
    experts.warm_up(weights(), 5000)
    assert clock.calls == 0 and experts.times == first.times
    assert [experts.choice(rows) for rows in (1, 20, 64, 5000)] == ["a", "a", "b", "b"]
    assert any("measured with 4 experts on a rank" in line for line in experts.explain())
    assert experts.table(weights()) is None, "what was carried over is not passed on as measured"
    again, clock = after(known, SPEC)
    again.warm_up(weights(), 300)
    assert clock.calls == 0 and again.carried is None and again.times == first.times
    assert not any("before the number of ranks changed" in line for line in again.explain())


@pytest.mark.parametrize(
    ("known", "options", "why"),
    [
        (KnownTimes(), {}, "nothing is known at a start"),
        (None, {}, "a library without a service"),
        ("start", {"again": True}, "it was asked for"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_otherwise_it_is_measured(known, options, why):
    experts, clock = after(known_after_a_start()[1] if known == "start" else known, **options)
    experts.warm_up(weights(), 300)
    assert clock.calls > 0 and experts.carried is None, why


def test_other_shapes_are_no_kin():
    _, known = known_after_a_start()
    spec = dataclasses.replace(MORE, shape=dataclasses.replace(MORE.shape, top_k=1))
    experts, clock = after(known, spec)
    experts.warm_up(weights(), 300)
    assert clock.calls > 0 and experts.carried is None


def test_a_candidate_that_was_left_out_stays_out():
    first, _ = after(KnownTimes(), other=WrongExperts)
    first.warm_up(weights(), 300)
    table = first.table(weights())
    assert table.left_out.keys() == {"b"}
    known = KnownTimes()
    known.add([dataclasses.replace(table, times={1: {"a": 1.0}})])
    experts, clock = after(known, SPEC, other=WrongExperts)
    experts.warm_up(weights(), 300)
    assert clock.calls == 0 and experts.choice(100) == "a" and "differs from that of a" in experts.left_out["b"]


def test_the_file_comes_first(tmp_path):
    """It is exact; what is known of another number of experts is not."""
    path = tmp_path / "times.json"
    start, clock = after(None, cache=path)
    start.warm_up(weights(), 300)
    _, known = known_after_a_start()
    experts, clock = after(known, cache=path)
    experts.warm_up(weights(), 300)
    assert clock.calls == 0 and experts.carried is None and experts.times == start.times


def test_the_most_similar_number_counts():
    known = KnownTimes()
    tables = [KnownTable(key=f"{n}", kin="kin", num_experts=n, times={1: {"a": n}}) for n in (2, 8, 32)]
    known.add(tables)
    assert known.find("8", "kin", 30).num_experts == 8
    assert known.find("30", "kin", 30).num_experts == 32
    assert known.find("30", "stranger", 30) is None
    for ranks in (2, 8):
        known.add_crossover(Crossover(caps={"a": None}, num_ranks=ranks))
    assert [known.crossover(ranks).num_ranks for ranks in (1, 2, 7)] == [2, 2, 8]
    assert KnownTimes().crossover(2) is None


# On ranks.


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("known times"), dtype=torch.float32)


def bridge_and_return(ranks: RankContext, path):
    """Two ranks with copies of all experts; each goes on alone, as if the other were lost, and they meet again."""
    engine = {
        "ranks": 2, "device": "cpu", "redundant_experts": 8, "experts_times": None, "all2all": "measured",
        "all2all_candidates": ["all_to_all", "allgather_reducescatter"], "max_tokens_per_rank": 64,
    }  # fmt: skip
    config = parse_config({"model": {"path": str(path), "layers": [LAYER]}, "engine": engine})
    worker = Worker(config, ranks)
    worker.load()
    worker.warm_up()
    together, crossover = worker.kernels.first.first.experts, worker.kernels.first.crossover
    full = worker.placements[LAYER]
    timed = []
    measure = MeasuredExperts._measure
    MeasuredExperts._measure = lambda self, *args: timed.append(self) or measure(self, *args)
    try:
        left = full.without({1 - ranks.rank}, version=1)
        alone = rank_plan.resized(config, left.layout.counts, left.num_logical)
        worker.leave()
        worker.arrange(0, Arrangement(config=alone, placements={LAYER: left}))
        worker.regroup(RankContext())
        worker.warm_up()
        x = torch.randn((5, 64), generator=torch.Generator().manual_seed(2))
        y = worker.step(StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=(5,), placement=1), x, None, None)
        torch.testing.assert_close(y, reference_block(path, LAYER)(x), rtol=1e-4, atol=1e-5)
        notes = worker.explain()
        worker.leave()
        worker.arrange(ranks.rank, Arrangement(config=config, placements={LAYER: full.with_version(2)}))
        worker.regroup(ranks)
        worker.warm_up()
    finally:
        MeasuredExperts._measure = measure
    again = worker.kernels.first.first.experts
    assert again is not together and again.times == together.times and again.carried is None
    assert worker.kernels.first.crossover == crossover and crossover.num_ranks == 2
    worker.close()
    return len(timed), notes


def test_ranks_that_go_on_alone_and_meet_again_time_nothing(path):
    for timed, notes in run_ranks(bridge_and_return, 2, path):
        assert timed == 0
        assert any("before the number of ranks changed" in line for line in notes), notes


def test_all_to_all_times_of_another_number_of_ranks_are_said(path):
    """They are not measured again while requests wait, either."""
    for ranks, timed, notes in run_ranks(fewer, 3, path):
        assert timed == 0 and (ranks == 3 or any("were measured with 3 ranks" in line for line in notes)), notes


def fewer(ranks: RankContext, path):
    import torch.distributed as dist

    import epserve.rank.kernels

    pair = dist.new_group([0, 1])  # collective
    engine = {
        "ranks": 3, "device": "cpu", "experts": "loop", "all2all": "measured", "max_tokens_per_rank": 64,
        "all2all_candidates": ["all_to_all", "allgather_reducescatter"],
    }  # fmt: skip
    config = parse_config({"model": {"path": str(path), "layers": [LAYER]}, "engine": engine})
    worker = Worker(config, ranks)
    worker.load()
    worker.warm_up()
    timed = []
    before = epserve.rank.kernels.measure
    epserve.rank.kernels.measure = lambda *args, **more: timed.append(1) or before(*args, **more)
    try:
        if ranks.rank < 2:
            placement = Placement.identity(8, 2)
            two = rank_plan.resized(config, placement.layout.counts, 8)
            worker.leave()
            worker.arrange(ranks.rank, Arrangement(config=two, placements={LAYER: placement.with_version(1)}))
            worker.regroup(dataclasses.replace(ranks, world_size=2, group=pair))
            worker.warm_up()
    finally:
        epserve.rank.kernels.measure = before
    return (3 if ranks.rank == 2 else 2), len(timed), worker.explain()


@pytest.mark.asyncio
@pytest.mark.timeout(400)
async def test_a_recovery_times_nothing_again(path):
    """Times are kept in no file here: what serves after a loss, and on the rank that comes back, was measured at the start."""
    async with running(path, ranks=2, redundant_experts=8, experts="auto", experts_times=None) as engine:

        def times():
            return [
                {choice.rows: dict(choice.seconds) for choice in rank.experts_choices} for rank in engine.status().ranks
            ]

        before = times()
        assert len(before) == 2 and all(before) and "number of ranks changed" not in engine.status().backends
        os.kill(pids(engine)[1], signal.SIGKILL)
        await until(lambda: engine._pool.recoveries and engine.state() == "serving", BACK_S, "a bridged loss")
        if len(engine.status().ranks) == 1:  # not back yet
            assert times() == before[:1] and "before the number of ranks changed" in engine.status().backends
        await until(lambda: len(engine.status().ranks) == 2 and engine.state() == "serving", BACK_S, "growing back")
        after = times()
        assert after[0] == before[0] and after[1] in before
        assert "number of ranks changed" not in engine.status().backends
