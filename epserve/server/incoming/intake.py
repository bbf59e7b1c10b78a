"""Counts the bytes of incomplete messages, which gRPC keeps, and ends calls when they become too many.

gRPC shows a message when it is whole. The incomplete part is the bytes that the kernel has counted on a connection, less the
messages that came over it. The count is an estimate: a share of the messages allows for headers and frames, and a client that
cancels a call in the middle of its message is trusted to have freed it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from epserve.errors import EpserveError, Overloaded
from epserve.protocol.dropping import drop

from . import sockets

log = logging.getLogger("epserve.server")

SAMPLE_S = 0.5
"""The time between two looks at the connections. Their bytes in that time may pass the limit."""
IDLE_SAMPLES = 60
"""While no message is awaited, only one in this number of looks is taken, to forget connections that have gone."""
SLACK_BYTES = 256 << 10
"""The bytes of each connection that do not count: settings, the first windows."""
MESSAGE_BYTES, MESSAGE_SHARE = 1024, 50
"""The allowance beside each message: MESSAGE_BYTES, and one part in MESSAGE_SHARE of its own bytes."""


class Read:
    """Represents a method that waits for its one message. `fail` ends the wait."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[Any] = task
        self.failure: EpserveError | None = None
        self.whole = False

    def fail(self, error: EpserveError) -> None:
        if self.failure is None:
            self.failure = error
            self.task.cancel()


class Peer:
    """Counts one connection: its calls, and its bytes since it last had no call. `name`: gRPC's name of it."""

    def __init__(self, name: str):
        self.name = name
        self.calls = 0
        self.held = 0
        self.reads: set[Read] = set()
        self.streams: set[asyncio.Task[Any]] = set()
        self._received = self._start = self._messages = 0

    def joined(self, stream: asyncio.Task[Any] | None) -> None:
        self.calls += 1
        if stream is not None:
            self.streams.add(stream)

    def left(self, stream: asyncio.Task[Any] | None) -> None:
        self.calls -= 1
        if stream is not None:
            self.streams.discard(stream)
        if not self.calls:
            self._begin()

    def delivered(self, nbytes: int) -> None:
        """Counts a whole message that came."""
        self._messages += nbytes + MESSAGE_BYTES + nbytes // MESSAGE_SHARE

    @contextmanager
    def read(self) -> Iterator[Read]:
        read = Read()
        self.reads.add(read)
        try:
            yield read
        finally:
            self.reads.discard(read)
            if not read.whole and not self.reads:
                self._begin()  # the bytes of that message are freed

    def sample(self, received: int) -> None:
        """Updates the count. received: bytes that the kernel has counted since the connection began."""
        if received < self._received:  # it is another connection from the same port
            self._start = 0
        self._received = received
        if not self.calls:
            self._begin()
        self.held = max(received - self._start - self._messages - SLACK_BYTES, 0)

    def shed(self, error: Overloaded) -> None:
        """Ends all calls that could hold a part of a message."""
        for read in list(self.reads):
            read.fail(error)
        for task in list(self.streams):
            drop(task)
        self._begin()

    def _begin(self) -> None:
        self._start, self._messages, self.held = self._received, 0, 0


class Intake:
    """Watches all connections of a server, except those over its Unix-domain socket, which only its own user can open.

    It belongs to one event loop. limit: the number of bytes that may be held.
    """

    def __init__(self, limit: int):
        self.port = 0
        """The server's port, once it is bound."""
        self._limit = limit
        self._peers: dict[str, Peer] = {}
        self._blind = False
        """The kernel tells nothing, so connections are known by their calls alone."""

    @property
    def waiting(self) -> int:
        """Returns the number of calls whose message is not complete."""
        return sum(len(peer.reads) for peer in self._peers.values())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of incomplete messages at the last look."""
        return sum(peer.held for peer in self._peers.values())

    @contextmanager
    def call(self, name: str, *, stream: asyncio.Task[Any] | None = None) -> Iterator[Peer]:
        """Counts a call. stream: the task of a call that reads many messages."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name)
        peer.joined(stream)
        try:
            yield peer
        finally:
            peer.left(stream)
            if self._blind and not peer.calls:
                self._peers.pop(name, None)

    async def watch(self) -> None:
        """Looks at the connections until cancelled."""
        for number in itertools.count(1):
            await asyncio.sleep(SAMPLE_S)
            waiting = any(peer.reads or peer.streams for peer in self._peers.values())
            if not waiting and (number % IDLE_SAMPLES or not self._peers):
                continue
            try:
                found = await asyncio.to_thread(sockets.connections, source_port=self.port)
            except OSError as error:
                text = "messages that are not whole are not counted, only their time is limited: no netlink here: %s"
                log.warning(text, error)
                self._blind = True
                return
            self.take(found)

    def take(self, found: Iterable[sockets.Connection]) -> None:
        """Counts again. Above the limit, the connections with most bytes lose their calls."""
        received = {end.peer: end.received for end in found}
        for name, peer in list(self._peers.items()):
            if name in received:
                peer.sample(received[name])
            elif not peer.calls:
                del self._peers[name]
        excess = self.nbytes - self._limit
        for peer in sorted(self._peers.values(), key=lambda peer: peer.held, reverse=True):
            if excess <= 0 or not peer.held:
                return
            excess -= peer.held
            log.warning("%s holds %d bytes of messages that are not whole; its calls are ended", peer.name, peer.held)
            text = f"{peer.held} bytes of this connection's messages are here, none of them whole"
            peer.shed(Overloaded(f"{text} (server.max_buffered_bytes); send fewer at once, or faster", retry_after_s=1))
