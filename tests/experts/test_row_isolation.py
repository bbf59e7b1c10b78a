"""No row changes another one on a CPU, whatever the processor: by a stand-in for AMX's products, and on the processor itself.

Overflow inside the experts and undefined memory are the two ways in which values that are not finite come beside good rows.
"""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from epserve import all2all, experts
from epserve.config import parse_config
from epserve.experts import rows
from epserve.models import SharedExperts
from epserve.modular_kernel import Activation, ExpertWeights, RankContext
from epserve.rank.gate import GateSpec, GateWeights, fitted, route
from epserve.rank.step import StepPlan
from epserve.rank.weights.hand_over import PeerSource
from epserve.rank.worker import Worker
from tests.experts.mixing_products import MixingProducts
from tests.kernel.test_modular_kernel_combinations import make_kernel
from tests.support.cases import CASES, same_set
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks

LARGE = 3e38
GOOD, BAD = 20, 40
PAIRS = [("local", "loop"), ("local", "grouped_mm"), ("all_to_all", "grouped_mm"), ("all_to_all_batched", "batched_loop"),
         ("all_to_all_batched", "batched_mm")]  # fmt: skip
SIZES = [(80, 48), (64, 80), (96, 176), (128, 720), (72, 64)]
"""Hidden and intermediate sizes, of which one at least is no multiple of 32; 176 and 720 are slices of published models."""
PROCESSORS = {"stand-in": MixingProducts, "this one": contextlib.nullcontext}


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def test_the_stand_in_does_what_amx_does():
    x, w_NK = torch.ones(40, 80).bfloat16(), torch.ones(64, 80).bfloat16()
    x[20] = float("inf")
    with MixingProducts() as mixing:
        for y in (x @ w_NK.T, F.linear(x, w_NK)):
            assert y.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [19, 20, 39]
        assert (x @ w_NK[0]).isfinite().logical_not().nonzero().flatten().tolist() == [19, 20, 39], "by a vector"
        assert F.linear(x[:, :64], w_NK[:, :64])[39].isfinite().all(), "64 columns are whole tiles"
        assert F.linear(x.float(), w_NK.float())[19].isfinite().all(), "float32 has no such tiles"
    assert mixing.crossed == 3


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize(("all2all_name", "experts_name"), PAIRS)
def test_overflow_in_one_row_leaves_the_others_as_they_are(all2all_name, experts_name, hidden, intermediate, processor):
    case = dataclasses.replace(
        CASES["bf16"], hidden=hidden, intermediate=intermediate, top_k=2, route=same_set, cap=128,
        tokens=lambda rank, world: GOOD + BAD,
    )  # fmt: skip
    manager = all2all.REGISTRY.get(all2all_name)(RankContext())
    kernel, inputs = make_kernel(manager, experts_name, case, RankContext())
    weights = kernel.fused_experts.prepare_weights(inputs.weights)
    kernel.warm_up(weights)
    x_MK = inputs.x_MK.clone()
    with torch.inference_mode(), PROCESSORS[processor]():
        alone = kernel.forward(x_MK, inputs.routing, weights=weights)
        x_MK[GOOD:] = LARGE
        kernel.workspaces.poison()
        beside = kernel.forward(x_MK, inputs.routing, weights=weights)
    manager.destroy()
    assert not beside[GOOD:].isfinite().all(), "the rows do not overflow: the test shows nothing"
    assert alone.isfinite().all() and torch.equal(beside[:GOOD], alone[:GOOD])


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_undefined_rows_of_a_block_stay_among_themselves(hidden, intermediate, processor):
    """Blocks of 128 rows with about ten defined ones: what earlier work left behind those is NaN."""
    case = dataclasses.replace(
        CASES["bf16"], hidden=hidden, intermediate=intermediate, cap=128, tokens=lambda rank, world: 25
    )
    manager = all2all.REGISTRY.get("all_to_all_batched")(RankContext())
    kernel, inputs = make_kernel(manager, "batched_mm", case, RankContext())
    weights = kernel.fused_experts.prepare_weights(inputs.weights)
    kernel.warm_up(weights)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory then holds NaN
    try:
        with torch.inference_mode(), PROCESSORS[processor]():
            kernel.workspaces.poison()
            out = kernel.forward(inputs.x_MK, inputs.routing, weights=weights)
    finally:
        torch.use_deterministic_algorithms(False)
    manager.destroy()
    assert out.isfinite().all()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_gate(processor):
    """The last row has memory of anybody behind it."""
    spec = GateSpec(top_k=2, scoring="softmax")
    plain, x = GateWeights(weight_EK=bf16(8, 80, seed=1)), bf16(33, 80)
    weights = fitted(plain, spec, torch.bfloat16)
    want = route(x.float(), GateWeights(weight_EK=plain.weight_EK.float()), spec)
    with torch.inference_mode(), PROCESSORS[processor]():
        for each in (weights, plain):
            routing = route(x, each, spec)
            assert routing.weights_Mt.isfinite().all()
            assert torch.allclose(routing.weights_Mt, want.weights_Mt, atol=0.05)
    assert torch.equal(weights.weight_EK, plain.weight_EK)


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("hidden", "inner"), [(80, 64), (64, 72), (80, 72)])
def test_shared_experts(hidden, inner, processor):
    plain = SharedExperts(
        w13_SK=bf16(2 * inner, hidden, seed=1, scale=hidden**-0.5), w2_KS=bf16(hidden, inner, seed=2, scale=inner**-0.5),
        activation=Activation(), gate_1K=bf16(1, hidden, seed=3),
    )  # fmt: skip
    shared, x = plain.fitted(), bf16(GOOD + BAD, hidden)
    with torch.inference_mode(), PROCESSORS[processor]():
        alone = shared(x)
        x[GOOD:] = LARGE
        assert torch.equal(shared(x)[:GOOD], alone[:GOOD]) and alone.isfinite().all()
        assert torch.equal(plain(x)[:GOOD], alone[:GOOD])


def on_rank(ranks: RankContext, path, engine: dict, processor: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Good rows of this rank in a step of their own, and beside another client's large ones."""
    config = parse_config(
        {"model": {"path": str(path)}, "engine": {"device": "cpu", "ranks": ranks.world_size, **engine}}
    )
    worker = Worker(config, ranks)
    worker.load()
    worker.warm_up()
    hidden, count = worker.info.hidden, (GOOD + BAD,) * ranks.world_size
    x = bf16(GOOD + BAD, hidden, seed=ranks.rank)
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=count)
    with PROCESSORS[processor]():
        alone = worker.step(plan, x, None, None)
        x[GOOD:] = LARGE
        beside = worker.step(plan, x, None, None)
    worker.close()
    assert not beside[GOOD:].isfinite().all()
    return alone[:GOOD], beside[:GOOD]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return {
        "mixtral": write("mixtral", folder / "mixtral", hidden=64, intermediate=80, dtype=torch.bfloat16),
        "shared": write("qwen2_moe", folder / "shared", hidden=80, intermediate=48, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", ["mixtral", "shared"])
@pytest.mark.parametrize("engine", [
    {}, {"experts": "loop"}, {"experts": "grouped_mm"}, {"all2all": "all_to_all_batched", "experts": "batched_mm"}
], ids=lambda engine: engine.get("experts", "as it comes"))  # fmt: skip
def test_a_rank_keeps_clients_apart(checkpoints, name, engine, processor):
    alone, beside = on_rank(RankContext(), checkpoints[name], engine, processor)
    assert alone.isfinite().all() and torch.equal(alone, beside)


@pytest.mark.parametrize("engine", [{"tensor_parallel": 2}, {}], ids=["slices", "whole experts"])
def test_ranks_keep_clients_apart(checkpoints, engine):
    """Slices of 80 values are 40 wide."""
    for alone, beside in run_ranks(on_rank, 4, checkpoints["mixtral"], engine, "stand-in"):
        assert alone.isfinite().all() and torch.equal(alone, beside)


def test_weights_are_copied_once_and_look_as_before():
    plain = bf16(3, 64, 80)
    wide = rows.with_zeros(plain)
    assert torch.equal(wide, plain) and wide.shape == plain.shape
    assert rows.with_zeros(wide) is wide
    assert rows.whole(wide).data_ptr() == wide.data_ptr() and rows.whole(wide).shape == (3, 64, 96)
    assert not rows.whole(wide)[..., 80:].any() and torch.equal(rows.whole(wide[1])[:, :80], plain[1])
    for other in (bf16(3, 64, 96), plain.float(), plain.half()):
        assert rows.with_zeros(other) is other and rows.whole(other) is other
    assert rows.whole(rows.with_zeros(plain[:0])).shape == (0, 64, 96)


def test_a_move_of_experts_takes_weights_with_and_without_zeros(checkpoints):
    """A rank that serves holds wide rows; what its checkpoint or a peer brings has none yet."""
    config = parse_config({"model": {"path": str(checkpoints["mixtral"])}, "engine": {"device": "cpu"}})
    worker = Worker(config, RankContext())
    worker.load()
    worker.warm_up()
    held = worker.weights.held(LAYER)
    few = held[0], held[1][:4], dataclasses.replace(held[2], experts=_first(held[2].experts, 4))
    moved = PeerSource(lambda _: few, {}, worker).load_layer(LAYER, (6, 1, 3), torch.device("cpu")).experts
    truth = worker.load_layer(LAYER, (6, 1, 3), torch.device("cpu")).experts
    assert torch.equal(moved.w13_eNK, truth.w13_eNK) and torch.equal(moved.w2_eKN, truth.w2_eKN)
    assert held[2].experts.w2_eKN.stride(1) == 96, "the rank's own are not wide: the test shows nothing"
    ready = experts.REGISTRY.get("grouped_mm")(worker.plan.spec).prepare_weights(moved)
    assert torch.equal(ready.w2_eKN, truth.w2_eKN) and not rows.whole(ready.w2_eKN)[..., 80:].any()
    worker.close()


def _first(weights: ExpertWeights, count: int) -> ExpertWeights:
    return dataclasses.replace(weights, w13_eNK=weights.w13_eNK[:count], w2_eKN=weights.w2_eKN[:count])
