"""A lane's call as an operator of torch: a graph that was compiled or exported holds the name of the lane, and no connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from epserve.errors import CallerError, EpserveError, ServiceError


class Lane(Protocol):
    """An open lane: `client.lanes.Lane`."""

    name: str

    def forward(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> torch.Tensor: ...

    def failed(self, error: EpserveError) -> None: ...


_lanes: WeakValueDictionary[str, Lane] = WeakValueDictionary()
# NOTE: a call waits on the host for another process, which no CUDA graph can hold.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def operator(of: Lane) -> Callable[..., torch.Tensor]:
    """Returns the function `(layer, hidden, topk_ids=None, topk_weights=None)` of an open lane."""
    name = of.name
    _lanes[name] = of

    def call(
        layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _lane(name, layer, hidden, topk_ids, topk_weights)

    return call


@torch.library.custom_op("epserve::lane", mutates_args=(), tags=_TAGS)
def _lane(
    name: str, layer: int, hidden: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    found = _lanes.get(name)
    if found is None:
        raise CallerError(f"the lane {name} of this graph is gone; trace the graph again with one that is open")
    try:
        return found.forward(layer, hidden, ids, weights)
    except ServiceError as error:
        found.failed(error)
        return torch.full_like(hidden, float("nan"), memory_format=torch.contiguous_format)


@_lane.register_fake
def _(name, layer, hidden, ids, weights):
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)
