"""Allocates experts' tensors, and gives loaders the part of them that one stored matrix fills.

Legend: e experts, K hidden size, N intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epserve.errors import ConfigError

from .quantization import BLOCK, FP8, QuantConfig
from .types import Activation, ExpertWeights

FIELDS = {"": ("w13_eNK", "w2_eKN"), "bias": ("b13", "b2"), "scale": ("s13", "s2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Holds the sizes of one layer's experts. `dtype`: of activations, biases and weights that are not quantised."""

    hidden: int
    intermediate: int
    dtype: torch.dtype
    activation: Activation = Activation()
    bias: bool = False

    @property
    def rows(self) -> int:
        """Returns the number of rows of the first projection."""
        return self.intermediate * (2 if self.activation.gated else 1)


def why_not_stored(sizes: ExpertSizes, quant: QuantConfig) -> str:
    """Returns the reason why experts of these sizes have no form in this scheme. Empty: they have one."""
    group = quant.shared
    if quant.scheme == "fp8_block":
        if sizes.activation.gated and sizes.intermediate % BLOCK:
            return f"fp8_block: intermediate size {sizes.intermediate} does not divide by {BLOCK}"
    elif sizes.hidden % group or sizes.intermediate % group:
        return f"{quant.scheme}: hidden {sizes.hidden} and intermediate {sizes.intermediate} must divide by {group}"
    return ""


def empty_weights(sizes: ExpertSizes, quant: QuantConfig, num_experts: int, device: torch.device) -> ExpertWeights:
    """Returns the stacked tensors of `num_experts` experts in `quant`, each allocated once, with undefined contents."""
    if reason := why_not_stored(sizes, quant):
        raise ConfigError(reason)
    codes, fit = quant.stored or sizes.dtype, 2 if quant.packed else 1

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_experts, *shape), dtype=dtype, device=device)

    def scale(rows: int, columns: int) -> torch.Tensor | None:
        match quant.scheme:
            case "none":
                return None
            case "fp8_tensor":
                return empty(torch.float32)
            case "fp8_channel" | "int8_channel":
                return empty(torch.float32, rows)
            case "fp8_block":
                return empty(torch.float32, -(-rows // BLOCK), -(-columns // BLOCK))
        kind = {"mxfp4": torch.uint8, "nvfp4": torch.float32}.get(quant.scheme, quant.scale_dtype)
        return empty(kind, rows, columns // quant.shared)

    K, N, wide = sizes.hidden, sizes.intermediate, sizes.rows
    return ExpertWeights(
        activation=sizes.activation,
        w13_eNK=empty(codes, wide, K // fit),
        w2_eKN=empty(codes, K, N // fit),
        b13=empty(sizes.dtype, wide) if sizes.bias else None,
        b2=empty(sizes.dtype, K) if sizes.bias else None,
        s13=scale(wide, K),
        s2=scale(K, N),
    )


def slot_view(
    weights: ExpertWeights, slot: int, role: str, *, transposed: bool = False, interleaved: bool = False
) -> torch.Tensor:
    """Returns the part of one slot that `role` fills, as a view whose elements come in the order of the file.

    Args:
        role: gate, up, gate_up (both in one) or down, and each with "_bias" or "_scale".
        transposed: the file's matrices are (in, out).
        interleaved: the rows of gate_up alternate gate, up, gate, ...
    """
    matrix = next(name for name in ("gate_up", "gate", "up", "down") if role.startswith(name))
    kind = role.removeprefix(matrix).removeprefix("_")
    part: Any = getattr(weights, FIELDS[kind][matrix == "down"])[slot]
    if part.ndim == 0:
        return part
    if matrix in ("gate", "up") and weights.activation.gated:
        half = part.shape[0] // 2
        part = part[:half] if matrix == "gate" else part[half:]
    if matrix == "gate_up" and interleaved:
        part = part.unflatten(0, (2, -1)).transpose(0, 1)  # (N, 2, ...): gate and up of one row side by side
    if transposed and kind != "bias":
        part = part.movedim(-1, 0)
    return part


def copy_part(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies `value` into `target`. float8 on the CPU is copied as bytes: some releases have no strided copy of it."""
    value = value.reshape(target.shape) if value.shape != target.shape else value
    if target.dtype == value.dtype and target.dtype == FP8:
        target.view(torch.uint8).copy_(value.view(torch.uint8))
    else:
        target.copy_(value)
