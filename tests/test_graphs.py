"""Steps by bucket: padding, keys and what is captured when. On the CPU a recorder stands in for CUDA graphs; `test_gpu_steps` has
the real ones."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from epserve import rank_kernels
from epserve.backend_choice import choose_backends
from epserve.errors import ConfigError, Incompatible
from epserve.models.demo import reference_block
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.graphs import StaticBatch, StepGraphs, why_no_graphs
from epserve.placement import Placement
from epserve.step import StepPlan
from epserve.worker import Worker

from .cases import CASES
from .checkpoints import LAYER, write
from .ranks import run_ranks
from .test_worker import make_config, tokens


class Recorded(StepGraphs):
    """Replays by running again, on the same static tensors."""

    device_type = "cpu"

    def _record(self, run):
        return type("Recording", (), {"replay": staticmethod(run)})()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("graphs") / "deepseek", dtype=torch.float32)


def test_a_shorter_batch_is_padded_with_rows_that_go_nowhere():
    spec = CASES["plain"].spec(1)
    batch = StaticBatch.empty(4, spec, torch.device("cpu"))
    for rows in (4, 1):
        routing = StaticBatch.empty(rows, spec, torch.device("cpu")).routing
        routing.ids_Mt.fill_(5)
        routing.weights_Mt.fill_(float("nan") if rows == 4 else 1.0)
        batch.fill(torch.full((rows, spec.shape.hidden), 7.0), routing)
    assert batch.routing.ids_Mt.tolist() == [[5] * 3, [-1] * 3, [-1] * 3, [-1] * 3]


@pytest.mark.parametrize(("counts", "bucket"), [((0, 0), 1), ((1, 0), 1), ((0, 2), 8), ((8, 8), 8), ((9, 0), None)])
def test_the_busiest_rank_decides_the_bucket(counts, bucket):
    graphs = Recorded(None, RankContext(world_size=2), CASES["plain"].spec(2), (1, 8))
    assert graphs.bucket(counts) == graphs.bucket(tuple(reversed(counts))) == bucket


def test_the_pool_of_graphs_that_are_all_gone_is_not_used_again(monkeypatch):
    """torch refuses a pool that no graph holds any more."""
    handles, used = iter(range(9)), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, *, pool, **other: used.append(pool) or nullcontext())

    class OnCpu(StepGraphs):
        device_type = "cpu"

    graphs = OnCpu(lambda x_MK, *args, **kwargs: x_MK, RankContext(), CASES["plain"].spec(1), (1, 2))
    for key in ("a", "b"):
        graphs.capture(key, None, None)
    graphs.drop("a")
    graphs.capture("c", None, None)
    graphs.drop("b")
    graphs.drop("c")
    graphs.capture("d", None, None)
    assert used == [0] * 6 + [1] * 2


@pytest.mark.parametrize("buckets", [(), (0, 1), (8, 1), (1, 1)])
def test_buckets_are_checked(buckets):
    with pytest.raises(ConfigError, match="buckets of CUDA graphs"):
        Recorded(None, RankContext(), CASES["plain"].spec(1), buckets)


def test_reasons_for_eager_steps():
    with pytest.raises(ConfigError, match="need a CUDA device, this rank has cpu"):
        StepGraphs(None, RankContext(), CASES["plain"].spec(1), (1,))
    on_gpu = CASES["plain"].spec(1, "cuda")
    assert "run on cpu" in why_no_graphs(CASES["plain"].spec(1), True, True, ("a", "b"))
    assert why_no_graphs(on_gpu, True, True, ("a", "b")) is None
    assert why_no_graphs(on_gpu, False, True, ("a", "b")).startswith("a waits on the host")
    assert why_no_graphs(on_gpu, True, False, ("a", "b")).startswith("b waits on the host")


def test_a_named_backend_that_waits_on_the_host_is_refused_with_graphs():
    """T23: before anything is started. Where no backend is named, the next one is tried."""
    spec = replace(CASES["bf16"].spec(2, "cuda"), cuda_graph=True)
    for name in ("deepep_ht", "all_to_all"):
        with pytest.raises(Incompatible, match="CUDA graphs: prepare/finalize waits on the CPU"):
            choose_backends(spec, all2all_name=name, here=False)
    assert choose_backends(spec, here=False).all2all == "nvlink"


def serve(ranks: RankContext, *arguments):
    """With recordings in place of graphs, in this process, for as long as it takes."""
    real = rank_kernels.StepGraphs, rank_kernels.why_no_graphs
    try:
        return recorded_steps(ranks, *arguments)
    finally:
        rank_kernels.StepGraphs, rank_kernels.why_no_graphs = real


def recorded_steps(ranks: RankContext, path, sizes, engine):
    """Steps as recordings and as eager ones; then a staged placement, which has its own recordings before its first step."""
    plain = Worker(make_config(path, ranks=ranks.world_size, **engine), ranks)
    rank_kernels.StepGraphs, rank_kernels.why_no_graphs = Recorded, lambda *_: None
    worker = Worker(make_config(path, ranks=ranks.world_size, cuda_graph_tokens=[2, 8], **engine), ranks)
    outs = []
    for each in (plain, worker):
        each.load()
        each.warm_up()

    def share(counts) -> torch.Tensor:
        first = sum(counts[: ranks.rank])
        return tokens(sum(counts))[first : first + counts[ranks.rank]]

    every = [path.graphs for path in worker.kernels.paths.values()]

    def replays() -> int:
        return sum(graphs.replays for graphs in every)

    for step, counts in enumerate(sizes):
        plan = StepPlan(step=step, layer=LAYER, mode="block", tokens_per_rank=tuple(counts))
        before = replays()
        y = worker.step(plan, share(counts), None, None)
        assert replays() - before == (max(counts) <= 8), counts
        torch.testing.assert_close(y, plain.step(plan, share(counts), None, None), rtol=1e-5, atol=1e-6)
        kept = y.clone()
        worker.step(plan, -share(counts), None, None)
        assert torch.equal(y, kept), "a step's result was overwritten by the next one"
        outs.append(y)

    placement = worker.placements[LAYER]
    swapped = Placement(
        version=3,
        num_logical=8,
        layout=placement.layout,
        physical_to_logical=tuple(reversed(placement.physical_to_logical)),
    )
    assert worker.stage(LAYER, swapped)
    worker.capture_staged(LAYER)
    plan = StepPlan(step=9, layer=LAYER, mode="block", tokens_per_rank=(4,) * ranks.world_size, placement=3)
    before, x = replays(), share(plan.tokens_per_rank)
    early = worker.step(plan, x, None, None)
    worker.adopt(LAYER, 3)
    assert torch.equal(early, worker.step(plan, x, None, None)) and replays() == before + 2
    for graphs in every:
        assert (LAYER, 3) in graphs.weight_keys() and (LAYER, 0) not in graphs.weight_keys()
    notes = worker.explain()
    worker.close()
    plain.close()
    return outs, notes


@pytest.mark.parametrize("engine", [{}, {"all2all": "measured"}, {"batches_in_flight": 2, "overlap_min_tokens": 2}])
def test_a_rank_replays_what_fits_a_bucket(checkpoint, engine):
    sizes = [(1, 1), (0, 2), (8, 3), (12, 1), (0, 0)]
    ranks = run_ranks(serve, 2, checkpoint, sizes, engine)
    for index, counts in enumerate(sizes):
        got = torch.cat([outs[index] for outs, _ in ranks])
        want = reference_block(checkpoint, LAYER)(tokens(sum(counts)))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert "all_to_all: CUDA graphs for up to 2, 8 tokens a rank" in ranks[0][1]
