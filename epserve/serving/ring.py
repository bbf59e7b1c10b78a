"""The client's side of the doorbell (doorbell.py): blocking calls over a few Unix sockets, one call on each at a time."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

from epserve.errors import DeadlineExceeded, NotReady
from epserve.serving import epserve_pb2 as pb

LENGTH = struct.Struct("!I")
CONNECT_S = 1.0


class Bell:
    """Of one region. `usable` is false for good when it cannot be reached: gRPC then does the same."""

    def __init__(self, name: str, key: bytes):
        self._name, self._key = name, key
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self.usable = bool(name and key)

    def connect(self) -> None:
        """A first connection; without one (in a container with a network of its own, say) the bell is not usable."""
        if self.usable:
            try:
                self._idle.append(self._connected())
            except OSError:
                self.usable = False

    def call(self, frame: pb.RequestFrame, timeout_s: float, cancellation: Any) -> pb.ReplyFrame:
        """Raises DeadlineExceeded, and NotReady when the connection ends before the reply."""
        deadline = time.monotonic() + timeout_s
        try:
            sock = self._take()
        except OSError as error:
            self.usable = False
            raise NotReady(f"the service's doorbell does not answer: {error}") from error
        data = frame.SerializeToString()
        ring = _Ring(sock)
        if cancellation is not None:
            cancellation.watch(ring)
        try:
            sock.settimeout(timeout_s)
            sock.sendall(LENGTH.pack(len(data)) + data)
            reply = pb.ReplyFrame.FromString(_frame(sock, deadline))
        except BaseException as error:
            ring.over()
            sock.close()  # whoever is asked there gives the call up
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no reply after {timeout_s:g} s") from None
            if isinstance(error, OSError):
                self._drop_idle()  # a service that went away left them all
                raise NotReady("the service ended the connection before the reply; it may be stopping") from error
            raise
        if ring.over():
            self._give(sock)
        return reply

    def close(self) -> None:
        self.usable = False
        self._drop_idle()

    def _take(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connected()

    def _give(self, sock: socket.socket) -> None:
        with self._lock:
            if self.usable:
                self._idle.append(sock)
                return
        sock.close()

    def _drop_idle(self) -> None:
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


class _Ring:
    """What a cancel ends: the call, and never the next one on the same socket."""

    def __init__(self, sock: socket.socket):
        self._sock: socket.socket | None = sock
        self._cut = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._cut = True
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def over(self) -> bool:
        """Whether the socket is good for another call."""
        with self._lock:
            self._sock = None
            return not self._cut


def _frame(sock: socket.socket, deadline: float) -> bytes:
    """Raises TimeoutError, and ConnectionError for an early end."""
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
