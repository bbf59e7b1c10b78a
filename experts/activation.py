"""The experts' non-linearities in plain torch, as `Activation` describes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from epserve.modular_kernel.types import Activation


def activate(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Turns `(..., 2N)`, gate then up, into `(..., N)`. Not gated: `(..., N)` -> `(..., N)`. The dtype is that of `h`."""
    if not activation.gated:
        return _nonlinear(h, activation)
    gate, up = h.chunk(2, dim=-1)
    if activation.kind == "swiglu_softcap":
        assert activation.limit is not None
        return _softcap(gate, activation.alpha) * torch.sigmoid(gate) * _softcap(up, activation.limit)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.kind == "swigluoai":
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    return _nonlinear(gate, activation) * up


def normalise_output(y_SK: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Normalises an expert's output in float32 if the activation asks for it, else returns it unchanged."""
    if activation.output_norm_eps is None:
        return y_SK
    wide = y_SK.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + activation.output_norm_eps)).to(y_SK.dtype)


def _nonlinear(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation.kind:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x).square()
    raise AssertionError(f"{activation.kind} has no ungated form")


def _softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)
