"""The step scheduler: joins the requests of a bounded queue into steps, and sends them to all ranks in one order.

A step is a pure function of its requests. When a rank fails, its requests go back to the front of the queue and run again on the
rebuilt ranks, so that callers see latency rather than errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from epserve.rank.step import StepPlan, StepResult

from .planning import Answer, Batch, Item, Piece, Step, StepQueue, last_in
from .records import StepPart, StepRecord
from .shares import hand_out, part_rows, refusal, shards, spread

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2  # one computes while the next one's bytes travel
MAX_ATTEMPTS = 3  # a request that is in a failing step for the third time is the likely cause
MISSING = "experts are missing while a rank is replaced (engine.when_experts_missing is refuse); try again later"
RATE_DECAY = 0.8  # of the moving averages: tokens per second behind retry_after_s, seconds behind the wait for joiners
TIMER_S = 0.001  # epoll's timeouts are whole milliseconds, rounded up


class Ranks(Protocol):
    """The part of the pool that the scheduler uses."""

    serving: asyncio.Event

    @property
    def num_ranks(self) -> int: ...

    @property
    def experts_missing(self) -> bool: ...

    @property
    def stuck(self) -> str: ...

    def rank_of(self, region: int) -> int:
        """Returns the rank that has a region of a GPU open. Raises InvalidRequest or NotReady when none has."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for the rows of several requests, if possible memory that the ranks share."""
        ...

    async def step(self, plans: Sequence[StepPlan], shards: Sequence[Sequence[torch.Tensor]]) -> StepResult:
        """Runs one step: plan r and shard r go to rank r. Raises RankFailed."""
        ...


class Scheduler:
    """Runs requests as steps. Any task of the loop may `submit`. One task takes steps off the queue."""

    def __init__(
        self, config: SchedulerConfig, ranks: Ranks, *, wait_for_ranks: bool = True, serve_without: bool = False
    ):
        """Starts the dispatching task.

        Args:
            config: limits of the queue and of steps.
            ranks: run the steps.
            wait_for_ranks: requests wait while no rank can go on. False: they get RankFailed at once.
            serve_without: answers name the experts that they had to do without. False: such requests get ExpertsMissing.
        """
        self._config, self._ranks, self._wait, self._serve_without = config, ranks, wait_for_ranks, serve_without
        self._queue = StepQueue()
        self._open: dict[Item, None] = {}  # accepted requests that have no answer yet, in the order of arrival
        self.queued: Counter[int] = Counter()  # tokens of those, per layer
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task] = set()
        self._joined_last = 1
        self._tokens_per_s = self._step_s = 0.0
        self._next_step = 0
        self.on_step: Callable[[StepRecord], None] = lambda record: None
        """Is called after each step that went well."""
        self.steps_done = 0
        self.replays = 0
        self._turn = threading.Lock()
        self._alone = self._held_back = False
        """A step of another thread runs; `_dispatch` waits for its end."""
        self.pushed_out = 0  # requests that left a full queue for another client's
        self._loop = asyncio.get_running_loop()
        self._loop_task = asyncio.ensure_future(self._dispatch())

    @property
    def queued_tokens(self) -> int:
        """Returns the tokens of accepted requests that have no answer yet."""
        return sum(self.queued.values())

    async def submit(self, batch: Batch) -> Answer:
        """Runs one request. Raises Overloaded, TooLarge, DeadlineExceeded, RankFailed, NotReady."""
        self._admit(batch)
        item = Item(batch=batch, future=asyncio.get_running_loop().create_future())
        self.queued[batch.layer] += batch.num_tokens
        self._open[item] = None
        self._queue.add(item)
        self._wake.set()
        try:
            async with asyncio.timeout_at(batch.deadline):  # wait_for would take one more round of the loop
                return await item.future
        except TimeoutError:
            raise self._too_late(item) from None
        finally:
            self._settle(item)

    def _settle(self, item: Item) -> None:
        if item in self._open:
            del self._open[item]
            self.queued[item.batch.layer] -= item.batch.num_tokens

    def begin_alone(self) -> int | None:
        """The number of a step that another thread runs now, until `end_alone`; None: a step runs or waits here. Any thread
        may call it."""
        with self._turn:
            if self._alone or self._running or len(self._queue):
                return None
            self._alone = True
            self._next_step += 1
            return self._next_step - 1

    def end_alone(self) -> None:
        with self._turn:
            self._alone, held_back, self._held_back = False, self._held_back, False
        if held_back:
            self._loop.call_soon_threadsafe(self._wake.set)

    def next_number(self) -> int:
        """Returns the number of a step that a rank has run without being asked."""
        with self._turn:
            self._next_step += 1
            return self._next_step - 1

    def did(self, record: StepRecord) -> None:
        """Counts a step that another thread ran well. In the loop."""
        self.steps_done += 1
        self._tokens_per_s = _average(self._tokens_per_s, record.tokens / max(record.seconds, 1e-6))
        self._step_s = _average(self._step_s, record.seconds)
        self.on_step(record)

    def join_wait_s(self) -> float:
        """How long a step may be held back for requests that would share it."""
        return min(self._config.join_wait_ms / 1000, self._config.join_wait_share * self._step_s)

    def refuse_waiting(self) -> None:
        """Refuses all waiting requests while experts are missing, unless requests shall wait or the recovery is stuck."""
        if stuck := self._ranks.stuck:
            self._fail(self._open, NotReady(stuck))
        elif not self._wait:
            self._fail(self._open, RankFailed(MISSING))

    async def drain(self, timeout: float) -> bool:
        """Waits until every accepted request is answered. Returns False when some are not after `timeout` seconds."""
        end = time.monotonic() + timeout
        while len(self._queue) or self._running or self._alone:
            self._queue.drop_finished()
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(0.01)
        return True

    async def close(self) -> None:
        """Ends all tasks. Requests without an answer get NotReady."""
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
        queued, limit = self.queued[batch.layer], self._config.max_queued_tokens
        if batch.num_tokens > limit:
            text = f"{batch.num_tokens} tokens; scheduler.max_queued_tokens is {limit}: send fewer at once"
            raise TooLarge(text, field="hidden_states")
        if queued + batch.num_tokens > limit:
            self._make_room(batch, queued + batch.num_tokens - limit)

    def _make_room(self, batch: Batch, needed: int) -> None:
        """Pushes requests of the largest flows out of a full queue. Raises Overloaded if no flow holds more than the batch's."""
        queued, limit = self.queued[batch.layer], self._config.max_queued_tokens
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
            with self._turn:
                self._held_back = self._alone
                step = self._queue.take(self._config.max_step_tokens) if not self._alone else ()
                if step:
                    self._joined_last = len(step)
                    task = asyncio.ensure_future(self._execute(step))
                    self._running.add(task)
                    task.add_done_callback(self._ended)
            if not step:
                if self._held_back:
                    await self._wake.wait()
                continue
            del step, task  # otherwise this frame would keep the tensors of the last step while it waits
            await asyncio.sleep(0)  # the task submits to the ranks before the next step is made

    async def _wait_for_joiners(self) -> None:
        """Waits a moment while the ranks are idle, so that the next requests of several clients join one step.

        The wait ends when as many requests are there as shared the last step, so that a lone client never waits, or when the step
        is full. It takes at most `join_wait_ms`, and at most `join_wait_share` of the time of a step.
        """
        config = self._config
        end = time.monotonic() + self.join_wait_s()
        while (left := end - time.monotonic()) > 0:
            requests, tokens = self._queue.next_joins()
            if requests >= self._joined_last or tokens >= config.max_step_tokens:
                return
            self._wake.clear()
            if left <= TIMER_S:
                await asyncio.sleep(0)  # a timer would come late, and the idle ranks leave the processor free
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), left - TIMER_S)

    def _ended(self, task: asyncio.Task) -> None:
        self._running.discard(task)
        self._wake.set()

    async def _execute(self, step: Step) -> None:
        step, pins = self._tied(step)
        if not step:
            return
        batch = step[0].item.batch
        shares = spread(step, self._ranks.num_ranks, pins)
        counts = tuple(sum(piece.num_tokens for piece in mine) for mine in shares)
        number, self._next_step = self._next_step, self._next_step + 1
        plans = [
            StepPlan(
                step=number,
                layer=batch.layer,
                mode=batch.mode,
                tokens_per_rank=counts,
                backward=batch.backward,
                columns=batch.columns,
                parts=part_rows(mine),
            )
            for mine in shares
        ]
        start = time.monotonic()
        try:
            result = await self._ranks.step(plans, shards(step, shares, self._ranks.empty))
        except RankFailed as error:
            self._replay(step, error)
            return
        except Exception as error:
            log.exception("step %d", number)
            self._fail([piece.item for piece in step], InternalError(f"step {number}: {error}"))
            return
        # Before any caller has its answer and sends the next call, to which the ranks would seem busy.
        self._running.discard(asyncio.current_task())  # type: ignore[arg-type]
        self.steps_done += 1
        seconds = max(time.monotonic() - start, 1e-6)
        self._tokens_per_s = _average(self._tokens_per_s, sum(counts) / seconds)
        self._step_s = _average(self._step_s, seconds)
        self._note(step, result)
        for item in hand_out(step, result.out_MK, shares):
            if not item.future.done():
                item.future.set_result(item.answer())
        self.on_step(record_of(plans[0], step, result, start, time.monotonic()))

    def _tied(self, step: Step) -> tuple[Step, list[int | None]]:
        """Returns the step without requests whose regions no rank has open, and the ranks that its pieces are tied to.

        The other requests fail. No ranks: no piece is tied.
        """
        if all(piece.item.batch.region is None for piece in step) or not self._ranks.serving.is_set():
            return step, []
        pieces: list[Piece] = []
        pins: list[int | None] = []
        for piece in step:
            region = piece.item.batch.region
            try:
                pins.append(self._ranks.rank_of(region) if region is not None else None)
                pieces.append(replace(piece, part=len(pieces)))
            except (InvalidRequest, NotReady) as error:
                self._fail([piece.item], error)
        return tuple(pieces), pins

    def _note(self, step: Step, result: StepResult) -> None:
        """Takes a result's findings over into the requests.

        NOTE: a request that is refused here may still have rows in the queue. They go with it (`drop_finished`).
        """
        for part, experts in result.left_out.items():
            item = step[part].item
            if self._serve_without:
                item.left_out.update(experts)
            else:
                self._fail([item], ExpertsMissing.of(item.batch.layer, experts))
        for part, rows in result.not_finite.items():
            step[part].item.not_finite.update(step[part].start + row for row in rows)
        for part, why in result.refused.items():
            self._fail([step[part].item], refusal(step[part], why))

    def _replay(self, step: Step, error: RankFailed) -> None:
        """Puts the requests back. All their rows run again, also those of other steps."""
        again = []
        for item in dict.fromkeys(piece.item for piece in step):
            if item.future.done():
                continue
            item.attempts += 1
            if item.attempts >= MAX_ATTEMPTS:
                self._fail([item], RankFailed(f"the ranks failed {item.attempts} times on this request: {error}"))
                continue
            item.start_anew()
            again.append(item)
        self.replays += len(again)
        self._queue.put_back(again)

    def _fail(self, items: Iterable[Item], error: EpserveError) -> None:
        for item in items:
            if not item.future.done():
                item.future.set_exception(error)


def _average(before: float, now: float) -> float:
    return RATE_DECAY * before + (1 - RATE_DECAY) * now if before else now


def record_of(plan: StepPlan, step: Step, result: StepResult, start: float, ended: float) -> StepRecord:
    batches = ((piece, piece.item.batch) for piece in step)
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
        ended=ended,
        parts=tuple(parts),
        phases=result.phases,
    )
