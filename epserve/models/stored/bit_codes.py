"""Turns codes of few bits into numbers, or into the order that the kernels read: two codes a byte, the even one low."""

from __future__ import annotations

import functools

import numpy as np
import torch

from epserve.modular_kernel.quantization import FP8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_OFFSET = 8
EXPONENT_BIAS = 127  # the bias of E8M0
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ's "gemm" version: column j of a word is its nibble AWQ_ORDER[j]


@functools.cache
def _table(kind: str) -> np.ndarray:
    """Returns the two float32 numbers of a byte, or of two e4m3, as one element of eight bytes. NumPy looks those up fastest."""
    if kind == "e4m3":
        values, low = torch.arange(256, dtype=torch.uint8).view(FP8).float(), torch.arange(1 << 16)
        both = torch.stack((values[low & 0xFF], values[low >> 8]), dim=1)
    else:
        values, low = torch.tensor(E2M1) if kind == "e2m1" else torch.arange(16.0) - INT4_OFFSET, torch.arange(256)
        both = torch.stack((values[low & 0xF], values[low >> 4]), dim=1)
    return both.contiguous().numpy().view(np.float64).reshape(-1)


def pairs(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Turns uint8 `(..., c)` into float32 `(..., 2c)`. kind: "e2m1", or "int4" with its offset."""
    return torch.from_numpy(_table(kind)[codes.numpy()].view(np.float32))


def e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """Returns the same as `codes.float()`, in a quarter of its time."""
    if not codes.is_contiguous() or codes.numel() % 2 or codes.shape[-1] % 2:
        return codes.float()
    words = codes.view(torch.uint8).view(torch.uint16)
    return torch.from_numpy(_table("e4m3")[words.numpy()].view(np.float32))


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """Views int32 (or int8) `(..., c)` as uint8. A word's lowest byte comes first."""
    return words.contiguous().view(torch.uint8)


def along_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Turns int32 `(..., c)` into uint8 codes `(..., c * 32 / bits)`, a word's lowest bits first."""
    codes = as_bytes(words)
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((codes.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def along_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Turns int32 `(..., r, c)` into uint8 codes `(..., r * 32 / bits, c)`, a word's lowest bits first."""
    return along_columns(words.transpose(-1, -2).contiguous(), bits).transpose(-1, -2)


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    """Turns int32 `(..., c)` into uint8 codes `(..., 8 c)`, in AutoAWQ's order of nibbles."""
    return along_columns(words, 4).unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)


def two_a_byte(codes: torch.Tensor) -> torch.Tensor:
    """Packs uint8 codes of 4 bits `(..., c)` into bytes `(..., c / 2)`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Turns any scale into float32. Bytes are E8M0: a power of two, with EXPONENT_BIAS."""
    if scale.dtype == torch.uint8:
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - EXPONENT_BIAS)
    return scale.float()


def scaled(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiplies numbers `(..., rows, columns)` in place by one scale for each block of rows and columns (0: all of them)."""
    rows, columns = values.shape[-2:]
    r, c = block[0] or rows, block[1] or columns
    scale = scale.reshape(*values.shape[:-2], -(-rows // r), -(-columns // c))
    if rows % r == 0 and columns % c == 0:
        blocks = values.view(*values.shape[:-2], rows // r, r, columns // c, c)
        blocks.mul_(scale.unsqueeze(-1).unsqueeze(-3))
        return values
    wide = scale.repeat_interleave(r, -2)[..., :rows, :].repeat_interleave(c, -1)[..., :columns]
    return values.mul_(wide)
