"""Checks whether all values of a tensor are finite, and finds the rows that are not."""

from __future__ import annotations

import math

import torch


def all_finite(x: torch.Tensor) -> bool:
    """Returns whether all values are finite.

    A finite sum has only finite terms, and a sum is the quickest to compute. A sum that is not finite may have overflowed, so
    each value is then checked.
    """
    return not x.numel() or math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def rows_not_finite(x_MK: torch.Tensor) -> list[int]:
    """Returns the rows with a value that is not finite, in ascending order. It costs one sum when there are none."""
    if all_finite(x_MK):
        return []
    return torch.isfinite(x_MK).all(1).logical_not().nonzero().flatten().tolist()
