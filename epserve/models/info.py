"""config.json -> what a model's MoE layers are, by the rules of its family."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epserve.errors import CheckpointError, ConfigError
from epserve.gate import GateSpec
from epserve.modular_kernel import UNQUANTIZED, Activation, QuantConfig

from .families import FAMILIES, REQUIRED, Family, Key

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "swigluoai": "swigluoai",
}
MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The MoE layers of one model. K = hidden, N = intermediate of a routed expert, E = num_experts (logical)."""

    family: str
    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    """Of activations and unquantised weights."""
    layers: tuple[int, ...]
    """Indices of the MoE layers that are served."""
    activation: Activation
    bias: bool
    """The routed experts have biases."""
    gate: GateSpec
    shared_intermediate: int
    """Of the dense shared experts; 0: none."""
    fingerprint: str
    """Changes with the configuration and with any tensor's name, dtype or shape."""
    quant: QuantConfig


class ConfigReader:
    """config.json with errors that name the file, the key and what is allowed."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self.config, self.source = config, source

    def family(self) -> Family:
        name = self.config.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            close = difflib.get_close_matches(str(name), FAMILIES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise CheckpointError(
                f"{self.source}: model_type {name!r} is unknown{hint} (known: {', '.join(FAMILIES)};"
                " and, with transformers installed, every family of its that has an experts module)"
            )
        return FAMILIES[name]

    def value(self, value: Any) -> Any:
        """A constant as it is; a Key looked up, where null counts as absent."""
        if not isinstance(value, Key):
            return value
        for name in value.names.split("|"):
            if self.config.get(name) is not None:
                return self.config[name]
        if value.default is REQUIRED:
            raise CheckpointError(f"{self.source}: key {value.names.replace('|', ' or ')} is missing")
        return value.default

    def size(self, key: Key | int, least: int = 1) -> int:
        size = self.value(key)
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            name = key.names if isinstance(key, Key) else "value"
            raise CheckpointError(f"{self.source}: {name} must be an integer of at least {least}, got {size!r}")
        return size

    def layers(self, family: Family) -> tuple[int, ...]:
        rule = family.layers
        first, step, dense = self.size(rule.first, 0), self.size(rule.step), self.value(rule.dense)
        every = range(self.size(Key("num_hidden_layers")))
        return tuple(layer for layer in every if layer >= first and layer not in dense and (layer + 1) % step == 0)

    def gate(self, family: Family, num_experts: int) -> GateSpec:
        fields = {name: self.value(value) for name, value in family.gate.items()}
        try:
            spec = GateSpec(top_k=self.size(Key("num_experts_per_tok")), **fields)
            spec.check_experts(num_experts)
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{self.source}: {error}") from None
        return spec

    def activation(self, family: Family) -> Activation:
        fields = {name: self.value(value) for name, value in family.activation.items()}
        if fields["kind"] not in ACTIVATIONS:
            raise CheckpointError(
                f"{self.source}: activation {fields['kind']!r} is not one of {', '.join(sorted(ACTIVATIONS))}"
            )
        gated = any("gate_up" in form.tensors or "gate" in form.tensors for form in family.forms)
        return Activation(**fields | {"kind": ACTIVATIONS[fields["kind"]], "gated": gated})

    def shared_intermediate(self, family: Family) -> int:
        if family.shared is None:
            return 0
        return math.prod(self.size(key, 0) for key in family.shared.intermediate)

    def quant(self) -> QuantConfig:
        declared = self.config.get("quantization_config")
        if declared is None:
            return UNQUANTIZED
        method, block = declared.get("quant_method"), declared.get("weight_block_size")
        if method == "fp8" and list(block or ()) == [128, 128]:
            return QuantConfig(scheme="fp8_block", dynamic=True)
        raise CheckpointError(
            f"{self.source}: quantization_config {method!r} with weight_block_size {block} cannot be loaded;"
            " known: 'fp8' with [128, 128], or none"
        )

    def dtype(self, wanted: str) -> torch.dtype:
        """`wanted`, or for "auto" the checkpoint's own."""
        declared = self.value(Key("dtype|torch_dtype", "bfloat16")) if wanted == "auto" else wanted
        name = str(declared).removeprefix("torch.")
        if name not in MODEL_DTYPES:
            raise CheckpointError(f"{self.source}: dtype {name!r} is not one of {', '.join(MODEL_DTYPES)}")
        return MODEL_DTYPES[name]
