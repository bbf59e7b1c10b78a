"""Whether all values of a tensor are finite, and which rows are not."""

from __future__ import annotations

import math

import torch


def all_finite(x: torch.Tensor) -> bool:
    """A sum that is finite has only such terms, and is the quickest to compute. One that is not may have passed the largest
    number: then each value is looked at."""
    return not x.numel() or math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def rows_not_finite(x_MK: torch.Tensor) -> list[int]:
    """Ascending. Costs a sum where there are none."""
    if all_finite(x_MK):
        return []
    return torch.isfinite(x_MK).all(1).logical_not().nonzero().flatten().tolist()
