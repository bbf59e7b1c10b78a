"""Matrices of experts as plain values: what their codes and scales mean, whatever scheme stores them.

Legend: N rows, K columns.
"""

from __future__ import annotations

import functools

import torch

from epserve.modular_kernel import ExpertWeights, QuantConfig
from epserve.modular_kernel.quantization import BLOCK

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INT4_OFFSET = 8
E8M0_BIAS = 127


def matrices(
    weights: ExpertWeights, expert: int, quant: QuantConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns one expert's two matrices in `dtype`: views where the weights are stored so, copies elsewhere."""
    w13_NK, w2_KN = weights.matrices(expert)
    if quant.scheme == "none":
        return w13_NK, w2_KN
    assert weights.s13 is not None
    assert weights.s2 is not None
    return values(w13_NK, weights.s13[expert], quant, dtype), values(w2_KN, weights.s2[expert], quant, dtype)


def values(codes_NK: torch.Tensor, scale: torch.Tensor, quant: QuantConfig, dtype: torch.dtype) -> torch.Tensor:
    """Returns a quantised matrix in `dtype`. Products with scales are rounded once, from float32."""
    if quant.packed:
        table = _table(quant.scheme, codes_NK.device)
        value = table[torch.stack((codes_NK & 0xF, codes_NK >> 4), -1).flatten(-2).int()]
    else:
        value = codes_NK.float()
    factor = torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()
    rows, columns = value.shape
    if quant.scheme == "fp8_block":
        factor = factor.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    elif quant.packed:
        factor = factor.repeat_interleave(quant.shared, 1)
    elif factor.ndim == 1:
        factor = factor[:, None]
    return (value * factor).to(dtype)


@functools.cache
def _table(scheme: str, device: torch.device) -> torch.Tensor:
    """Returns the 16 values of a 4-bit code."""
    if scheme == "int4":
        return torch.arange(16, device=device, dtype=torch.float32) - INT4_OFFSET
    return torch.tensor((*E2M1, *(-value for value in E2M1)), device=device)
