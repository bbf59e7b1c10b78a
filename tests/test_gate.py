"""Gates against transformers' own router modules: the same ids and the same bits of every weight."""

from __future__ import annotations

import pytest
import torch

from epserve.errors import ConfigError
from epserve.gate import GateSpec, GateWeights, route, route_logits
from epserve.models import open_checkpoint
from epserve.models.demo import reference_module

from .checkpoints import FAMILIES, LAYER, write

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
