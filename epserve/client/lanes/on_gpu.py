"""This module is a lane whose rows lie on a GPU. A call is work of the current stream: it writes the bell, waits for the rank's
answer, and no thread of this process takes part. A CUDA graph can hold it.

A watchdog ends the waits of the stream when the service is gone or does not answer in time.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from epserve.client import cuda_region
from epserve.client.checks import check_both, check_no_gradient
from epserve.client.options import RetryPolicy
from epserve.errors import (
    CallerError,
    DeadlineExceeded,
    EpserveError,
    InternalError,
    InvalidRequest,
    NotFinite,
    NotReady,
    TooLarge,
)
from epserve.process import cuda_memory
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import lane_words as lw
from epserve.protocol import wire

from .lane import MARGIN_S, Lane

WATCH_S = 0.02
"""The pause between two looks of the watchdog."""
RELEASE_S = 50e-6
"""The pause between two looks once the lane has ended, for work that the stream still has."""
STILL = 200
"""Looks without such work, after which the pause is `WATCH_S` again."""
UNIT = 1 << 32


class Streams:
    """The calls of CUDA that a lane needs, on one GPU."""

    def __init__(self, device: Any):
        self.device = device

    def here(self) -> Any:
        """Makes the GPU current in this thread, as a context manager."""
        import torch

        return torch.cuda.device(self.device)

    def current(self) -> int:
        """Returns the current stream."""
        import torch

        return torch.cuda.current_stream(self.device).cuda_stream

    def synchronize(self, *, all_streams: bool = False) -> None:
        """Waits for the current stream, or for the whole device."""
        import torch

        if all_streams:
            torch.cuda.synchronize(self.device)
        else:
            torch.cuda.current_stream(self.device).synchronize()

    def tensor(self, address: int, nbytes: int) -> Any:
        """Returns a uint8 tensor over host memory that `cuda_memory.register_host` gave an address on the GPU."""
        return cuda_memory.tensor(cuda_memory.Bytes(address, nbytes), self.device)


class Rows:
    """The GPU's memory for the slots of a lane that is to be opened."""

    def __init__(self, model: pb.GetModelReply, max_tokens: int, slots: int, device: Any):
        """Raises InvalidRequest or TooLarge for sizes that the service refuses, or when the GPU has no memory."""
        import torch

        if not 1 <= slots <= lw.MAX_SLOTS:
            raise InvalidRequest(f"slots: {slots}, must be 1 to {lw.MAX_SLOTS}", field="slots")
        most = min(model.max_tokens_per_request, lw.MAX_TOKENS)
        if not 1 <= max_tokens <= most:
            text = f"max_tokens: {max_tokens}, must be 1 to {most} (server.max_tokens_per_request)"
            raise (InvalidRequest if max_tokens < 1 else TooLarge)(text, field="max_tokens")

        dtype = getattr(torch, wire.DTYPE_NAMES[model.dtype])
        self.layout = lw.Layout(
            slots=slots, cap=max_tokens, hidden=model.hidden, top_k=model.top_k, itemsize=dtype.itemsize, on_gpu=True
        )
        self.memory = cuda_region.GpuMemory(self.layout.gpu_bytes, device)
        self.proof = secrets.token_bytes(cuda_region.PROOF_BYTES)
        _, start = self.memory.piece(0, cuda_region.PROOF_BYTES)
        start.copy_(torch.tensor(list(self.proof), dtype=torch.uint8))
        self.memory.finish()

    def add_to(self, request: pb.OpenLaneRequest) -> pb.OpenLaneRequest:
        request.cuda.handle, request.cuda.gpu_uuid = self.memory.handle, self.memory.gpu_uuid
        request.proof = self.proof
        return request


class GpuLane(Lane):
    """A lane on a GPU. `call`, `start`, `retry` and `forward` only queue work on the current stream, and return at once.

    The results of a call that fails are NaN, and `check` raises its error. `check` waits for the current stream;
    `check(wait=False)` raises what is known by now. A slot is for one stream at a time. `forward` gives each stream a slot.

    Once the lane has ended, calls give NaN, and graphs that hold calls may be replayed until `close`.
    """

    streams = Streams

    def __init__(self, reply: pb.OpenLaneReply, retry: RetryPolicy, rows: Rows):
        """Takes the words over. Raises NotReady, InternalError, or InvalidRequest where the GPU cannot reach the words."""
        self._rows = rows
        self._streams = self.streams(rows.memory.device)
        self.device = rows.memory.device
        self.queued = reply.queued
        """Whether the calls go through the service's queue, and not to a thread of the rank."""
        with self._streams.here():
            super().__init__(reply, retry)
            self._load()
        self._slot_of: dict[int, int] = {}
        self._queueing = threading.Lock()
        self._status = 0
        self._stop = threading.Event()
        self._noticed = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="lane-watchdog", daemon=True)
        self._watchdog.start()

    def _mapped(self) -> None:
        """Gives the GPU the memory of the words, and memory for errors."""
        import torch

        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        try:
            self._there = cuda_memory.register_host(self._host, self._layout.shared)
        except cuda_memory.DriverError as error:
            raise InvalidRequest(f"device: the GPU cannot reach the lane's words: {error}", field="device") from None
        self._shared = self._streams.tensor(self._there, self._layout.shared)
        self._bells, self._statuses = self._shared.view(torch.int64), self._shared.view(torch.int32)
        self._last = torch.zeros(self.slots, dtype=torch.int32, device=self.device)
        self._numbers = torch.zeros(self.slots, dtype=torch.int64, device=self.device)  # in the upper halves
        # The statuses since the last check, in memory where this process can look at any time.
        self._own = mmap.mmap(-1, mmap.PAGESIZE)
        self._own_host = ctypes.addressof(ctypes.c_char.from_buffer(self._own))
        self._seen = torch.frombuffer(self._own, dtype=torch.int32, count=self.slots)
        self._kept = self._streams.tensor(cuda_memory.register_host(self._own_host, mmap.PAGESIZE), mmap.PAGESIZE)
        self._kept = self._kept.view(torch.int32)
        self._streams.synchronize()

    def _load(self) -> None:
        """Runs each kind of kernel of a call once. A kernel is loaded at its first launch, which may wait for the stream, and the
        stream for the rank."""
        import torch

        with torch.inference_mode(False):
            rows, number, last = self._tensors["y", 0][:1], torch.zeros_like(self._numbers[:1]), self._last[:1]
            torch.add(number.add_(0), 0, out=number)
            torch.bitwise_or(last, self._kept[:1], out=last)
            rows.fill_(float("nan")).masked_fill_(last.copy_(self._kept[:1]) != 0, float("nan")).zero_()
        self._streams.synchronize()

    # Calls.

    def start(self, layer: int, tokens: int, *, slot: int = 0, routed: bool = False) -> None:
        held = self._slots[self._checked(slot)]
        number = self._checked_call(layer, tokens)
        held.header = lw.header(mode=lw.ROUTED if routed else lw.BLOCK, layer=layer, tokens=number)
        self._ring(slot)

    def finish(self, *, slot: int = 0, timeout: float | None = None) -> Any:
        held = self._slots[self._checked(slot)]
        if not held.header:
            raise CallerError(f"slot {slot}: there was no call")
        return self._tensors["y", slot][: held.header & lw.MAX_TOKENS]

    def retry(self, *, slot: int = 0, timeout: float | None = None) -> Any:
        if not self._slots[self._checked(slot)].header:
            raise CallerError(f"slot {slot}: there was no call")
        self._ring(slot)
        return self.finish(slot=slot)

    def check(self, *, wait: bool = True) -> None:
        """Raises the error of the calls since the last `check`, and forgets it. It waits for the current stream first."""
        if wait:
            self._streams.synchronize()
        for slot, value in enumerate(self._seen.tolist()):
            if value:
                self._seen[slot] = 0
                self._errors.append(self._error_of(slot, value))
        super().check()

    def takes(self, layer: int, hidden: Any) -> bool:
        fits = wire.is_torch(hidden) and hidden.device == self.device and hidden.dtype == self.dtype
        if not (self.usable and fits and layer in self.layers and 1 <= len(hidden) <= self.max_tokens):
            return False
        return self._streams.current() in self._slot_of or len(self._slot_of) < self.slots

    def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *, timeout: float | None = None
    ) -> Any:
        """Returns the layer's output for a tensor on the lane's GPU. It is there when the stream comes to it."""
        self._check_batch(hidden, topk_ids, topk_weights)
        check_no_gradient(hidden, "hidden_states")
        check_both(topk_ids, topk_weights)
        tokens = self._checked_call(layer, len(hidden))
        with self._queueing:
            slot = self._slot_of_stream()
            self._tensors["x", slot][:tokens].copy_(hidden, non_blocking=True)
            if topk_ids is not None:
                self._put_routing(slot, tokens, topk_ids, topk_weights)
            self.start(layer, tokens, slot=slot, routed=topk_ids is not None)
            return self._tensors["y", slot][:tokens].clone()

    def operator(self) -> Callable[..., Any]:
        """Returns `forward` as an operator of torch, `epserve::lane_on_gpu`, which compilers, exporters and CUDA graphs keep."""
        from .operator import operator_on_gpu

        return operator_on_gpu(self)

    def close(self, why: str = "the lane is closed") -> None:
        """Waits for the calls that the GPU has, and lets the words go. No graph with a call may be replayed afterwards."""
        if self._stop.is_set():
            return
        self._streams.synchronize(all_streams=True)  # the watchdog bounds it
        super().close(why)
        self._stop.set()
        self._noticed.set()
        self._watchdog.join()
        with suppress(cuda_memory.DriverError):
            cuda_memory.unregister_host(self._host)
            cuda_memory.unregister_host(self._own_host)

    def lost(self) -> None:
        text = f"{self.name} is no longer open: the service has ended it, or the connection; open another"
        self._die(lw.RANK_LOST, text)

    # The work of a call.

    def _ring(self, slot: int) -> None:
        """Queues a call: results are NaN until there are others, the bell, the wait, and the status into the sum."""
        with self._streams.here():
            self._queue(slot)

    def _queue(self, slot: int) -> None:
        import torch

        held = self._slots[slot]
        rows = self._tensors["y", slot][: held.header & lw.MAX_TOKENS].fill_(float("nan"))
        if self._ended:
            self._seen[slot] |= self._status or lw.CLOSED
            return
        stream, arrived = self._streams.current(), lw.answer_at(slot) + lw.ARRIVED_AT
        cuda_memory.write_word(stream, self._there + arrived, 0)
        number = self._numbers[slot : slot + 1].add_(UNIT)
        at = lw.bell_at(slot) >> 3
        torch.add(number, held.header, out=self._bells[at : at + 1])
        cuda_memory.wait_for_word(stream, self._there + arrived, 1)
        at, kept = lw.answer_at(slot) >> 2, self._kept[slot : slot + 1]
        status = self._statuses[at : at + 1]
        torch.bitwise_or(kept, status, out=kept)
        if self.queued:
            rows.masked_fill_(self._last[slot : slot + 1].copy_(status) != 0, float("nan"))

    def _put_routing(self, slot: int, tokens: int, ids: Any, weights: Any) -> None:
        width = ids.shape[1]
        to_ids, to_weights = self._tensors["ids", slot][:tokens], self._tensors["weights", slot][:tokens]
        to_ids[:, :width].copy_(ids.clamp(-1 << 31, (1 << 31) - 1) if ids.itemsize > 4 else ids)
        to_weights[:, :width].copy_(weights)
        if width < self.top_k:
            to_ids[:, width:].fill_(-1)
            to_weights[:, width:].zero_()

    def _slot_of_stream(self) -> int:
        stream = self._streams.current()
        if stream not in self._slot_of:
            if len(self._slot_of) == self.slots:
                raise CallerError(f"lane: {self.slots} streams use its {self.slots} slots; open one with more")
            self._slot_of[stream] = len(self._slot_of)
        return self._slot_of[stream]

    def _error_of(self, slot: int, status: int) -> EpserveError:
        if self.queued or status & ~(lw.BAD_HEADER | lw.BAD_IDS | lw.NOT_FINITE):
            if self._status == lw.TIMED_OUT:  # the watchdog's own
                return DeadlineExceeded(self._ended)
            error = self._why(slot, status)
            return error if str(error) else NotReady(self._ended or f"lane: calls have failed with status {status}")
        if status & lw.BAD_IDS:
            return InvalidRequest("topk_ids: an id of a call is outside the layer's experts", field="topk_ids")
        if status & lw.NOT_FINITE:
            text = "hidden_states: rows or weights of a call, or its results, hold NaN or infinity"
            return NotFinite(text, field="hidden_states")
        return InvalidRequest(f"bell: a call was out of range (status {status})", field="bell")

    # The watchdog.

    def _watch(self) -> None:
        since: dict[int, tuple[int, float]] = {}
        limit = self._timeout_s + MARGIN_S
        while not self._noticed.wait(WATCH_S):
            now = time.monotonic()
            for slot in range(self.slots):
                number = self._words.load(lw.bell_at(slot)) >> 32
                if number == self._words.load(lw.answer_at(slot)) >> 32:
                    since.pop(slot, None)
                elif since.setdefault(slot, (number, now))[0] != number:
                    since[slot] = number, now
                elif now - since[slot][1] > limit:
                    self._die(lw.TIMED_OUT, f"lane: no answer after {limit:.3g} s, the lane has ended; open another")
        still = 0
        while not self._stop.wait(RELEASE_S if still < STILL else WATCH_S):
            still = 0 if self._release() else still + 1

    def _die(self, status: int, why: str) -> None:
        self._status = self._status or status
        super().close(why)
        self._noticed.set()

    def _release(self) -> bool:
        """Lets the stream go on where it waits. Returns whether it did."""
        found = False
        for slot in range(self.slots):
            arrived = lw.answer_at(slot) + lw.ARRIVED_AT
            if not self._words.load_half(arrived):
                self._words.store_half(lw.answer_at(slot), self._status)
                self._words.store_half(arrived, 1)
                found = True
        return found

    # Its memory.

    def _laid_out(self, reply: pb.OpenLaneReply) -> lw.Layout:
        layout = self._rows.layout
        if (reply.hidden, reply.top_k, reply.slots) != (layout.hidden, layout.top_k, layout.slots):
            raise InternalError(f"lane: the service gives other sizes than its model has: {reply}")
        return layout

    def _memory(self, name: str, offset: int, size: int) -> Any:
        if name in ("ids", "weights"):
            return self._shared[offset : offset + size]
        return self._rows.memory.piece(offset, size)[1]
