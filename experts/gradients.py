"""Gradients through frozen experts: those of the rows that an expert computes, and those of the routing weights.

The experts compute their forward again up to the activation, so that nothing is kept between the two. One expert is computed
after the other, since a quantised or packed weight is made plain one expert at a time. Weights have no gradient. Rounding of
activations to a quantised dtype counts as the identity. Legend: S slots, m rows of one expert, t top-k, K hidden size, N
intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from epserve.modular_kernel import ExpertWeights, QuantConfig

from . import dequantised, rows
from .activation import activate, normalise_output


def slot_gradients(
    x_SK: torch.Tensor, g_SK: torch.Tensor, counts: list[int], weights: ExpertWeights, quant: QuantConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradients of slots that are sorted by expert.

    Args:
        x_SK: the slots' rows, in the model's dtype.
        g_SK: the gradients of their tokens' results.
        counts: the number of slots of each expert.
        weights: the rank's experts.
        quant: the scheme of the weights.

    Returns:
        The gradient of the rows for a routing weight of 1, `(S, K)` in the model's dtype, and that of the routing weights,
        float32 `(S,)`.
    """
    dx_SK = torch.empty_like(x_SK)
    dw_S = torch.empty(x_SK.shape[0], dtype=torch.float32, device=x_SK.device)
    start = 0
    for expert, count in enumerate(counts):
        stop = start + count
        if count:
            dx_SK[start:stop], dw_S[start:stop] = expert_gradients(
                x_SK[start:stop], g_SK[start:stop], weights, expert, quant
            )
        start = stop
    return dx_SK, dw_S


def expert_gradients(
    x_mK: torch.Tensor, g_mK: torch.Tensor, weights: ExpertWeights, expert: int, quant: QuantConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `slot_gradients` of one expert.

    The routing weight's gradient is g . y. Without a norm behind it that is (W2^T g) . a + g . b2, which saves the product
    for y.
    """
    w13_NK, w2_KN = dequantised.matrices(weights, expert, quant, x_mK.dtype)
    b13 = None if weights.b13 is None else weights.b13[expert]
    b2 = None if weights.b2 is None else weights.b2[expert]
    h = rows.linear(x_mK, w13_NK, b13)
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        a_mN = activate(leaf, weights.activation)
    dw_m = None
    if weights.activation.output_norm_eps is not None:
        with torch.enable_grad():
            z_mK = rows.linear(a_mN.detach(), w2_KN, b2).detach().requires_grad_()
            y_mK = normalise_output(z_mK, weights.activation)
        dw_m = _dots(g_mK, y_mK.detach())
        (g_mK,) = torch.autograd.grad(y_mK, z_mK, g_mK)
    da_mN = product(g_mK, w2_KN)
    if dw_m is None:
        dw_m = _dots(da_mN, a_mN.detach())
        if b2 is not None:
            dw_m += g_mK.float() @ b2.float()
    (dh,) = torch.autograd.grad(a_mN, leaf, da_mN)
    return product(dh, w13_NK), dw_m


def product(x_mN: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """Multiplies `(m, N)` by `(N, K)`. The inner size ends in zeros where `rows` asks for it."""
    missing = rows.padded(w_NK.shape[0], w_NK.dtype, w_NK.device.type) - w_NK.shape[0]
    if missing:
        x_mN, w_NK = F.pad(x_mN, (0, missing)), F.pad(w_NK, (0, 0, 0, missing))
    return x_mN @ w_NK


def _dots(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.float() * right.float()).sum(-1)
