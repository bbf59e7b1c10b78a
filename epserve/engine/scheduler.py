"""The step scheduler: a bounded queue of requests, joined into steps, in one order to all ranks.

A step is a pure function of its requests: when a rank fails, its requests go back to the front of the queue and run again
on the rebuilt ranks, so that callers see latency rather than errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch

from epserve.config import SchedulerConfig
from epserve.errors import (
    DeadlineExceeded,
    EpserveError,
    ExpertsMissing,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    RankFailed,
    TooLarge,
)
from epserve.rank.step import StepPlan

from .planning import Batch, Item, JoinedStep, StepQueue, last_in
from .records import StepPart, StepRecord
from .shares import device_rows, hand_out, plain, refusal, shards, spread

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2  # one computes while the next one's bytes travel
MAX_ATTEMPTS = 3  # the third time a request is in a failing step, the request is what ranks fail on
MISSING = "experts are missing while a rank is replaced (engine.when_experts_missing is refuse); try again later"
RATE_DECAY = 0.8  # of the moving averages: tokens per second behind retry_after_s, seconds behind the wait for joiners
TIMER_S = 0.001  # epoll's timeouts are whole milliseconds, rounded up


class Ranks(Protocol):
    """What the scheduler needs of the pool."""

    serving: asyncio.Event

    @property
    def num_ranks(self) -> int: ...

    @property
    def experts_missing(self) -> bool: ...

    @property
    def stuck(self) -> str: ...

    def rank_of(self, region: int) -> int:
        """Which rank has a region of a GPU open. Raises InvalidRequest or NotReady where none has."""
        ...

    async def step(self, plan: StepPlan, shards) -> torch.Tensor: ...


class Scheduler:
    """`submit` from any task of the loop; one task takes steps off the queue."""

    def __init__(
        self, config: SchedulerConfig, ranks: Ranks, *, wait_for_ranks: bool = True, serve_without: bool = False
    ):
        """wait_for_ranks: requests wait while no rank can go on; False: they get RankFailed at once.

        serve_without: what a step had to do without is noted in the request; False: the request gets ExpertsMissing.
        """
        self._config, self._ranks, self._wait, self._serve_without = config, ranks, wait_for_ranks, serve_without
        self._empty = getattr(ranks, "empty", plain)  # ranks may have memory that they share with this process
        self._queue = StepQueue()
        self._open: dict[Item, None] = {}  # accepted, and not answered yet; in the order of arrival
        self._queued: Counter[int] = Counter()  # tokens of those, per layer
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task] = set()
        self._joined_last = 1
        self._tokens_per_s = self._step_s = 0.0
        self._next_step = 0
        self.on_step: Callable[[StepRecord], None] = lambda record: None
        """Called after each step that went well."""
        self.steps_done = 0
        self.replays = 0
        self.pushed_out = 0  # requests that left a full queue for another client's
        self._loop_task = asyncio.ensure_future(self._dispatch())

    @property
    def queued_tokens(self) -> int:
        """Accepted and not answered yet."""
        return sum(self._queued.values())

    async def submit(self, batch: Batch) -> torch.Tensor:
        """The result `(M, K)`. Raises Overloaded, TooLarge, DeadlineExceeded, RankFailed, NotReady."""
        self._admit(batch)
        item = Item(batch=batch, future=asyncio.get_running_loop().create_future())
        self._queued[batch.layer] += batch.num_tokens
        self._open[item] = None
        self._queue.add(item)
        self._wake.set()
        try:
            async with asyncio.timeout_at(
                batch.deadline
            ):  # the loop's clock; wait_for would take a round of the loop more
                return await item.future
        except TimeoutError:
            raise self._too_late(item) from None
        finally:
            self._settle(item)

    def _settle(self, item: Item) -> None:
        if item in self._open:
            del self._open[item]
            self._queued[item.batch.layer] -= item.batch.num_tokens

    def refuse_waiting(self) -> None:
        """Experts are missing: unless requests shall wait for them, all that wait now are refused; where nobody brings them, in
        any case.
        """
        if stuck := self._ranks.stuck:
            self._fail(self._open, NotReady(stuck))
        elif not self._wait:
            self._fail(self._open, RankFailed(MISSING))

    async def drain(self, timeout: float) -> bool:
        """Wait until every accepted request is answered; whether that came to be within `timeout`."""
        end = time.monotonic() + timeout
        while len(self._queue) or self._running:
            self._queue.drop_finished()
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(0.01)
        return True

    async def close(self) -> None:
        """Whoever still waits gets NotReady."""
        for task in (self._loop_task, *self._running):
            task.cancel()
        await asyncio.gather(self._loop_task, *self._running, return_exceptions=True)
        self._fail(self._open, NotReady("the service has stopped"))

    def _admit(self, batch: Batch) -> None:
        left = batch.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the deadline passed {-left:.3f} s before the request was queued")
        if stuck := self._ranks.stuck:
            raise NotReady(stuck)
        if not self._wait and self._ranks.experts_missing:
            raise RankFailed(MISSING)
        queued, limit = self._queued[batch.layer], self._config.max_queued_tokens
        if batch.num_tokens > limit:
            text = f"{batch.num_tokens} tokens; scheduler.max_queued_tokens is {limit}: send fewer at once"
            raise TooLarge(text, field="hidden_states")
        if queued + batch.num_tokens > limit:
            self._make_room(batch, queued + batch.num_tokens - limit)

    def _make_room(self, batch: Batch, needed: int) -> None:
        """In a full queue, at the cost of whoever holds most of it. Raises Overloaded where nobody holds more than `batch`."""
        queued, limit = self._queued[batch.layer], self._config.max_queued_tokens
        delay = min(max(queued / self._tokens_per_s, 0.05), 5.0) if self._tokens_per_s else 0.5
        full = f"the limit of {limit} (scheduler.max_queued_tokens); try again in {delay:.2f} s"
        going = last_in((item for item in self._open if item.batch.layer == batch.layer), batch, needed)
        if not going:
            raise Overloaded(
                f"layer {batch.layer} has {queued} tokens queued, {batch.num_tokens} more would pass {full}",
                retry_after_s=delay,
            )
        for item in going:
            text = (
                f"layer {batch.layer} has {queued} tokens queued, this client's are most of them and another one came:"
            )
            item.future.set_exception(Overloaded(f"{text} {full}", retry_after_s=delay))
            self._settle(item)
            self.pushed_out += 1

    def _too_late(self, item: Item) -> EpserveError:
        if item.attempts or not self._ranks.serving.is_set():
            return RankFailed("a rank failed and the deadline came before it was replaced; send the request again")
        where = "in the queue" if item.taken == 0 else "while its step ran"
        return DeadlineExceeded(f"the deadline passed {where}")

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            if len(self._running) >= STEPS_IN_FLIGHT or not len(self._queue):
                await self._wake.wait()
                continue
            if not self._ranks.serving.is_set():
                await self._ranks.serving.wait()
                continue
            if not self._running:
                await self._wait_for_joiners()
            step = self._queue.take(self._config.max_step_tokens)
            if step is None:
                continue
            self._joined_last = len(step.pieces)
            task = asyncio.ensure_future(self._execute(step))
            self._running.add(task)
            task.add_done_callback(self._ended)
            del step, task  # what stays in this frame while it waits would keep the tensors of the last step
            await asyncio.sleep(0)  # the task submits to the ranks before the next step is made

    async def _wait_for_joiners(self) -> None:
        """Idle ranks and several clients at work: a short wait joins the next requests of all of them.

        Until as many are there as shared the last step (a lone client never waits, since nobody would come) or the step is
        full; at most `join_wait_ms`, and at most `join_wait_share` of what steps take.
        """
        config = self._config
        end = time.monotonic() + min(config.join_wait_ms / 1000, config.join_wait_share * self._step_s)
        while (left := end - time.monotonic()) > 0:
            requests, tokens = self._queue.next_joins()
            if requests >= self._joined_last or tokens >= config.max_step_tokens:
                return
            self._wake.clear()
            if left <= TIMER_S:
                await asyncio.sleep(0)  # a timer would come late; the ranks are idle, and so is the processor
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), left - TIMER_S)

    def _ended(self, task: asyncio.Task) -> None:
        self._running.discard(task)
        self._wake.set()

    async def _execute(self, step: JoinedStep) -> None:
        tied, pins = self._tied(step)
        if tied is None:
            return
        step = tied
        layer, mode, _, backward = step.key
        shares = spread(step, self._ranks.num_ranks, pins)
        on_devices = tuple(device_rows(step, mine) for mine in shares) if pins else ()
        plan = StepPlan(
            step=self._next_step,
            layer=layer,
            mode=mode,
            tokens_per_rank=tuple(sum(share.num_tokens for share in mine) for mine in shares),
            backward=backward,
            columns=step.pieces[0].item.batch.columns,
            parts=tuple(piece.num_tokens for piece in step.pieces),
            shares=tuple(tuple((share.part, share.num_tokens) for share in mine) for mine in shares),
            device_rows=on_devices,
        )
        self._next_step += 1
        start = time.monotonic()
        try:
            out_MK = await self._ranks.step(plan, shards(step, shares, self._empty))
        except RankFailed as error:
            self._replay(step, error)
            return
        except Exception as error:
            log.exception("step %d", plan.step)
            self._fail([piece.item for piece in step.pieces], InternalError(f"step {plan.step}: {error}"))
            return
        self.steps_done += 1
        seconds = max(time.monotonic() - start, 1e-6)
        self._tokens_per_s = _average(self._tokens_per_s, step.num_tokens / seconds)
        self._step_s = _average(self._step_s, seconds)
        self._note_missing(step, plan)
        for part, rows in plan.not_finite.items():
            piece = step.pieces[part]
            piece.item.batch.not_finite.update(piece.start + row for row in rows)
        for part, why in plan.refused.items():
            self._fail([step.pieces[part].item], refusal(step.pieces[part], why))
        for item in hand_out(step, out_MK, shares):
            if not item.future.done():
                item.future.set_result(item.out_MK)
        self.on_step(_record(plan, step, start))

    def _tied(self, step: JoinedStep) -> tuple[JoinedStep | None, list[int | None]]:
        """The step without requests whose regions no rank has open, which get told; and the ranks that the others are tied to.

        None: nothing is left. No ranks: nothing is tied to one.
        """
        if all(piece.item.batch.region is None for piece in step.pieces) or not self._ranks.serving.is_set():
            return step, []
        pieces, pins = [], []
        for piece in step.pieces:
            region = piece.item.batch.region
            try:
                pins.append(self._ranks.rank_of(region) if region is not None else None)
                pieces.append(piece)
            except (InvalidRequest, NotReady) as error:
                self._fail([piece.item], error)
        return (JoinedStep(pieces=tuple(pieces)) if pieces else None), pins

    def _note_missing(self, step: JoinedStep, plan: StepPlan) -> None:
        """NOTE: a request that is refused here may have rows in the queue still: those go with it (`drop_finished`)."""
        for part, experts in plan.left_out.items():
            item = step.pieces[part].item
            if self._serve_without:
                item.batch.left_out.update(experts)
            else:
                self._fail([item], ExpertsMissing.of(plan.layer, experts))

    def _replay(self, step: JoinedStep, error: RankFailed) -> None:
        """All rows of the requests again: what other steps had of them counts no more."""
        again = []
        for item in dict.fromkeys(piece.item for piece in step.pieces):
            if item.future.done():
                continue
            item.attempts += 1
            if item.attempts >= MAX_ATTEMPTS:
                self._fail([item], RankFailed(f"the ranks failed {item.attempts} times on this request: {error}"))
                continue
            item.taken = item.done = 0
            item.out_MK = None
            item.batch.left_out.clear()
            item.batch.not_finite.clear()
            again.append(item)
        self.replays += len(again)
        self._queue.put_back(again)

    def _fail(self, items, error: EpserveError) -> None:
        for item in items:
            if not item.future.done():
                item.future.set_exception(error)


def _average(before: float, now: float) -> float:
    return RATE_DECAY * before + (1 - RATE_DECAY) * now if before else now


def _record(plan: StepPlan, step: JoinedStep, start: float) -> StepRecord:
    batches = ((piece, piece.item.batch) for piece in step.pieces)
    parts = (
        StepPart(request_id=batch.request_id, tokens=piece.num_tokens, queued=piece.item.queued, trace=batch.trace)
        for piece, batch in batches
    )
    return StepRecord(
        step=plan.step,
        layer=plan.layer,
        mode=f"{plan.mode} backward" if plan.backward else plan.mode,
        tokens_per_rank=plan.tokens_per_rank,
        started=start,
        ended=time.monotonic(),
        parts=tuple(parts),
    )
