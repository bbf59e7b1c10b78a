"""Whole steps as graphs on a rank: what they compute, count and leave alone, and which of them are kept.

On the CPU a recorder stands in for CUDA graphs. `tests/gpus/test_gpu_step_graphs.py` has the real ones.
"""

from __future__ import annotations

import pytest
import torch

from epserve.config import parse_config
from epserve.models import open_checkpoint
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.steps import worth
from epserve.rank import kernels as rank_kernels
from epserve.rank.placement import Placement
from epserve.rank.setup import plan as rank_plan
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from tests.kernel.test_graphs import Recorded, RunsAgain
from tests.rank.test_worker import make_config, make_worker, tokens
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks

BUCKETS = [2, 8]
ALONE = RankContext()


class Refuses(RunsAgain):
    """In place of a capture that a library spoils."""

    def record(self, pool, run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("step_graphs") / "deepseek", dtype=torch.float32)


@pytest.fixture
def recorded(monkeypatch):
    stand_in(monkeypatch.setattr)


def stand_in(put) -> None:
    put(rank_kernels, "StepGraphs", Recorded)
    put(rank_kernels, "why_no_graphs", lambda *_: None)


def step(
    worker: Worker, x: torch.Tensor, number: int = 0, routed=None, counts=None, placement: int = 0
) -> torch.Tensor:
    plan = StepPlan(step=number, layer=LAYER, mode="block" if routed is None else "routed",
                    tokens_per_rank=counts or (len(x),), placement=placement)  # fmt: skip
    return worker.step(plan, x, *(routed or (None, None)))


def routing(count: int, columns: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.rand((count, 8), generator=generator).topk(columns).indices.int()
    return ids, torch.rand((count, columns), generator=generator)


def replays(worker: Worker) -> int:
    return sum(path.graphs.replays for path in worker.kernels.first.paths.values() if path.graphs is not None)


def test_both_modes_equal_eager_steps_and_count_the_same_load(checkpoint, recorded):
    """Full buckets bit for bit: the batch is the same. Padded ones as far as other sizes of products round alike."""
    eager = make_worker(checkpoint, ALONE, cuda_graph_tokens=[])
    worker = make_worker(checkpoint, ALONE, cuda_graph_tokens=BUCKETS)
    assert replays(worker) == 0 and not any(worker.load_counter.read()), "warm-up counts as load"
    top_k = worker.info.top_k
    for number, count in enumerate((2, 8, 1, 5, 0, 8)):
        x = tokens(count)
        narrow = routing(count, top_k - 1)  # a request may name fewer experts a token than the model has
        for routed in (None, routing(count, top_k), narrow):
            got, want = (step(each, x, number, routed) for each in (worker, eager))
            assert got.shape == want.shape
            if count in BUCKETS:
                assert torch.equal(got, want), (count, routed)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert replays(worker) == 18 and replays(eager) == 0
    assert worker.load_counter.read() == eager.load_counter.read() and any(eager.load_counter.read())
    assert worker.counters == eager.counters


def test_rows_that_are_not_finite_reach_neither_their_neighbours_nor_a_later_step(checkpoint, recorded):
    worker = make_worker(checkpoint, ALONE, cuda_graph_tokens=BUCKETS)
    x = tokens(8)
    clean, few = step(worker, x), step(worker, x[:3])
    spoiled = x.clone()
    spoiled[3:] = float("nan")
    got = step(worker, spoiled)
    torch.testing.assert_close(got[:3], clean[:3], rtol=1e-5, atol=1e-6)  # other rows now go to other experts
    assert not got[3:].isfinite().any()
    assert torch.equal(step(worker, x[:3]), few), "an earlier step's rows lay behind these"
    static = worker.kernels.first.first.graphs._batch(8)
    assert not static.x_MK[3:].any() and static.x_MK[:3].any()


def replicas_on_ranks(ranks: RankContext, path, sizes):
    """Copies of experts: each token's copy follows from its number among the tokens of all ranks."""
    before = rank_kernels.StepGraphs, rank_kernels.why_no_graphs
    try:
        stand_in(setattr)
        engine = {"redundant_experts": 8, "all2all": "all_to_all"}
        eager = make_worker(path, ranks, cuda_graph_tokens=[], **engine)
        worker = make_worker(path, ranks, cuda_graph_tokens=BUCKETS, **engine)
        assert not worker.placements[LAYER].is_identity
        for number, counts in enumerate(sizes):
            first = sum(counts[: ranks.rank])
            x = tokens(sum(counts))[first : first + counts[ranks.rank]]
            ids, weights = (each[first : first + len(x)] for each in routing(sum(counts)))
            for routed in (None, (ids, weights)):
                got, want = (step(each, x, number, routed, counts) for each in (worker, eager))
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        same = worker.load_counter.read() == eager.load_counter.read()
        return replays(worker), same, bool(worker.kernels.first.first.graphs.step_keys())
    finally:
        rank_kernels.StepGraphs, rank_kernels.why_no_graphs = before


def test_copies_of_experts_are_chosen_as_by_eager_steps(checkpoint):
    sizes = [(3, 8), (0, 2), (1, 0), (8, 8), (9, 1)]
    assert run_ranks(replicas_on_ranks, 2, checkpoint, sizes) == [(8, True, True)] * 2


def test_a_layer_without_some_experts_runs_eagerly_and_says_what_is_left_out(checkpoint, recorded):
    config = rank_plan.resized(make_config(checkpoint, cuda_graph_tokens=BUCKETS), (6,), 8)
    worker = Worker(config, ALONE)
    assert worker.placements[LAYER].missing == (6, 7)
    worker.load()
    worker.warm_up()
    ids = torch.tensor([[6, 0], [1, 2]], dtype=torch.int32)
    step(worker, tokens(2), 0, (ids, torch.ones(2, 2)))
    assert worker.left_out == {0: (6,)} and replays(worker) == 0
    assert worker.kernels.first.first.graphs.step_keys() == set()


def test_leaving_a_group_drops_graphs_and_joining_makes_them_again(checkpoint, recorded):
    worker = make_worker(checkpoint, ALONE, cuda_graph_tokens=BUCKETS)
    before = step(worker, tokens(8))
    count = worker.load_counter.read()
    worker.regroup(ALONE)
    assert worker.kernels.first.first.graphs is None
    worker.warm_up()
    assert worker.load_counter.read() == count, "a second warm-up lost or added loads"
    assert torch.equal(step(worker, tokens(8)), before) and replays(worker) == 1


def test_the_next_placement_has_graphs_before_its_first_step_and_the_old_one_loses_its(checkpoint, recorded):
    worker = make_worker(checkpoint, ALONE, cuda_graph_tokens=BUCKETS)
    present = worker.placements[LAYER]
    swapped = Placement(version=3, num_logical=8, layout=present.layout,
                        physical_to_logical=tuple(reversed(present.physical_to_logical)))  # fmt: skip
    old = step(worker, tokens(8))
    assert worker.stage(LAYER, swapped)
    worker.capture_staged(LAYER)
    new = step(worker, tokens(8), placement=3)
    torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)
    assert torch.equal(step(worker, tokens(8)), old) and replays(worker) == 3
    worker.adopt(LAYER, 3)
    graphs = worker.kernels.first.first.graphs
    others = {layer for layer in worker.plan.layers if layer != LAYER}
    assert graphs.step_keys() == {(LAYER, 3, mode) for mode in ("block", "routed")} | {
        (layer, 0, mode) for layer in others for mode in ("block", "routed")
    }
    assert torch.equal(step(worker, tokens(8), placement=3), new)


@pytest.mark.parametrize(("slow", "kept"), [((), (1, 8, 32)), ((8,), (1, 32)), ((1, 8, 32), ())])
def test_auto_keeps_the_sizes_whose_graphs_are_faster_and_says_both_times(
    checkpoint, recorded, monkeypatch, slow, kept
):
    order = []

    def seconds(run, device):  # a graph takes 1 ms, or 3 where it is slow, and an eager step 2 ms
        run()
        graph = run.func.__name__ == "replay"
        order.append(graph)
        return (3e-3 if run.args[1] in slow else 1e-3) if graph else 2e-3

    monkeypatch.setattr(worth, "seconds", seconds)
    worker = make_worker(checkpoint, ALONE, max_tokens_per_rank=32)
    assert any(order) and not all(order)
    graphs, notes = worker.kernels.first.first.graphs, worker.explain()
    assert (graphs.buckets if graphs is not None else ()) == kept
    ways = {bucket: "eager (3000" if bucket in slow else "graph (1000" for bucket in (1, 8, 32)}
    for tokens_, bucket in ((1, 1), (2, 8), (9, 32)):
        what = (
            f"{tokens_} token{'s' * (tokens_ > 1)}, padded to {bucket}: {ways[bucket]} us as a graph, 2000 us eagerly)"
        )
        assert any(what in note for note in notes), notes
    if not kept:
        assert "local: no CUDA graphs: none is faster than the eager step" in notes
    else:
        num = 2 * len(kept) * len(worker.plan.layers)
        assert any(note.startswith(f"{num} CUDA graphs take") for note in notes), notes
    for count in (1, 5, 32, 40):
        before = replays(worker)
        assert step(worker, tokens(count)).isfinite().all()
        assert replays(worker) - before == (bool(kept) and count <= max(kept, default=0))


def test_auto_goes_on_without_graphs_where_a_step_cannot_be_captured_and_named_sizes_do_not(
    checkpoint, recorded, monkeypatch
):
    monkeypatch.setattr(Recorded, "capture_type", Refuses)
    worker = make_worker(checkpoint, ALONE)
    assert any(
        "no CUDA graphs: rank 0 cannot capture a step (RuntimeError: operation not" in each for each in worker.explain()
    )
    assert step(worker, tokens(5)).isfinite().all() and replays(worker) == 0
    with pytest.raises(RuntimeError, match="not permitted"):
        make_worker(checkpoint, ALONE, cuda_graph_tokens=BUCKETS)


def test_auto_goes_on_without_graphs_where_memory_is_too_small_for_all_layers(checkpoint, recorded, monkeypatch):
    class Full(RunsAgain):
        room = 12

        def record(self, pool, run):
            Full.room -= 1
            if Full.room < 0:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return super().record(pool, run)

    monkeypatch.setattr(Recorded, "capture_type", Full)
    monkeypatch.setattr(worth, "seconds", lambda run, device: 1.0 if run.func.__name__ == "eager" else 0.5)
    worker = make_worker(checkpoint, ALONE)
    assert any("rank 0 cannot capture them all (OutOfMemoryError" in each for each in worker.explain()), (
        worker.explain()
    )
    assert step(worker, tokens(5)).isfinite().all() and replays(worker) == 0


def test_a_cpu_rank_has_no_graphs_and_no_word_of_them(checkpoint):
    worker = make_worker(checkpoint, ALONE)
    assert worker.kernels.first.first.graphs is None and not any("graph" in each for each in worker.explain())


@pytest.mark.parametrize(("engine", "most", "captured"), [
    ({}, 1024, (1, 8, 32, 128, 512)),
    ({}, 100, (1, 8, 32)),
    ({"cuda_graph_tokens": [4, 200]}, 100, (4, 200)),
    ({"cuda_graph_tokens": []}, 100, ()),
    ({"ranks": 2, "tensor_parallel": 2}, 100, ()),
])  # fmt: skip
def test_sizes_that_are_captured(checkpoint, engine, most, captured):
    config = parse_config({"model": {"path": str(checkpoint)}, "engine": {"max_tokens_per_rank": most, **engine}})
    plan = rank_plan.plan_ranks(config, open_checkpoint(checkpoint).info, device="cpu")
    assert rank_plan.graph_tokens(config.engine, plan.first.paths[0]) == captured
