"""The lanes that the only rank serves itself: who serves them now, and the news of their calls.

A lane goes to a rank by a frame of its link, with a key for the lane's memory. It comes back when the rank closes the connection
that the memory came by, so nothing here has to be asked whether it is the front end's again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from epserve.link.failure import RankLost
from epserve.pool.pool import Pool

from .records import StepPart, StepRecord
from .scheduler import Scheduler

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Longest wait for a rank's answer. It comes behind the steps that the rank has been sent."""


@dataclass(frozen=True, slots=True)
class DoneCall:
    """A call that a rank has answered. Times are time.monotonic() seconds. `joined`: it shared its step with others."""

    tokens: int
    seen: float
    ended: float
    joined: bool


@dataclass(slots=True, eq=False)
class Served:
    """A lane that a rank serves, by its number there. `done` is told of each call, a while after its answer."""

    number: int
    link: Any
    name: str
    done: Callable[[DoneCall], None]


class DirectLanes:
    """Gives lanes to the rank, in the engine's loop."""

    def __init__(self, scheduler: Scheduler, ranks: Pool):
        self._scheduler, self._ranks = scheduler, ranks
        self._numbers = itertools.count(1)
        self._served: dict[int, Served] = {}
        self.max_tokens: int = ranks.config.scheduler.max_step_tokens
        """Most tokens of one step. The queue cuts longer calls, a rank does not."""
        self.cpu_s = 0.0
        """Processor time of the rank's step thread, as it last told."""

    @property
    def possible(self) -> bool:
        """Whether a rank can serve lanes now: it is the only one, computes on this host's processors, and has every expert."""
        ranks = self._ranks
        return (
            ranks.serving.is_set()
            and ranks.num_ranks == 1
            and ranks.device == "cpu"
            and not ranks.missing
            and all(member.link is not None and member.link.words is not None for member in ranks.members)
        )

    async def give(self, lane: Mapping[str, Any], name: str, done: Callable[[DoneCall], None]) -> Served | None:
        """Lets the rank serve a lane (`rank.lanes.direct.DirectLanes.told`). Returns None when it does not."""
        if not self.possible:
            return None
        served = Served(next(self._numbers), self._ranks.members[0].link, name, done)
        self._served[served.number] = served
        answer = await self._ask(served.link, {**lane, "open": served.number})
        if answer is None or "refused" in answer:
            log.debug("the rank takes no lane: %s", answer)
            self.take(served)  # it may open it later
            return None
        self._tell(answer)
        return served

    def take(self, served: Served) -> None:
        """Asks for a lane back. Its connection ends after the step that the rank is at. `done` is told of the rest."""
        if served.link.lost:
            self._served.pop(served.number, None)
            return
        asked = served.link.ask({"direct": {"close": served.number}})
        asked.add_done_callback(functools.partial(self._taken, served.number))

    async def news(self) -> None:
        """Asks the rank for the calls that it has answered since the last time."""
        for member in list(self._ranks.members[:1]):
            while member.link is not None and not member.link.lost:
                if (answer := await self._ask(member.link, {})) is None:
                    break
                self._tell(answer)
                if not answer["more"]:
                    break

    async def _ask(self, link: Any, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        future = link.ask({"direct": asked})
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(future)
        except (TimeoutError, RankLost):
            future.add_done_callback(lambda each: each.cancelled() or each.exception())
            return None

    def _taken(self, number: int, future: asyncio.Future[dict[str, Any]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._tell(future.result())
        self._served.pop(number, None)

    def _tell(self, answer: Mapping[str, Any]) -> None:
        """Counts the steps of an answer as the scheduler's own."""
        if "steps" not in answer:
            return
        self.cpu_s = answer["cpu_s"]
        for layer, mode, start, end, phases, calls in answer["steps"]:
            parts = []
            for number, rows, seen, ended in calls:
                served = self._served.get(number)
                name = served.name if served is not None else ""
                parts.append(StepPart(request_id=name, tokens=rows, queued=seen))
                if served is not None:
                    served.done(DoneCall(rows, seen, ended, len(calls) > 1))
            record = StepRecord(
                step=self._scheduler.next_number(), layer=layer, mode=mode, tokens_per_rank=(sum(call[1] for call in calls),),
                started=start, ended=end, phases=(phases,), parts=tuple(parts),
            )  # fmt: skip
            self._ranks.steps.count(record.tokens_per_rank, self._ranks.members)
            self._scheduler.did(record)
