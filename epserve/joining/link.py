"""A connection between a front end that has joined and the process that orders the steps. No pickle, no Ray, no gRPC.

Both sides prove that they know the secret (link/greeting.py). Nothing is encrypted, as between front end and ranks. What goes
over it: `join_frames`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from epserve.errors import ConfigError
from epserve.link.greeting import HANDSHAKE_S, MAX_GREETING, Greeting, Stranger

from .frames import MAGIC, PIECE, PIECE_BYTES, PREFIX, Arriving, JoinError, Large, Make, Outbox, Part, described
from .values import made

MAX_HEADER = 16 << 20
"""The status of a large model names each layer's experts."""
SOCKET_BUFFER = 4 << 20
BEAT_S = 1.0
SILENCE_S = 10.0
"""A side that has not been heard of for so long is taken for gone: a host that vanished closes no connection."""
VERSION = 3


class Receiver(Protocol):
    """Who gets the messages of a link, in the loop's thread. What these raise ends the connection."""

    def arriving(self, header: dict[str, Any], nbytes: int) -> Make | None:
        """A message with payloads begins. What makes room for them; None: they are passed over, and `arrived` is not called."""

    def arrived(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None: ...

    def dropped(self, header: dict[str, Any]) -> None:
        """The rest of what was `arriving`, and was not passed over, will not come."""


class Link:
    """One connection. `send` never waits; payloads go out by reference."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._outbox = Outbox()
        self._more, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._arriving: dict[int, Arriving] = {}
        self._ahead, self._have = memoryview(bytearray(PREFIX.size)), 0
        """The next frame's prefix, as far as it is here."""
        self._heard = time.monotonic()
        self._closed = False
        self._max_header = MAX_GREETING  # of strangers

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Large | None:
        """What `drop` takes, for a message that goes in pieces."""
        if self._closed:
            return None
        large = self._outbox.add(header, tensors)
        self._empty.clear()
        self._more.set()
        return large

    def drop(self, sent: Large | None) -> None:
        """The rest of a message that nobody wants any more need not be sent."""
        if not self._closed:
            self._outbox.drop(sent)
            self._more.set()

    async def write(self) -> None:
        """Sends what `send` has queued, until cancelled or the connection ends."""
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
        """All of them, with as few calls of the system as it goes."""
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
        """Until all that is queued is out."""
        await self._empty.wait()

    async def read(self, receiver: Receiver) -> None:
        """Hands `receiver` what comes, until the connection ends, which raises."""
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
        await asyncio.sleep(0)  # what small messages have begun goes on, also where pieces come without a pause

    async def header(self) -> dict[str, Any]:
        """The next frame's header, of a frame without payloads. Raises JoinError."""
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
            header = json.loads(text, object_hook=made)
        except ValueError as error:
            raise JoinError(f"not a header: {error}") from None
        if not isinstance(header, dict) or not isinstance(header.get("tensors"), list):
            raise JoinError("a header without tensors")
        return header

    async def receive(self, view: memoryview, *, frame_ends: bool = False) -> None:
        """Fills `view`. frame_ends: a prefix follows it, which may be read along."""
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
        """Says that this side lives. Raises JoinError when the other one has been silent for too long."""
        late = 0
        while True:
            silent = time.monotonic() - self._heard
            late = late + 1 if silent > SILENCE_S else 0
            if late > 1:  # the first time it may be this process that did not listen
                raise JoinError(f"nothing was heard for {silent:.1f} s")
            self.send({"kind": "beat"})
            await asyncio.sleep(BEAT_S)

    async def serve(self, receiver: Receiver) -> None:
        """Reads, writes and watches until one of them ends. Raises why; closes the connection."""
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
        """What reads or writes here ends, and then closes the connection."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self.hang_up()
        self._sock.close()

    async def greet(self, secret: bytes, *, joining: bool) -> None:
        """Raises ConnectionError for a stranger. The same call on both sides."""
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
        text = json.dumps({**header, "tensors": []}).encode()
        await asyncio.get_running_loop().sock_sendall(self._sock, PREFIX.pack(MAGIC, len(text), 0) + text)


async def _ready(sock: socket.socket, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    """Until the socket can be read, or written."""
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
    """Blocks. Raises OSError, or ConfigError for what is no address."""
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
