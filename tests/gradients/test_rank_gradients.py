"""Backward steps of ranks: gradients against float64, the same on any number of ranks, rows independent of each other."""

import json

import pytest
import torch

from benchmarks import gradients as benchmark
from epserve.config import parse_config
from epserve.experts import dequantised
from epserve.experts.activation import activate
from epserve.models.demo import reference_module
from epserve.modular_kernel import RankContext
from epserve.rank.step import StepPlan, split_gradients
from epserve.rank.worker import Worker
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks

FAMILIES = {
    "mixtral": {},
    "qwen3_moe": {},
    "qwen2_moe": {},  # a gate on the shared expert
    "deepseek_v3": {},
    "gpt_oss": {},  # biases, clamps, weights from a softmax of the chosen logits
}
HIDDEN = 64
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    made = {}

    def get(family: str, dtype: torch.dtype = torch.float32, **sizes):
        key = family, dtype, *sizes.items()
        if key not in made:
            made[key] = write(family, folder / str(len(made)), dtype=dtype, **sizes)
        return made[key]

    return get


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def backward(ranks: RankContext, path, counts, engine, x, g, routing=None) -> torch.Tensor:
    """This rank's share of one backward step, which must have the same bits when it is run again."""
    worker = Worker(parse_config({"model": {"path": str(path)}, "engine": {"ranks": len(counts), **engine}}), ranks)
    worker.load()
    worker.warm_up()
    rows = slice(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
    ids, weights = (None, None) if routing is None else (each[rows] for each in routing)
    mode = "block" if routing is None else "routed"
    plan = StepPlan(step=0, layer=LAYER, mode=mode, tokens_per_rank=tuple(counts), backward=True)
    x, g = x[rows].to(worker.info.dtype), g[rows].to(worker.info.dtype)
    made = worker.step(plan, x, ids, weights, g)
    again = worker.step(plan, x, ids, weights, g)
    assert torch.equal(made.view(torch.uint8), again.view(torch.uint8))  # of NaN too
    worker.close()
    return made


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def block_gradient(path, x, g) -> torch.Tensor:
    """Of transformers' own block in float64."""
    block = reference_module(path, LAYER).double()
    leaf = x.double().requires_grad_()
    out = block(leaf[None])
    (out[0] if isinstance(out, tuple) else out).reshape(x.shape).backward(g.double())
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("family", FAMILIES)
def test_a_blocks_gradient_is_that_of_transformers(checkpoints, family):
    path = checkpoints(family)
    x, g = normal(1, 7, HIDDEN), normal(2, 7, HIDDEN)
    (got,) = run_ranks(backward, 1, path, (7,), {}, x, g)
    assert error(got, block_gradient(path, x, g)) < BOUND[torch.float32]


# Each row: tokens of each rank, engine settings, and why the row exists.
CASES = {
    "two ranks": ((5, 6), {}),
    "four ranks, a silent one holds experts that others need": ((4, 0, 4, 4), {}),
    "no token anywhere": ((0, 0), {}),
    "above the cap on one rank only": ((13, 2), {"max_tokens_per_rank": 4}),
    "sums in slot order": ((5, 5), {"combine_order": "slot"}),
    "ranks that share experts": ((4, 3, 2, 5), {"tensor_parallel": 2}),
    "batched experts in the forward": ((3, 4), {"all2all": "all_to_all_batched"}),
    "every row on every rank in the forward": ((3, 4), {"all2all": "allgather_reducescatter"}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_the_gradient_of_one(checkpoints, case):
    counts, engine = CASES[case]
    path, total = checkpoints("deepseek_v3"), sum(counts)
    x, g = normal(3, total, HIDDEN), normal(4, total, HIDDEN)
    got = torch.cat(run_ranks(backward, len(counts), path, counts, engine, x, g))
    want = block_gradient(path, x, g)
    assert got.shape == want.shape and (total == 0 or error(got, want) < BOUND[torch.float32])


def routed_reference(path, x, g, ids, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and routing weights by autograd in float64, from the experts' plain matrices."""
    worker = Worker(parse_config({"model": {"path": str(path)}}), RankContext())
    experts = worker.load_layer(LAYER, range(worker.info.num_experts), torch.device("cpu")).experts
    quant = worker.plan.served[LAYER]
    x, w = x.to(worker.info.dtype).double().requires_grad_(), weights.double().requires_grad_()
    total = torch.zeros_like(x)
    for expert in range(experts.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = (each.double() for each in dequantised.matrices(experts, expert, quant, torch.float32))
        h = x[token] @ w13.T + (0 if experts.b13 is None else experts.b13[expert].double())
        y = activate(h, experts.activation) @ w2.T + (0 if experts.b2 is None else experts.b2[expert].double())
        total = total.index_add(0, token, y * w[token, slot, None])
    dx, dw = torch.autograd.grad(total, (x, w), g.to(worker.info.dtype).double())
    return dx, dw


def routing(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some slots without an expert, some tokens that choose one expert twice."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 8, (tokens, 2), generator=generator).int()
    return ids, torch.rand((tokens, 2), generator=generator)


@pytest.mark.parametrize(("counts", "order"), [((11,), "rank"), ((6, 5), "slot"), ((6, 0, 5, 0), "rank")])
@pytest.mark.parametrize("dtype", BOUND)
def test_gradients_of_rows_and_routing_weights(checkpoints, counts, order, dtype):
    path, total = checkpoints("gpt_oss", dtype), sum(counts)
    x, g, routed = normal(5, total, HIDDEN), normal(6, total, HIDDEN), routing(7, total)
    made = torch.cat(run_ranks(backward, len(counts), path, counts, {"combine_order": order}, x, g, routed))
    dx, dw = split_gradients(made, HIDDEN)
    want_dx, want_dw = routed_reference(path, x, g, *routed)
    assert dx.dtype == dtype and dw.dtype == torch.float32
    assert error(dx, want_dx) < BOUND[dtype] and error(dw, want_dw) < BOUND[dtype]
    assert (dw[routed[0] < 0] == 0).all()


def test_slot_order_has_the_same_bits_on_any_number_of_ranks(checkpoints):
    path = checkpoints("mixtral", torch.bfloat16)
    x, g, routed = normal(8, 12, HIDDEN), normal(9, 12, HIDDEN), routing(10, 12)
    found = [
        torch.cat(run_ranks(backward, len(counts), path, counts, {"combine_order": "slot"}, x, g, routed))
        for counts in ((12,), (6, 6), (3, 3, 3, 3))
    ]
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_a_row_does_not_depend_on_the_others(checkpoints):
    """A gradient that overflows stays in its row."""
    path = checkpoints("mixtral", torch.bfloat16, hidden=72, intermediate=24)  # not whole tiles of a processor
    x, g = normal(11, 6, 72), normal(12, 6, 72)
    routed = torch.zeros((6, 2), dtype=torch.int32), torch.ones((6, 2))
    routed[0][:, 1] = 1
    (clean,) = run_ranks(backward, 1, path, (6,), {}, x, g, routed)
    x[2], g[2] = 3e38, 3e38
    (spoilt,) = run_ranks(backward, 1, path, (6,), {}, x, g, routed)
    others = [0, 1, 3, 4, 5]
    assert not spoilt[2, :72].isfinite().all() and torch.equal(clean[others], spoilt[others])


def test_the_benchmark_compares_both_kinds_of_step(tmp_path):
    sizes = [
        "--hidden",
        "64",
        "--intermediate",
        "32",
        "--experts",
        "4",
        "--top-k",
        "2",
        "--repeats",
        "2",
        "--tokens",
        "0",
        "5",
    ]
    benchmark.main([*sizes, "--device", "cpu", "--dtype", "float32", "--json", str(tmp_path / "out.json")])
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [each["tokens"] for each in cells] == [0, 5]
    assert all(each["ratio"] == pytest.approx(each["backward_ms"] / each["forward_ms"], rel=0.1) for each in cells)
