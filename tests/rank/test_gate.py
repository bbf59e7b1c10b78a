"""Gates against transformers' own router modules: the same ids and the same bits of every weight. The kernels that take their
place on a GPU: in Triton's interpreter, compiled for GPUs that are not there, and (marked gpu) on one against float64.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.gate import check, reference
from epserve.errors import ConfigError
from epserve.models import open_checkpoint
from epserve.models.demo import reference_module
from epserve.modular_kernel import GateSpec, GateWeights
from epserve.rank.gate import fitted, route, route_logits, warm_up
from tests.support.checkpoints import FAMILIES, LAYER, write
from tests.support.own_process import run_checks

FLOAT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def router_of(block: torch.nn.Module) -> torch.nn.Module:
    return block.router if hasattr(block, "router") else block.gate


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_ids_and_weights_as_transformers(family, dtype, tmp_path):
    write(family, tmp_path, num_experts=16, top_k=4, dtype=FLOAT_TYPES[dtype], seed=3)
    checkpoint = open_checkpoint(tmp_path)
    gate = checkpoint.load_layer(LAYER, []).gate
    x_MK = torch.randn(257, 64, generator=torch.Generator().manual_seed(5)).to(FLOAT_TYPES[dtype])
    with torch.no_grad():
        _, weights, ids = router_of(reference_module(tmp_path, LAYER))(x_MK)
    routing = route(x_MK, gate, checkpoint.info.gate)
    assert torch.equal(routing.ids_Mt, ids.int())
    assert torch.equal(routing.weights_Mt, weights.float())
    assert len(routing.ids_Mt.unique()) == 16  # the inputs reach every expert


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_moe", "norm_topk_prob", False),
        ("olmoe", "norm_topk_prob", True),
        ("deepseek_v3", "norm_topk_prob", False),
        ("deepseek_v3", "routed_scaling_factor", 1.0),
        ("deepseek_v3", "n_group", 8),
        ("deepseek_v3", "topk_group", 4),
    ],
)
def test_every_gate_key_of_the_config_counts(family, key, value, tmp_path):
    """Each key changes the result, and changes it as in transformers."""
    x_MK = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    results = []
    for name, config in (("plain", {}), ("changed", {key: value})):
        path = write(family, tmp_path / name, num_experts=16, top_k=2, dtype=torch.float32, **config)
        checkpoint = open_checkpoint(path)
        routing = route(x_MK, checkpoint.load_layer(LAYER, []).gate, checkpoint.info.gate)
        with torch.no_grad():
            _, weights, ids = router_of(reference_module(path, LAYER))(x_MK)
        assert torch.equal(routing.ids_Mt, ids.int()) and torch.equal(routing.weights_Mt, weights)
        results.append(routing)
    same_ids = torch.equal(results[0].ids_Mt, results[1].ids_Mt)
    assert not (same_ids and torch.equal(results[0].weights_Mt, results[1].weights_Mt))


def test_group_limited_by_maximum_is_that_of_deepseek_v2():
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=32, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0,
    )  # fmt: skip
    config.num_experts = 12
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    x_MK = torch.randn(50, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad():
        _, weights, ids = router(x_MK)
    spec = GateSpec(
        top_k=3,
        num_groups=4,
        top_groups=2,
        group_score="max",
        routed_scaling_factor=16.0,
        logits_float32=True,
        sorted=False,
    )
    routing = route(x_MK, GateWeights(weight_EK=router.weight.detach()), spec)
    order, expected = routing.ids_Mt.long().sort(dim=1), ids.sort(dim=1)
    assert torch.equal(order.values, expected.values)
    assert torch.equal(routing.weights_Mt.gather(1, order.indices), weights.gather(1, expected.indices))


def test_correction_bias_moves_the_choice_but_not_the_weights():
    spec = GateSpec(top_k=2, scoring="sigmoid", correction_bias=True)
    routing = route_logits(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 9.0]), spec)
    assert routing.ids_Mt.tolist() == [[3, 0]]
    assert torch.equal(routing.weights_Mt, torch.tensor([[-1.0, 2.0]]).sigmoid())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_topk"])
def test_empty_batch(scoring):
    routing = route(torch.empty(0, 8), GateWeights(weight_EK=torch.ones(4, 8)), GateSpec(top_k=3, scoring=scoring))
    assert routing.ids_Mt.shape == routing.weights_Mt.shape == (0, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring": "softmin"}, "softmin"),
        ({"group_score": "mean"}, "mean"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 13}, "top_k 13 is more than the 12 experts"),
        ({"num_groups": 5, "top_groups": 2}, "12 experts do not divide into 5 groups"),
        ({"num_groups": 2, "top_groups": 3}, r"top_groups must lie in 1..num_groups \(2\), got 3"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 4}, "top_k 4 is more than the experts of 1 groups of 3"),
        ({"num_groups": 12, "top_groups": 4, "group_score": "top2_sum"}, "needs two experts a group"),
        ({"scoring": "softmax_of_topk", "correction_bias": True}, "neither groups nor a correction bias"),
    ],
)
def test_impossible_gates_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        GateSpec(**{"top_k": 2} | fields).check_experts(12)


def test_the_order_among_equals_on_a_gpu_is_that_of_the_ids():
    """What torch does there; on the CPU torch.topk decides, as it does in transformers."""
    from epserve.rank.gate import _stable_top

    values, ids = _stable_top(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 4)
    assert ids.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]] and values[0].tolist() == [3.0, 3.0, 3.0, 2.0]


def test_float64_reference_is_the_gate():
    """What the kernels are checked against on a GPU, against `route`, which is checked against transformers."""
    x, weights = hidden_states(300, 128), deepseek(64, 128)
    ids, shares, clear = reference(x, weights, DEEPSEEK)
    got = route(x, weights, DEEPSEEK)
    assert clear.float().mean() > 0.9
    assert torch.equal(got.ids_Mt.long()[clear], ids[clear])
    torch.testing.assert_close(got.weights_Mt[clear], shares[clear].float(), rtol=0, atol=1e-6)
    assert check(lambda x: route(x, weights, DEEPSEEK), x, weights, DEEPSEEK) < 1e-6
    with pytest.raises(ValueError, match="clear tokens with other ids"):
        check(lambda x: route(-x, weights, DEEPSEEK), x, weights, DEEPSEEK)


def test_weights_stay_as_they_are_on_the_cpu():
    weights = deepseek(64, 128, held=torch.float32)
    assert fitted(weights, DEEPSEEK, torch.bfloat16) is weights
    warm_up(weights, DEEPSEEK, torch.bfloat16)  # nothing to compile


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_kernels_in_the_interpreter():
    run_checks("tests/experts/triton_interpreter/check_gate.py", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_kernels_compile(capability):
    words = ("-k", "tensor_cores")
    run_checks("tests/experts/triton_aot/check_gate.py", *words, EPSERVE_TEST_CAPABILITY=capability)


def test_no_kernel_compiles_after_warm_up():
    run_checks("tests/experts/triton_aot/check_gate.py", "-k", "any_size")


DEEPSEEK = GateSpec(
    top_k=8, scoring="sigmoid", renormalise=True, renormalise_epsilon=1e-20, num_groups=8, top_groups=4, group_score="top2_sum",
    correction_bias=True, routed_scaling_factor=2.5, logits_float32=True,
)  # fmt: skip
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here"),
]


def on_a_gpu(test):
    for mark in ON_A_GPU:
        test = mark(test)
    return test


def hidden_states(tokens: int, hidden: int, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    return torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def deepseek(num_experts: int, hidden: int, device: str = "cpu", held: torch.dtype = torch.bfloat16) -> GateWeights:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn((num_experts, hidden), generator=generator) * hidden**-0.5
    bias = torch.rand(num_experts, generator=generator) * 0.01
    return GateWeights(weight_EK=weight.to(held).to(device), correction_bias_E=bias.to(device))


@on_a_gpu
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_experts", "hidden"), [(64, 7168), (256, 7168), (72, 1040), (512, 2048)])
def test_float64_on_a_gpu(num_experts, hidden, held):
    weights = deepseek(num_experts, hidden, "cuda", held)
    for tokens in (1, 7, 33, 128, 300, 4096):
        x = hidden_states(tokens, hidden, "cuda", seed=tokens)
        assert check(lambda x: route(x, weights, DEEPSEEK), x, weights, DEEPSEEK) < 1e-6
    assert route(x[:0], weights, DEEPSEEK).ids_Mt.shape == (0, 8)


@on_a_gpu
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_chooses_as_torch_does_on_a_gpu(scoring, dtype, monkeypatch):
    """From equal logits: the same ids, with ties, and weights within a unit of their last place."""
    from epserve.rank import gate

    rounded = dtype != torch.float32
    spec = GateSpec(top_k=8, scoring=scoring, renormalise=scoring != "softmax_of_topk", round_weights=rounded)
    logits = torch.randn((999, 128), generator=torch.Generator().manual_seed(3)).mul(8).round().div(8).to("cuda", dtype)
    got = route_logits(logits, None, spec)
    monkeypatch.setattr(gate, "_kernels", lambda *tensors: None)
    want = route_logits(logits, None, spec)
    assert torch.equal(got.ids_Mt, want.ids_Mt)
    unit = torch.finfo(dtype).eps if rounded else 2e-6
    torch.testing.assert_close(got.weights_Mt, want.weights_Mt, rtol=unit, atol=1e-7)


@on_a_gpu
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_experts", [64, 256])
def test_a_token_has_the_same_bits_in_any_batch_on_a_gpu(num_experts, held):
    weights, x = deepseek(num_experts, 7168, "cuda", held), hidden_states(2000, 7168, "cuda")
    whole = route(x, weights, DEEPSEEK)
    for tokens in (1, 16, 17, 32, 33, 129, 256, 257, 1025):
        part = route(x[700 : 700 + tokens], weights, DEEPSEEK)
        assert torch.equal(part.ids_Mt, whole.ids_Mt[700 : 700 + tokens]), tokens
        assert torch.equal(part.weights_Mt, whole.weights_Mt[700 : 700 + tokens]), tokens


@on_a_gpu
@pytest.mark.parametrize("tokens", [1, 128, 1000])
def test_replayed_graphs_on_a_gpu(tokens):
    weights, x = deepseek(256, 7168, "cuda"), hidden_states(tokens, 7168, "cuda")
    warm_up(weights, DEEPSEEK, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        routing = route(x, weights, DEEPSEEK)
    for seed in (5, 6):
        x.copy_(hidden_states(tokens, 7168, seed=seed))
        graph.replay()
        eager = route(x, weights, DEEPSEEK)
        assert torch.equal(routing.ids_Mt, eager.ids_Mt) and torch.equal(routing.weights_Mt, eager.weights_Mt)


@on_a_gpu
def test_nothing_waits_and_nothing_compiles_after_warm_up_on_a_gpu():
    from epserve.experts.triton.compiles import COUNTER

    narrow = deepseek(256, 7168, "cuda")
    weights = fitted(dataclasses.replace(narrow, weight_EK=narrow.weight_EK.float()), DEEPSEEK, torch.bfloat16)
    assert weights.weight_EK.dtype == torch.bfloat16
    warm_up(weights, DEEPSEEK, torch.bfloat16)
    x, late, ready = hidden_states(1500, 7168, "cuda"), COUNTER.num_late, COUNTER.is_ready
    COUNTER.ready()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in (1, 2, 15, 16, 33, 100, 257, 1500):
            route(x[:tokens], weights, DEEPSEEK)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        COUNTER.is_ready = ready
    assert COUNTER.num_late == late


@on_a_gpu
def test_a_weight_that_16_bits_do_not_hold_stays_on_a_gpu():
    weights = deepseek(64, 128, "cuda", held=torch.float32)
    assert fitted(weights, DEEPSEEK, torch.bfloat16) is weights
