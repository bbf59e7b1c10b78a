"""The data path: one connection from the engine to each rank. Ray places and supervises, but carries no activations.

On the engine's own node the connection is an abstract Unix socket, elsewhere TCP. A random token, handed over through
Ray, opens it. Frames leave in the order of submission, so that all ranks see steps in the same order; a rank answers in
that order too. Measured against Ray actor calls in docs/design.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import wire
from .failure import Failure, RankLost

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
SOCKET_BUFFER = 4 << 20  # bytes; the kernel caps it. Fewer wake-ups for a shard of a few MB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """Where a rank listens. `host` empty: `name` is an abstract Unix socket on this machine."""

    name: str = ""
    host: str = ""
    port: int = 0
    token: str

    def connect(self) -> socket.socket:
        if self.host:
            sock = socket.create_connection((self.host, self.port), timeout=HANDSHAKE_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.connect("\0" + self.name)
        return sock


class Link(Protocol):
    """What the pool needs of a data path to one rank."""

    def submit(
        self, header: dict[str, Any], tensors: Sequence[torch.Tensor], out: torch.Tensor
    ) -> asyncio.Future[dict[str, float]]:
        """Queue a step; the future ends when `out` is filled, with the rank's seconds by phase, or with RankLost. Never waits."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Pending:
    out: torch.Tensor
    future: asyncio.Future[dict[str, float]]


class SocketLink:
    """A link over one socket. `on_lost()` is called once when the rank's process goes away."""

    def __init__(self, sock: socket.socket, on_lost: Callable[[], None]):
        self._sock, self._on_lost = sock, on_lost
        self._pending: dict[int, _Pending] = {}
        self._outgoing: asyncio.Queue[list] = asyncio.Queue()
        self._beats = 0  # counts down: steps have the numbers above
        self.heard = 0.0  # when the last answer came, time.monotonic()
        self.lost = False
        self._tasks = {asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())}
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @classmethod
    async def open(cls, address: LinkAddress, on_lost: Callable[[], None]) -> SocketLink:
        def connect() -> socket.socket:
            sock = address.connect()
            _enlarge(sock)
            wire.send(sock, {"token": address.token})
            wire.receive_header(sock)  # the rank's word that it took the token
            sock.setblocking(False)
            return sock

        return cls(await asyncio.to_thread(connect), on_lost)

    @property
    def num_pending(self) -> int:
        """Steps, not beats."""
        return len(self.pending())

    def submit(self, header, tensors, out):
        future = asyncio.get_running_loop().create_future()
        if self.lost:
            future.set_exception(self._gone("the connection is closed"))
            return future
        self._pending[header["step"]] = _Pending(out, future)
        self._outgoing.put_nowait(wire.encode(header, tensors))
        return future

    def beat(self) -> asyncio.Future[dict[str, float]]:
        """Ends when the rank's step thread has taken an empty frame; then it has finished all steps before."""
        self._beats -= 1
        return self.submit({"step": self._beats, "beat": True}, [], torch.empty(0))

    def pending(self) -> list[asyncio.Future[dict[str, float]]]:
        return [each.future for step, each in self._pending.items() if step >= 0]

    def close(self) -> None:
        self._end("the connection was closed here", report=False)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                for part in await self._outgoing.get():
                    await loop.sock_sendall(self._sock, part)
        except OSError as error:
            self._end(f"{type(error).__name__}: {error}")

    async def _read(self) -> None:
        try:
            while True:
                header = await wire.receive_header_async(self._sock)
                self.heard = time.monotonic()
                pending = self._pending[header["step"]]
                if header["tensors"] and pending.out.numel():
                    await wire.receive_exactly_async(self._sock, wire.as_bytes(pending.out))
                del self._pending[header["step"]]
                if pending.future.done():
                    continue
                if header.get("failure"):
                    pending.future.set_exception(RankLost(Failure(**header["failure"])))
                else:
                    pending.future.set_result(header.get("phases", {}))
        except (OSError, ValueError, KeyError) as error:
            self._end(f"{type(error).__name__}: {error}")

    def _end(self, why: str, *, report: bool = True) -> None:
        if self.lost:
            return
        self.lost = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        with contextlib.suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if not each.future.done():
                each.future.set_exception(self._gone(why))
        if report:
            self._on_lost()

    def _task_ended(self, task: asyncio.Task) -> None:
        # NOTE: closed only when no task waits on the descriptor; the loop would otherwise watch whoever gets its number.
        self._tasks.discard(task)
        if not self._tasks:
            self._sock.close()

    def _gone(self, why: str) -> RankLost:
        return RankLost(Failure(rank=-1, phase="process", step=-1, message=f"gone ({why})", consequence=False))


class StepServer:
    """The rank's end: a thread that answers one engine's frames in order."""

    def __init__(
        self, answer: Callable[[dict, list[torch.Tensor]], tuple[dict, list[torch.Tensor]]], *, host: str = ""
    ):
        """host: listen on TCP there; empty: on an abstract Unix socket."""
        token = secrets.token_hex(16)
        if host:
            self._listener = socket.create_server((host, 0))
            self.address = LinkAddress(host=host, port=self._listener.getsockname()[1], token=token)
        else:
            self.address = LinkAddress(name=f"epserve-{secrets.token_hex(8)}", token=token)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind("\0" + self.address.name)
            self._listener.listen()
        self._answer, self._token = answer, token
        self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # close() was called
            try:
                self._greet(sock)
                while True:
                    wire.send(sock, *self._answer(*wire.receive(sock)))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                log.debug("connection ended: %s", error)
            finally:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        _enlarge(sock)
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        header = wire.receive_header(sock)
        if not hmac.compare_digest(str(header.get("token", "")), self._token):
            raise wire.WireError("wrong token")
        wire.send(sock, {})
        sock.settimeout(None)


def _enlarge(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
