"""Warm spares: processes that have imported torch, opened the checkpoint and perhaps copied it, and hold no rank yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from epserve.rank.weights.newcomers import Welcome

from .members import Member

log = logging.getLogger(__name__)

RETRY_S = 5.0  # after a spare that could not start
REFILL_DELAY_S = 1.0  # the requests that waited for a recovery come first: a starting process takes a core for seconds


class Spares:
    """`make` starts a process without a rank, `drop` ends one; `enough`: how many are to be ready."""

    def __init__(
        self, make: Callable[[], Member], drop: Callable[[Member], None], *, enough: int, start_timeout_s: float
    ):
        self._drop = drop
        self._make, self._enough, self._timeout = make, enough, start_timeout_s
        self._ready: list[Member] = []
        self._filling: asyncio.Task | None = None
        self.welcome: Welcome | None = None
        """What the checkpoint looked like when the service started: a spare takes no other one."""

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def filling(self) -> asyncio.Task | None:
        """What starts them now or did so last."""
        return self._filling

    def take(self, count: int) -> list[Member]:
        """As many as are ready, `count` at most. Their places are not filled before `refill`."""
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def refill(self, *, delay: float = REFILL_DELAY_S) -> None:
        """Start what is missing, one after the other, in the background."""
        if self._filling is None or self._filling.done():
            self._filling = asyncio.ensure_future(self._fill(delay))

    async def check(self, timeout: float) -> None:
        """Replace those that do not answer any more."""
        for spare in list(self._ready):
            if not await spare.ping(timeout) and spare in self._ready:
                log.warning("a spare does not answer: replacing it")
                self._ready.remove(spare)
                self._drop(spare)
                self.refill()

    def close(self) -> list[asyncio.Task]:
        """Ends all of them; the tasks that are to be awaited."""
        for spare in self.take(self.ready):
            self._drop(spare)
        if self._filling is None:
            return []
        self._filling.cancel()
        return [self._filling]

    async def _fill(self, delay: float) -> None:
        await asyncio.sleep(delay)
        while len(self._ready) < self._enough:
            spare = self._make()
            try:
                outcome = await spare.call("warm", self.welcome, timeout=self._timeout)
            except asyncio.CancelledError:
                self._drop(spare)
                raise
            if outcome.failure is None:
                spare.facts = outcome.value
                self._ready.append(spare)
                log.info("a spare is ready (%d of %d)", len(self._ready), self._enough)
                continue
            log.warning("a spare could not start: %s", outcome.failure.describe())
            self._drop(spare)
            await asyncio.sleep(RETRY_S)
