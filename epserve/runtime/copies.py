"""Copies of a model's experts in host memory, from which a spare takes what the rank that it replaces held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from epserve.models import LayerWeights
from epserve.worker import LayerSource

LAYER_WIDE = ("a1", "a2")
"""Tensors of `ExpertWeights` that all experts of a layer share: scales of activations."""


class HostCopies:
    """All experts of the served layers in host memory: a source of any rank's weights that needs no file."""

    def __init__(self, checkpoint: LayerSource, num_experts: int, layers: Sequence[int]):
        self._layers = {
            layer: checkpoint.load_layer(layer, range(num_experts), torch.device("cpu")) for layer in layers
        }

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights:
        whole = self._layers[layer]
        index = torch.tensor(experts, dtype=torch.int64)
        # Weights, biases and scales of weights have the experts in front.
        chosen: dict[str, Any] = {
            name: (tensor if name in LAYER_WIDE else _pick(tensor, index)).to(device)
            for name, tensor in whole.experts.tensors().items()
        }
        return LayerWeights(
            experts=replace(whole.experts, derived={}, **chosen),
            gate=moved(whole.gate, device),
            shared=moved(whole.shared, device) if whole.shared is not None else None,
        )


def moved(weights: Any, device: torch.device) -> Any:
    """A dataclass of tensors, on another device."""
    tensors = {each.name: getattr(weights, each.name) for each in fields(weights)}
    return replace(weights, **{k: v.to(device) for k, v in tensors.items() if isinstance(v, torch.Tensor)})


def _pick(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() > 1:
        return tensor[index]
    return tensor.view(torch.uint8)[index].view(tensor.dtype)  # float8 has no indexing of its own
