"""Listening sockets of ranks, and connections whose two sides have greeted each other.

On one node a door is an abstract Unix socket, which leaves no file behind and takes this user's processes only. Between nodes it
is TCP. A random secret, which goes through Ray, opens it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from epserve.process.unix_peers import same_user

from . import wire
from .greeting import HANDSHAKE_S, MAX_GREETING, MOST_GREETED, Greeting

log = logging.getLogger(__name__)

VERSION = 2
SOCKET_BUFFER = 4 << 20  # bytes; the kernel caps it. Fewer wake-ups for a shard of a few MB
PAUSE_S = 0.05  # pause before another attempt when the system is short of a resource


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAddress:
    """The address of a door. Without `host`, `name` is an abstract Unix socket on this machine. `protocol` names its messages."""

    name: str = ""
    host: str = ""
    port: int = 0
    token: str = field(repr=False)  # no log shows it
    protocol: str

    def connect(self, timeout_s: float | None = None) -> socket.socket:
        """Returns a blocking connection after the greeting. Raises OSError, also when that takes longer than HANDSHAKE_S."""
        end = time.monotonic() + (HANDSHAKE_S if timeout_s is None else timeout_s)
        sock = self._reach(end)
        try:
            settle(sock)
            _greet(sock, self, end, connecting=True)
        except BaseException:
            sock.close()
            raise
        return sock

    def _reach(self, end: float) -> socket.socket:
        if self.host:
            return socket.create_connection((self.host, self.port), timeout=end - time.monotonic())
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(end - time.monotonic())
                sock.connect("\0" + self.name)
                return sock
            except BlockingIOError:  # the listening side has not taken earlier connections yet
                sock.close()
                if time.monotonic() > end:
                    raise
                time.sleep(PAUSE_S)
            except BaseException:
                sock.close()
                raise


class Door:
    """Listens from the start. `enter` gets each greeted connection in the connection's own thread, and closes it.

    Greetings run side by side, so that silent strangers hold up no other connection.
    """

    def __init__(self, enter: Callable[[socket.socket], None], *, protocol: str, host: str = ""):
        """host: address of a TCP socket. Empty: an abstract Unix socket."""
        self._enter, self._closed = enter, False
        self._greeted: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        token = secrets.token_hex(32)
        if host:
            self._listener = socket.create_server((host, 0))
            port = self._listener.getsockname()[1]
            self.address = LinkAddress(host=host, port=port, token=token, protocol=protocol)
        else:
            self.address = LinkAddress(name=f"epserve-{secrets.token_hex(8)}", token=token, protocol=protocol)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind("\0" + self.address.name)
            self._listener.listen()
        threading.Thread(target=self._accept, name=f"door of {protocol}", daemon=True).start()

    def close(self) -> None:
        """Takes no new connections. Entered ones go on."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("a connection was not taken: %s", error)
                    time.sleep(PAUSE_S)
                continue
            if not same_user(sock):
                sock.close()
                continue
            with self._lock:
                self._greeted.append(sock)
                if len(self._greeted) > MOST_GREETED:
                    _hang_up(self._greeted.popleft())
            threading.Thread(
                target=self._serve, args=(sock,), name=f"{self.address.protocol} of one peer", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            settle(sock)
            _greet(sock, self.address, time.monotonic() + HANDSHAKE_S, connecting=False)
        except (OSError, ValueError) as error:
            log.debug("a connection ended in its greeting: %s", error)
            sock.close()
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._greeted.remove(sock)
        self._enter(sock)


def _greet(sock: socket.socket, address: LinkAddress, end: float, *, connecting: bool) -> None:
    greeting = Greeting(address.token.encode(), protocol=address.protocol, version=VERSION, connecting=connecting)

    def receive() -> dict:
        return wire.receive_header(sock, most=MAX_GREETING, until=end)

    wire.send(sock, greeting.hello())
    greeting.hear(receive())
    if connecting:
        wire.send(sock, greeting.proof())
        greeting.check(receive())
    else:
        greeting.check(receive())
        wire.send(sock, greeting.proof())
    sock.settimeout(HANDSHAKE_S)


def settle(sock: socket.socket) -> None:
    """Gives a connection large buffers, lets small frames go out at once, and sets the timeout of the greeting."""
    sock.settimeout(HANDSHAKE_S)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _hang_up(sock: socket.socket) -> None:
    """Ends a connection. NOTE: its thread closes it. A descriptor that is closed here could belong to another connection."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
