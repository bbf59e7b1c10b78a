"""A lane for programs that run in an asyncio event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .lane import Lane


class AsyncLane:
    """A lane whose calls are awaited: `AsyncClient.open_lane` makes it.

    A loop cannot wait for words of shared memory, so a thread for each slot does. The way to a thread and back takes about as
    long as the call's own way. A program that only calls layers one behind the other is quicker with `Lane`. A task that is
    cancelled leaves its slot to the call until the answer has come.
    """

    def __init__(self, lane: Lane):
        self.lane = lane
        """The lane itself, with its static buffers, `layers`, `hidden`, `dtype` and `usable`."""
        self._threads = ThreadPoolExecutor(lane.slots, thread_name_prefix="lane")

    async def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *, timeout: float | None = None
    ) -> Any:
        """Does the same as Lane.forward."""
        return await self._in_thread(self.lane.forward, layer, hidden, topk_ids, topk_weights, timeout=timeout)

    async def call(
        self, layer: int, tokens: int, *, slot: int = 0, routed: bool = False, timeout: float | None = None
    ) -> Any:
        """Does the same as Lane.call."""
        return await self._in_thread(self.lane.call, layer, tokens, slot=slot, routed=routed, timeout=timeout)

    async def retry(self, *, slot: int = 0, timeout: float | None = None) -> Any:
        """Does the same as Lane.retry."""
        return await self._in_thread(self.lane.retry, slot=slot, timeout=timeout)

    def check(self) -> None:
        """Does the same as Lane.check."""
        self.lane.check()

    def close(self) -> None:
        self.lane.close()
        self._threads.shutdown(wait=False)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        call = functools.partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
