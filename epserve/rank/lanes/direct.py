"""The lanes in host memory that this rank serves itself, while it is the only one: a call is one wake-up each way.

The step thread waits for their bells beside the frames of the engine, so all steps have one order. Only calls that go well are
answered here. A call that has to be refused, or cannot be computed now, stays unanswered: the rank gives its lane back to the
front end, which serves it as any other request. The connection that brought the lane's memory says who serves it. While it is
open the rank may write to the memory, and its end gives the lane back, also when this process dies.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from epserve.config import SchedulerConfig
from epserve.errors import InvalidRequest
from epserve.modular_kernel import check_routing
from epserve.process import words
from epserve.rank.gate import ROUTED
from epserve.rank.step import PartRows, StepPlan

from .batches import MODES

log = logging.getLogger(__name__)

STEP = 0
"""The number of every such step here. The front end numbers the steps when it is told of them."""
MOST_KNOWN = 256
"""Most plans, and most views of rows of one buffer, that are remembered."""
MOST_RECORDS = 1 << 14
"""Most steps that are kept until the front end asks for them. Beyond it the oldest are only counted."""
MOST_TOLD = 1024
"""Most steps in one answer to the front end."""
FEW = 4
"""So many lanes are looked at one by one."""
STEP_DECAY = 0.8


class Worker(Protocol):
    """A `rank.worker.Worker`: its steps and its placements."""

    config: Any
    info: Any
    ranks: Any
    clock: Any
    left_out: dict[int, tuple[int, ...]]

    @property
    def placements(self) -> Mapping[int, Any]: ...

    def step(self, plan: StepPlan, x_MK: Any, ids_Mt: Any, weights_Mt: Any) -> torch.Tensor: ...


class Rows:
    """Rows of one tensor, and the views of it that were made before."""

    def __init__(self, all_rows: torch.Tensor):
        self._all = all_rows
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        if (found := self._known.get((start, stop))) is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[start, stop] = self._all[start:stop]
        return found


@dataclass(slots=True, eq=False)
class _Slot:
    """One slot. The rows lie in the lane's memory, which the client can write at any time."""

    bell_at: int
    answer_at: int
    x: Rows
    y: Rows
    ids: Rows
    weights: Rows
    last: int
    busy: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    number: int
    held: socket.socket
    bell: int
    words: words.Words
    slots: tuple[_Slot, ...]
    layers: frozenset[int]
    cap: int


@dataclass(slots=True, eq=False)
class _Call:
    lane: _Lane
    slot: _Slot
    number: int
    key: tuple[int, int]
    """Layer and mode. Calls with equal keys can share a step."""
    tokens: int
    seen: float


@dataclass(slots=True)
class _Batch:
    """The rows of a step, copied and checked here, since a client may write to its own at any time."""

    x: Rows = field(default_factory=lambda: Rows(torch.empty((0, 0))))
    ids: Rows = field(default_factory=lambda: Rows(torch.empty((0, 0))))
    weights: Rows = field(default_factory=lambda: Rows(torch.empty((0, 0))))


class DirectLanes:
    """One rank's lanes. `ready` and `give_back` run while no step does, all else in the step thread.

    `waiting`: calls have rung that no step has taken yet.
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._generation = -1
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        """Readable when a bell has rung."""
        self._lanes: dict[int, _Lane] = {}
        self._numbers: dict[int, _Lane] = {}
        self.waiting: list[_Call] = []
        self._joined_last = 1
        self._step_s = 0.0
        self._batch = _Batch()
        self._plans: dict[tuple[Any, ...], StepPlan] = {}
        self._records: deque[tuple[Any, ...]] = deque(maxlen=MOST_RECORDS)

    @property
    def open(self) -> bool:
        """Whether this rank serves any lane."""
        return bool(self._lanes)

    def ready(self, worker: Worker, generation: int) -> None:
        """Takes lanes from now on, and computes on this worker."""
        self._worker, self._generation = worker, generation
        self._plans.clear()

    def pause(self) -> None:
        """Gives all lanes back, and takes none until `ready`."""
        self._worker = None
        self.give_back()

    def give_back(self) -> None:
        """Leaves all lanes to the front end, with the calls that wait."""
        for lane in list(self._lanes.values()):
            self._give(lane)

    def told(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Serves {"open": number, ...}, {"close": number} or {} of the front end. Returns what has been done since the last time.

        "open" comes with "socket" and "key" for the memory, its "size", "layers", "cap", "hidden", "top_k", and for each slot
        the offsets "bell", "answer", "x", "y", "ids", "weights", and "last", the number of its last bell.
        """
        if "close" in asked:
            if (lane := self._numbers.get(asked["close"])) is not None:
                self._finish(lane)
        elif "open" in asked and (why := self._open(asked)):
            return {"refused": why}
        records = [self._records.popleft() for _ in range(min(len(self._records), MOST_TOLD))]
        return {
            "steps": [(*head, phases(), calls) for *head, phases, calls in records],
            "more": bool(self._records),
            "cpu_s": time.thread_time(),
        }

    def _open(self, asked: dict[str, Any]) -> str:
        """Takes a lane. Returns the reason why not, or nothing."""
        worker = self._worker
        if worker is None or worker.ranks.world_size > 1 or worker.ranks.device.type != "cpu":
            return "this rank is not the only one, or is being rebuilt"
        try:
            held, memory, bell = words.hold_descriptors(asked["socket"], bytes.fromhex(asked["key"]))
        except (OSError, ValueError) as error:
            return f"the lane's memory is not to be had: {error}"
        try:
            mapped = words.map_sealed(memory, asked["size"])
            dtype, cap = worker.info.dtype, asked["cap"]

            def rows(at: int, kind: torch.dtype, columns: int) -> Rows:
                return Rows(torch.frombuffer(mapped, dtype=kind, count=cap * columns, offset=at).view(cap, columns))

            slots = tuple(
                _Slot(
                    bell_at=slot["bell"], answer_at=slot["answer"], last=slot["last"], x=rows(slot["x"], dtype, asked["hidden"]),
                    y=rows(slot["y"], dtype, asked["hidden"]), ids=rows(slot["ids"], torch.int32, asked["top_k"]),
                    weights=rows(slot["weights"], torch.float32, asked["top_k"]),
                )
                for slot in asked["slots"]
            )  # fmt: skip
            lane = _Lane(asked["open"], held, bell, words.Words(mapped), slots, frozenset(asked["layers"]), cap)
            self._epoll.register(bell, select.EPOLLIN | select.EPOLLET)  # no read: each write is an edge
        except (OSError, ValueError) as error:
            _close(held, bell)
            return f"the lane's memory is of no use: {error}"
        self._lanes[bell] = self._numbers[lane.number] = lane
        self._look(lane)
        return ""

    def _finish(self, lane: _Lane) -> None:
        """Gives a lane back after the calls that have rung."""
        self._look(lane)
        while self._worker is not None and any(call.lane is lane for call in self.waiting):
            self.serve()
        self._give(lane)

    def _give(self, lane: _Lane) -> None:
        """Gives a lane back. Its calls that wait stay unanswered."""
        if self._numbers.pop(lane.number, None) is None:
            return
        del self._lanes[lane.bell]
        self._epoll.unregister(lane.bell)
        self.waiting = [call for call in self.waiting if call.lane is not lane]
        _close(lane.held, lane.bell)

    # Calls.

    def serve(self) -> None:
        """Computes one step for calls that have rung, and answers them."""
        if len(self._lanes) <= FEW:  # the bell is found before the kernel is asked which one it was
            for lane in list(self._lanes.values()):
                self._look(lane)
        if not self.waiting:
            self._collect(0)
        if not self.waiting or self._worker is None:
            return
        config: SchedulerConfig = self._worker.config.scheduler
        self._wait_for_joiners(config)
        calls = self._take(config.max_step_tokens)
        try:
            self._compute(self._worker, calls)
        except Exception:
            log.warning("a step of lanes failed; the front end runs it again", exc_info=True)
            for call in calls:
                self._give(call.lane)

    def _collect(self, longest_s: float) -> None:
        """Takes the bells that have rung. It waits so long for one."""
        if longest_s:
            select.select((self.fd,), (), (), longest_s)  # epoll's own limit is in whole milliseconds
        for bell, _ in self._epoll.poll(0):
            if (lane := self._lanes.get(bell)) is not None:
                self._look(lane)

    def _look(self, lane: _Lane) -> None:
        """Takes the bells of a lane. Each is read once."""
        for slot in lane.slots:
            if slot.busy or (bell := lane.words.load(slot.bell_at)) >> 32 == slot.last:
                continue
            number, mode, layer, tokens = bell >> 32, bell >> 30 & 3, bell >> 16 & 0x3FFF, bell & 0xFFFF
            fits = number == (slot.last + 1) & 0xFFFFFFFF and mode < len(MODES) and layer in lane.layers
            if not fits or not 1 <= tokens <= lane.cap:
                self._give(lane)  # the front end refuses it
                return
            slot.last, slot.busy = number, True
            self.waiting.append(_Call(lane, slot, number, (layer, mode), tokens, time.monotonic()))

    def _wait_for_joiners(self, config: SchedulerConfig) -> None:
        """As the scheduler does: until as many calls are here as shared the last step, and only for a part of its time."""
        if self._joined_last <= len(self.waiting):
            return
        end = time.monotonic() + min(config.join_wait_ms / 1000, config.join_wait_share * self._step_s)
        while self.waiting and sum(call.key == self.waiting[0].key for call in self.waiting) < self._joined_last:
            if (left := end - time.monotonic()) <= 0:
                return
            self._collect(left)

    def _take(self, most: int) -> list[_Call]:
        """The first call, and those that may share its step."""
        if len(self.waiting) == 1:
            taken, self.waiting = self.waiting, []
            return taken
        taken, left, room = [], [], most
        for call in self.waiting:
            if not taken or (call.key == taken[0].key and call.tokens <= room):
                taken.append(call)
                room -= call.tokens
            else:
                left.append(call)
        self.waiting = left
        return taken

    def _compute(self, worker: Worker, calls: Sequence[_Call]) -> None:
        """Runs one step and answers its calls. A lane whose call cannot be answered with OK is given back."""
        start = time.monotonic()
        while calls:
            self._joined_last = len(calls)
            wrong = self._gather(worker, calls)
            if not wrong:
                break
            for call in wrong:
                self._give(call.lane)
            calls = [call for call in calls if call.lane.number in self._numbers]
        if not calls:
            return
        (layer, mode), total = calls[0].key, sum(call.tokens for call in calls)
        batch, routed = self._batch, MODES[mode] == ROUTED
        given = (batch.ids(0, total), batch.weights(0, total)) if routed else (None, None)
        out_MK = worker.step(self._plan(worker, calls), batch.x(0, total), *given)
        phases, told, first = worker.clock.take(), [], 0
        fine = not worker.left_out and math.isfinite(out_MK.sum().item())
        for call in calls:
            rows_MK = out_MK if len(calls) == 1 else out_MK[first : first + call.tokens]
            first += call.tokens
            if not fine and (worker.left_out or not bool(torch.isfinite(rows_MK).all())):
                self._give(call.lane)
                continue
            if call.lane.number not in self._numbers:
                continue  # given back with another of its calls
            call.slot.y(0, call.tokens).copy_(rows_MK)
            call.slot.busy = False  # before the word: the client may ring at once
            call.lane.words.store(call.slot.answer_at, call.number)
            call.lane.words.wake(call.slot.answer_at)
            told.append((call.lane.number, call.tokens, call.seen, time.monotonic()))
        end = time.monotonic()
        self._step_s = STEP_DECAY * self._step_s + (1 - STEP_DECAY) * (end - start) if self._step_s else end - start
        self._records.append((layer, MODES[mode], start, end, phases, told))

    def _gather(self, worker: Worker, calls: Sequence[_Call]) -> list[_Call]:
        """Copies the rows of a step, and checks the copy. Returns the calls whose values are out of range."""
        total, routed, first = sum(call.tokens for call in calls), MODES[calls[0].key[1]] == ROUTED, 0
        batch, info = self._batch, worker.info
        if total > len(batch.x):
            room = max(total, 2 * len(batch.x))
            batch.x = Rows(torch.empty((room, info.hidden), dtype=info.dtype))
            batch.ids = Rows(torch.empty((room, info.top_k), dtype=torch.int32))
            batch.weights = Rows(torch.empty((room, info.top_k)))
        for call in calls:
            slot, tokens = call.slot, call.tokens
            batch.x(first, first + tokens).copy_(slot.x(0, tokens))
            if routed:
                batch.ids(first, first + tokens).copy_(slot.ids(0, tokens))
                batch.weights(first, first + tokens).copy_(slot.weights(0, tokens))
            first += tokens
        if self._fine(info, 0, total, routed):
            return []
        ends, wrong = 0, []
        for call in calls:
            first, ends = ends, ends + call.tokens
            if not self._fine(info, first, ends, routed):
                wrong.append(call)
        # A sum of finite rows may pass the largest number. The front end then looks at each value.
        return wrong or list(calls)

    def _fine(self, info: Any, start: int, stop: int, routed: bool) -> bool:
        batch = self._batch
        if not math.isfinite(batch.x(start, stop).sum().item()):
            return False
        if routed:
            try:
                ids, weights = batch.ids(start, stop), batch.weights(start, stop)
                check_routing(ids, weights, num_tokens=stop - start, num_experts=info.num_experts)
            except InvalidRequest:
                return False
        return True

    def _plan(self, worker: Worker, calls: Sequence[_Call]) -> StepPlan:
        (layer, mode), rows = calls[0].key, tuple(call.tokens for call in calls)
        key = (layer, mode, version := worker.placements[layer].version, rows)
        if (plan := self._plans.get(key)) is None:
            if len(self._plans) >= MOST_KNOWN:
                self._plans.clear()
            plan = self._plans[key] = StepPlan(
                step=STEP, layer=layer, mode=MODES[mode], tokens_per_rank=(sum(rows),), generation=self._generation,
                placement=version, parts=tuple(PartRows(part=part, rows=count) for part, count in enumerate(rows)),
            )  # fmt: skip
        return plan


def _close(held: socket.socket, bell: int) -> None:
    os.close(bell)
    with contextlib.suppress(OSError):
        held.close()
