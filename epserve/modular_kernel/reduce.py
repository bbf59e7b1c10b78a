"""Multiplies by the routing weights and sums over a token's experts. The experts say which of these classes finalize uses.

Sums are taken in float32 in the order of the slots (column 0 of the ids first), so they do not depend on timing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .types import Routing


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(self, y: torch.Tensor, routing: Routing, out_MK: torch.Tensor) -> torch.Tensor:
        """Writes the weighted sum of each token's local slots to `out_MK` `(M, K)` and returns it."""


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """The experts did both: `y` is `(M, K)`."""

    def apply(self, y, routing, out_MK):
        return out_MK.copy_(y)


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """The experts left one row a slot: `y` is `(M, t, K)`. Rows of slots whose id is -1 are undefined."""

    def apply(self, y, routing, out_MK):
        return out_MK.copy_(weighted_sum(y, routing))


class TopKWeightAndReduceNaiveBatched(TopKWeightAndReduce):
    """The experts left the batched format: `y` is `(e, T, K)`, filled by taking tokens in order for each expert."""

    def apply(self, y, routing, out_MK):
        num_experts = y.shape[0]
        flat = routing.ids_Mt.flatten().long()
        hit = flat[:, None] == torch.arange(num_experts, device=flat.device)[None, :]
        row = (hit.cumsum(0) - 1).gather(1, flat.clamp(0, num_experts - 1)[:, None]).squeeze(1)
        slots = y[flat.clamp(0, num_experts - 1), row.clamp(0, max(y.shape[1] - 1, 0))] if y.shape[1] else None
        if slots is None or not flat.numel():
            return out_MK.zero_()
        return out_MK.copy_(weighted_sum(slots.view(*routing.ids_Mt.shape, -1), routing))


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """The experts leave the choice to finalize: the backend's own combine weights and reduces."""

    def apply(self, y, routing, out_MK):
        raise AssertionError("Delegate means that prepare/finalize replaces this object by its own")


def weighted_sum(y_MtK: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns float32 `(M, K)`. It adds slots in column order and skips slots with id -1, even if their rows hold NaN."""
    total = torch.zeros((y_MtK.shape[0], y_MtK.shape[2]), dtype=torch.float32, device=y_MtK.device)
    for slot in range(y_MtK.shape[1]):
        keep = (routing.ids_Mt[:, slot] >= 0)[:, None]
        term = y_MtK[:, slot].float() * routing.weights_Mt[:, slot, None]
        total += torch.where(keep, term, 0.0)
    return total
