"""Changes of a running service, of which at most one is under way, and steps of a thread of their own, likewise."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from epserve.errors import NotReady

log = logging.getLogger(__name__)

T = TypeVar("T")


class OneAtATime:
    """Runs one change at a time, in one event loop. `tasks` has all running tasks, for the code that ends the loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.tasks: set[asyncio.Task] = set()

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Waits for the present change: `async with one.turn():`. No other change runs in the block."""
        return self._lock

    async def alone(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Runs `work` to its end, also when the caller is cancelled, since half a change is no valid state. Raises NotReady."""
        if self.busy:
            work.close()
            raise NotReady("another change of ranks or experts is under way; ask again when it is done")
        await self._lock.acquire()  # free, so this does not wait

        async def to_the_end() -> T:
            try:
                return await work
            finally:
                self._lock.release()

        task = self.background(to_the_end(), name=what)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                log.warning("%s: whoever asked for it has gone; it goes on", what)
                task.add_done_callback(_tell)
            raise

    def background(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


def _tell(task: asyncio.Task) -> None:
    """Logs the end of a change whose caller is gone."""
    if task.cancelled():
        log.warning("%s: given up, the service stops", task.get_name())
    elif error := task.exception():
        log.warning("%s: %s", task.get_name(), error)


class Alone:
    """Tells whether another thread than the loop's runs a step. `begin` and `end` belong to that thread and take no lock."""

    def __init__(self) -> None:
        self._running = False
        self._waiting: deque[concurrent.futures.Future[None]] = deque()

    def begin(self) -> None:
        self._running = True

    def end(self) -> None:
        self._running = False
        while self._waiting:
            self._waiting.popleft().set_result(None)

    async def ended(self) -> None:
        """Waits for the step that runs now, if any."""
        if not self._running:
            return
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._waiting.append(future)
        if self._running:  # else it has ended meanwhile, perhaps without a look at this future
            await asyncio.wrap_future(future)
