"""This module is the client's side of a lane: calls of layers through shared memory with the service's host, without
messages. Its only I/O is with the Unix socket that hands the memory over."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from epserve.client.attempts import Attempts
from epserve.client.checks import check_both, check_no_gradient, whole_number
from epserve.client.exchange import priority_of
from epserve.client.options import RetryPolicy
from epserve.errors import (
    CallerError,
    DeadlineExceeded,
    EpserveError,
    ExpertsMissing,
    InternalError,
    InvalidRequest,
    NotReady,
)
from epserve.process import words
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import lane_words as lw
from epserve.protocol import status, wire

MARGIN_S = 1.0
"""The client waits so much longer for an answer than the service takes at most, so that the service's error comes first."""


MOST_KINDS = 1024
"""The kinds of calls that are remembered."""


@dataclass(slots=True, eq=False)
class _Slot:
    """`number`, `header`: of the last bell. `since`: when it rang. `owed`: no answer to it has been seen."""

    number: int = 0
    header: int = 0
    since: float = 0.0
    owed: bool = False
    error: EpserveError | None = None


class Lane:
    """A lane has static buffers for each of its slots: `x` for rows, `y` for results, `ids` and `weights`.

    A call of a slot takes the first rows of its buffers, and its results are there when `call` returns. A call that fails
    raises nothing: its results are NaN, and `check` raises its error. So a step of many layers has one place where errors
    surface. `retry` sends the last call of a slot again. `forward` does all of it for one batch.

    `Client.open_lane` makes it. Threads may share a lane if each has slots of its own; `forward` shares them by itself.
    """

    def __init__(self, reply: pb.OpenLaneReply, retry: RetryPolicy):
        """Takes the memory over. Raises NotReady where the service's socket cannot be reached."""
        import torch

        self.name, self.slots, self.max_tokens = reply.lane, reply.slots, reply.max_tokens
        self.hidden, self.top_k, self.layers = reply.hidden, reply.top_k, tuple(reply.layers)
        self.dtype = getattr(torch, wire.DTYPE_NAMES[reply.dtype])
        self._timeout_s, self._policy = reply.timeout_ms / 1000, retry
        self._layout = self._laid_out(reply)
        if reply.byte_size != self._layout.shared:
            raise InternalError(
                f"lane: the service gives {reply.byte_size} bytes, its sizes make {self._layout.shared}"
            )
        memory, self._bell = _received(reply.socket, reply.key)
        try:
            self._map = words.map_sealed(memory, reply.byte_size)
        except (OSError, ValueError) as error:
            os.close(self._bell)
            raise NotReady(f"lane: {error}") from None
        self._words = words.Words(self._map)
        self._slots = [_Slot() for _ in range(self.slots)]
        self._free, self._given = set(range(self.slots)), threading.Condition()
        self._ended = ""
        self._ringing = threading.Lock()  # a bell is not written once its descriptor is another file's
        self._errors: list[EpserveError] = []
        self._headers: dict[tuple[int, int, bool], int] = {}
        """(layer, tokens, routed) -> the lower half of the bell of such a call, whose arguments have been checked."""
        self._tensors: dict[tuple[str, int], Any] = {}
        with torch.inference_mode(False):  # else no call outside of that mode could write them
            self._mapped()
            for name, slot in itertools.product(("x", "y", "ids", "weights"), range(self.slots)):
                self._tensors[name, slot] = self._tensor(name, slot)

    def _laid_out(self, reply: pb.OpenLaneReply) -> lw.Layout:
        return lw.Layout(
            slots=reply.slots,
            cap=reply.max_tokens,
            hidden=reply.hidden,
            top_k=reply.top_k,
            itemsize=self.dtype.itemsize,
        )

    # Static buffers, and calls of one slot.

    def x(self, slot: int = 0) -> Any:
        """Returns the rows of a slot, (max_tokens, hidden) of the model's dtype."""
        return self._tensors["x", self._checked(slot)]

    def y(self, slot: int = 0) -> Any:
        """Returns the results of a slot, of the same shape."""
        return self._tensors["y", self._checked(slot)]

    def ids(self, slot: int = 0) -> Any:
        """Returns the experts of a slot's rows, (max_tokens, top_k) int32. -1: no expert."""
        return self._tensors["ids", self._checked(slot)]

    def weights(self, slot: int = 0) -> Any:
        """Returns the weights of a slot's experts, (max_tokens, top_k) float32."""
        return self._tensors["weights", self._checked(slot)]

    def call(
        self, layer: int, tokens: int, *, slot: int = 0, routed: bool = False, timeout: float | None = None
    ) -> Any:
        """Calls a layer on the first `tokens` rows of the slot, and returns their results, a view of `y(slot)`.

        Args:
            layer: one of `layers`.
            tokens: 1 to `max_tokens`.
            slot: the slot. Its last call has been answered.
            routed: ids and weights of the slot choose the experts. Else the layer's gate does.
            timeout: seconds, by default as long as the service takes at most.

        Raises:
            InvalidRequest: an argument is out of range. Every other error is raised by `check`.
        """
        self.start(layer, tokens, slot=slot, routed=routed)
        return self.finish(slot=slot, timeout=timeout)

    def start(self, layer: int, tokens: int, *, slot: int = 0, routed: bool = False) -> None:
        """Begins a call, which `finish` waits for."""
        held = self._slots[self._checked(slot)]
        kind = (layer, tokens, routed)
        header = self._headers.get(kind) if type(layer) is int and type(tokens) is int else None
        if header is None:
            number = self._checked_call(layer, tokens)
            header = lw.header(mode=lw.ROUTED if routed else lw.BLOCK, layer=layer, tokens=number)
            if len(self._headers) < MOST_KINDS:
                self._headers[kind] = header
        self._check_answered(slot)
        held.header = header
        self._ring(slot)

    def finish(self, *, slot: int = 0, timeout: float | None = None) -> Any:
        """Waits for the call of a slot, and returns its results."""
        held = self._slots[self._checked(slot)]
        if not held.header:
            raise CallerError(f"slot {slot}: there was no call")
        rows = self._tensors["y", slot][: held.header & lw.MAX_TOKENS]
        if held.owed:
            held.error = self._wait(slot, timeout)
        if held.error is not None:
            rows.fill_(float("nan"))
            self._errors.append(held.error)
            held.error = None
        return rows

    def retry(self, *, slot: int = 0, timeout: float | None = None) -> Any:
        """Sends the last call of a slot again, with the rows that lie there, and returns its results."""
        held = self._slots[self._checked(slot)]
        if not held.header:
            raise CallerError(f"slot {slot}: there was no call")
        self._check_answered(slot)
        self._ring(slot)
        return self.finish(slot=slot, timeout=timeout)

    def check(self) -> None:
        """Raises the first error of the calls since the last `check`, and forgets the others."""
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    # Batches.

    @property
    def usable(self) -> bool:
        """Whether the lane is open on both sides."""
        return not self._ended

    def takes(self, layer: int, hidden: Any) -> bool:
        """Tells whether `forward` can compute this batch."""
        fits = wire.is_torch(hidden) and hidden.device.type == "cpu" and hidden.dtype == self.dtype
        return self.usable and fits and layer in self.layers and 1 <= len(hidden) <= self.max_tokens

    def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *, timeout: float | None = None
    ) -> Any:
        """Returns the layer's output for a torch tensor `hidden`, as `Client.forward` does, with the same errors."""
        self._check_batch(hidden, topk_ids, topk_weights)
        self._checked_call(layer, len(hidden))
        attempts = Attempts(self._policy, self._timeout_s if timeout is None else timeout)
        with self._slot(attempts) as slot:
            tokens = len(hidden)
            self._tensors["x", slot][:tokens].copy_(hidden)
            if topk_ids is not None:
                width = topk_ids.shape[1]
                ids, weights = self._tensors["ids", slot][:tokens], self._tensors["weights", slot][:tokens]
                ids[:, :width].copy_(topk_ids.clamp(-1 << 31, (1 << 31) - 1) if topk_ids.itemsize > 4 else topk_ids)
                weights[:, :width].copy_(topk_weights)
                if width < self.top_k:
                    ids[:, width:].fill_(-1)
                    weights[:, width:].zero_()
            self.start(layer, tokens, slot=slot, routed=topk_ids is not None)
            while (error := self._wait(slot, attempts.remaining())) is not None:
                if not self.usable or self._slots[slot].owed or isinstance(error, ExpertsMissing):
                    raise error
                time.sleep(attempts.wait_after(error))
                self._ring(slot)
            return self._tensors["y", slot][:tokens].to(hidden.dtype, copy=True)

    def operator(self) -> Callable[..., Any]:
        """Returns `forward` as an operator of torch, `epserve::lane`, which compilers and exporters keep whole.

        A call of the function that fails gives NaN, and `check` raises its error.
        """
        from .operator import operator

        return operator(self)

    def failed(self, error: EpserveError) -> None:
        """Keeps an error for `check`."""
        self._errors.append(error)

    def close(self, why: str = "the lane is closed") -> None:
        """No call begins any more, and those that wait end."""
        with self._ringing:
            before, self._ended = self._ended, self._ended or why
            if not before:
                os.close(self._bell)
        if not before:
            for slot in range(self.slots):
                self._words.wake(lw.answer_at(slot))
            with self._given:
                self._given.notify_all()

    def lost(self) -> None:
        """Notes that the service has closed the lane."""
        self.close(f"{self.name} is no longer open: the service has ended it, or the connection; open another")

    @contextmanager
    def _slot(self, attempts: Attempts) -> Iterator[int]:
        """A slot that no other thread uses. A slot whose call was given up is used again when the answer has come."""
        with self._given:
            while not (free := [slot for slot in self._free if self._answered(slot)]) and self.usable:
                if attempts.over:
                    raise DeadlineExceeded(f"lane: all {self.slots} slots are in use; open one with more")
                self._given.wait(min(attempts.remaining(), 0.1))
            if not self.usable:
                raise NotReady(self._ended)
            slot = free[0]
            self._free.remove(slot)
        try:
            yield slot
        finally:
            with self._given:
                self._free.add(slot)
                self._given.notify()

    def _ring(self, slot: int) -> None:
        held = self._slots[slot]
        held.number, held.since, held.owed = held.number + 1 & 0xFFFFFFFF, time.monotonic(), True
        held.error = None
        self._words.store(lw.bell_at(slot), held.number, held.header)
        with self._ringing:
            if not self._ended:
                os.eventfd_write(self._bell, 1)

    def _answered(self, slot: int) -> bool:
        held = self._slots[slot]
        held.owed = held.owed and self._words.load(lw.answer_at(slot)) >> 32 != held.number
        return not held.owed

    def _wait(self, slot: int, timeout: float | None) -> EpserveError | None:
        """Waits for a slot's answer. Returns the error of the call, if any."""
        held, at = self._slots[slot], lw.answer_at(slot)
        limit = self._timeout_s + MARGIN_S if timeout is None else timeout
        until = held.since + limit if timeout is None else time.monotonic() + limit
        while (seen := self._words.load(at)) >> 32 != held.number:
            if self._ended:
                return NotReady(self._ended)
            if time.monotonic() >= until:
                return DeadlineExceeded(f"lane: no answer after {limit:.3g} s")
            self._words.wait(at, seen >> 32, until)
        held.owed = False
        value = seen & 0xFFFFFFFF
        return self._why(slot, value) if value else None

    def _why(self, slot: int, value: int) -> EpserveError:
        at = lw.why_at(slot)
        size = int.from_bytes(self._map[at : at + 2], "little")
        try:
            return status.error_of(pb.Failure.FromString(self._map[at + 2 : at + 2 + min(size, lw.WHY_BYTES - 2)]))
        except ValueError:  # DecodeError is one
            return InternalError(f"lane: the call failed with status {value}")

    def _check_answered(self, slot: int) -> None:
        if self._ended:
            raise NotReady(self._ended)
        if not self._answered(slot):
            raise CallerError(f"slot {slot}: its last call has not been answered; finish it, or use another slot")

    def _checked(self, slot: int) -> int:
        if type(slot) is int and 0 <= slot < self.slots:
            return slot
        if (number := whole_number(slot)) is None or not 0 <= number < self.slots:
            raise InvalidRequest(f"slot: {slot!r}, the lane has 0 to {self.slots - 1}", field="slot")
        return number

    def _checked_call(self, layer: int, tokens: int) -> int:
        if layer not in self.layers:
            raise InvalidRequest(f"layer: {layer!r} is none of the lane's {self.layers}", field="layer")
        if (number := whole_number(tokens)) is None or not 1 <= number <= self.max_tokens:
            text = f"tokens: {tokens!r}, must be 1 to {self.max_tokens}, the lane's max_tokens"
            raise InvalidRequest(text, field="tokens")
        return number

    def _check_batch(self, hidden: Any, ids: Any, weights: Any) -> None:
        if not wire.is_torch(hidden) or hidden.ndim != 2 or hidden.shape[1] != self.hidden:
            shape = tuple(getattr(hidden, "shape", ()))
            text = f"hidden_states: {type(hidden).__name__} {shape}, must be a torch tensor (tokens, {self.hidden})"
            raise InvalidRequest(text, field="hidden_states")
        check_no_gradient(hidden, "hidden_states")
        check_both(ids, weights)
        if ids is None:
            return
        check_no_gradient(weights, "topk_weights")
        if not wire.is_torch(ids) or ids.is_floating_point() or not wire.is_torch(weights):
            raise InvalidRequest(
                "topk_ids: must be a torch tensor of integers, and topk_weights one of floats", field="topk_ids"
            )
        if (
            ids.shape != weights.shape
            or ids.ndim != 2
            or len(ids) != len(hidden)
            or not 1 <= ids.shape[1] <= self.top_k
        ):
            text = f"topk_ids: {tuple(ids.shape)} with weights {tuple(weights.shape)}, must be ({len(hidden)}, 1 to {self.top_k})"
            raise InvalidRequest(text, field="topk_ids")

    def _tensor(self, name: str, slot: int) -> Any:
        import torch

        dtype, width = {"ids": (torch.int32, self.top_k), "weights": (torch.float32, self.top_k)}.get(
            name, (self.dtype, self.hidden)
        )
        offset, size = self._layout.part(slot, name)
        return self._memory(name, offset, size).view(dtype)[: self.max_tokens * width].view(self.max_tokens, width)

    def _mapped(self) -> None:
        """Is called when the memory with the words is there, before any tensor is made."""

    def _memory(self, name: str, offset: int, size: int) -> Any:
        """Returns the bytes of a part as a uint8 tensor."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=offset)


def request(*, max_tokens: Any, slots: Any, layers: Any, timeout_s: float, priority: str) -> pb.OpenLaneRequest:
    """Returns the request that opens a lane. Raises InvalidRequest for arguments that are no numbers of it."""
    try:
        return pb.OpenLaneRequest(
            max_tokens=max_tokens, slots=slots, layers=layers, priority=priority_of(priority),
            timeout_ms=min(max(1, round(timeout_s * 1000)), (1 << 32) - 1),
        )  # fmt: skip
    except (TypeError, ValueError, OverflowError) as error:
        text = f"max_tokens {max_tokens!r}, slots {slots!r}, layers {layers!r}: must be whole numbers ({error})"
        raise InvalidRequest(text, field="max_tokens") from None


def _received(name: str, key: bytes) -> tuple[int, int]:
    """Returns the descriptors of the memory and of the bell. Raises NotReady."""
    try:
        return words.receive_descriptors(name, key)
    except OSError as error:
        raise NotReady(f"lane: the service's socket is not reached from here: {error}") from None
    except ValueError as error:
        raise NotReady(f"lane: the service's socket gives no memory: {error}") from None
