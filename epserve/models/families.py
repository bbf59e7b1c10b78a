"""Describes model families as data: the places of the MoE layers' tensors, and config.json's sizes, gate and activation.

A new family is one `Family` record here. Tensor names are relative to the MoE block. `{e}` is the logical expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Key:
    """Names a key of config.json with a default. Of several names ("num_experts|num_local_experts") the first present counts."""

    names: str
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """Describes one way in which routed experts lie on disk.

    Args:
        tensors: role -> name. Roles are gate, up, gate_up (both in one) and down, and each with "_bias" or "_scale". A name
            with `{e}` is one tensor an expert. Without `{e}`, the experts are stacked along the first dimension.
        transposed: matrices are (in, out) rather than (out, in).
        interleaved: the rows of gate_up alternate gate, up, gate, ...
    """

    tensors: Mapping[str, str]
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedForm:
    """Describes the dense experts that every token visits.

    `intermediate`: the product of these keys. The value 0 or null means that the model has no shared experts.
    """

    intermediate: tuple[Key, ...]
    gate: str
    up: str
    down: str
    sigmoid_gate: str = ""
    """Names a (1, K) tensor: the output is multiplied by sigmoid(x . gate) (Qwen2-MoE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRule:
    """Tells the MoE layers: layer i is one if i >= first, i is not in `dense`, and (i + 1) is divisible by `step`."""

    first: Key | int = 0
    step: Key | int = 1
    dense: Key | tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Describes one family. `name`: the model_type of config.json. Values of `gate` and `activation` are constants or Keys."""

    name: str
    blocks: tuple[str, ...] = ("model.layers.{layer}.mlp.",)
    """Prefixes of the MoE block. The one that fits the checkpoint is taken."""
    intermediate: Key
    num_experts: Key
    layers: LayerRule = LayerRule()
    gate: Mapping[str, Any]
    """Values of the fields of GateSpec, without top_k."""
    gate_only: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json about the gate, each with the only value that the service computes. With another it does not gate."""
    gate_tensors: Mapping[str, str] = field(default_factory=lambda: {"weight": "gate.weight"})
    """Names of weight, and of bias and correction_bias if the family has them."""
    forms: tuple[ExpertForm, ...]
    shared: SharedForm | None = None
    activation: Mapping[str, Any] = field(default_factory=lambda: {"kind": Key("hidden_act", "silu")})
    """Values of the fields of Activation, with `kind` in the words of transformers."""


MODULES = ExpertForm(
    tensors={
        "gate": "experts.{e}.gate_proj.weight",
        "up": "experts.{e}.up_proj.weight",
        "down": "experts.{e}.down_proj.weight",
    }
)
FUSED = ExpertForm(tensors={"gate_up": "experts.gate_up_proj", "down": "experts.down_proj"})
QWEN_GATE = {"scoring": "softmax", "renormalise": Key("norm_topk_prob", False), "round_weights": True}
QWEN_LAYERS = LayerRule(step=Key("decoder_sparse_step", 1), dense=Key("mlp_only_layers", ()))

_ALL = (
    Family(
        name="mixtral",
        blocks=("model.layers.{layer}.block_sparse_moe.", "model.layers.{layer}.mlp."),
        intermediate=Key("intermediate_size"),
        num_experts=Key("num_local_experts|num_experts"),
        gate={"scoring": "softmax", "renormalise": True},
        forms=(
            ExpertForm(
                tensors={
                    "gate": "experts.{e}.w1.weight",
                    "up": "experts.{e}.w3.weight",
                    "down": "experts.{e}.w2.weight",
                }
            ),
            FUSED,
        ),
    ),
    Family(
        name="qwen3_moe",
        intermediate=Key("moe_intermediate_size"),
        num_experts=Key("num_experts|num_local_experts"),
        layers=QWEN_LAYERS,
        gate=QWEN_GATE,
        forms=(MODULES, FUSED),
    ),
    Family(
        name="qwen2_moe",
        intermediate=Key("moe_intermediate_size"),
        num_experts=Key("num_experts|num_local_experts"),
        layers=QWEN_LAYERS,
        gate=QWEN_GATE,
        forms=(MODULES, FUSED),
        shared=SharedForm(
            intermediate=(Key("shared_expert_intermediate_size"),),
            gate="shared_expert.gate_proj.weight",
            up="shared_expert.up_proj.weight",
            down="shared_expert.down_proj.weight",
            sigmoid_gate="shared_expert_gate.weight",
        ),
    ),
    Family(
        name="olmoe",
        intermediate=Key("intermediate_size"),
        num_experts=Key("num_experts|num_local_experts"),
        gate=QWEN_GATE,
        forms=(MODULES, FUSED),
    ),
    Family(
        name="deepseek_v3",
        intermediate=Key("moe_intermediate_size"),
        num_experts=Key("n_routed_experts|num_local_experts"),
        layers=LayerRule(first=Key("first_k_dense_replace", 3)),
        gate={
            "scoring": "sigmoid",
            "renormalise": Key("norm_topk_prob", True),
            "renormalise_epsilon": 1e-20,
            "num_groups": Key("n_group", 8),
            "top_groups": Key("topk_group", 4),
            "group_score": "top2_sum",
            "correction_bias": True,
            "routed_scaling_factor": Key("routed_scaling_factor", 2.5),
            "logits_float32": True,
            "sorted": False,
        },
        gate_only={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        gate_tensors={"weight": "gate.weight", "correction_bias": "gate.e_score_correction_bias"},
        forms=(MODULES, FUSED),
        shared=SharedForm(
            intermediate=(Key("moe_intermediate_size"), Key("n_shared_experts", 1)),
            gate="shared_experts.gate_proj.weight",
            up="shared_experts.up_proj.weight",
            down="shared_experts.down_proj.weight",
        ),
    ),
    Family(
        name="gpt_oss",
        intermediate=Key("intermediate_size"),
        num_experts=Key("num_local_experts|num_experts"),
        gate={"scoring": "softmax_of_topk", "round_weights": True},
        gate_tensors={"weight": "router.weight", "bias": "router.bias"},
        forms=(
            ExpertForm(
                tensors={
                    "gate_up": "experts.gate_up_proj",
                    "gate_up_bias": "experts.gate_up_proj_bias",
                    "down": "experts.down_proj",
                    "down_bias": "experts.down_proj_bias",
                },
                transposed=True,
                interleaved=True,
            ),
            ExpertForm(
                tensors={
                    "gate_up": "experts.gate_up_projs.{e}.weight",
                    "gate_up_bias": "experts.gate_up_projs.{e}.bias",
                    "down": "experts.down_projs.{e}.weight",
                    "down_bias": "experts.down_projs.{e}.bias",
                },
                interleaved=True,
            ),
        ),
        activation={"kind": "swigluoai", "limit": Key("swiglu_limit", 7.0), "alpha": Key("swiglu_alpha", 1.702)},
    ),
)
_SAME = {"kimi_k2": "deepseek_v3"}  # another model_type, everything else alike
_BY_NAME = {family.name: family for family in _ALL}
FAMILIES = _BY_NAME | {name: replace(_BY_NAME[other], name=name) for name, other in _SAME.items()}
