"""Cuts experts along their intermediate size N, for ranks that share each expert (tensor parallelism). Pure functions.

Slice p of T holds rows p N/T .. of gate and of up, and the same columns of the down projection, with their scales. The sum of the
slices' outputs is the expert's output. Legend: e experts, K hidden size, N intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from epserve.errors import ConfigError
from epserve.modular_kernel import Activation, ExpertWeights, QuantConfig
from epserve.modular_kernel.quantization import BLOCK

from .weights import LayerWeights

MOST_SLICES = 64  # the largest number that a message suggests


def check_slices(intermediate: int, quant: QuantConfig, activation: Activation, slices: int) -> None:
    """Raises ConfigError with the numbers, and the numbers of slices that would divide. Needs no weights."""
    if slices == 1:
        return
    if activation.output_norm_eps is not None:
        raise ConfigError(
            f"tensor_parallel {slices}: these experts normalise their outputs, slices cannot; set it to 1"
        )
    group = quant.shared
    if intermediate % slices == 0 and (intermediate // slices) % group == 0:
        return
    able = [each for each in range(1, MOST_SLICES + 1) if intermediate % (each * group) == 0]
    unit = f" of whole groups of {group} ({quant.scheme})" if group > 1 else ""
    raise ConfigError(
        f"tensor_parallel {slices}: intermediate size {intermediate} does not divide into {slices} slices{unit};"
        f" possible are {', '.join(map(str, able)) or 'none'}"
    )


def slice_experts(weights: ExpertWeights, quant: QuantConfig, part: int, slices: int) -> ExpertWeights:
    """Returns a copy of slice `part` of `slices`. The caller has run `check_slices`."""
    packed, group = (2 if quant.packed else 1), quant.shared
    whole = weights.w2_eKN.shape[2] * packed
    start, stop = part * whole // slices, (part + 1) * whole // slices
    halves = 2 if weights.activation.gated else 1

    def rows(tensor: torch.Tensor | None, unit: int = 1) -> torch.Tensor | None:
        """Returns the slice's rows of gate and of up. `unit` values of N share a row."""
        if tensor is None:
            return None
        return tensor.unflatten(1, (halves, -1))[:, :, start // unit : stop // unit].flatten(1, 2).contiguous()

    def columns(tensor: torch.Tensor, unit: int) -> torch.Tensor:
        return tensor[:, :, start // unit : stop // unit].contiguous()

    s13, s2, b2 = weights.s13, weights.s2, weights.b2
    if s13 is not None and s13.ndim > 1:  # one scale for a whole matrix holds for each of its slices
        s13 = rows(s13, BLOCK if quant.scheme == "fp8_block" else 1)
    if s2 is not None and s2.ndim == 3:
        s2 = columns(s2, group)
    if b2 is not None and part > 0:
        b2 = torch.zeros_like(b2)  # added once, by the first slice
    w13 = rows(weights.w13_eNK)
    assert w13 is not None
    return replace(
        weights,
        w13_eNK=w13,
        w2_eKN=columns(weights.w2_eKN, packed),
        b13=rows(weights.b13),
        b2=b2,
        s13=s13,
        s2=s2,
        derived={},
    )


def slice_layer(layer: LayerWeights, quant: QuantConfig, part: int, slices: int, device: torch.device) -> LayerWeights:
    """Returns a slice of a layer's experts, with its gate and shared experts whole, on `device`."""
    return replace(
        layer,
        experts=moved(slice_experts(layer.experts, quant, part, slices), device),
        gate=moved(layer.gate, device),
        shared=moved(layer.shared, device) if layer.shared is not None else None,
    )


def moved(weights: Any, device: torch.device) -> Any:
    """Returns a dataclass of tensors, moved to another device."""
    tensors = {each.name: getattr(weights, each.name) for each in fields(weights)}
    return replace(weights, **{k: v.to(device) for k, v in tensors.items() if isinstance(v, torch.Tensor)})


class SlicedLayers:
    """Loads one slice of each layer of a source. Each layer passes whole through host memory, one at a time."""

    def __init__(self, source: Any, quants: Mapping[int, QuantConfig], part: int, slices: int):
        """source: any checkpoint class. quants: the scheme of each layer's experts."""
        self._source, self._quants, self._part, self._slices = source, quants, part, slices

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights:
        whole = self._source.load_layer(layer, experts, torch.device("cpu"))
        return slice_layer(whole, self._quants[layer], self._part, self._slices, device)
