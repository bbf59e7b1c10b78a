"""This module is the thread that serves all lanes of this process. It sleeps until a bell rings.

A call that finds the ranks idle is computed at once: the thread writes the step to the ranks, waits for their words and
answers (`engine/now.py`). No event loop, socket or message is on that way. Otherwise the call goes through the queue, as
any other request does: while other steps run, for clients with limits, with traces, and after a rank has failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from epserve.engine.planning import Batch
from epserve.errors import DeadlineExceeded, EpserveError, ExpertsMissing, NotReady, RankFailed
from epserve.protocol import lane_words as lw
from epserve.server.calls import Calls

from .lane import Call, Lane

log = logging.getLogger("epserve.server")

METHOD = "epserve.v1.Experts/OpenLane (call)"
"""The name of a lane's call in traces."""
IDLE_S = 1.0
"""The thread wakes at this interval while no bell rings, and beats."""
SILENT_S = 0.001
"""The pause between two looks while a lane is open whose bells make no sound, as a GPU's."""
TELL_S = 0.02
"""Metrics get what was done after so long a pause, or after `TELL_AT_LAST_S` without one."""
TELL_AT_LAST_S = 0.25


@dataclass(slots=True)
class Counts:
    """What the lanes did since the start (`pb.Lanes`)."""

    calls: int = 0
    joined: int = 0
    refused: int = 0
    waited: int = 0


@dataclass(frozen=True, slots=True)
class _Done:
    """A call that was answered without the loop."""

    status: str
    seconds: float
    call: Call


class Poller:
    """`start` and `stop` in the server's loop. `add` and `remove` too."""

    def __init__(self, calls: Calls):
        self._calls, self._observer = calls, calls.observer
        self._loop = asyncio.get_running_loop()
        self.counts = Counts()
        self._lanes: dict[int, Lane] = {}  # replaced, never changed: the thread reads it
        self._turn = 0
        self._waiting: list[Call] = []
        self._done: list[_Done] = []
        self._told = time.monotonic()
        self._joined_last = 1
        self._beats = 0
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN | select.EPOLLET)
        self._leaving: deque[tuple[Lane, asyncio.Future[bool]]] = deque()
        """Lanes that a rank shall serve. The future tells whether the thread has left the lane."""
        self._left: set[Lane] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self.cpu_s = 0.0
        """Processor time of the thread."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes.values())

    @property
    def polling_share(self) -> float:
        """Processor time of the thread over the time since it began."""
        return self.cpu_s / max(time.monotonic() - self._began, 1e-9) if self._thread is not None else 0.0

    def add(self, lane: Lane) -> None:
        self._left.discard(lane)
        self._lanes = {**self._lanes, lane.bell: lane}
        self._epoll.register(lane.bell, select.EPOLLIN | select.EPOLLET)  # no read: each write is an edge
        if self._thread is None:
            self._began = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="lanes", daemon=True)
            self._thread.start()

    async def release(self, lane: Lane) -> bool:
        """Stops to look at a lane, so that a rank can serve it. Returns False where the lane has calls under way, or has gone."""
        if lane.bell not in self._lanes:
            return False
        self._leaving.append((lane, future := self._loop.create_future()))
        os.eventfd_write(self._wake, 1)
        if not await future:
            return False
        self._forget(lane)
        return not lane.closed

    def remove(self, lane: Lane) -> None:
        self._forget(lane)
        self._left.discard(lane)
        lane.close()

    def _forget(self, lane: Lane) -> None:
        if lane.bell in self._lanes:
            self._epoll.unregister(lane.bell)
            self._lanes = {bell: each for bell, each in self._lanes.items() if each is not lane}

    async def stop(self) -> None:
        """Returns when the thread has ended: after the step that it is at."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        while self._leaving:
            _settle(self._leaving.popleft()[1], False)
        for lane in self.lanes:
            self.remove(lane)
        self._epoll.close()
        os.close(self._wake)

    # In the thread.

    def _run(self) -> None:
        while not self._stopping:
            silent = any(lane.silent for lane in self.lanes)
            rung = self._epoll.poll(SILENT_S if silent else TELL_S if self._done else IDLE_S)
            try:
                if rung or silent:
                    while not self._stopping and self._round():
                        pass
                if self._done and (not rung or time.monotonic() - self._told > TELL_AT_LAST_S):
                    self._tell()
                self._leave()
                self._beat()
            except Exception:  # a defect must not end all lanes
                log.exception("serving lanes")
            self.cpu_s = time.thread_time()

    def _leave(self) -> None:
        while self._leaving:
            lane, future = self._leaving.popleft()
            idle = not lane.busy and all(call.lane is not lane for call in self._waiting)
            if idle:
                self._left.add(lane)
            self._loop.call_soon_threadsafe(_settle, future, idle)

    def _beat(self) -> None:
        if (second := int(time.monotonic())) != self._beats:
            self._beats = second
            for lane in self.lanes:
                lane.beat(second)

    def _round(self) -> bool:
        """Serves the calls that share a step with the first that waits. Returns False when there is none."""
        self._collect()
        if not self._waiting:
            return False
        now = self._now()
        if now is not None:
            self._wait_for_joiners(now.join_wait_s)
        calls = self._take(now.max_tokens if now is not None else lw.MAX_TOKENS)
        if batches := self._decoded(calls, now):
            self._serve(now, batches)
        return True

    def _now(self) -> Any:
        """The quick way to the ranks. None: calls go through the queue."""
        return self._calls.engine.now if not self._observer.tracing.on else None

    def _collect(self) -> None:
        """Takes all bells that have rung. Each round begins at another lane."""
        lanes = self.lanes
        self._turn += 1
        for index in range(len(lanes)):
            lane = lanes[(index + self._turn) % len(lanes)]
            for slot, bell in () if lane.closed or lane in self._left else tuple(lane.rung()):
                self._begin(lane, slot, bell)

    def _begin(self, lane: Lane, slot: int, bell: int) -> None:
        self.counts.calls += 1
        number, tokens = bell >> 32, 0
        try:
            call = lane.take(slot, bell)
            tokens = call.tokens
            lane.caller.account.current()
            if self._calls.draining.is_set():
                raise NotReady("the server is stopping; call another one, or again later")
            self._waiting.append(call)
        except EpserveError as error:
            self._refused(lane, slot, number, error, tokens)

    def _wait_for_joiners(self, longest_s: float) -> None:
        """As the scheduler does: until as many calls are here as shared the last step, and only for a part of its time."""
        end = time.monotonic() + longest_s
        while (key := self._waiting[0].key) and sum(call.key == key for call in self._waiting) < self._joined_last:
            left = end - time.monotonic()
            if left <= 0 or not self._epoll.poll(left):
                return
            self._collect()

    def _take(self, most: int) -> list[Call]:
        """The first call, and those that may share its step."""
        key, room = self._waiting[0].key, most
        taken: list[Call] = []
        left: list[Call] = []
        for call in self._waiting:
            if call.key == key and (call.tokens <= room or not taken):
                taken.append(call)
                room -= call.tokens
            else:
                left.append(call)
        self._waiting = left
        return taken

    def _decoded(self, calls: Sequence[Call], now: Any) -> list[tuple[Call, Batch]]:
        memory = now.memory if now is not None else lambda nbytes: None
        found = []
        for call in calls:
            try:
                if time.monotonic() > call.deadline:
                    raise DeadlineExceeded(
                        f"no rank was free for {call.lane.timeout_s:g} s, the limit of the lane's calls"
                    )
                found.append((call, call.lane.batch(call, memory)))
            except EpserveError as error:
                self._refuse(call, error)
        return found

    def _serve(self, now: Any, batches: list[tuple[Call, Batch]]) -> None:
        """Computes one step, and answers. What cannot be computed at once goes into the queue."""
        quick: list[tuple[Call, Batch]] = []
        slow: list[tuple[Call, Batch]] = []
        for each in batches:
            limited = now is None or not each[0].lane.quick or each[0].lane.caller.account.claim(0) is not None
            (slow if limited else quick).append(each)
        self._joined_last = len(batches)
        self.counts.joined += len(batches) if len(batches) > 1 else 0
        if quick:
            try:
                results = _run(now, quick)
            except RankFailed:
                results = None  # computed again when the ranks are back
            except Exception as error:  # the engine's door, or a defect
                results = []
                for call, _ in quick:
                    self._refuse(call, error)
            if results is None:
                slow += quick
            for (call, _), out_MK in zip(quick, results or (), strict=False):
                self._answer(call, out_MK)
        if slow:
            self.counts.waited += len(slow)
            self._loop.call_soon_threadsafe(self._queue, slow)

    def _answer(self, call: Call, out_MK: torch.Tensor) -> None:
        try:
            call.lane.answer(call, out_MK)
            self._done.append(_Done("OK", time.monotonic() - call.seen, call))
        except EpserveError as error:
            self._refuse(call, error)

    def _refuse(self, call: Call, error: Exception) -> None:
        self._refused(call.lane, call.slot, call.number, error, call.tokens)

    def _refused(self, lane: Lane, slot: int, number: int, error: Exception, tokens: int) -> None:
        self.counts.refused += 1
        status = lane.refuse(slot, number, error, tokens)
        self._loop.call_soon_threadsafe(self._observer.error, status)
        if status == "UNAUTHENTICATED":
            self._loop.call_soon_threadsafe(lane.ended.set)

    def _tell(self) -> None:
        done, self._done, self._told = self._done, [], time.monotonic()
        if (now := self._calls.engine.now) is not None:
            now.tell()
        self._loop.call_soon_threadsafe(self._note, done)

    # In the loop.

    def _note(self, done: Sequence[_Done]) -> None:
        for each in done:
            call, size = each.call, each.call.nbytes
            sent = call.tokens * call.lane.layout.hidden * call.lane.layout.itemsize
            self._observer.metrics.request(each.status, each.seconds, tokens=call.tokens, received=size, sent=sent)
            self._observer.history.request(each.seconds)

    def _queue(self, batches: Sequence[tuple[Call, Batch]]) -> None:
        for call, batch in batches:
            task = self._loop.create_task(self._through_queue(call, batch))
            call.lane.running.add(task)
            task.add_done_callback(call.lane.running.discard)

    async def _through_queue(self, call: Call, batch: Batch) -> None:
        """Serves a call as any other request."""
        observer, caller, code = self._observer, call.lane.caller, "CANCELLED"
        with observer.tracing.call(METHOD, ()):
            watch = observer.request(call.request_id, layer=call.layer, tokens=call.tokens, received=call.nbytes)
            try:
                with self._calls.admitting(call, caller):
                    claim = caller.account.claim(call.nbytes)
                    batch = replace(
                        batch, trace=watch.trace, claim=claim, deadline=call.deadline, request_id=call.request_id
                    )
                    async with asyncio.timeout_at(call.deadline):
                        answer = await self._calls.engine.answer(batch)
                if answer.left_out:  # a lane has no place for their numbers
                    raise ExpertsMissing.of(call.layer, answer.left_out)
                call.lane.finish(call, answer)
                code, watch.sent = "OK", answer.out_MK.nbytes
            except asyncio.CancelledError:  # the lane is closed
                raise
            except BaseException as error:
                if isinstance(error, EpserveError) and error.retryable:
                    caller.account.give_back(call.tokens)
                if isinstance(error, TimeoutError):
                    error = DeadlineExceeded(
                        f"no result after {call.lane.timeout_s:g} s, the limit of the lane's calls"
                    )
                self.counts.refused += 1
                code = call.lane.refuse(call.slot, call.number, error, call.tokens)
                observer.error(code)
            finally:
                watch.ended(code)


def _run(now: Any, batches: Sequence[tuple[Call, Batch]]) -> list[torch.Tensor] | None:
    """Computes the batches in one step. Returns None when that cannot be at once.

    A call alone runs the step that was written down for its kind, as long as that is of use.
    """
    if len(batches) > 1:
        step = now.ready([batch for _, batch in batches])
        return None if step is None else now.run(step)
    ((call, batch),) = batches
    kept = call.lane.slots[call.slot].ready
    if (step := kept.get(call.kind)) is None:
        step = now.ready([batch])
        if step is not None and step.again:
            kept[call.kind] = step
    results = None if step is None else now.run(step)
    if results is None:  # the ranks have work, or have changed
        kept.pop(call.kind, None)
    return results


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
