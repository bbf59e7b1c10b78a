"""This module is the client's side of the doorbell (server/doorbell.py). Blocking calls go over a few Unix sockets, one
call on each at a time. Calls of asyncio go over one socket, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from epserve.errors import DeadlineExceeded, NotReady
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import frames

LENGTH = struct.Struct("!I")
CONNECT_S = 1.0


class Bell:
    """The bell serves one region. `usable` turns false for good when the bell cannot be reached. gRPC then takes the
    calls."""

    def __init__(self, name: str, key: bytes):
        self._name, self._key = name, key
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self.usable = bool(name and key)

    def connect(self) -> None:
        """Makes a first connection. Without one (in a container with its own network, say) the bell is not usable."""
        if self.usable:
            try:
                self._idle.append(self._connected())
            except OSError:
                self.usable = False

    def call(self, frame: Any, timeout_s: float, cancellation: Any) -> Any:
        """Sends a frame and returns the reply. Raises DeadlineExceeded, and NotReady when the connection ends before
        the reply."""
        return self.begin(frame, timeout_s, cancellation).result()

    def begin(self, frame: Any, timeout_s: float, cancellation: Any = None) -> Ringing:
        """Sends a frame. Raises as `call` does."""
        try:
            sock = self._take()
        except OSError as error:
            self.usable = False
            raise NotReady(f"the service's doorbell does not answer: {error}") from error
        ringing = Ringing(self, sock, timeout_s)
        if cancellation is not None:
            cancellation.watch(ringing)
        data = frames.serialise(frame)
        ringing.send(LENGTH.pack(len(data)) + data)
        return ringing

    def close(self) -> None:
        self.usable = False
        self.drop_idle()

    async def for_asyncio(self) -> AsyncBell | None:
        """Returns a bell for asyncio, or None when it cannot be reached."""
        if not self.usable:
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, bell = await loop.create_unix_connection(AsyncBell, "\0" + self._name)
        except OSError:  # TimeoutError is an OSError
            return None
        bell.send(self._key)
        return bell

    def _take(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connected()

    def give(self, sock: socket.socket) -> None:
        """Takes a socket back whose call has had its reply."""
        with self._lock:
            if self.usable:
                self._idle.append(sock)
                return
        sock.close()

    def drop_idle(self) -> None:
        """Closes the connections of no call."""
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _connected(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect("\0" + self._name)
            sock.sendall(self._key)
        except BaseException:
            sock.close()
            raise
        return sock


class AsyncBell(asyncio.Protocol):
    """This bell serves one region and one event loop. Replies come in any order."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, frame_of: Callable[[int], Any], timeout_s: float) -> Any:
        """Sends a call and returns the reply. frame_of: maps the call's number to its frame. Raises DeadlineExceeded,
        and NotReady when the connection ends."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send_frame(frame_of(number))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"no reply after {timeout_s:.3g} s") from None
        finally:
            if self._waiting.pop(number, None) is not None:  # given up: the server need not go on
                self._send_frame(pb.RequestFrame(call=number, cancel=pb.Cancel()))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _send_frame(self, frame: Any) -> None:
        data = frames.serialise(frame)
        self.send(LENGTH.pack(len(data)) + data)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) - start >= LENGTH.size:
            stop = start + LENGTH.size + LENGTH.unpack_from(received, start)[0]
            if stop > len(received):
                break
            frame = frames.parse_reply(bytes(received[start + LENGTH.size : stop]))
            future = self._waiting.pop(frame.call, None)
            if future is not None and not future.done():
                future.set_result(frame)
            start = stop
        del received[:start]

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(NotReady("the service ended the connection before the reply; it may be stopping"))


class Ringing:
    """A call that was sent on one socket. A cancel ends this call, and never the next one on the same socket."""

    def __init__(self, bell: Bell, sock: socket.socket, timeout_s: float):
        self._bell, self._sock, self._timeout_s = bell, sock, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._over = self._cut = False
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        try:
            self._sock.settimeout(self._timeout_s)
            self._sock.sendall(data)
        except BaseException as error:
            self._failed(error)

    def result(self) -> Any:
        """Returns the reply's frame. Raises as `Bell.call` does."""
        try:
            self._sock.settimeout(max(self._deadline - time.monotonic(), 1e-3))
            reply = frames.parse_reply(_frame(self._sock, self._deadline))
        except BaseException as error:
            self._failed(error)
        if self._ended():
            self._bell.give(self._sock)
        return reply

    def cancel(self) -> None:
        with self._lock:
            if not self._over:
                self._cut = True
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Gives the call up before `result`, which is not called any more. The server then gives it up too."""
        self._ended()
        self._sock.close()

    def _ended(self) -> bool:
        """Ends the call, and tells whether the socket is good for another one."""
        with self._lock:
            self._over = True
            return not self._cut

    def _failed(self, error: BaseException) -> NoReturn:
        """Raises what the error of a socket means."""
        self.drop()
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"no reply after {self._timeout_s:.3g} s") from None
        if isinstance(error, OSError):
            self._bell.drop_idle()  # a service that stops closes them all
            raise NotReady("the service ended the connection before the reply; it may be stopping") from error
        raise error


def _frame(sock: socket.socket, deadline: float) -> bytes:
    """Reads one frame. Raises TimeoutError, and ConnectionError for an early end."""
    data = sock.recv(1 << 16)
    while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
        if not data:
            raise ConnectionError("the connection was closed")
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = sock.recv(1 << 20)
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data[LENGTH.size :]
