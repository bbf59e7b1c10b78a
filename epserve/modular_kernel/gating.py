"""Describes a model's gate as data. `epserve.rank.gate` computes it. Checkpoints and kernels describe it.

Legend: K hidden size, E logical experts, t = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epserve.errors import ConfigError

SCORINGS = ("softmax", "sigmoid", "softmax_of_topk", "client")
GROUP_SCORES = ("max", "top2_sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """Describes the computation of one model's gate.

    Args:
        scoring: "softmax" or "sigmoid" over all experts and then top-k. "softmax_of_topk": top-k of the logits, then a softmax
            over the chosen ones (gpt-oss). "client": the service has no gate of this model, and ids and weights come with
            each request.
        num_groups, top_groups: experts are chosen only from the `top_groups` best of `num_groups` groups of consecutive
            experts. A group's score is the maximum ("max") or the sum of the two best ("top2_sum") of its experts.
    """

    top_k: int
    scoring: str = "softmax"
    renormalise: bool = False
    """The chosen weights are divided by their sum."""
    renormalise_epsilon: float = 0.0
    """This number is added to that sum. DeepSeek-V3 has 1e-20."""
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    """A bias per expert is added for the choice only. The weights come from the plain scores (DeepSeek-V3)."""
    routed_scaling_factor: float = 1.0
    logits_float32: bool = False
    """The router's matrix product is in float32 (DeepSeek). Otherwise it is in the dtype of the hidden states."""
    round_weights: bool = False
    """The weights are rounded to the dtype of the logits (Qwen, OLMoE). Otherwise they stay float32 (Mixtral, DeepSeek)."""
    sorted: bool = True
    """Slots are in descending order of score. False leaves torch.topk's own order."""
    refusal: str = ""
    """The reason why the scoring is "client" although the family has a gate: the setting that the service does not compute."""

    def __post_init__(self):
        if self.scoring not in SCORINGS:
            raise ConfigError(f"gate scoring {self.scoring!r} is not one of {', '.join(SCORINGS)}")
        if self.group_score not in GROUP_SCORES:
            raise ConfigError(f"gate group_score {self.group_score!r} is not one of {', '.join(GROUP_SCORES)}")
        if self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1, got {self.top_k}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(f"top_groups must lie in 1..num_groups ({self.num_groups}), got {self.top_groups}")
        if self.scoring == "softmax_of_topk" and (self.num_groups > 1 or self.correction_bias):
            raise ConfigError("gate scoring 'softmax_of_topk' has neither groups nor a correction bias")

    def check_experts(self, num_experts: int) -> None:
        """Raises ConfigError when this gate cannot choose among `num_experts`."""
        if self.top_k > num_experts:
            raise ConfigError(f"top_k {self.top_k} is more than the {num_experts} experts")
        if num_experts % self.num_groups:
            raise ConfigError(f"{num_experts} experts do not divide into {self.num_groups} groups")
        if self.top_groups * (num_experts // self.num_groups) < self.top_k:
            raise ConfigError(
                f"top_k {self.top_k} is more than the experts of {self.top_groups} groups of {num_experts // self.num_groups}"
            )
        if self.num_groups > 1 and self.group_score == "top2_sum" and num_experts < 2 * self.num_groups:
            raise ConfigError(f"group_score 'top2_sum' needs two experts a group: {num_experts} in {self.num_groups}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateWeights:
    """Holds the tensors of one gate.

    Args:
        weight_EK: in the model's dtype, or in float32 if the spec has `logits_float32` (the product is in float32 then).
        bias_E: in the same dtype.
        correction_bias_E: float32. It is there exactly when `GateSpec.correction_bias` is true.
    """

    weight_EK: torch.Tensor
    bias_E: torch.Tensor | None = None
    correction_bias_E: torch.Tensor | None = None
