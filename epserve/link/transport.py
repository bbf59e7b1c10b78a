"""The data path: one connection from the engine to each rank. Ray places and supervises, but carries no activations.

The connection goes through the rank's door (door.py). Frames leave in the order of submission, so that all ranks see steps in
the same order. A rank answers in that order too. If the two share memory (shm.py), a frame has the offsets of its tensors and of
the result, and the socket is the doorbell. Otherwise, and for small tensors, the bytes follow the frame.

Every wait ends: at a step's deadline (pool/steps.py), or when the other process ends, since its socket then closes. The engine
keeps memory that a rank may still read or write until the rank has answered or its end of the socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from epserve.process.words import why_not

from . import step_words, wire
from .door import LinkAddress
from .failure import Failure, RankLost, gone
from .shm import Arena
from .step_words import StepWords

log = logging.getLogger(__name__)

INLINE_BYTES = 16 << 10  # up to this size the socket is quicker than a block of shared memory
READS_AT_ONCE = 64  # after so many reads the loop turns to other tasks
OUTLAST_S = 0.02  # between two looks for an answer that comes late


class Link(Protocol):
    """The data path to one rank, as the pool uses it."""

    def submit(
        self, header: dict[str, Any], tensors: Sequence[torch.Tensor], out: torch.Tensor
    ) -> asyncio.Future[dict[str, Any]]:
        """Queues a step without waiting. The future ends when `out` is filled, with the answer's header, or with RankLost."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rung:
    """A step by words, written down but for its number. `held`: memory that the rank reads."""

    header: bytes
    held: Sequence[torch.Tensor]
    out: torch.Tensor


@dataclass(slots=True)
class _Pending:
    """A step without an answer. `held`: memory that the rank reads. `shared`: some of its memory lies in the arena.

    `future`: None for a step by words, until a task of the loop waits for it.
    """

    out: torch.Tensor
    future: asyncio.Future[dict[str, Any]] | None
    held: Sequence[torch.Tensor]
    shared: bool


class SocketLink:
    """A link over one socket. It calls `on_lost()` once when the rank's process goes away.

    arena: memory that the rank has mapped. Other tensors are copied there, or sent when it is full.
    """

    def __init__(
        self, sock: socket.socket, on_lost: Callable[[], None], arena: Arena | None = None, *, local: bool = True,
        words: StepWords | None = None,
    ):  # fmt: skip
        """local: the rank runs on this host. words: which it has mapped, for steps from other threads than the loop's."""
        self._sock, self._on_lost, self._arena, self.local, self.words = sock, on_lost, arena, local, words
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._outgoing: deque[memoryview] = deque()
        self._beats = 0  # counts down, since steps have the numbers above
        self.heard = 0.0  # time of the last answer, time.monotonic()
        self.lost = False
        self._watched = False  # a caller waits for the ends of steps
        self._incoming = self._answers()
        self._view = next(self._incoming)
        self._loop.add_reader(sock, self._readable)

    @classmethod
    async def open(cls, address: LinkAddress, on_lost: Callable[[], None], arena: Arena | None = None) -> SocketLink:
        """Opens a link. Raises OSError, also after HANDSHAKE_S of silence."""
        if address.host or (arena is not None and arena.fd < 0):
            arena = None  # another machine, or the pool is about to close

        quick = StepWords() if arena is not None and not why_not() else None

        def connect() -> socket.socket:
            sock = address.connect()
            try:
                if arena is None:
                    wire.send(sock, {})
                else:
                    more = (quick.fd, quick.bell) if quick is not None else ()
                    wire.send_with_descriptors(sock, {"arena": arena.size}, (arena.fd, *more))
                wire.receive_header(sock)  # the rank's step thread runs, and has mapped the memory
            except BaseException:
                sock.close()
                raise
            sock.setblocking(False)
            return sock

        try:
            sock = await asyncio.to_thread(connect)
        except BaseException:
            if quick is not None:
                quick.lost()
            raise
        return cls(sock, on_lost, arena, local=not address.host, words=quick)

    @property
    def num_pending(self) -> int:
        """Returns the number of steps without an answer. Beats do not count."""
        return sum(step >= 0 for step in list(self._pending))

    def submit(self, header, tensors, out):
        future = self._loop.create_future()
        if self.lost:
            future.set_exception(gone("the connection is closed"))
            return future
        tensors, offsets = self._placed(tensors)
        home = self._offset_of(out)
        if home is not None:
            header = {**header, "out": [*wire.describe(out), home]}
        shared = home is not None or any(at is not None for at in offsets)
        self._pending[header["step"]] = _Pending(out, future, tensors, shared)
        self._send(wire.encode(header, tensors, offsets))
        return future

    def rung(self, header: dict[str, Any], tensors: Sequence[torch.Tensor], out: torch.Tensor) -> Rung:
        """Writes a step down for `ring`. All tensors lie in the arena."""
        places = [[*wire.describe(tensor), self._offset_of(tensor) or 0] for tensor in tensors]
        header = {**header, "step": 0, "tensors": places, "out": [*wire.describe(out), self._offset_of(out) or 0]}
        return Rung(step_words.written(header), tensors, out)

    def ring(self, rung: Rung, step: int) -> None:
        """Begins a step by words, while no other one is under way. Any thread may call it. `answered` waits for it."""
        assert self.words is not None
        self._pending[step] = _Pending(rung.out, None, rung.held, True)
        if not self.lost:
            self.words.ring(rung.header, step)

    def answered(self, step: int, until: float) -> dict[str, Any] | None:
        """Waits for the answer of a step that was rung, and returns its header. None: there is none at `until`, or the link
        has ended. The memory of such a step is kept until the rank's end of the socket is closed."""
        assert self.words is not None
        if not self.words.answered(until):
            return None
        self.heard = time.monotonic()
        pending = self._pending.pop(step, None)
        if pending is not None and self._watched:
            self._loop.call_soon_threadsafe(_done, pending)
        return self.words.reply()

    async def outlast(self, step: int) -> None:
        """Waits for the answer of a step that was given up: the rank is free again, or its link has ended."""
        while not self.lost and step in self._pending:
            if self.answered(step, 0.0) is None:
                await asyncio.sleep(OUTLAST_S)

    def beat(self) -> asyncio.Future[dict[str, Any]]:
        """Sends an empty frame. The future ends when the rank's step thread has taken it, after all steps before."""
        return self.ask({"beat": True})

    def ask(self, header: dict[str, Any]) -> asyncio.Future[dict[str, Any]]:
        """Sends a frame that is no step to the step thread. The future ends with the header of the answer."""
        self._beats -= 1
        return self.submit({**header, "step": self._beats}, [], torch.empty(0))

    def pending(self) -> list[asyncio.Future[dict[str, Any]]]:
        """The futures of those steps. They end with the steps."""
        self._watched = True
        found = []
        for step, each in list(self._pending.items()):
            if step >= 0:
                each.future = each.future or self._loop.create_future()
                found.append(each.future)
        return found

    def close(self) -> None:
        self._end("the connection was closed here", report=False)

    def _placed(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int | None]]:
        """Copies large tensors into the arena while it has room. Returns all tensors, and their offsets in the arena."""
        placed, offsets = [], []
        for tensor in tensors:
            at = self._offset_of(tensor)
            if at is None and self._arena is not None and tensor.nbytes > INLINE_BYTES:
                copy = self._arena.empty(tuple(tensor.shape), tensor.dtype)
                if copy is not None:
                    tensor, at = copy.copy_(tensor), self._offset_of(copy)
            placed.append(tensor)
            offsets.append(at)
        return placed, offsets

    def _offset_of(self, tensor: torch.Tensor) -> int | None:
        return self._arena.offset_of(tensor) if self._arena is not None and tensor.numel() else None

    def _send(self, parts: list[bytes | memoryview]) -> None:
        """Sends as much as the socket takes now, and the rest when it is writable."""
        waiting = bool(self._outgoing)
        self._outgoing.extend(memoryview(part).cast("B") for part in parts)
        if not waiting and not self._write():
            self._loop.add_writer(self._sock, self._writable)

    def _write(self) -> bool:
        """Returns whether all has been sent. The loop reports an end of the connection, since `submit` never raises."""
        try:
            while self._outgoing:
                sent = self._sock.sendmsg(list(self._outgoing)[:16])
                while sent:
                    part = self._outgoing.popleft()
                    if sent < len(part):
                        self._outgoing.appendleft(part[sent:])
                    sent -= min(sent, len(part))
        except BlockingIOError:
            return False
        except OSError as error:
            self._loop.call_soon(self._end, f"{type(error).__name__}: {error}")
            self._outgoing.clear()
        return True

    def _writable(self) -> None:
        if self._write():
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            for _ in range(READS_AT_ONCE):
                count = self._sock.recv_into(self._view)
                if not count:
                    raise wire.WireError("the other side closed the connection")
                self._view = self._view[count:]
                while not self._view:
                    self._view = next(self._incoming)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._end(f"{type(error).__name__}: {error}")

    def _answers(self) -> Iterator[memoryview]:
        """Yields the buffers to fill, without end: prefix, header, perhaps the result."""
        while True:
            prefix = bytearray(wire.PREFIX.size)
            yield memoryview(prefix)
            text = bytearray(wire.header_size(prefix))
            yield memoryview(text)
            header = wire.parse(text)
            self.heard = time.monotonic()
            out = self._pending[header["step"]].out
            if header["tensors"] and out.numel():
                yield wire.as_bytes(out)
            del out  # NOTE: otherwise this frame would keep the memory of the last step while it waits
            self._settle(self._pending.pop(header["step"]).future, header)

    def _settle(self, future: asyncio.Future[dict[str, Any]] | None, header: dict[str, Any]) -> None:
        if future is None or future.done():
            return
        if header.get("failure"):
            future.set_exception(RankLost(Failure(**header["failure"])))
        else:
            future.set_result(header)

    def _end(self, why: str, *, report: bool = True) -> None:
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if each.future is not None and not each.future.done():
                each.future.set_exception(gone(why))
                each.future.exception()  # a step that was rung may have no reader
        if self.words is not None:
            self.words.lost()
        kept = [each for each in pending.values() if each.shared]
        if kept:
            _Remains(self._loop, self._sock, kept)
        else:
            with contextlib.suppress(OSError):  # not connected any more
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
        if report:
            self._on_lost()


def _done(pending: _Pending) -> None:
    if pending.future is not None and not pending.future.done():
        pending.future.set_result({})


class _Remains:
    """Keeps the memory of unanswered steps until the rank has closed its end. A rank that hangs may still write to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, kept: list[_Pending]):
        self._loop, self._sock, self._kept = loop, sock, kept
        with contextlib.suppress(OSError):  # the rank leaves its loop when it next looks at the socket
            sock.shutdown(socket.SHUT_WR)
        loop.add_reader(sock, self._readable)

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                if self._sock.recv(1 << 16):
                    return
            except ConnectionError:
                pass
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._kept.clear()
