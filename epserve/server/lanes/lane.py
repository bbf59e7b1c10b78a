"""This module is the server's end of one lane: its memory, its slots, and what a call in it holds."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from epserve.engine.planning import Answer, Batch, Priority
from epserve.engine.shares import not_finite
from epserve.errors import (
    DeadlineExceeded,
    EpserveError,
    InvalidRequest,
    NotFinite,
    NotReady,
    Overloaded,
    RankFailed,
    Unauthenticated,
)
from epserve.models import ModelInfo
from epserve.modular_kernel import check_routing
from epserve.process import words
from epserve.protocol import lane_words as lw
from epserve.protocol import status
from epserve.server.calls import Caller
from epserve.server.finite import all_finite, rows_not_finite

STATUSES: tuple[tuple[type[EpserveError], int], ...] = (
    (Unauthenticated, lw.CLOSED),
    (DeadlineExceeded, lw.TIMED_OUT),
    (Overloaded, lw.OVERLOADED),
    (RankFailed, lw.RANK_LOST),
    (NotReady, lw.RANK_LOST),
)
FIELDS = {"bell": lw.BAD_HEADER, "layer": lw.BAD_HEADER, "topk_ids": lw.BAD_IDS, "hidden_states": lw.NOT_FINITE,
          "topk_weights": lw.NOT_FINITE}  # fmt: skip
MOST_KINDS = 256
"""The kinds of calls of one slot that are remembered."""
MESSAGE_CHARS = 300
"""Longest text of a failure in a lane's page."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot. The first four tensors lie in the lane's memory, which the client can write at any time. `own` has the copy
    that is checked and computed on, once there was a call."""

    x: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    last: int = 0
    """The number of the last bell that was taken."""
    busy: bool = False
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    batches: dict[tuple[int, int, int], Batch] = field(default_factory=dict)
    """(mode, layer, tokens) -> a batch of the first rows of `own`, for all calls of that kind."""
    ready: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """The same key -> the step that computes such a call alone, written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A bell that was taken. Times are time.monotonic() seconds."""

    lane: Lane
    slot: int
    number: int
    mode: int
    layer: int
    tokens: int
    seen: float

    @property
    def key(self) -> tuple[int, int]:
        return self.layer, self.mode

    @property
    def kind(self) -> tuple[int, int, int]:
        """Returns what calls have in common whose steps differ in their rows alone."""
        return self.mode, self.layer, self.tokens

    @property
    def deadline(self) -> float:
        return self.seen + self.lane.timeout_s

    @property
    def request_id(self) -> str:
        return f"{self.lane.name}-{self.slot}-{self.number}"

    @property
    def nbytes(self) -> int:
        """The bytes of rows, ids and weights."""
        layout = self.lane.layout
        routing = 8 * layout.top_k if self.mode == lw.ROUTED else 0
        return self.tokens * (layout.hidden * layout.itemsize + routing)

    @property
    def reply_bytes(self) -> int:
        """None: the result lies in the lane."""
        return 0

    @property
    def regions(self) -> frozenset[Any]:
        return frozenset()


@dataclass(slots=True, eq=False)
class Lane:
    """Made by `LaneDoor.open`. `ended`: set when the service closes it."""

    quick: ClassVar[bool] = True
    """Whether its calls may go to the ranks without the queue."""
    silent: ClassVar[bool] = False
    """Whether its bells make no sound: a thread has to look."""

    layout: lw.Layout
    layers: frozenset[int]
    info: ModelInfo
    caller: Caller
    priority: Priority
    timeout_s: float
    name: str = field(default_factory=lambda: f"lane-{secrets.token_hex(4)}")
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    why: EpserveError | None = None
    """The reason why the service closes it."""
    closed: bool = False
    running: set[asyncio.Task[None]] = field(default_factory=set)
    """Calls that wait in the queue, or run from there."""
    fd: int = -1
    bell: int = -1
    slots: tuple[Slot, ...] = ()
    _map: Any = None
    _words: Any = None

    @property
    def through_poller(self) -> bool:
        """Whether the thread of this process serves it (`Poller`)."""
        return True

    def make(self) -> None:
        """Makes the memory. Raises OSError where the system gives none."""
        layout = self.layout
        self.fd = words.sealed_memory("epserve-lane", layout.shared)
        try:
            self._map = words.map_sealed(os.dup(self.fd), layout.shared)
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            os.close(self.fd)
            raise
        self._words = words.Words(self._map)
        self._words.store(0, layout.slots, lw.MAGIC & 0xFFFFFFFF)
        self.slots = tuple(self._slot(number) for number in range(layout.slots))

    def close(self) -> None:
        """No bell is taken any more. The memory goes with the last tensor over it."""
        self.closed = True
        for fd in (self.fd, self.bell):
            if fd >= 0:
                os.close(fd)
        self.fd = self.bell = -1
        for task in list(self.running):
            task.cancel()

    @property
    def busy(self) -> bool:
        return any(slot.busy for slot in self.slots)

    def resume(self) -> None:
        """Goes on after another process has served the lane: the calls without an answer are taken here."""
        for number, slot in enumerate(self.slots):
            slot.last, slot.busy = self._words.load(lw.answer_at(number)) >> 32, False
            self._words.wake(lw.answer_at(number))  # the other process may have ended between its word and its wake-up

    def rung_sum(self) -> int:
        """Returns another number when a bell has rung since the last time."""
        return sum(self._words.load(lw.bell_at(slot)) >> 32 for slot in range(self.layout.slots))

    def rung(self) -> Iterator[tuple[int, int]]:
        """Yields each slot whose bell has another number than the last, and the bell, which is read once."""
        load = self._words.load
        for number, slot in enumerate(self.slots):
            if not slot.busy and (bell := load(lw.bell_at(number))) >> 32 != slot.last:
                yield number, bell

    def take(self, slot: int, bell: int) -> Call:
        """Takes a bell. The call is answered in any case. Raises InvalidRequest for a header that is out of range."""
        number, mode, layer, tokens = lw.parts(bell)
        held = self.slots[slot]
        wanted, held.last = (held.last + 1) & 0xFFFFFFFF, number
        if number != wanted:
            raise InvalidRequest(f"bell: number {number}, the next one of slot {slot} is {wanted}", field="bell")
        if mode not in lw.MODES:
            raise InvalidRequest(f"bell: mode {mode}, there are {len(lw.MODES)}", field="bell")
        if layer not in self.layers:
            raise InvalidRequest(f"bell: layer {layer} is none of the lane's {len(self.layers)}", field="layer")
        if not 1 <= tokens <= self.layout.cap:
            raise InvalidRequest(f"bell: {tokens} tokens, the lane takes 1 to {self.layout.cap}", field="bell")
        held.busy = True
        return Call(lane=self, slot=slot, number=number, mode=mode, layer=layer, tokens=tokens, seen=time.monotonic())

    def batch(self, call: Call, memory: Callable[[int], Any]) -> Batch:
        """Copies a call's rows, ids and weights, and checks the copy. Raises InvalidRequest.

        Calls of one kind share the batch. Its deadline and request id are those of the first.

        memory: gives a buffer that the ranks read in place, or None.
        """
        slot = self.slots[call.slot]
        if (batch := slot.batches.get(call.kind)) is None:
            batch = self._new_batch(slot, call, memory)
        hidden = batch.hidden.copy_(slot.x[: call.tokens])
        if not all_finite(hidden):
            row, column = torch.isfinite(hidden).logical_not().nonzero()[0].tolist()
            raise not_finite(self.info.dtype, row, column, str(hidden[row, column].item()))
        if batch.ids is not None and batch.weights is not None:
            batch.ids.copy_(slot.ids[: call.tokens])
            batch.weights.copy_(slot.weights[: call.tokens])
            check_routing(batch.ids, batch.weights, num_tokens=call.tokens, num_experts=self.info.num_experts)
        return batch

    def _new_batch(self, slot: Slot, call: Call, memory: Callable[[int], Any]) -> Batch:
        slot.own = slot.own or self._own(memory)
        x, ids, weights = (each[: call.tokens] for each in slot.own)
        routed = call.mode == lw.ROUTED
        if len(slot.batches) >= MOST_KINDS:
            slot.batches.clear()
            slot.ready.clear()
        batch = slot.batches[call.kind] = Batch(
            layer=call.layer, hidden=x, ids=ids if routed else None, weights=weights if routed else None,
            deadline=call.deadline, client=self.caller.name, request_id=call.request_id, priority=self.priority,
            routing_checked=True,
        )  # fmt: skip
        return batch

    def finish(self, call: Call, answer: Answer) -> None:
        """Answers with what the engine says. Raises NotFinite, and answers nothing then."""
        self.answer(call, answer.out_MK)

    def answer(self, call: Call, out_MK: torch.Tensor) -> None:
        """Puts the result into the slot and answers. Raises NotFinite, and answers nothing then."""
        self._check_finite(call, rows_not_finite(out_MK))
        self.slots[call.slot].y[: call.tokens].copy_(out_MK)
        self._say(call.slot, call.number, lw.OK)

    def _check_finite(self, call: Call, wrong: Sequence[int]) -> None:
        if wrong:
            raise NotFinite(
                f"hidden_states: layer {call.layer} makes NaN or infinity of {len(wrong)} of {call.tokens} tokens, the first is"
                f" row {wrong[0]}: values pass the largest number on the way; send smaller ones, or call over gRPC with"
                " keep_not_finite",
                field="hidden_states",
            )

    def refuse(self, slot: int, number: int, error: BaseException, tokens: int = 0) -> str:
        """Answers with the error. The rows of the result become NaN. Returns the status's name."""
        code = self._explain(slot, number, error)
        if tokens and not self.layout.on_gpu:
            self.slots[slot].y[:tokens].fill_(float("nan"))
        self._say(slot, number, status_word(error))
        return code

    def _explain(self, slot: int, number: int, error: BaseException) -> str:
        """Puts the reason of an answer beside it. Returns the status's name."""
        failure = status.failure_of(error, f"{self.name}-{slot}-{number}")
        failure.message = failure.message[:MESSAGE_CHARS]
        why = failure.SerializeToString()
        at = lw.why_at(slot)
        if len(why) <= lw.WHY_BYTES - 2:
            self._map[at + 2 : at + 2 + len(why)] = why
            self._map[at : at + 2] = len(why).to_bytes(2, "little")
        return failure.code

    def beat(self, count: int) -> None:
        self._words.store(lw.BEAT_AT, 0, count & 0xFFFFFFFF)

    def _say(self, slot: int, number: int, value: int) -> None:
        self.slots[slot].busy = False  # before the word: the client may ring at once
        self._words.store(lw.answer_at(slot), number, value)
        self._words.wake(lw.answer_at(slot))

    def _slot(self, number: int) -> Slot:
        rows, routing = (self.layout.cap, self.layout.hidden), (self.layout.cap, self.layout.top_k)
        x, y = (
            torch.empty(0) if self.layout.on_gpu else self._tensor(number, name, self.info.dtype, rows) for name in "xy"
        )
        return Slot(
            x=x, y=y, ids=self._tensor(number, "ids", torch.int32, routing),
            weights=self._tensor(number, "weights", torch.float32, routing),
        )  # fmt: skip

    def _tensor(self, slot: int, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        offset, size = self.layout.part(slot, name)
        return torch.frombuffer(self._map, dtype=dtype, count=size // dtype.itemsize, offset=offset).view(*shape)

    def _own(self, memory: Callable[[int], Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slot = self.slots[0]

        def made(like: torch.Tensor) -> torch.Tensor:
            buffer = memory(like.nbytes)
            return torch.frombuffer(buffer, dtype=like.dtype).view(like.shape) if buffer else torch.empty_like(like)

        return made(slot.x), made(slot.ids), made(slot.weights)


def status_word(error: BaseException) -> int:
    """Returns the status of an answer."""
    for kind, value in STATUSES:
        if isinstance(error, kind):
            return value
    if isinstance(error, InvalidRequest):
        return FIELDS.get(error.field, lw.FAILED)
    return lw.FAILED
