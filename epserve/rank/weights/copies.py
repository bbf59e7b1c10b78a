"""Copies of a model's experts in host memory. A spare takes the experts of the rank that it replaces from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from epserve.errors import NotReady
from epserve.models import LayerWeights
from epserve.rank.step import LayerSource

LAYER_WIDE = ("a1", "a2")
"""Tensors of `ExpertWeights` that all experts of a layer share: scales of activations."""

MARGIN = 1.1  # free memory / bytes of the copies: other allocations that grow meanwhile must not fail


def free_bytes() -> int:
    """Returns the free host memory in bytes."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


class HostCopies:
    """Holds all experts of the served layers in host memory: a source of any rank's weights without files."""

    def __init__(self, checkpoint: LayerSource, num_experts: int, layers: Sequence[int]):
        """Copies all layers. Raises NotReady with both sizes before memory runs out: the first layer tells the size of all."""
        self._layers: dict[int, LayerWeights] = {}
        for number, layer in enumerate(layers):
            self._layers[layer] = checkpoint.load_layer(layer, range(num_experts), torch.device("cpu"))
            if number == 0:
                tensors = self._layers[layer].experts.tensors().values()
                missing = sum(each.numel() * each.element_size() for each in tensors) * (len(layers) - 1)
                free = free_bytes()
                if missing * MARGIN > free:
                    raise NotReady(
                        f"copies of all experts need another {missing >> 20} MiB of host memory, {free >> 20} MiB are free"
                        " (engine.spare_weights: host)"
                    )

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights:
        whole = self._layers[layer]
        index = torch.tensor(experts, dtype=torch.int64)
        # Weights, biases and scales of weights have the expert dimension in front.
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
    """Returns a dataclass of tensors on another device."""
    tensors = {each.name: getattr(weights, each.name) for each in fields(weights)}
    return replace(weights, **{k: v.to(device) for k, v in tensors.items() if isinstance(v, torch.Tensor)})


def _pick(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() > 1:
        return tensor[index]
    return tensor.view(torch.uint8)[index].view(tensor.dtype)  # float8 has no indexing of its own
