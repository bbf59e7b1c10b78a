"""A lane's call as an operator of torch: a graph that was compiled or exported holds the name of the lane, and no connection.

There are two operators. That of a lane in shared memory waits on the host, and that of a lane on a GPU does not.
"""

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
    return _function(of, _lane)


def operator_on_gpu(of: Lane) -> Callable[..., torch.Tensor]:
    """Does the same for a lane on a GPU."""
    return _function(of, _lane_on_gpu)


def _function(of: Lane, op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    name = of.name
    _lanes[name] = of

    def call(
        layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return op(name, layer, hidden, topk_ids, topk_weights)

    return call


def _called(
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


def _like(
    name: str, layer: int, hidden: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@torch.library.custom_op("epserve::lane", mutates_args=(), tags=_TAGS)
def _lane(
    name: str, layer: int, hidden: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    return _called(name, layer, hidden, ids, weights)


@torch.library.custom_op("epserve::lane_on_gpu", mutates_args=())
def _lane_on_gpu(
    name: str, layer: int, hidden: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    return _called(name, layer, hidden, ids, weights)


_lane.register_fake(_like)
_lane_on_gpu.register_fake(_like)
