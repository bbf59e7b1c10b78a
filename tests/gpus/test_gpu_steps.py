"""Steps on GPUs: CUDA graphs equal eager steps bit for bit, halves that overlap equal sequential ones, several paths in one rank.

python -m pytest -m gpu tests/gpus/test_gpu_steps.py -q
"""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
import torch

from epserve import all2all, experts
from epserve.config import parse_config
from epserve.errors import ConfigError, EpserveError
from epserve.models import open_checkpoint
from epserve.models.demo import write_demo_checkpoint
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    FusedMoEModularKernel,
    LayerSpec,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
)
from epserve.modular_kernel.steps.graphs import StepGraphs, kernel_step
from epserve.modular_kernel.steps.in_flight import TwoInFlight
from epserve.rank.step import StepPlan
from tests.rank.test_worker import make_worker
from tests.support.cases import reference
from tests.support.ranks import RANKS_PER_GPU, cluster_section, num_places, run_ranks

from . import test_gpu_service
from .padded import padded_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here"),
]

BUCKETS = (1, 8, 32)
STEPS = 60
GRAPH_PAIRS = [
    ("local", "triton", 1),
    ("nvlink", "triton", 2),
    ("deepep_ll", "triton_batched", 2),
    ("nvlink_batched", "triton_batched", 2),
    ("nvshmem", "triton", 2),
]
OVERLAP_PAIRS = [("nvlink", "triton"), ("deepep_ht", "triton"), ("deepep_ll", "triton_batched"), ("all_to_all", "triton"),
                 ("allgather_reducescatter", "triton"), ("all_to_all_batched", "triton_batched"),
                 ("nvlink_batched", "triton_batched")]  # fmt: skip


def need(world: int, *names: str) -> None:
    if num_places() < world:
        pytest.skip(f"needs {world} CUDA GPUs, torch sees {torch.cuda.device_count()}")
    for name in names:
        if text := all2all.REGISTRY.get(name).unavailable():
            pytest.skip(f"{name}: {text}")


def spec_of(world: int, hidden: int = 2048) -> LayerSpec:
    shape = ExpertShape(hidden=hidden, intermediate=256, num_experts=16, top_k=4, dtype=torch.bfloat16)
    return LayerSpec(shape=shape, layout=ExpertLayout.even(16, world), device="cuda")


def kernel_of(ranks: RankContext, pf_name: str, experts_name: str, cap: int, in_flight: int = 1):
    spec = spec_of(ranks.world_size)
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    options = PrepareFinalizeOptions(max_tokens_per_rank=cap, batches_in_flight=in_flight)
    kernel = FusedMoEModularKernel(manager.get_handle(spec, options), experts.REGISTRY.get(experts_name)(spec))
    weights = kernel.fused_experts.prepare_weights(weights_of(spec, ranks))
    kernel.warm_up(weights)
    return manager, kernel, weights


def weights_of(spec: LayerSpec, ranks: RankContext, seed: int = 7) -> ExpertWeights:
    gen = torch.Generator().manual_seed(seed)
    e, k, n = spec.layout.counts[ranks.rank], spec.shape.hidden, spec.shape.intermediate
    w13 = (torch.randn((e, 2 * n, k), generator=gen) * k**-0.5).bfloat16().to(ranks.device)
    w2 = (torch.randn((e, k, n), generator=gen) * n**-0.5).bfloat16().to(ranks.device)
    return ExpertWeights(w13_eNK=w13, w2_eKN=w2)


def batch_of(spec: LayerSpec, num_tokens: int, seed: int, device: torch.device) -> tuple[torch.Tensor, Routing]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn((num_tokens, spec.shape.hidden), generator=gen).bfloat16().to(device)
    ids = torch.rand((num_tokens, spec.shape.num_experts), generator=gen).topk(spec.shape.top_k).indices.int()
    ids[torch.rand(ids.shape, generator=gen) < 0.1] = -1
    weights = torch.rand(ids.shape, generator=gen)
    return x, Routing(ids_Mt=ids.contiguous().to(device), weights_Mt=weights.to(device))


# --- CUDA graphs -------------------------------------------------------------------------------------------------


def graphs_on_ranks(ranks: RankContext, pf_name: str, experts_name: str, in_flight: int) -> int:
    """Random steps, by graph and eagerly in turn; counts are drawn alike on all ranks, zero among them."""
    manager, kernel, weights = kernel_of(ranks, pf_name, experts_name, BUCKETS[-1], in_flight)
    spec, other = kernel.prepare_finalize.spec, weights_of(kernel.prepare_finalize.spec, ranks, seed=8)
    forward = kernel.forward
    if in_flight > 1:
        two = TwoInFlight(kernel)
        two.warm_up()
        forward = two.forward
    shared_KK = (torch.randn((spec.shape.hidden,) * 2, generator=torch.Generator().manual_seed(3)) * 0.02).bfloat16()
    shared_KK = shared_KK.to(ranks.device)
    layers = {
        "a": (weights, None),
        "b": (kernel.fused_experts.prepare_weights(other), lambda x: torch.tanh(x @ shared_KK)),
    }
    with torch.no_grad():
        graphs = StepGraphs(ranks, spec, BUCKETS)
        runs = {key: kernel_step(forward, *of_layer, ranks.world_size) for key, of_layer in layers.items()}
        for key, run in runs.items():
            graphs.warm(run)
            graphs.capture(key, run)
        same = random.Random(5)
        for step in range(STEPS):
            longest = same.choice(BUCKETS)
            counts = [same.randrange(longest + 1) for _ in range(ranks.world_size)]
            key = same.choice("ab")
            bucket, (of_layer, shared) = graphs.bucket(counts), layers[key]
            x, routing = batch_of(spec, counts[ranks.rank], 100 * step + ranks.rank, ranks.device)
            replayed = graphs.replay(key, bucket, x, routing)
            eager = padded_eager(graphs, runs[key], bucket, x, routing)
            plain = kernel.forward(x, routing, weights=of_layer, tokens_per_rank=counts, shared_experts=shared)
            kernel.prepare_finalize.check()
            assert torch.equal(replayed, eager), f"step {step}, {counts} tokens in bucket {bucket}: other bits"
            torch.testing.assert_close(replayed.float(), plain.float(), rtol=3e-2, atol=3e-2)
            assert replayed.isfinite().all() and (not counts[ranks.rank] or replayed.abs().sum() > 0)
    replays = graphs.replays
    del graphs
    manager.destroy()
    return replays


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("pf_name", "experts_name", "world"), GRAPH_PAIRS)
def test_replays_equal_eager_steps_bit_for_bit(pf_name, experts_name, world, in_flight):
    need(world, pf_name)
    if in_flight == 2 and not all2all.REGISTRY.get(pf_name).prepare_finalize.capability.async_receive:
        pytest.skip(f"{pf_name} holds one batch")
    if pf_name == "nvshmem" and RANKS_PER_GPU > 1:
        pytest.skip("NVSHMEM's barrier between processes of one GPU cannot be captured")
    assert (
        run_ranks(graphs_on_ranks, world, pf_name, experts_name, in_flight, device="cuda", timeout=240)
        == [STEPS] * world
    )


def memory_comes_back(device: torch.device) -> bool:
    """Memory that two streams have used is free again, which torch's allocator puts off as long as a capture is under way."""

    def active() -> int:
        return torch.cuda.memory_stats(device)["active_bytes.all.current"]

    before, other = active(), torch.cuda.Stream(device)
    x = torch.empty(1 << 24, dtype=torch.uint8, device=device)
    x.record_stream(other)
    del x
    torch.cuda.synchronize(device)
    torch.empty(1, device=device)  # the allocator looks at its events when it is asked
    return active() <= before


def captures_after_trouble(ranks: RankContext, trouble: str) -> None:
    """Whatever became of earlier captures, a new one replays the eager step's bits, on the caller's stream."""
    manager, kernel, weights = kernel_of(ranks, "local", "triton", BUCKETS[-1])
    spec, armed = kernel.prepare_finalize.spec, []

    def forward(x_MK, routing, **arguments):
        out = kernel.forward(x_MK, routing, **arguments)
        if armed and x_MK.shape[0] == BUCKETS[1]:
            armed[0]()
        return out

    def refuse() -> None:
        raise ConfigError("refused inside a capture")

    graphs, stream, kept = StepGraphs(ranks, spec, BUCKETS), torch.cuda.current_stream(), []
    run = kernel_step(forward, weights, None)
    with torch.no_grad():
        graphs.warm(run)
        for _ in range(3):
            graphs.capture("a", run)
            x, routing = batch_of(spec, 5, 1, ranks.device)
            kept.append(graphs.replay("a", 8, x, routing))
            if trouble == "all dropped":
                graphs.drop("a")
            else:
                armed.append(refuse if trouble == "an error" else torch.cuda.synchronize)  # the latter breaks a capture
                with pytest.raises((ConfigError, RuntimeError)) as caught:
                    graphs.capture("b", run)
                assert "use_count" not in str(caught.value), caught.value
                armed.clear()
            assert len(graphs) == 0 and torch.cuda.current_stream() == stream
            assert memory_comes_back(ranks.device), "the allocator takes the broken capture for one under way"
        graphs.capture("c", run)
        again = graphs.replay("c", 8, x, routing)
        assert torch.equal(again, padded_eager(graphs, run, 8, x, routing))
        assert all(torch.equal(again, each) for each in kept)
    manager.destroy()


@pytest.mark.parametrize("trouble", ["all dropped", "an error", "a broken capture"])
def test_captures_after_trouble(trouble):
    run_ranks(captures_after_trouble, 1, trouble, device="cuda", timeout=120)


def capture_high_throughput(ranks: RankContext) -> None:
    manager, kernel, weights = kernel_of(ranks, "deepep_ht", "triton", BUCKETS[-1])
    with torch.no_grad():
        graphs = StepGraphs(ranks, kernel.prepare_finalize.spec, BUCKETS)
        run = kernel_step(kernel.forward, weights, None, ranks.world_size)
        graphs.warm(run)
        with pytest.raises(ConfigError, match="no CUDA graph"):
            graphs.capture("a", run)
    manager.abandon()


def test_high_throughput_refuses_capture():
    need(2, "deepep_ht")
    run_ranks(capture_high_throughput, 2, device="cuda", timeout=120)


# --- two batches in flight ---------------------------------------------------------------------------------------


def overlapped(ranks: RankContext, pf_name: str, experts_name: str) -> None:
    manager, kernel, weights = kernel_of(ranks, pf_name, experts_name, 64, in_flight=2)
    two = TwoInFlight(kernel)
    two.warm_up()
    spec, same = kernel.prepare_finalize.spec, random.Random(6)
    shared_KK = torch.eye(spec.shape.hidden, dtype=torch.bfloat16, device=ranks.device)
    for step in range(STEPS):
        counts = [same.choice((0, 1, 7, 64, 150)) for _ in range(ranks.world_size)]
        x, routing = batch_of(spec, counts[ranks.rank], 100 * step + ranks.rank, ranks.device)
        arguments = {
            "weights": weights,
            "tokens_per_rank": counts,
            "shared_experts": lambda x: torch.tanh(x @ shared_KK),
        }
        kernel.workspaces.poison()
        two.second.poison()
        outs = [two.forward(x, routing, overlap=overlap, **arguments) for overlap in (True, False)]
        torch.cuda.synchronize()
        kernel.prepare_finalize.check()
        assert torch.equal(*outs), f"step {step}, {counts} tokens: overlapped and sequential differ"
        assert outs[0].isfinite().all()
    manager.destroy()


@pytest.mark.parametrize(("pf_name", "experts_name"), OVERLAP_PAIRS)
def test_overlapped_halves_are_bit_equal_to_sequential_ones(pf_name, experts_name):
    need(2, pf_name)
    run_ranks(overlapped, 2, pf_name, experts_name, device="cuda", timeout=240)


# --- a whole rank ------------------------------------------------------------------------------------------------

LAYER = 1


def steps_on_ranks(ranks: RankContext, path, sizes, engine) -> tuple[list[torch.Tensor], list[str], int]:
    worker = make_worker(path, ranks, device="cuda", max_tokens_per_rank=256, **engine)
    outs = []
    for step, counts in enumerate(sizes):
        first = sum(counts[: ranks.rank])
        x = tokens(sum(counts))[first : first + counts[ranks.rank]]
        plan = StepPlan(step=step, layer=LAYER, mode="routed", tokens_per_rank=tuple(counts))
        ids, weights = routed(sum(counts))
        rows = slice(first, first + counts[ranks.rank])
        outs.append(worker.step(plan, x, ids[rows], weights[rows]).cpu())
        worker.check()
    replays = sum(path.graphs.replays for path in worker.kernels.first.paths.values() if path.graphs is not None)
    notes = worker.explain()
    worker.close()
    return outs, notes, replays


def tokens(count: int) -> torch.Tensor:
    return torch.randn((count, 2048), generator=torch.Generator().manual_seed(count)).bfloat16()


def routed(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(count + 1)
    ids = torch.rand((count, 16), generator=gen).topk(4).indices.int()
    return ids, torch.rand((count, 4), generator=gen)


def in_float64(path, sizes) -> list[torch.Tensor]:
    """The routed experts alone: what mode "routed" returns."""
    every = open_checkpoint(path).load_layer(LAYER, range(16)).experts
    outs = []
    for counts in sizes:
        ids, weights = routed(sum(counts))
        outs.append(reference(tokens(sum(counts)), Routing(ids_Mt=ids.contiguous(), weights_Mt=weights), every))
    return outs


ENGINES = {
    "measured": {"all2all": "measured"},
    "measured, graphs, two in flight": {
        "all2all": "measured", "cuda_graph_tokens": [1, 8, 64], "batches_in_flight": 2, "overlap_min_tokens": 32,
    },
    "graphs on nvlink": {"all2all": "nvlink", "cuda_graph_tokens": [4, 64]},
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_a_rank_with_several_paths_gives_the_same_sums(tmp_path, name):
    need(2, "nvlink")
    path = tmp_path / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.bfloat16, hidden=2048, intermediate=256, num_experts=16, top_k=4,
                          num_layers=2, seed=3)  # fmt: skip
    sizes = [(1, 1), (0, 1), (8, 3), (40, 64), (200, 10), (300, 600), (0, 0)]
    results = run_ranks(steps_on_ranks, 2, path, sizes, ENGINES[name], device="cuda", timeout=300)
    for index, want in enumerate(in_float64(path, sizes)):
        got = torch.cat([outs[index] for outs, _, _ in results]).double()
        assert got.shape == want.shape
        assert (got - want).norm() <= 1.2e-2 * want.norm().clamp(min=1e-6), (name, sizes[index])
    for _, notes, replays in results:
        assert ("cuda_graph_tokens" in ENGINES[name]) == any("CUDA graphs for up to" in note for note in notes)
        assert name != "graphs on nvlink" or replays == 5  # all steps that fit a bucket
        assert "measured" not in name or any("on the busiest rank" in note for note in notes)


def test_two_paths_refuse_a_budget_that_they_exceed(tmp_path):
    need(2, "nvlink")
    path = tmp_path / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.bfloat16, hidden=2048, intermediate=256, num_experts=16, top_k=4,
                          num_layers=2, seed=3)  # fmt: skip
    ranks = dataclasses.replace(RankContext(), world_size=2, device=torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"all2all_budget_mib: .* the limit is 1 MiB"):
        make_worker(path, ranks, device="cuda", all2all="measured", all2all_budget_mib=1)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_service_with_several_paths_and_graphs(tmp_path, caplog, family):
    """Under Ray, over gRPC: what is measured, captured and halved is the configuration's alone."""
    need(2, "nvlink")
    path = tmp_path / family
    write_demo_checkpoint(family, path, dtype=torch.bfloat16, **test_gpu_service.SIZES)
    engine = {
        "ranks": 2, "device": "cuda", "all2all": "measured", "cuda_graph_tokens": [1, 8, 64],
        "batches_in_flight": 2, "overlap_min_tokens": 256,
    }  # fmt: skip
    config = parse_config(
        {"model": {"path": str(path)}, "engine": engine, "cluster": cluster_section(), "server": {"port": 0}}
    )
    try:
        errors, status = asyncio.run(test_gpu_service.answers(config, path))
    except EpserveError as error:
        # What a rank said first: a later attempt to join may fail of something else.
        print("\n".join(record.getMessage() for record in caplog.records))
        print(getattr(getattr(error, "failure", None), "trace", "") or "no rank's trace")
        raise
    assert max(errors) <= test_gpu_service.TOLERANCE, errors
    assert "tokens on the busiest rank" in status.backends and "CUDA graphs for up to 1, 8, 64" in status.backends
