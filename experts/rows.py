"""Matrix products on the CPU in which no row sees another one.

oneDNN's bf16 kernels for AMX read a row in tiles of 32 columns. If the inner size is not a multiple of 32, the last tile
reaches into the next row, or behind the tensor. The values there are multiplied by zero, which gives NaN for NaN and infinity.
Here the rows of both factors then end in zeros, those of a weight since its load. docs/experts.md has the cost of the zeros.

Legend: M rows, N columns, K inner size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from epserve.modular_kernel import ExpertWeights, LayerSpec

TILE = 32
"""Columns of an AMX tile: a row has 64 bytes of bf16."""


def padded(size: int, dtype: torch.dtype, device: str) -> int:
    """Returns the inner size of a product of rows of `size` values. It is the same on all processors, and so are the bits."""
    return -(-size // TILE) * TILE if dtype == torch.bfloat16 and device == "cpu" else size


def padded_hidden(spec: LayerSpec) -> int:
    return padded(spec.shape.hidden, spec.shape.dtype, spec.device)


def with_zeros(w_NK: torch.Tensor) -> torch.Tensor:
    """Returns the weight `(..., N, K)` with zeros in memory behind each row. It is a copy, or the weight if it needs no zeros."""
    size = w_NK.shape[-1]
    wide = _padded(w_NK)
    if size == wide or _ends_in_zeros(w_NK):
        return w_NK
    return F.pad(w_NK, (0, wide - size))[..., :size]


def experts_with_zeros(weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, w13_eNK=with_zeros(weights.w13_eNK), w2_eKN=with_zeros(weights.w2_eKN))


def whole(w_NK: torch.Tensor) -> torch.Tensor:
    """Returns the weight with the zeros behind its rows. A weight without the zeros of `with_zeros` is copied."""
    if w_NK.shape[-1] == _padded(w_NK):
        return w_NK
    if not _ends_in_zeros(w_NK):
        w_NK = with_zeros(w_NK)
    return w_NK.as_strided((*w_NK.shape[:-1], _padded(w_NK)), w_NK.stride())


def fitted(x_MK: torch.Tensor, whole_NK: torch.Tensor) -> torch.Tensor:
    """Returns rows as wide as those of a weight from `whole`."""
    missing = whole_NK.shape[-1] - x_MK.shape[-1]
    return F.pad(x_MK, (0, missing)) if missing else x_MK


def linear(x_MK: torch.Tensor, w_NK: torch.Tensor, b_N: torch.Tensor | None = None) -> torch.Tensor:
    whole_NK = whole(w_NK)
    return F.linear(fitted(x_MK, whole_NK), whole_NK, b_N)


def _padded(w_NK: torch.Tensor) -> int:
    return padded(w_NK.shape[-1], w_NK.dtype, w_NK.device.type)


def _ends_in_zeros(w_NK: torch.Tensor) -> bool:
    """Returns whether the rows of a weight end in zeros.

    NOTE: it looks at the distance of the rows alone. Any other view of finite weights with that distance does no harm, because
    the rows of the other factor end in zeros.
    """
    wide = _padded(w_NK)
    last = w_NK.storage_offset() + sum(
        (n - 1) * step for n, step in zip(w_NK.shape[:-1], w_NK.stride()[:-1], strict=True)
    )
    room = w_NK.numel() == 0 or (last + wide) * w_NK.element_size() <= w_NK.untyped_storage().nbytes()
    return w_NK.stride(-2) == wide and w_NK.stride(-1) == 1 and room
