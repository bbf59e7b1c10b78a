"""Steps that a thread of its own runs at once, while the scheduler has none: the way of lanes, with no event loop on it.

The scheduler and such a thread take turns: `Scheduler.begin_alone` succeeds only while no step runs and no request waits,
and the scheduler begins none until the thread's step has ended. All ranks therefore see one order of steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from epserve.rank.step import StepPlan, StepResult

from .planning import Batch, Item, Piece, Step
from .scheduler import Scheduler, record_of
from .shares import Shares, hand_out, part_rows, shards, spread

NO_ROWS = torch.empty(0)


class Ranks(Protocol):
    """The part of the pool that such a thread needs."""

    @property
    def num_ranks(self) -> int: ...

    def ready(self, plans: Sequence[StepPlan], shards: Sequence[Sequence[torch.Tensor]]) -> Any: ...

    def run_alone(self, step: Any, number: int) -> StepResult | None: ...

    def shared(self, nbytes: int) -> Any: ...


@dataclass(slots=True)
class ReadyStep:
    """A step that is written down but for its number. `written` is the ranks' own."""

    plan: StepPlan
    step: Step
    shares: Shares
    written: Any
    again: bool
    """It may run again, when other rows lie in the batch's memory. Rows of several batches are copied into one step."""
    _results: list[torch.Tensor] | None = None

    def results(self, out_MK: torch.Tensor) -> list[torch.Tensor]:
        """Returns the rows of each batch. They lie in the same place after each run."""
        if self._results is None:
            hand_out(self.step, out_MK, self.shares)
            self._results = [piece.item.out_MK for piece in self.step if piece.item.out_MK is not None]
        return self._results


@dataclass(frozen=True, slots=True)
class _Ran:
    """A step that went well, for its record."""

    ready: ReadyStep
    number: int
    phases: tuple[Mapping[str, float], ...]
    start: float
    end: float


class StepsNow:
    """Runs steps for one thread at a time."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks, check: Callable[[Batch], Batch], max_tokens: int):
        """check: the engine's door. max_tokens: most tokens of one step."""
        self._scheduler, self._ranks, self._check, self.max_tokens = scheduler, ranks, check, max_tokens
        self._loop = asyncio.get_running_loop()
        self._ran: deque[_Ran] = deque()

    def memory(self, nbytes: int) -> Any:
        """Returns a writable buffer in memory that the ranks of this host read in place, or None where there is none."""
        return self._ranks.shared(nbytes)

    @property
    def join_wait_s(self) -> float:
        """How long a step may be held back for calls that would share it."""
        return self._scheduler.join_wait_s()

    def ready(self, batches: Sequence[Batch]) -> ReadyStep | None:
        """Writes a step down for batches of one layer, mode and width. Returns None where it has to wait for its turn.

        `run` may run it many times if it is `again`. Rows that the ranks cannot read in place are copied here.

        Raises:
            CallerError: the engine's door refuses a batch.
        """
        if sum(batch.num_tokens for batch in batches) > self.max_tokens:
            return None
        step = tuple(
            Piece(item=Item(batch=self._check(batch), future=None), start=0, stop=batch.num_tokens, part=part)
            for part, batch in enumerate(batches)
        )
        shares = spread(step, self._ranks.num_ranks)
        counts = tuple(sum(piece.num_tokens for piece in mine) for mine in shares)
        like = batches[0]
        plans = [
            StepPlan(step=0, layer=like.layer, mode=like.mode, tokens_per_rank=counts, parts=part_rows(mine))
            for mine in shares
        ]
        written = self._ranks.ready(plans, shards(step, shares))
        if written is None:
            return None
        return ReadyStep(plans[0], step, shares, written, again=written.in_place and len(batches) == 1)

    def run(self, ready: ReadyStep) -> list[torch.Tensor] | None:
        """Runs a step. Returns the result of each batch, which the next run overwrites, or None: not now, or not any more.

        Raises:
            RankFailed: a rank failed. Recovery is under way, and the batches may be sent through the queue.
        """
        number = self._scheduler.begin_alone()
        if number is None:
            return None
        try:
            start = time.monotonic()
            result = self._ranks.run_alone(ready.written, number)
        finally:
            self._scheduler.end_alone()
        if result is None:
            return None
        self._ran.append(_Ran(ready, number, result.phases, start, time.monotonic()))
        return ready.results(result.out_MK)

    def tell(self) -> None:
        """Tells the listeners of the steps since the last call. Any thread may call it."""
        if self._ran:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        while self._ran:
            ran = self._ran.popleft()
            for piece in ran.ready.step:
                piece.item.queued = ran.start
            plan, result = replace(ran.ready.plan, step=ran.number), StepResult(out_MK=NO_ROWS, phases=ran.phases)
            self._scheduler.did(record_of(plan, ran.ready.step, result, ran.start, ran.end))
