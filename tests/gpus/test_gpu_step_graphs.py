"""Whole steps as CUDA graphs on real GPUs: gate, placement, count of loads, all-to-all, experts and shared experts.

python -m pytest -m gpu tests/gpus/test_gpu_step_graphs.py -q      (EPSERVE_TEST_RANKS_PER_GPU=2 for two ranks on one GPU)

What does not need a GPU is in tests/rank/test_step_graphs.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from epserve import all2all
from epserve.config import parse_config
from epserve.models.demo import write_demo_checkpoint
from epserve.modular_kernel import RankContext, Routing
from epserve.rank.gate import whole
from epserve.rank.placement import Placement
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from tests.support.ranks import num_places, run_ranks

from .padded import padded_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here"),
]

HIDDEN, EXPERTS, TOP_K = 2048, 16, 4
SIZES = {"hidden": HIDDEN, "intermediate": 256, "num_experts": EXPERTS, "top_k": TOP_K, "num_layers": 3, "seed": 3}
BUCKETS = (1, 8, 64)
STEPS = 80
MODES = ("block", "routed")


def need(world: int, name: str) -> None:
    if num_places() < world:
        pytest.skip(f"needs {world} CUDA GPUs, torch sees {torch.cuda.device_count()}")
    if text := all2all.REGISTRY.get(name).unavailable():
        pytest.skip(f"{name}: {text}")


@pytest.fixture(scope="module", params=["deepseek_v3", "mixtral"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("step_graphs") / request.param
    write_demo_checkpoint(request.param, path, dtype=torch.bfloat16, **SIZES)
    return path


def worker_of(path, ranks: RankContext, **engine) -> Worker:
    engine = {"device": "cuda", "ranks": ranks.world_size, "max_tokens_per_rank": 256, "experts_timing_s": 0, **engine}
    worker = Worker(parse_config({"model": {"path": str(path)}, "engine": engine}), ranks)
    worker.load()
    worker.warm_up()
    return worker


def rows_of(count: int, seed: int, columns: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((count, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand((count, EXPERTS), generator=generator).topk(columns).indices.int()
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    return x.to(device), ids, torch.rand(ids.shape, generator=generator)


def graphs_of(worker: Worker):
    return worker.kernels.first.first.graphs


def counted(worker: Worker) -> torch.Tensor:
    return worker.load_counter._counts_LE1[:, 1:].cpu().clone()


def whole_steps(ranks: RankContext, path, engine) -> int:
    """Random steps of both modes and all layers, each beside the same padded batch without a graph, and beside an eager step."""
    worker = worker_of(path, ranks, cuda_graph_tokens=list(BUCKETS), **engine)
    kernels, same = worker.kernels.first.first, random.Random(5)
    graphs, info = graphs_of(worker), worker.info
    assert graphs is not None, worker.explain()
    assert not counted(worker).any(), "warm-up counts as load"
    expected = torch.zeros_like(counted(worker))
    for number in range(STEPS):
        longest, mode = same.choice(BUCKETS), same.choice(MODES)
        layer, columns = same.choice(worker.plan.layers), same.choice((TOP_K, TOP_K - 1))
        counts = tuple(same.randrange(longest + 1) for _ in range(ranks.world_size))
        spoil = number % 5 == 4
        x, ids, weights = rows_of(counts[ranks.rank], 100 * number + ranks.rank, columns, ranks.device)
        if spoil and len(x) > 1:
            x[len(x) // 2 :] = float("nan")  # harms neither its neighbours nor a later step
        plan = StepPlan(step=number, layer=layer, mode=mode, tokens_per_rank=counts)
        routed = (ids, weights) if mode == "routed" else (None, None)
        before, replays = counted(worker), graphs.replays
        y = worker.step(plan, x, *routed)
        torch.cuda.synchronize()
        worker.check()
        assert graphs.replays == replays + 1
        loads = counted(worker) - before
        kept = y.clone()
        # The same batch, padded, without a graph.
        step = next(
            each
            for each in worker._steps(layer, worker.placements[layer], worker.weights.layers[layer])
            if each.mode == mode
        )
        bucket = graphs.bucket(counts)
        given = None
        if mode == "routed":
            given = whole(Routing(ids_Mt=ids, weights_Mt=weights), info.top_k)
        first = sum(counts[: ranks.rank])
        with torch.inference_mode():
            eager = padded_eager(graphs, kernels.as_run(step), bucket, x, given, first=first)
        torch.cuda.synchronize()
        assert torch.equal(y.nan_to_num(), kept.nan_to_num()), "a step's result was overwritten by the next one"
        finite = len(x) // 2 if spoil and len(x) > 1 else len(x)
        assert torch.equal(y[:finite], eager[:finite]), f"step {number}, {mode}, {counts} tokens: other bits"
        assert y[:finite].isfinite().all() and (not finite or y[:finite].abs().sum() > 0)
        # The eager step of the same rows: other sizes of products round otherwise.
        graphs_kept, kernels.graphs = kernels.graphs, None
        plain = worker.step(plan, x, *routed)
        kernels.graphs = graphs_kept
        assert (y[:finite].float() - plain[:finite].float()).norm() <= 2e-2 * plain[:finite].float().norm().clamp(
            min=1e-6
        )
        row = worker.plan.layers.index(layer)
        again = counted(worker) - before - loads  # the padded batch and the eager step
        assert spoil or torch.equal(again, 2 * loads), "a graph counts other loads than eager steps"
        if mode == "routed":
            wanted = torch.bincount(ids[ids >= 0].long(), minlength=EXPERTS)
            assert torch.equal(loads[row], wanted)
        expected += loads
        static = graphs._batch(bucket)
        assert not static.x_MK[len(x) :].any(), "an earlier step's rows are left behind these"
    assert expected.any() and graphs.replays == STEPS
    worker.close()
    return graphs.replays


CASES = [
    ("local", 1, {}),
    ("local", 1, {"redundant_experts": 5}),
    ("nvlink", 2, {}),
    ("nvlink", 2, {"redundant_experts": 16}),
    ("nvlink", 2, {"batches_in_flight": 2, "overlap_min_tokens": 8}),
]


@pytest.mark.parametrize(
    ("name", "world", "engine"), CASES, ids=[f"{name}-{'-'.join(more)}" for name, _, more in CASES]
)
def test_whole_steps_equal_eager_ones_bit_for_bit(checkpoint, name, world, engine):
    need(world, name)
    engine = {"all2all": name, **engine}
    assert run_ranks(whole_steps, world, checkpoint, engine, device="cuda", timeout=300) == [STEPS] * world


def moved_and_left(ranks: RankContext, path) -> None:
    """A staged placement has graphs before its first step, adopting it drops the old ones, and leaving the group drops all."""
    worker = worker_of(path, ranks, cuda_graph_tokens=list(BUCKETS))
    layer = worker.plan.layers[0]
    x, _, _ = rows_of(8, 1, TOP_K, ranks.device)
    counts = (8,) * ranks.world_size

    def step(placement: int) -> torch.Tensor:
        return worker.step(
            StepPlan(step=1, layer=layer, mode="block", tokens_per_rank=counts, placement=placement), x, None, None
        )

    present = worker.placements[layer]
    old = step(present.version)
    swapped = Placement(version=7, num_logical=EXPERTS, layout=present.layout,
                        physical_to_logical=tuple(reversed(present.physical_to_logical)))  # fmt: skip
    assert worker.stage(layer, swapped)
    worker.capture_staged(layer)
    new = step(7)
    assert (new.float() - old.float()).norm() <= 2e-2 * old.float().norm()
    assert torch.equal(step(present.version), old)
    worker.adopt(layer, 7)
    assert {version for of, version, _ in graphs_of(worker).step_keys() if of == layer} == {7}
    assert torch.equal(step(7), new)
    replays = graphs_of(worker).replays
    assert replays == 4
    loads = counted(worker)
    worker.regroup(ranks)
    assert graphs_of(worker) is None
    worker.warm_up()
    assert torch.equal(counted(worker), loads), "a second warm-up lost or added loads"
    assert torch.equal(step(7), new) and graphs_of(worker).replays == 1
    worker.close()


@pytest.mark.parametrize("world", [1, 2])
def test_moves_and_recovery_change_graphs_with_the_experts(checkpoint, world):
    need(world, "local" if world == 1 else "nvlink")
    run_ranks(moved_and_left, world, checkpoint, device="cuda", timeout=200)


def by_default(ranks: RankContext, path) -> list[str]:
    worker = worker_of(path, ranks)
    x, _, _ = rows_of(8, 1, TOP_K, ranks.device)
    plan = StepPlan(step=1, layer=worker.plan.layers[0], mode="block", tokens_per_rank=(8,) * ranks.world_size)
    assert worker.step(plan, x, None, None).isfinite().all()
    assert graphs_of(worker) is None or graphs_of(worker).replays >= 1
    notes = worker.explain()
    worker.close()
    return notes


@pytest.mark.parametrize("world", [1, 2])
def test_graphs_are_on_by_default_and_the_log_has_both_times(checkpoint, world):
    need(world, "local" if world == 1 else "nvlink")
    told = run_ranks(by_default, world, checkpoint, device="cuda", timeout=200)
    print("\n".join(told[0]))
    assert all(any("us as a graph" in note and "us eagerly" in note for note in notes) for notes in told), told
    assert all(any("CUDA graphs take" in note for note in notes) for notes in told), told
    assert [[n for n in notes if "CUDA graphs for" in n] for notes in told] == [
        [n for n in told[0] if "CUDA graphs for" in n]
    ] * world
