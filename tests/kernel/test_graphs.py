"""Steps by bucket: padding, keys and what is captured when. On the CPU a recorder stands in for CUDA graphs; `test_gpu_steps` has
the real ones."""

from __future__ import annotations

import random
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from epserve.errors import ConfigError, Incompatible
from epserve.models.demo import reference_block
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.steps.graphs import StaticBatch, StepGraphs, TorchCapture, kernel_step, why_no_graphs
from epserve.rank import kernels as rank_kernels
from epserve.rank.placement import Placement
from epserve.rank.setup.backends import choose_backends
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from tests.rank.test_worker import make_config, tokens
from tests.support.cases import CASES
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks


class RunsAgain:
    """In place of a capture: replays by running again, on the same static tensors."""

    def new_pool(self):
        return object()

    def record(self, pool, run):
        return type("Recording", (), {"replay": staticmethod(run)})()


class Recorded(StepGraphs):
    device_type = "cpu"
    capture_type = RunsAgain


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("graphs") / "deepseek", dtype=torch.float32)


def test_a_shorter_batch_is_padded_with_zero_rows_that_go_nowhere():
    """Whatever an earlier step left in the batch, not finite values too."""
    spec = CASES["plain"].spec(1)
    graphs, seen = Recorded(RankContext(), spec, (4,)), []

    def forward(x_MK, routing, *, tokens_per_rank, **others):
        seen.append((x_MK.clone(), routing.ids_Mt.clone(), routing.weights_Mt.clone()))
        assert tokens_per_rank == (4,)
        return 2 * x_MK

    graphs.capture("step", kernel_step(forward, None, None))
    for rows in (4, 1, 0, 3):
        routing = StaticBatch(rows, spec, torch.device("cpu")).routing
        routing.ids_Mt.fill_(5)
        routing.weights_Mt.fill_(float("nan") if rows == 4 else 1.0)
        x_MK = torch.full((rows, spec.shape.hidden), float("inf") if rows == 4 else 7.0)
        y_MK = graphs.replay("step", 4, x_MK, routing)
        assert torch.equal(y_MK, 2 * x_MK)
        x, ids, weights = seen[-1]
        assert torch.equal(x[:rows], x_MK) and not x[rows:].any()
        assert ids.tolist() == [[5] * 3] * rows + [[-1] * 3] * (4 - rows) and not weights[rows:].any()


@pytest.mark.parametrize(("counts", "bucket"), [((0, 0), 1), ((1, 0), 1), ((0, 2), 8), ((8, 8), 8), ((9, 0), None)])
def test_the_busiest_rank_decides_the_bucket(counts, bucket):
    graphs = Recorded(RankContext(world_size=2), CASES["plain"].spec(2), (1, 8))
    assert graphs.bucket(counts) == graphs.bucket(tuple(reversed(counts))) == bucket


class Allocator:
    """The rules of torch's allocator for the memory of graphs: `create_or_incref_pool`, `beginAllocateToPool`, `releasePool`."""

    def __init__(self):
        self.users, self.open, self.pools, self.refuses_to_end = {}, set(), 0, False

    def new_pool(self):
        self.pools += 1
        return self.pools

    def record(self, pool, run):
        if pool in self.open:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if pool in self.users and self.users[pool] == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.users[pool] = self.users.get(pool, 0) + 1
        self.open.add(pool)
        try:
            run()
        except BaseException:
            if self.refuses_to_end:  # and stays open
                raise RuntimeError("operation failed due to a previous error during capture") from None
            self.open.remove(pool)
            self._release(pool)
            raise
        self.open.remove(pool)
        graph = type("Graph", (), {"replay": staticmethod(run)})()
        weakref.finalize(graph, self._release, pool)
        return graph

    def _release(self, pool):
        self.users[pool] -= 1


class OnCpu(StepGraphs):
    device_type = "cpu"
    capture_type = Allocator


def on_cpu() -> tuple[OnCpu, Allocator]:
    graphs = OnCpu(RankContext(), CASES["plain"].spec(1), (1, 2))
    return graphs, graphs._graphs._capture


def test_a_pool_lives_as_long_as_its_graphs():
    """Twenty orders of capturing and dropping: never a pool that the allocator refuses, never a second one without need."""
    for seed in range(20):
        same, (graphs, allocator) = random.Random(seed), on_cpu()
        held: set[int] = set()
        emptied = 0
        for key in range(30):
            graphs.capture(key, lambda batch: batch.x_MK)
            held.add(key)
            for gone in same.sample(sorted(held), same.randrange(len(held) + 1)):
                graphs.drop(gone)
                held.remove(gone)
            emptied += not held
            assert graphs.step_keys() == held and len(graphs) == 2 * len(held)
            assert sum(allocator.users.values()) == len(graphs)
        assert allocator.pools <= emptied + 1
    graphs.drop("unknown")


def test_after_a_failed_capture_nothing_is_left_and_the_next_one_begins_anew():
    """The first error is the one that is raised; what ending the broken capture raised stands in its notes."""
    broken = []

    def run(batch):
        if broken and batch.num_tokens == 2:  # the second bucket: one graph of this key is there by then
            raise broken[0]
        return batch.x_MK

    graphs, allocator = on_cpu()
    graphs.capture("a", run)
    for refuses_to_end in (False, True):
        broken.append(ConfigError("a dispatch waits on the host"))
        allocator.refuses_to_end = refuses_to_end
        with pytest.raises(ConfigError, match="waits on the host") as caught:
            graphs.capture("b", run)
        notes = getattr(caught.value, "__notes__", [])
        assert bool(notes) == refuses_to_end and all("previous error during capture" in note for note in notes)
        assert len(graphs) == 0 and graphs.step_keys() == set() and not graphs.has("a", 1)
        broken.clear()
        allocator.refuses_to_end = False
        graphs.capture("a", run)
        assert graphs.has("a", 1) and graphs.has("a", 2)


@pytest.mark.parametrize("at", ["begin", "run", "end"])
def test_a_capture_that_fails_gives_the_stream_back_and_leaves_the_allocator(monkeypatch, at):
    """torch.cuda.graph makes a stream current, and keeps it so where its own begin or end raises. The allocator goes on to ask a
    graph that could not be ended, until it is told otherwise."""
    current, recording, uses = ["caller's"], set(), []

    def end(device, pool):
        if pool not in recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        recording.remove(pool)

    @contextmanager
    def stream(which):
        before, current[0] = current[0], which
        try:
            yield
        finally:
            current[0] = before

    class Graph:
        def __init__(self, graph, *, pool, capture_error_mode):
            assert (pool, capture_error_mode) == ("pool", "thread_local")

        def __enter__(self):
            current[0] = "capture's"
            if at == "begin":
                raise RuntimeError("begin")
            recording.add("pool")
            uses.append("pool")

        def __exit__(self, *error):
            if at != "run":
                raise RuntimeError("end")
            recording.remove("pool")
            uses.remove("pool")
            current[0] = "caller's"

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: uses.remove(pool), raising=False)
    for name, value in (("stream", stream), ("graph", Graph), ("CUDAGraph", object)):
        monkeypatch.setattr(torch.cuda, name, value)

    def run():
        assert current == ["capture's"]
        if at == "run":
            raise RuntimeError("run")

    with pytest.raises(RuntimeError, match=at):
        TorchCapture().record("pool", run)
    assert current == ["caller's"] and not recording and not uses


@pytest.mark.parametrize("buckets", [(), (0, 1), (8, 1), (1, 1)])
def test_buckets_are_checked(buckets):
    with pytest.raises(ConfigError, match="buckets of CUDA graphs"):
        Recorded(RankContext(), CASES["plain"].spec(1), buckets)


def test_reasons_for_eager_steps():
    with pytest.raises(ConfigError, match="need a CUDA device, this rank has cpu"):
        StepGraphs(RankContext(), CASES["plain"].spec(1), (1,))
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

    every = [path.graphs for path in worker.kernels.first.paths.values()]

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
        versions = {(layer, version) for layer, version, mode in graphs.step_keys()}
        assert (LAYER, 3) in versions and (LAYER, 0) not in versions
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
