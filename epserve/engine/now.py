"""Steps that a thread of its own runs at once, while the scheduler has none: the way of lanes, with no event loop on it.

The scheduler and such a thread take turns: `Scheduler.begin_alone` succeeds only while no step runs and no request waits,
and the scheduler begins none until the thread's step has ended. All ranks therefore see one order of steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from epserve.rank.step import StepPlan, StepResult

from .planning import Batch, Item, Piece, Step
from .scheduler import Scheduler, record_of
from .shares import hand_out, part_rows, shards, spread


class Ranks(Protocol):
    """The part of the pool that such a thread needs."""

    @property
    def num_ranks(self) -> int: ...

    def run_alone(self, plans: Sequence[StepPlan], shards: Sequence[Sequence[torch.Tensor]]) -> StepResult | None: ...

    def shared(self, nbytes: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Ran:
    """A step that went well, for its record. `result` has no rows any more."""

    plan: StepPlan
    step: Step
    result: StepResult
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

    def run(self, batches: Sequence[Batch]) -> list[torch.Tensor] | None:
        """Runs one step for batches of one layer, mode and width. Returns the result of each, or None: not now.

        Raises:
            RankFailed: a rank failed. Recovery is under way, and the batches may be sent through the queue.
            CallerError: the engine's door refuses a batch.
        """
        if sum(batch.num_tokens for batch in batches) > self.max_tokens:
            return None
        step = tuple(
            Piece(item=Item(batch=self._check(batch), future=None), start=0, stop=batch.num_tokens, part=part)
            for part, batch in enumerate(batches)
        )
        number = self._scheduler.begin_alone()
        if number is None:
            return None
        try:
            start = time.monotonic()
            shares = spread(step, self._ranks.num_ranks)
            counts = tuple(sum(piece.num_tokens for piece in mine) for mine in shares)
            plans = [
                StepPlan(
                    step=number,
                    layer=batches[0].layer,
                    mode=batches[0].mode,
                    tokens_per_rank=counts,
                    parts=part_rows(mine),
                )
                for mine in shares
            ]
            result = self._ranks.run_alone(plans, shards(step, shares))
        finally:
            self._scheduler.end_alone()
        if result is None:
            return None
        end = time.monotonic()
        hand_out(step, result.out_MK, shares)
        results = [piece.item.out_MK for piece in step if piece.item.out_MK is not None]
        for piece in step:
            piece.item.out_MK = None  # the record must not keep the step's memory
        self._ran.append(_Ran(plans[0], step, replace(result, out_MK=torch.empty(0)), start, end))
        return results

    def tell(self) -> None:
        """Tells the listeners of the steps since the last call. Any thread may call it."""
        if self._ran:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        while self._ran:
            ran = self._ran.popleft()
            self._scheduler.did(record_of(ran.plan, ran.step, ran.result, ran.start, ran.end))
