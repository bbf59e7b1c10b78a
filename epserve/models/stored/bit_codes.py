"""Codes of few bits -> numbers, and back into the order that the kernels read: two codes a byte, the even one low."""

from __future__ import annotations

import functools

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_OFFSET = 8
EXPONENT_BIAS = 127  # of E8M0
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ's "gemm" version: column j of a word is its nibble AWQ_ORDER[j]


@functools.cache
def _table(kind: str) -> torch.Tensor:
    """`(256, 2)`: the two numbers of a byte."""
    values = torch.tensor(E2M1) if kind == "e2m1" else torch.arange(16.0) - INT4_OFFSET
    byte = torch.arange(256)
    return torch.stack((values[byte & 0xF], values[byte >> 4]), dim=1)


def pairs(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """uint8 `(..., c)` -> float32 `(..., 2c)`. kind: "e2m1", or "int4" with its offset."""
    flat = _table(kind).index_select(0, codes.reshape(-1).int())
    return flat.view(*codes.shape[:-1], -1)


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 (or int8) `(..., c)` -> uint8: a word's lowest byte comes first."""
    return words.contiguous().view(torch.uint8)


def along_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `(..., c)` -> uint8 codes `(..., c * 32 / bits)`, a word's lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def along_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `(..., r, c)` -> uint8 codes `(..., r * 32 / bits, c)`, a word's lowest bits first."""
    return along_columns(words.transpose(-1, -2).contiguous(), bits).transpose(-1, -2)


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    """int32 `(..., c)` -> uint8 codes `(..., 8 c)`, in AutoAWQ's order of nibbles."""
    return along_columns(words, 4).unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)


def two_a_byte(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes of 4 bits `(..., c)` -> `(..., c / 2)`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Any scale -> float32. Bytes are E8M0: a power of two, with EXPONENT_BIAS."""
    if scale.dtype == torch.uint8:
        return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - EXPONENT_BIAS)
    return scale.float()


def spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """One scale for each block of rows and columns (0: all of them) -> what broadcasts against `(..., rows, columns)`."""
    rows, columns = shape[-2:]
    r, c = block[0] or rows, block[1] or columns
    scale = scale.reshape(*shape[:-2], -(-rows // r), -(-columns // c))
    if 1 < r < rows:
        scale = scale.repeat_interleave(r, -2)[..., :rows, :]
    if 1 < c < columns:
        scale = scale.repeat_interleave(c, -1)[..., :columns]
    return scale
