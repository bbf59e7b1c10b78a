"""This module chooses lanes for a session's requests: it opens them, and opens others when they have ended."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from epserve.client.checks import requires_gradient
from epserve.errors import CallerError, EpserveError, ExpertsMissing, NotReady

log = logging.getLogger(__name__)

LANE_TOKENS, LANE_SLOTS = 1024, 2
"""The size of the lane to a service on this host. Longer batches go another way."""
LANE_AGAIN_S = 5.0
"""The time between two attempts to open a lane. Requests go another way meanwhile."""
OPEN_S = 1.0
"""The time for one attempt."""
Given = Sequence[torch.Tensor | None]
"""Hidden states, and ids and weights, which are both there or both None."""


class LaneWays:
    """The lanes to a service on this host: one for tensors in the host's memory, and one for each GPU."""

    def __init__(self, transport: Any, max_tokens: int):
        self._make = partial(LaneWay, transport, max_tokens)
        self._lock = threading.Lock()
        self._ways: dict[torch.device | None, LaneWay] = {}

    def forward(self, layer: int, given: Given) -> torch.Tensor | None:
        """Returns the result, or None when the request has to go another way. Raises the errors of `Client.forward`.

        A lane on a GPU returns before its result is there. The error of a call that failed is raised by a later one.
        """
        device = gpu_of(given[0])
        way = self._ways.get(device)
        if way is None:
            with self._lock:
                way = self._ways.setdefault(device, self._make(device))
        return way.forward(layer, given)

    def close(self) -> None:
        with self._lock:
            for way in self._ways.values():
                way.close()


def gpu_of(tensor: Any) -> torch.device | None:
    """Returns the GPU that a tensor lies on, or None."""
    return tensor.device if tensor is not None and tensor.device.type == "cuda" else None


class LaneWay:
    """The lane to a service on this host. It is opened at the first request, and again when it has ended.

    device: the GPU of its rows, or None.
    """

    def __init__(self, transport: Any, max_tokens: int, device: torch.device | None):
        self._transport, self._max_tokens, self._device = transport, min(max_tokens, LANE_TOKENS), device
        self._lock = threading.Lock()
        self._held = ExitStack()
        self._lane: Any = None
        self._next_try = 0.0 if hasattr(transport, "open_lane") else math.inf
        """The time from which a lane may be opened. Infinite: the service has none for this client."""

    def forward(self, layer: int, given: Given) -> torch.Tensor | None:
        """Returns the result, or None when the request has to go another way. Raises the errors of `Client.forward`."""
        hidden, ids, weights = given
        if self._device is not None and self._lane is not None:
            self._lane.check(wait=not self._lane.usable)  # before another lane takes its place
        lane = self._open() if not requires_gradient(hidden, weights) else None
        if lane is None or not lane.takes(layer, hidden):
            return None
        try:
            return lane.forward(layer, hidden, ids, weights)
        except ExpertsMissing:
            return None  # the service may answer without them, which it tells over gRPC
        except NotReady:
            if lane.usable:
                raise
            return None  # the lane has ended, perhaps with the service

    def close(self) -> None:
        with self._lock:
            lane, self._next_try, self._lane = self._lane, math.inf, None
            if lane is not None and self._device is not None:
                try:
                    lane.check()
                except EpserveError as error:
                    log.warning("the last calls of a lane on %s failed, their results are NaN: %s", self._device, error)
            self._held.close()

    def _open(self) -> Any:
        if (self._lane is not None and self._lane.usable) or time.monotonic() < self._next_try:
            return self._lane
        with self._lock:
            if time.monotonic() < self._next_try:
                return self._lane
            self._lane, self._next_try = None, time.monotonic() + LANE_AGAIN_S
            self._held.close()
            try:
                on_gpu = {} if self._device is None else {"device": self._device}
                opened = self._transport.open_lane(self._max_tokens, slots=LANE_SLOTS, timeout=OPEN_S, **on_gpu)
                self._lane = self._held.enter_context(opened)
            except CallerError:  # the service is on another host, or has lanes switched off
                self._next_try = math.inf
            except EpserveError:
                log.debug("no lane now; requests go another way", exc_info=True)
        return self._lane
