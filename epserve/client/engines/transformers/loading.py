"""Hooks into transformers' building, reading, writing and changing of a model whose experts are in a service.

NOTE: transformers has no hook between building and reading a model. `_get_dtype_plan` is called once on the outermost model, when
all its modules are on the meta device. The device map, the conversion mapping and the reads are made from its parameters later.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel

from epserve.errors import ConfigError, Incompatible, InvalidRequest
from epserve.models.conversion import destinations
from epserve.models.expert_modules import find_layers, is_experts

from . import adapters
from .comparison import differences
from .remote_modules import (
    BINDING,
    NAME,
    Binding,
    RemoteBlock,
    RemoteExperts,
    bind,
    check_implementation,
    refuse_write,
    remote_modules,
    some,
    weights_of,
)
from .service import Service, current, use


def from_pretrained(
    path: str | Path, service: Service, *, model_class: Any = transformers.AutoModelForCausalLM, **kwargs: Any
) -> Any:
    """Loads like `model_class.from_pretrained(path, ...)`, with experts in this `service` even if other services are open."""
    with use(service):
        return model_class.from_pretrained(path, experts_implementation=NAME, **kwargs)


def attach(model: PreTrainedModel, service: Service, dtype: torch.dtype) -> None:
    """Takes the weights out of `model`, whose parameters are on the meta device, and binds its experts to `service`.

    Raises Incompatible with every difference between the two, and CheckpointError when experts cannot be separated.
    """
    layers = find_layers(model)
    reasons = differences(service.model, model, layers, dtype, service.gate)
    if reasons:
        raise Incompatible(
            f"{type(model).__name__} does not fit the service of {service.model.name!r}:", tuple(reasons)
        )
    for module in model.modules():
        if is_experts(module):
            vars(module)[BINDING] = Binding(service=None)
    emptied: set[str] = set()
    for layer in layers:
        binding = Binding(service=service, layer=layer.layer, num_experts=layer.shape.num_experts)
        if service.gate == "remote":
            name = layer.name.rpartition(".")[0]
            emptied |= bind(model.get_submodule(name), name, binding, RemoteBlock)
            vars(layer.module)[BINDING] = binding
        else:
            emptied |= bind(layer.module, layer.name, binding, RemoteExperts)
    base = f"{model.base_model_prefix}."  # a checkpoint of the base model lacks it
    model._keys_to_ignore_on_load_unexpected = {  # otherwise transformers would report these keys as surplus
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(f"^(.*\\.)?{re.escape(name.removeprefix(base))}$" for name in emptied),
    }
    model.all_tied_weights_keys = {
        key: source for key, source in model.all_tied_weights_keys.items() if key not in emptied
    }
    vars(model)["save_pretrained"] = _refuse_to_save
    vars(model)["set_experts_implementation"] = functools.partial(_set_experts_implementation, model)
    if service.gate == "remote":
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)
    adapters.guard()


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ConfigError("a model with remote experts cannot be saved: its checkpoint would have none")


def _set_experts_implementation(model: PreTrainedModel, experts_implementation: str | dict) -> None:
    """Replaces transformers' method. It raises ConfigError for values that do not leave the remote experts in place."""
    before = model.get_experts_implementation()
    original = type(model).set_experts_implementation
    original(model, experts_implementation)
    try:
        for module in remote_modules(model).values():
            check_implementation(getattr(module, "config", None))
    except ConfigError:
        original(model, before)
        raise


def _refuse_router_logits(module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Raises InvalidRequest if router logits are requested from a model whose gate is in the service."""
    wanted = kwargs.get("output_router_logits")
    if wanted is None:
        wanted = getattr(module.config, "output_router_logits", False)
    if wanted:
        raise InvalidRequest(
            "output_router_logits: the router of this model is in the service and returns no logits; connect with gate='local'",
            field="output_router_logits",
        )


def _refuse_remote_weights(model: PreTrainedModel, names: Iterable[str], rules: Any) -> None:
    """Raises ConfigError when weights that are given to a model belong to its remote modules."""
    remote = remote_modules(model)
    if not remote:
        return
    keys = {key for name, module in remote.items() for key in weights_of(name, module)}
    prefixes = tuple(f"{name}." for name in remote)
    base = f"{model.base_model_prefix}."
    found = []
    for name, target, _, _ in destinations(model, names, rules):
        for each in (name, target, base + target):
            if each in keys or each.startswith(prefixes):
                found.append(name)
                break
    if found:
        refuse_write(f"state_dict: {some(found)}")


def _experts_forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Implements "epserve" of transformers' experts interface, for modules that have their weights here."""
    if BINDING not in vars(self):
        raise ConfigError(
            f"{type(self).__name__} was not loaded with remote experts: call epserve.transformers.connect(address) before"
            " from_pretrained(..., experts_implementation='epserve')"
        )
    return type(self).forward.__wrapped__(self, *args, **kwargs)  # type: ignore[attr-defined]


def _wants_remote(model: PreTrainedModel) -> bool:
    configs = (getattr(module, "config", None) for module in (model, *filter(is_experts, model.modules())))
    return any(getattr(config, "_experts_implementation", None) == NAME for config in configs)


def register() -> None:
    """Registers the implementation with transformers, and wraps two steps of `from_pretrained`."""
    for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        interface.register(NAME, _experts_forward)
    plan, read = PreTrainedModel._get_dtype_plan, PreTrainedModel._load_pretrained_model

    @functools.wraps(plan)
    def _get_dtype_plan(self: PreTrainedModel, dtype: torch.dtype) -> dict:
        on_meta = any(parameter.is_meta for parameter in self.parameters())
        if on_meta and _wants_remote(self):
            attach(self, current(), dtype)
        return plan(self, dtype)

    @functools.wraps(read)
    def _load_pretrained_model(model: PreTrainedModel, state_dict: dict | None, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["load_config"] if "load_config" in kwargs else args[1]
        if state_dict is not None:
            _refuse_remote_weights(model, state_dict, config.weight_mapping)
        return read(model, state_dict, *args, **kwargs)

    PreTrainedModel._get_dtype_plan = _get_dtype_plan  # type: ignore[method-assign]
    PreTrainedModel._load_pretrained_model = staticmethod(_load_pretrained_model)  # type: ignore[method-assign]
