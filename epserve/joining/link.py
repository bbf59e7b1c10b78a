"""A connection between a joined front end and the process that orders the steps. No pickle, no Ray, no gRPC.

Both sides prove that they know the secret (link/greeting.py). The bytes are not encrypted, like those between front end and
ranks. `frames` has their format.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from epserve.errors import ConfigError
from epserve.link import wire
from epserve.link.door import settle
from epserve.link.greeting import HANDSHAKE_S, MAX_GREETING, Greeting, Stranger
from epserve.link.wire import MAGIC, PREFIX

from .frames import PIECE, PIECE_BYTES, Arriving, JoinError, Large, Make, Outbox, Part, described
from .values import made

MAX_HEADER = 16 << 20
"""The status of a large model names each layer's experts."""
BEAT_S = 1.0
SILENCE_S = 10.0
"""A side that has been silent for so long counts as gone, since a host that vanished closes no connection."""
VERSION = 4


class Receiver(Protocol):
    """Gets the messages of a link, in the loop's thread. An exception ends the connection."""

    def arriving(self, header: dict[str, Any], nbytes: int) -> Make | None:
        """A message with payloads begins. Returns the maker of their room. None: they are passed over, without `arrived`."""

    def arrived(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None: ...

    def dropped(self, header: dict[str, Any]) -> None:
        """The rest of an `arriving` message, which was not passed over, will not come."""


class Link:
    """One connection. `send` never waits. Payloads go out by reference."""

    def __init__(self, sock: socket.socket):
        settle(sock)
        sock.setblocking(False)
        self._sock = sock
        self._outbox = Outbox()
        self._more, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._arriving: dict[int, Arriving] = {}
        self._ahead, self._have = memoryview(bytearray(PREFIX.size)), 0
        """The prefix of the next frame, as far as it has come."""
        self._heard = time.monotonic()
        self._closed = False
        self._max_header = MAX_GREETING  # for strangers

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Large | None:
        """Queues a message. Returns the argument of `drop` for a message that goes in pieces, else None."""
        if self._closed:
            return None
        large = self._outbox.add(header, tensors)
        self._empty.clear()
        self._more.set()
        return large

    def drop(self, sent: Large | None) -> None:
        """Drops the rest of a message that has become useless."""
        if not self._closed:
            self._outbox.drop(sent)
            self._more.set()

    async def write(self) -> None:
        """Sends queued messages until it is cancelled or the connection ends."""
        while True:
            parts = self._outbox.next()
            if parts is None:
                self._empty.set()
                self._more.clear()
                await self._more.wait()
                continue
            await self._send(parts)
            del parts  # while this waits, it would keep the last message's tensors
            if self._outbox.in_pieces:
                await asyncio.sleep(0)  # a socket that takes it all would keep others from adding small ones

    async def _send(self, parts: Sequence[Part]) -> None:
        """Sends all parts in as few system calls as possible."""
        views, loop = deque(memoryview(part) for part in parts if len(part)), asyncio.get_running_loop()
        while views:
            try:
                count = self._sock.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                await _ready(self._sock, loop.add_writer, loop.remove_writer)
                continue
            while views and count >= len(views[0]):
                count -= len(views.popleft())
            if count:
                views[0] = views[0][count:]

    async def sent(self) -> None:
        """Waits until all queued messages are out."""
        await self._empty.wait()

    async def read(self, receiver: Receiver) -> None:
        """Hands messages to the receiver until the connection ends. Raises the reason."""
        try:
            while True:
                await self._frame(receiver)
        finally:
            arriving, self._arriving = self._arriving, {}
            for each in arriving.values():
                if each.wanted:
                    receiver.dropped(each.header)

    async def _frame(self, receiver: Receiver) -> None:
        magic, size, stream = await self._prefix()
        if magic == PIECE:
            await self._piece(size, stream, receiver)
            return
        header = await self._json(size)
        if header.get("kind") == "dropped":
            given_up = self._arriving.pop(header["stream"], None)
            if given_up is not None and given_up.wanted:
                receiver.dropped(given_up.header)
            return
        described_ = described(header)
        if not described_:
            receiver.arrived(header, [])
            return
        make = receiver.arriving(header, sum(nbytes for _, _, nbytes in described_))
        arriving = Arriving(header, described_, make)
        if stream:
            if stream in self._arriving or arriving.complete:
                raise JoinError(f"stream {stream} is in use, or empty")
            self._arriving[stream] = arriving
            return
        try:
            for nbytes in [nbytes for _, _, nbytes in described_ if nbytes]:
                await self.receive(arriving.room(nbytes))
        except BaseException:
            if arriving.wanted:
                receiver.dropped(header)
            raise
        if arriving.wanted:
            receiver.arrived(header, arriving.tensors())

    async def _piece(self, size: int, stream: int, receiver: Receiver) -> None:
        arriving = self._arriving.get(stream)
        if arriving is None or size > PIECE_BYTES:
            raise JoinError(f"a piece of {size} bytes of stream {stream}, which is too large or of no message")
        await self.receive(arriving.room(size), frame_ends=True)
        if arriving.complete:
            del self._arriving[stream]
            if arriving.wanted:
                receiver.arrived(arriving.header, arriving.tensors())
        await asyncio.sleep(0)  # other tasks go on, also when pieces come without a pause

    async def header(self) -> dict[str, Any]:
        """Receives a frame without payloads. Returns its header. Raises JoinError."""
        magic, size, _ = await self._prefix()
        if magic != MAGIC:
            raise JoinError(f"not a message: starts with {magic!r}")
        return await self._json(size)

    async def _prefix(self) -> tuple[bytes, int, int]:
        await self.receive(self._ahead[self._have :])
        self._have = 0
        magic, size, stream = PREFIX.unpack(self._ahead)
        if magic not in (MAGIC, PIECE) or size > self._max_header:
            raise JoinError(f"not a frame: starts with {bytes(self._ahead)!r}")
        return magic, size, stream

    async def _json(self, size: int) -> dict[str, Any]:
        text = bytearray(size)
        await self.receive(memoryview(text))
        try:
            header = wire.parse(text, made)
        except ValueError as error:
            raise JoinError(f"not a header: {error}") from None
        if not isinstance(header.get("tensors"), list):
            raise JoinError("a header without tensors")
        return header

    async def receive(self, view: memoryview, *, frame_ends: bool = False) -> None:
        """Fills `view`. frame_ends: a prefix follows, which may be read in the same call."""
        loop = asyncio.get_running_loop()
        while view:
            try:
                count, *_ = self._sock.recvmsg_into([view, self._ahead] if frame_ends else [view])
            except (BlockingIOError, InterruptedError):
                await _ready(self._sock, loop.add_reader, loop.remove_reader)
                continue
            if not count:
                raise JoinError("the other side closed the connection")
            self._heard = time.monotonic()
            self._have = max(count - len(view), 0)
            view = view[count:]

    async def watch(self) -> None:
        """Sends signs of life. Raises JoinError when the other side has been silent for too long."""
        late = 0
        while True:
            silent = time.monotonic() - self._heard
            late = late + 1 if silent > SILENCE_S else 0
            if late > 1:  # the first time, this process may not have listened
                raise JoinError(f"nothing was heard for {silent:.1f} s")
            self.send({"kind": "beat"})
            await asyncio.sleep(BEAT_S)

    async def serve(self, receiver: Receiver) -> None:
        """Reads, writes and watches until one of them ends. Closes the connection and raises the reason."""
        tasks = [asyncio.ensure_future(each) for each in (self.read(receiver), self.write(), self.watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._closed = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close()

    def hang_up(self) -> None:
        """Ends reading and writing, which then closes the connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self.hang_up()
        self._sock.close()

    async def greet(self, secret: bytes, *, joining: bool) -> None:
        """Greets the other side, which makes the same call. Raises ConnectionError for a stranger."""
        greeting = Greeting(secret, protocol="join", version=VERSION, connecting=joining)
        async with asyncio.timeout(HANDSHAKE_S):
            await self._say(greeting.hello())
            greeting.hear(await self.header())
            try:
                if joining:
                    await self._say(greeting.proof())
                greeting.check(await self.header())
            except Stranger as error:
                raise JoinError(f"{error} (server.join_secret_file)") from None
            if not joining:
                await self._say(greeting.proof())
            self._max_header = MAX_HEADER

    async def _say(self, header: Mapping[str, Any]) -> None:
        (frame,) = wire.encode(header, [])
        await asyncio.get_running_loop().sock_sendall(self._sock, frame)


async def _ready(sock: socket.socket, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    """Waits until the socket can be read, or written."""
    ready = asyncio.get_running_loop().create_future()
    number = sock.fileno()
    if number < 0:
        raise JoinError("the connection is closed")
    add(number, _set, ready)
    try:
        await ready
    finally:
        remove(number)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# Addresses: host:port, or unix:@NAME for an abstract socket of this host.


def connect(address: str) -> socket.socket:
    """Connects, and blocks meanwhile. Raises OSError, or ConfigError for text that is no address."""
    if address.startswith("unix:@"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(HANDSHAKE_S)
            sock.connect("\0" + address.removeprefix("unix:@"))
        except BaseException:
            sock.close()
            raise
        return sock
    return socket.create_connection(parse_address(address), timeout=HANDSHAKE_S)


def parse_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"join: {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
