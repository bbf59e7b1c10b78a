"""Experts by torch's grouped products for GPUs (CUTLASS): bf16 by `grouped_mm`, fp8 row by row by `_scaled_grouped_mm`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from epserve.modular_kernel import Activation, ExpertsCapability, ExpertWeights, FusedMoEActivationFormat

from .triton import warmup as triton_warmup
from .triton.library_gemms import LibraryGemmExperts, Operand

CAPABILITIES = ((9, 0), (10, 0))
"""Compute capabilities that torch builds these CUTLASS kernels for. On others it loops over the experts, from the host."""


class CutlassExperts(LibraryGemmExperts):
    """Turns scales into the kernels' form: scales of weights become one an output channel, of activations one a row."""

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        quant_schemes=frozenset({"none", "fp8_tensor", "fp8_channel"}),
        activations=frozenset(Activation.KINDS),
        ungated=False,
        bias=False,
        hidden_multiple_of=16,  # torch's condition: row strides of 16 bytes
        intermediate_multiple_of=16,
        cuda_graph=True,
    )

    @classmethod
    def unavailable(cls):
        if reason := triton_warmup.unavailable():
            return reason
        if torch.cuda.is_available() and torch.cuda.get_device_capability() not in CAPABILITIES:
            return f"torch has no CUTLASS grouped products for compute capability {torch.cuda.get_device_capability()}"
        return None

    def prepare_weights(self, weights):
        """Spreads scales over output channels, once. Weights stay unchanged."""
        for first in (True, False):
            self._channel_scales(weights, first)
        return weights

    def multiply(self, x: Operand, weights: ExpertWeights, *, first: bool, out: torch.Tensor | None) -> torch.Tensor:
        w_eKN = (weights.w13_eNK if first else weights.w2_eKN).transpose(1, 2)
        assert x.ends is not None
        w_scales = self._channel_scales(weights, first)
        if x.scales is None or w_scales is None:
            return F.grouped_mm(x.rows, w_eKN, offs=x.ends)
        return scaled_grouped_mm(x.rows, w_eKN, x.scales, w_scales, x.ends)

    def _channel_scales(self, weights: ExpertWeights, first: bool) -> torch.Tensor | None:
        scale, width = (weights.s13, weights.w13_eNK.shape[1]) if first else (weights.s2, weights.w2_eKN.shape[1])
        if scale is None or scale.ndim == 2:
            return scale
        key = ("cutlass", "s13" if first else "s2")
        if key not in weights.derived:
            weights.derived[key] = scale[:, None].expand(-1, width).contiguous()
        return weights.derived[key]


def scaled_grouped_mm(
    x_SK: torch.Tensor, w_eKN: torch.Tensor, x_scales: torch.Tensor, w_scales: torch.Tensor, ends_e: torch.Tensor
) -> torch.Tensor:
    """Returns bf16 `(S, N)`: (x * a scale a row) @ (w[e] * a scale a column) for the rows of each expert.

    Rows past the last end are undefined. Fast accumulation: sums of e4m3 products stay in the tensor core's registers.
    """
    if (private := getattr(torch, "_scaled_grouped_mm", None)) is not None:  # torch 2.8 to at least 2.13
        return private(x_SK, w_eKN, x_scales, w_scales, offs=ends_e, out_dtype=torch.bfloat16, use_fast_accum=True)
    rows = F.ScalingType.RowWise
    public: Any = F.scaled_grouped_mm  # type: ignore[attr-defined]
    return public(x_SK, w_eKN, x_scales, rows, w_scales, rows, offs=ends_e, output_dtype=torch.bfloat16,
                               use_fast_accum=True)  # fmt: skip
