"""Finds the experts modules of a transformers model, with their sizes and the function of their non-linearity.

A class marked with transformers' `use_experts_implementation` declares how its weights lie. The function between its
two matrix products is code, not data. `recognise` finds the `Activation` that computes the same, by trying it.

Legend: E experts, K hidden size, N intermediate size.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from epserve.errors import CheckpointError
from epserve.experts.activation import activate
from epserve.modular_kernel import Activation

DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
TOP_K_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k",
)
PROBE_ROWS, PROBE_SCALE = 64, 12.0  # wide enough to reach the clamps of published models (7 and 10) and soft caps (25)
TOLERANCE = 2e-5  # relative. GELU and its tanh form differ by 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Holds the sizes and numerics that all layers of one service share. `interleaved`: rows alternate gate, up, gate, ..."""

    num_experts: int
    hidden: int
    intermediate: int
    activation: Activation
    interleaved: bool
    transposed: bool
    bias: bool
    norm_offset: float | None = None
    """Outputs are multiplied by (norm_offset + post_expert_norm.weight), then normalised. None: the model has no such norm."""

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Returns the parameters' names and shapes as the module declares them."""
        E, K, N = self.num_experts, self.hidden, self.intermediate
        first, wide = ("gate_up_proj", 2 * N) if self.activation.gated else ("up_proj", N)
        shapes: dict[str, tuple[int, ...]] = {
            first: (E, K, wide) if self.transposed else (E, wide, K),
            "down_proj": (E, N, K) if self.transposed else (E, K, N),
        }
        if self.bias:
            shapes |= {f"{first}_bias": (E, wide), "down_proj_bias": (E, K)}
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLayer:
    """Names one experts module. `layer`: its number in the service. `name`: the module's name within the model."""

    layer: int
    name: str
    module: nn.Module
    shape: ExpertsShape


def is_experts(module: nn.Module) -> bool:
    return all(name in vars(module) for name in DECLARED) and hasattr(module, "down_proj")


def find_layers(model: nn.Module) -> tuple[ExpertsLayer, ...]:
    """Returns the experts modules that one service can hold: of all sets of equal shape, the set with the most weights.

    Models may have other experts beside them (the vision experts of Ernie 4.5 VL, the talker of Qwen3-Omni). Those stay with
    the rest of the model. Raises CheckpointError when the model has no experts modules, or no kernel computes their function.
    """
    found = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not found:
        raise CheckpointError(
            f"{type(model).__name__} has no experts module that transformers' experts interface knows"
        )
    groups: dict[ExpertsShape, list[tuple[str, nn.Module]]] = {}
    known: list[tuple[Activation, bool]] = []
    for name, module in found:
        groups.setdefault(_shape(name, module, known), []).append((name, module))
    shape, members = max(groups.items(), key=lambda item: _weights(item[0]) * len(item[1]))
    numbers = number_layers([name for name, _ in members])
    return tuple(
        ExpertsLayer(layer=number, name=name, module=module, shape=shape)
        for number, (name, module) in zip(numbers, members, strict=True)
    )


def number_layers(names: list[str]) -> list[int]:
    """Returns the first number in each name (`model.layers.3.mlp.experts` -> 3), or positions when those are not unique."""
    numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    found = [int(match[1]) for match in numbers if match]
    return found if len(set(found)) == len(names) else list(range(len(names)))


def top_k(config: Any, model: nn.Module, layer: ExpertsLayer) -> int:
    """Returns how many experts a token visits, from the router beside the experts or from the configuration."""
    beside = model.get_submodule(layer.name.rpartition(".")[0])
    routers = [module for module in beside.modules() if module is not layer.module]
    for holder in (*(vars(module) for module in routers), vars(layer.module.config), vars(config)):
        for name in TOP_K_NAMES:
            value = holder.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= layer.shape.num_experts:
                return value
    raise CheckpointError(f"{layer.name}: no router or configuration says how many experts a token visits")


def recognise(module: nn.Module, known: Iterable[tuple[Activation, bool]] = ()) -> tuple[Activation, bool] | None:
    """Returns the Activation that equals the module's function between its products, and whether gate and up are interleaved.

    known: answers of earlier layers, tried first. Returns None when no Activation fits.
    """
    probe = torch.randn((PROBE_ROWS, 32), generator=torch.Generator().manual_seed(0)) * PROBE_SCALE
    with torch.no_grad(), torch.device("cpu"):
        wanted = (module._apply_gate if module.has_gate else module.act_fn)(probe)  # type: ignore[operator]
        for activation, interleaved in itertools.chain(known, _candidates(module)):
            if activation.gated != module.has_gate:
                continue
            h = torch.cat((probe[:, 0::2], probe[:, 1::2]), dim=-1) if interleaved else probe
            if torch.allclose(activate(h, activation), wanted, rtol=TOLERANCE, atol=TOLERANCE):
                return activation, interleaved
    return None


def recognise_norm(norm: nn.Module) -> tuple[float, float] | None:
    """Returns eps and offset of a norm that multiplies by (offset + weight) and divides by the root mean square, or None."""
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", 0.0))
    with torch.no_grad(), torch.device("cpu"):
        filled = copy.deepcopy(norm).to_empty(device="cpu").float()
        weight, generator = filled.get_parameter("weight"), torch.Generator().manual_seed(0)
        weight.copy_(torch.rand(weight.shape, generator=generator))
        probe = torch.randn((PROBE_ROWS, *weight.shape), generator=generator)
        wanted = filled(probe)
        for offset in (0.0, 1.0):
            scaled = probe * (offset + weight)
            made = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps)
            if torch.allclose(made, wanted, rtol=TOLERANCE, atol=TOLERANCE):
                return float(eps), offset
    return None


def _candidates(module: nn.Module) -> Iterator[tuple[Activation, bool]]:
    """Yields every kind of Activation, with every number that the module holds as clamp or as slope."""
    gated = bool(module.has_gate)
    held = [value for part in module.modules() for value in vars(part).values() if type(value) in (int, float)]
    numbers = list(dict.fromkeys(float(value) for value in held if value > 0))
    layouts = (not module.is_concatenated, module.is_concatenated) if gated else (False,)
    alpha_default = Activation().alpha
    for kind in Activation.KINDS + Activation.RARE:
        if not gated and kind in Activation.GATED_ONLY:
            continue
        slopes = [alpha_default, *numbers] if kind in Activation.GATED_ONLY else [alpha_default]
        limits = [None, *numbers] if gated else [None]
        for alpha, limit, interleaved in itertools.product(slopes, limits, layouts):
            if kind != "swiglu_softcap" or limit is not None:
                yield Activation(kind=kind, gated=gated, limit=limit, alpha=alpha), bool(interleaved)


def _shape(name: str, module: nn.Module, known: list[tuple[Activation, bool]]) -> ExpertsShape:
    normalises = getattr(module, "has_post_expert_norm", False)  # older releases of transformers do not declare it
    norm = recognise_norm(module.get_submodule("post_expert_norm")) if normalises else (None, None)
    if norm is None:
        raise CheckpointError(
            f"{name}: {type(module).__name__} normalises each expert's output in a way that no kernel does"
        )
    found = recognise(module, known)
    if found is None:
        kinds = ", ".join(Activation.KINDS + Activation.RARE)
        raise CheckpointError(f"{name}: the non-linearity of {type(module).__name__} is none of {kinds}")
    if found not in known:
        known.append(found)
    down = tuple(module.get_parameter("down_proj").shape)
    intermediate, hidden = down[1:] if module.is_transposed else down[:0:-1]
    shape = ExpertsShape(
        num_experts=down[0],
        hidden=hidden,
        intermediate=intermediate,
        activation=replace(found[0], output_norm_eps=norm[0]),
        norm_offset=norm[1],
        interleaved=found[1],
        transposed=bool(module.is_transposed),
        bias=bool(module.has_bias),
    )
    for parameter, wanted in shape.parameters().items():
        value = getattr(module, parameter, None)
        if value is None or tuple(value.shape) != wanted:
            has = "nothing" if value is None else f"shape {tuple(value.shape)}"
            raise CheckpointError(f"{name}.{parameter}: {has}, expected {wanted}: the experts are not separable")
    return shape


def _weights(shape: ExpertsShape) -> int:
    return sum(torch.Size(each).numel() for each in shape.parameters().values())
