"""Reads a model's MoE layers from config.json, by the rules of its family."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from epserve.errors import CheckpointError, ConfigError
from epserve.modular_kernel import Activation, GateSpec, QuantConfig
from epserve.modular_kernel.weights import ExpertSizes

from .families import FAMILIES, REQUIRED, Family, Key
from .stored.experts import StoredAs
from .tensors import shown, shown_name

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "swigluoai": "swigluoai",
}
MAX_LAYERS = 1024
"""The deepest known models have about a hundred layers. Each layer costs time before its tensors are looked for."""
MAX_EXPERTS = 16_384
"""The most experts of one layer. The largest known number is 2,048."""
MAX_SIZE = 1 << 24
"""The largest hidden or intermediate size. The product of two such sizes and an item's size stays below 2^63."""
MAX_COUNT = 1 << 17
"""The largest value of any other integer. It may say how many objects a library makes."""
MAX_LIST = 1024
"""The longest list of config.json. The longest known ones have an item for each layer."""
LIMITS = (
    (re.compile(r"(^|_)(layers?|blocks?|depths?)$"), MAX_LAYERS),
    (re.compile(r"(^|_)experts?$"), MAX_EXPERTS),
    (re.compile(r"theta|rope.*base"), 10**12),
    (re.compile(r"vocab"), 1 << 31),
    (
        re.compile(r"size|dim|length|len$|seq|position|embedding|pixels|ctx|context|window|token|seed|index|_ids?$"),
        MAX_SIZE,
    ),
)
"""Words in the names of config.json's keys, in the language of transformers' families, and the most that their integers may be.
The first pattern that fits counts."""
QUANTISATION = "quantization_config"
"""It may list every matrix of a model that is not quantised. Nothing is built from it."""
MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Describes one model's MoE layers. K = hidden, N = intermediate of a routed expert, E = num_experts (logical)."""

    family: str
    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    """The dtype of activations and unquantised weights."""
    layers: tuple[int, ...]
    """Indices of the MoE layers that are served."""
    activation: Activation
    bias: bool
    """The routed experts have biases."""
    gate: GateSpec
    shared_intermediate: int
    """The intermediate size of the dense shared experts. 0: the model has none."""
    fingerprint: str
    """A hash that changes with the configuration and with any tensor's name, dtype or shape."""
    quant: QuantConfig
    """The scheme in which most layers can stay packed."""
    stored: tuple[StoredAs, ...] = ()
    """All layers, grouped by the way they are stored. Empty: all are stored in `quant`."""

    @property
    def sizes(self) -> ExpertSizes:
        return ExpertSizes(
            hidden=self.hidden,
            intermediate=self.intermediate,
            dtype=self.dtype,
            activation=self.activation,
            bias=self.bias,
        )

    @property
    def kinds(self) -> tuple[StoredAs, ...]:
        return self.stored or (StoredAs(layers=self.layers, name=self.quant.scheme, quant=self.quant),)


def check_config(config: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError for integers and lists that no model has: transformers makes objects by them, here and in clients.

    It also wants names in `architectures`.
    """
    for key, value in config.items():
        if key != QUANTISATION:
            _check_value(key, value, source)
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"{source}: architectures must be a list of names, got {shown(names)}")


def _check_value(key: str, value: Any, source: str) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_value(name, inner, source)
    elif isinstance(value, list):
        if len(value) > MAX_LIST:
            raise CheckpointError(
                f"{source}: {shown_name(key)} has {len(value)} items, at most {MAX_LIST} can be served"
            )
        for inner in value:
            _check_value(key, inner, source)
    elif type(value) is int:
        most = next((most for words, most in LIMITS if words.search(key)), MAX_COUNT)
        if abs(value) > most:
            text = f"{source}: {shown_name(key)} is {shown(value)}, at most {most} can be served"
            raise CheckpointError(text)


class ConfigReader:
    """Reads config.json. Its errors name the file, the key and the allowed values."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config, self.source = config, source

    def family(self) -> Family:
        name = self.config.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            close = difflib.get_close_matches(str(name)[:100], FAMILIES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise CheckpointError(
                f"{self.source}: model_type {shown(name)} is unknown{hint} (known: {', '.join(FAMILIES)};"
                " and, with transformers installed, every family of its that has an experts module)"
            )
        return FAMILIES[name]

    def value(self, value: Any) -> Any:
        """Returns a constant as it is, and looks a Key up. A null counts as absent."""
        if not isinstance(value, Key):
            return value
        for name in value.names.split("|"):
            if self.config.get(name) is not None:
                return self.config[name]
        if value.default is REQUIRED:
            raise CheckpointError(f"{self.source}: key {value.names.replace('|', ' or ')} is missing")
        return value.default

    def size(self, key: Key | int, least: int = 1, most: int = MAX_SIZE) -> int:
        size = self.value(key)
        name = key.names if isinstance(key, Key) else "value"
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise CheckpointError(f"{self.source}: {name} must be an integer of at least {least}, got {shown(size)}")
        if size > most:
            raise CheckpointError(f"{self.source}: {name} is {shown(size)}, at most {most} can be served")
        return size

    def layers(self, family: Family) -> tuple[int, ...]:
        rule = family.layers
        first, step, dense = self.size(rule.first, 0), self.size(rule.step), self.value(rule.dense)
        if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
            raise CheckpointError(f"{self.source}: {_names(rule.dense)} must be a list of layers, got {shown(dense)}")
        every, skipped = range(self.size(Key("num_hidden_layers"), most=MAX_LAYERS)), frozenset(dense)
        return tuple(layer for layer in every if layer >= first and layer not in skipped and (layer + 1) % step == 0)

    def gate(self, family: Family, num_experts: int) -> GateSpec:
        """Returns the gate of the configuration. A gate that `route` cannot compute becomes scoring "client" with the reason:
        clients may gate themselves.

        Raises CheckpointError for a top-k above the number of experts, and for values of a wrong type.
        """
        top_k = self.size(Key("num_experts_per_tok"))
        if top_k > num_experts:
            raise CheckpointError(f"{self.source}: top_k {top_k} is more than the {num_experts} experts")
        found = self._fields(GateSpec, family.gate)
        for name, only in family.gate_only.items():
            if (declared := self.value(Key(name, only))) != only:
                refusal = f"{name} is {shown(declared)}, only {only!r} is known"
                return GateSpec(scoring="client", top_k=top_k, refusal=refusal)
        try:
            spec = GateSpec(top_k=top_k, **found)
            spec.check_experts(num_experts)
        except ConfigError as error:
            return GateSpec(scoring="client", top_k=top_k, refusal=str(error))
        return spec

    def activation(self, family: Family) -> Activation:
        found = self._fields(Activation, family.activation)
        if found["kind"] not in ACTIVATIONS:
            raise CheckpointError(
                f"{self.source}: activation {shown(found['kind'])} is not one of {', '.join(sorted(ACTIVATIONS))}"
            )
        gated = any("gate_up" in form.tensors or "gate" in form.tensors for form in family.forms)
        return Activation(**found | {"kind": ACTIVATIONS[found["kind"]], "gated": gated})

    def _fields(self, made: type, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values for the fields of a dataclass. Raises CheckpointError for a value that is not of its field's type."""
        types = {field.name: str(field.type).removesuffix(" | None") for field in fields(made)}
        found = {}
        for name, source in wanted.items():
            value = found[name] = self.value(source)
            what, fits = TYPES[types[name]]
            if isinstance(source, Key) and not fits(value):
                raise CheckpointError(f"{self.source}: {_names(source)} must be {what}, got {shown(value)}")
        return found

    def shared_intermediate(self, family: Family) -> int:
        if family.shared is None:
            return 0
        return math.prod(self.size(key, 0) for key in family.shared.intermediate)

    def dtype(self, wanted: str) -> torch.dtype:
        """Returns `wanted`, or for "auto" the checkpoint's own dtype."""
        declared = self.value(Key("dtype|torch_dtype", "bfloat16")) if wanted == "auto" else wanted
        name = str(declared).removeprefix("torch.")
        if name not in MODEL_DTYPES:
            raise CheckpointError(f"{self.source}: dtype {shown(name)} is not one of {', '.join(MODEL_DTYPES)}")
        return MODEL_DTYPES[name]


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # an integer may be too large for a float


TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an integer", lambda value: type(value) is int),
    "float": ("a finite number", _finite),
    "str": ("a name", lambda value: isinstance(value, str)),
}


def _names(key: Any) -> str:
    return key.names.replace("|", " or ") if isinstance(key, Key) else "value"
