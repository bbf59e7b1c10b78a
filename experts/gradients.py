"""Gradients through frozen experts: those of the rows that an expert computes, and those of the routing weights.

The experts compute their forward again up to the activation, so that nothing is kept between the two. On a CPU one expert is
computed after the other, and a quantised or packed weight is made plain one expert at a time. Weights have no gradient. Rounding
of activations to a quantised dtype counts as the identity. On a GPU a Triton kernel multiplies the rows of many experts at once.

Legend: S slots, m rows of one expert, e experts, t top-k, K hidden size, N intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from epserve.modular_kernel import Activation, ExpertWeights, QuantConfig

from . import dequantised, rows
from .activation import activate, normalise_output

SCRATCH_BYTES = 256 << 20
"""Most memory for plain copies of quantised weights on a GPU, where the products of many experts are one launch."""


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
    at_once = _at_once(x_SK, weights, quant)
    start = 0
    for first in range(0, len(counts), at_once):
        some = counts[first : first + at_once]
        stop = start + sum(some)
        if stop > start:
            compute = expert_gradients if at_once == 1 else grouped_gradients
            given: Any = first if at_once == 1 else (first, some)
            dx_SK[start:stop], dw_S[start:stop] = compute(x_SK[start:stop], g_SK[start:stop], weights, given, quant)
        start = stop
    return dx_SK, dw_S


def _at_once(x_SK: torch.Tensor, weights: ExpertWeights, quant: QuantConfig) -> int:
    """Returns the number of experts whose products are computed together. 1: each by torch's own product."""
    from .triton import gradients as triton_gradients

    if not triton_gradients.suits(x_SK):
        return 1
    if quant.scheme == "none" and weights.packing is None:
        return max(weights.num_experts, 2)
    values = weights.w13_eNK[0].numel() * (2 if quant.packed else 1)
    return max(SCRATCH_BYTES // (2 * values * x_SK.element_size()), 2)  # W2 has at most as many values as W13


def expert_gradients(
    x_mK: torch.Tensor, g_mK: torch.Tensor, weights: ExpertWeights, expert: int, quant: QuantConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `slot_gradients` of one expert."""
    w13_NK, w2_KN = dequantised.matrices(weights, expert, quant, x_mK.dtype)
    b13 = None if weights.b13 is None else weights.b13[expert]
    b2 = None if weights.b2 is None else weights.b2[expert]
    products = Products(
        first=lambda x: rows.linear(x, w13_NK, b13),
        second=lambda a: rows.linear(a, w2_KN, b2),
        back_second=lambda g: product(g, w2_KN),
        back_first=lambda h: product(h, w13_NK),
    )
    return _gradients(x_mK, g_mK, products, b2, weights.activation)


def grouped_gradients(
    x_SK: torch.Tensor,
    g_SK: torch.Tensor,
    weights: ExpertWeights,
    experts: tuple[int, list[int]],
    quant: QuantConfig,
    *,
    tile: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `slot_gradients` of several experts in grouped products.

    Args:
        experts: the first expert, and the number of slots of it and of those after it.
        tile: rows of a tile. 0: those that suit the number of slots.
    """
    from .triton.gradients import Grouped

    first, counts = experts
    taken = slice(first, first + len(counts))
    counts_e = torch.tensor(counts, device=x_SK.device)
    grouped = Grouped(counts_e, len(x_SK), tile=tile)
    w13_eNK, w2_eKN = weights.w13_eNK[taken], weights.w2_eKN[taken]
    if quant.scheme != "none" or weights.packing is not None:
        plain = [dequantised.matrices(weights, expert, quant, x_SK.dtype) for expert in range(*taken.indices(1 << 30))]
        w13_eNK, w2_eKN = (torch.stack(each) for each in zip(*plain, strict=True))
    expert_S = torch.repeat_interleave(counts_e, output_size=len(x_SK))
    b13_SN, b2_SK = (None if each is None else each[taken][expert_S] for each in (weights.b13, weights.b2))
    products = Products(
        first=lambda x: _plus(grouped.linear(x, w13_eNK), b13_SN),
        second=lambda a: _plus(grouped.linear(a, w2_eKN), b2_SK),
        back_second=lambda g: grouped.product(g, w2_eKN),
        back_first=lambda h: grouped.product(h, w13_eNK),
    )
    return _gradients(x_SK, g_SK, products, b2_SK, weights.activation)


def warm_up(weights: ExpertWeights, quant: QuantConfig, dtype: torch.dtype) -> None:
    """Compiles what `slot_gradients` may need for any number of rows, if there are kernels for these weights."""
    from .triton import gradients as triton_gradients

    if not weights.num_experts:
        return
    hidden = weights.w2_eKN.shape[1]
    x_1K = torch.zeros((1, hidden), dtype=dtype, device=weights.w2_eKN.device)
    if triton_gradients.suits(x_1K):
        for tile in (triton_gradients.THIN, triton_gradients.THICK):
            grouped_gradients(x_1K, x_1K, weights, (0, [1]), quant, tile=tile)


Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The products of rows with both matrices of their experts, biases included, and those with the transposed matrices."""

    first: Product
    second: Product
    back_second: Product
    back_first: Product


def _gradients(
    x_SK: torch.Tensor, g_SK: torch.Tensor, products: Products, b2: torch.Tensor | None, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Goes forward to the activation and back.

    The routing weight's gradient is g . y. Without a norm behind it that is (W2^T g) . a + g . b2, which saves the product
    for y.
    """
    h = products.first(x_SK)
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        a_SN = activate(leaf, activation)
    dw_S = None
    if activation.output_norm_eps is not None:
        with torch.enable_grad():
            z_SK = products.second(a_SN.detach()).detach().requires_grad_()
            y_SK = normalise_output(z_SK, activation)
        dw_S = _dots(g_SK, y_SK.detach())
        (g_SK,) = torch.autograd.grad(y_SK, z_SK, g_SK)
    da_SN = products.back_second(g_SK)
    if dw_S is None:
        dw_S = _dots(da_SN, a_SN.detach())
        if b2 is not None:
            dw_S += _dots(g_SK, b2)
    (dh,) = torch.autograd.grad(a_SN, leaf, da_SN)
    return products.back_first(dh), dw_S


def _plus(rows_SN: torch.Tensor, bias_SN: torch.Tensor | None) -> torch.Tensor:
    return rows_SN if bias_SN is None else rows_SN + bias_SN


def product(x_mN: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """Multiplies `(m, N)` by `(N, K)`. The inner size ends in zeros where `rows` asks for it."""
    missing = rows.padded(w_NK.shape[0], w_NK.dtype, w_NK.device.type) - w_NK.shape[0]
    if missing:
        x_mN, w_NK = F.pad(x_mN, (0, missing)), F.pad(w_NK, (0, 0, 0, missing))
    return x_mN @ w_NK


def _dots(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.float() * right.float()).sum(-1)
