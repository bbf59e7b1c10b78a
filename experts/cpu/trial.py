"""Tries the operator for quantised weights on a few rows of small experts, before a rank relies on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from epserve.experts import dequantised
from epserve.modular_kernel import Activation, ExpertWeights, QuantConfig
from epserve.modular_kernel.quantization import FP8
from epserve.modular_kernel.weights import ExpertSizes, empty_weights

from . import formats

SIZE, ROWS, EXPERTS = 128, 3, 2
APART = {"int8_channel": 5e-2, "int4": 5e-2}
"""Largest relative L2 distance from float32 where rows are quantised to 8 bits."""
APART_ELSE = 2e-2


def wrong(scheme: str) -> str | None:
    """Returns what is wrong with the operator's results for a scheme, or None.

    Raises RuntimeError or AttributeError where the library lacks the operators, and InternalError where it orders weights in
    an unknown way.
    """
    for group in (32, 64, 128) if scheme == "int4" else (128,):
        quant = QuantConfig(scheme=scheme, group=group)
        plain = random_weights(quant)
        weights = formats.packed(plain, quant)
        for expert in range(EXPERTS):
            both = zip(weights.matrices(expert), plain.matrices(expert), strict=True)
            if not all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in both):
                return f"{scheme}: packs weights in an order that is not known here"
        x_SK = torch.randn((ROWS, SIZE), generator=torch.Generator().manual_seed(1)).bfloat16()
        y_SK, expert_S = torch.empty_like(x_SK), torch.arange(ROWS, dtype=torch.int32) % EXPERTS
        formats.fused(y_SK, x_SK, weights, expert_S, (None, None))
        want = torch.stack(
            [_expert(x_SK[row].float(), plain, int(expert), quant) for row, expert in enumerate(expert_S)]
        )
        apart = float((y_SK.float() - want).norm() / want.norm())
        if not apart <= APART.get(scheme, APART_ELSE):
            return f"{scheme}: gives wrong results on this processor ({apart:.2g} from float32)"
    return None


def random_weights(quant: QuantConfig) -> ExpertWeights:
    """Returns experts with random codes and scales."""
    sizes = ExpertSizes(hidden=SIZE, intermediate=SIZE, dtype=torch.bfloat16, activation=Activation())
    made, generator = empty_weights(sizes, quant, EXPERTS, torch.device("cpu")), torch.Generator().manual_seed(0)
    for codes, scales in ((made.w13_eNK, made.s13), (made.w2_eKN, made.s2)):
        if scales is None:
            codes.copy_(torch.randn(codes.shape, generator=generator) * SIZE**-0.5)
            continue
        if codes.dtype == FP8:
            codes.copy_(torch.randn(codes.shape, generator=generator) * 100)
        else:
            low, high = (-127, 128) if codes.dtype == torch.int8 else (0, 256)
            codes.copy_(torch.randint(low, high, codes.shape, generator=generator, dtype=codes.dtype))
        if scales.dtype == torch.uint8:
            scales.copy_(torch.randint(120, 124, scales.shape, generator=generator))
        else:
            scales.copy_((0.5 + torch.rand(scales.shape, generator=generator)) / (50 if quant.packed else 1000))
    return made


def _expert(x_K: torch.Tensor, weights: ExpertWeights, expert: int, quant: QuantConfig) -> torch.Tensor:
    w13, w2 = dequantised.matrices(weights, expert, quant, torch.float32)
    gate, up = F.linear(x_K, w13.float()).chunk(2)
    return F.linear(F.silu(gate) * up, w2.float())
