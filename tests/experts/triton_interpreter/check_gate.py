"""The gate's kernels against the torch path, in Triton's interpreter. Run by test_gate.py in its own process."""

import dataclasses

import pytest
import torch

from tests.experts.triton_interpreter import exact_casts  # first: it patches the interpreter

from epserve.rank import gate  # isort: skip
from epserve.modular_kernel import GateSpec, GateWeights  # isort: skip
from epserve.experts.triton import gate as triton_gate  # isort: skip

torch.set_num_threads(1)
assert exact_casts.install is not None
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEEPSEEK = GateSpec(
    top_k=8, scoring="sigmoid", renormalise=True, renormalise_epsilon=1e-20, num_groups=8, top_groups=4, group_score="top2_sum",
    correction_bias=True, routed_scaling_factor=2.5, logits_float32=True,
)  # fmt: skip
PLAIN = GateSpec(top_k=2)


@pytest.fixture(autouse=True)
def lowest_id_first(monkeypatch):
    """The torch path as it is on a GPU; on the CPU equal scores are left to torch.topk."""
    monkeypatch.setattr(gate, "_top", lambda values, k, in_order: gate._stable_top(values, k))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bias_for(spec: GateSpec, num_experts: int) -> torch.Tensor | None:
    return torch.rand(num_experts, generator=generator(9)) * 0.1 if spec.correction_bias else None


def same(got, want, atol: float = 1e-6) -> None:
    assert got.ids_Mt.dtype == torch.int32 and got.weights_Mt.dtype == F32
    assert torch.equal(got.ids_Mt, want.ids_Mt)
    torch.testing.assert_close(got.weights_Mt, want.weights_Mt, rtol=2e-6, atol=atol, equal_nan=True)


SIZES = [(1, 1), (2, 1), (3, 2), (8, 8), (60, 4), (64, 6), (72, 16), (128, 8), (160, 6), (257, 7), (384, 8), (512, 10)]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_topk"])
@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
def test_any_number_of_experts(num_experts, top_k, scoring):
    spec = GateSpec(top_k=top_k, scoring=scoring, renormalise=scoring == "sigmoid")
    logits = torch.randn((7, num_experts), generator=generator(num_experts))
    same(triton_gate.choose(logits, None, spec), gate.route_logits(logits, None, spec))


VARIANTS = {
    "DeepSeek-V3": (256, DEEPSEEK),
    "groups of 9, which is no power of two": (72, dataclasses.replace(DEEPSEEK, top_k=6)),
    "three groups": (12, dataclasses.replace(DEEPSEEK, top_k=4, num_groups=3, top_groups=2)),
    "all groups": (64, dataclasses.replace(DEEPSEEK, num_groups=4, top_groups=4)),
    "one group of many": (64, dataclasses.replace(DEEPSEEK, num_groups=8, top_groups=1)),
    "groups by maximum, as in DeepSeek-V2": (
        160,
        GateSpec(top_k=6, num_groups=8, top_groups=3, routed_scaling_factor=16.0, logits_float32=True),
    ),
    "groups of one expert": (8, GateSpec(top_k=2, num_groups=8, top_groups=4)),
    "a bias on softmax scores": (64, GateSpec(top_k=4, correction_bias=True, renormalise=True)),
    "no renormalisation": (64, dataclasses.replace(DEEPSEEK, renormalise=False)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_field_of_the_spec(name):
    num_experts, spec = VARIANTS[name]
    spec.check_experts(num_experts)
    logits, bias = torch.randn((9, num_experts), generator=generator(1)), bias_for(spec, num_experts)
    want = gate.route_logits(logits, bias, spec)
    same(triton_gate.choose(logits, bias, spec), want, atol=4e-6 if spec.routed_scaling_factor > 4 else 1e-6)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        GateSpec(top_k=8, renormalise=True, round_weights=True),
        GateSpec(top_k=8, round_weights=True),
        GateSpec(top_k=4, scoring="softmax_of_topk", round_weights=True),
        GateSpec(top_k=4, scoring="softmax_of_topk", renormalise=True, routed_scaling_factor=1.7),
        GateSpec(top_k=4, scoring="sigmoid", renormalise=True, routed_scaling_factor=1.7),
    ],
    ids=str,
)
def test_logits_of_16_bits_tie_often_and_round_as_torch_does(spec, dtype):
    """At most one unit of the last place where the weights are rounded: float32 differs by its own last bit before that."""
    logits = (torch.randn((64, 128), generator=generator(2)) * 4).round().to(dtype)
    assert (logits.sort(dim=1).values.diff(dim=1) == 0).any()
    got, want = triton_gate.choose(logits, None, spec), gate.route_logits(logits, None, spec)
    assert torch.equal(got.ids_Mt, want.ids_Mt)
    rounded = spec.round_weights or spec.scoring == "softmax_of_topk"
    unit = torch.finfo(dtype).eps if rounded else 1e-6
    torch.testing.assert_close(got.weights_Mt, want.weights_Mt, rtol=unit, atol=1e-7)
    if rounded:
        assert torch.equal(got.weights_Mt.to(dtype).float(), got.weights_Mt)


@pytest.mark.parametrize("spec", [DEEPSEEK, GateSpec(top_k=8), GateSpec(top_k=8, scoring="softmax_of_topk")], ids=str)
def test_equal_scores_go_to_the_lowest_id(spec):
    logits = torch.zeros((3, 64))
    logits[1, 40:] = 1.0
    logits[2] = torch.tensor([0.0, -0.0]).repeat(32)  # equal, though their bits differ
    bias = torch.zeros(64) if spec.correction_bias else None
    got = triton_gate.choose(logits, bias, spec)
    same(got, gate.route_logits(logits, bias, spec))
    assert got.ids_Mt[0].tolist() == got.ids_Mt[2].tolist() == list(range(8))
    assert got.ids_Mt[1].tolist() == list(range(40, 48))


@pytest.mark.parametrize("spec", [DEEPSEEK, GateSpec(top_k=8), GateSpec(top_k=8, scoring="softmax_of_topk")], ids=str)
def test_rows_that_are_not_finite_keep_to_themselves(spec):
    """NaN anywhere, +-inf, and a row of -inf: ids stay distinct and in range; other rows keep every bit."""
    logits = torch.randn((9, 64), generator=generator(3))
    bias = bias_for(spec, 64)
    clean = triton_gate.choose(logits, bias, spec)
    dirty = logits.clone()
    dirty[1] = float("nan")
    dirty[3, 5] = float("nan")
    dirty[4, 7] = float("-inf")
    dirty[5] = float("-inf")
    dirty[6, 60] = float("inf")
    dirty[7, 3:] = float("-inf")
    got, want = triton_gate.choose(dirty, bias, spec), gate.route_logits(dirty, bias, spec)
    same(got, want)
    assert all(len(set(row)) == 8 and 0 <= min(row) <= max(row) < 64 for row in got.ids_Mt.tolist())
    for row in (0, 2, 8):
        assert torch.equal(got.ids_Mt[row], clean.ids_Mt[row]) and torch.equal(
            got.weights_Mt[row], clean.weights_Mt[row]
        )


PRODUCTS = [
    # tokens, hidden, experts, x and weight, spec: why
    (1, 7168, 64, BF16, BF16, DEEPSEEK),  # one token, every level of the sum
    (
        5,
        7168,
        40,
        BF16,
        F32,
        dataclasses.replace(DEEPSEEK, num_groups=5, top_groups=3),
    ),  # float32 weight in three pieces
    (33, 1040, 70, BF16, BF16, PLAIN),  # second size of tiles; neither K nor E divides
    (33, 1040, 70, F16, F16, PLAIN),
    (260, 528, 130, BF16, BF16, PLAIN),  # thick, wide
    (260, 528, 20, BF16, BF16, PLAIN),  # thick, few experts
    (260, 528, 130, BF16, F32, dataclasses.replace(PLAIN, logits_float32=True)),
    (3, 64, 4, BF16, BF16, PLAIN),  # less than one chunk
    (0, 64, 4, BF16, BF16, PLAIN),
]


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("tokens", "hidden", "num_experts", "dtype", "stored", "spec"), PRODUCTS)
def test_from_hidden_states(tokens, hidden, num_experts, dtype, stored, spec, with_bias):
    x = torch.randn((tokens, hidden), generator=generator(4)).to(dtype)
    w = (torch.randn((num_experts, hidden), generator=generator(5)) * hidden**-0.5).to(stored)
    bias = torch.randn(num_experts, generator=generator(6)).to(stored) if with_bias else None
    weights = GateWeights(weight_EK=w, bias_E=bias, correction_bias_E=bias_for(spec, num_experts))
    assert triton_gate.multiplies(x, weights, spec) and triton_gate.chooses(spec, num_experts)
    got = triton_gate.route(x, weights, spec)
    logits = x.double() @ w.double().T + (0 if bias is None else bias.double())
    held = logits.float() if spec.logits_float32 else logits.to(dtype)
    want = gate.route_logits(held, weights.correction_bias_E, spec)
    if spec.logits_float32:
        same(got, want)
        return
    agree = (got.ids_Mt == want.ids_Mt).all(dim=1)  # a logit may round to the neighbour: then equal ones part
    assert agree.float().mean() > 0.95 if tokens else got.ids_Mt.shape == (0, spec.top_k)
    torch.testing.assert_close(got.weights_Mt[agree], want.weights_Mt[agree], rtol=2e-2, atol=1e-6)


def test_what_the_kernels_leave_to_torch():
    x, w = torch.zeros((2, 64), dtype=BF16), torch.zeros((4, 64))
    exact = dataclasses.replace(PLAIN, logits_float32=True)
    assert triton_gate.multiplies(x, GateWeights(weight_EK=w), exact)
    assert not triton_gate.multiplies(x, GateWeights(weight_EK=w), PLAIN)  # torch would refuse it
    assert not triton_gate.multiplies(x.half(), GateWeights(weight_EK=w), exact)  # three bfloat16 do not hold fp16
    assert not triton_gate.multiplies(x.float(), GateWeights(weight_EK=w), exact)
    assert not triton_gate.multiplies(x[:, :40], GateWeights(weight_EK=w.bfloat16()[:, :40]), PLAIN)
    assert not triton_gate.multiplies(torch.zeros(65, dtype=BF16)[1:].view(1, 64), GateWeights(weight_EK=w), exact)
    assert not triton_gate.chooses(PLAIN, 1025)
    assert not triton_gate.chooses(GateSpec(top_k=33), 64)
