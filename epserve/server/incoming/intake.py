"""Counts the bytes of incomplete messages, which gRPC keeps, and ends calls when they become too many.

gRPC shows a message when it is whole. The incomplete part is the bytes that the kernel has counted on a connection, less the
messages that came over it. Two times a second the server looks at the kernel's counts. Headers and frames come beside the
messages, so each look allows for some bytes beside the messages since the look before. The unused allowance of a look lapses, so
many small messages do not hide a part of a large one. The bytes of a call that has ended are gone, so the bytes of a connection
since its oldest open call began are an upper bound.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from epserve.errors import EpserveError, Overloaded
from epserve.protocol.dropping import drop

from . import sockets

log = logging.getLogger("epserve.server")

SAMPLE_S = 0.5
"""The time between two looks at the connections. Their bytes in that time may pass the limit."""
IDLE_SAMPLES = 60
"""While no call is open, only one in this number of looks is taken, to forget connections that have gone."""
SLACK_BYTES = 256 << 10
"""The bytes of each connection that do not count: settings, the first windows. They are fewer if there are many connections."""
SLACK_SHARE = 4
"""The slack of all connections together is at most one part in SLACK_SHARE of the limit."""
CALL_BYTES, MESSAGE_BYTES, MESSAGE_SHARE = 1024, 128, 100
"""The allowance beside the messages between two looks: CALL_BYTES for each call, MESSAGE_BYTES for each message, and one part in
MESSAGE_SHARE of its own bytes."""
SHOWN = 3
"""The most connections that one line of the log names."""


@dataclass(slots=True)
class Look:
    """Notes one look at a connection. `received`: the bytes since the connection began."""

    number: int
    received: int
    whole: int = 0
    """The bytes of complete messages, of the calls that referred to this look when they came."""


class Arrival:
    """Represents an open call. `fail` ends it. `waits`: its one message is not here yet.

    NOTE: the task of a call refers to this object, so this one does not refer to the
    task. A call that is dropped is free only when nothing refers to it.
    """

    def __init__(self, peer: Peer):
        self.peer = peer
        self.failure: EpserveError | None = None
        self.waits = False
        self.since = self.following = peer.before()
        """The look before the bytes of this call, apart from its complete messages."""

    def delivered(self, nbytes: int) -> None:
        """Counts a complete message. A part of the next one may have come before its end."""
        self.peer.delivered(nbytes, self.since)
        self.since, self.following = self.following, self.peer.before()

    def fail(self, error: EpserveError) -> None:
        """Ends the call: with a status while the method waits for its message, otherwise by a reset of the stream."""
        task = self.peer.calls.get(self)
        if task is None:
            return
        if not self.waits:
            drop(task)
        elif self.failure is None:
            self.failure = error
            task.cancel()


class Peer:
    """Counts one connection: its calls and its bytes. `name`: gRPC's name of it."""

    def __init__(self, name: str):
        self.name = name
        self.calls: dict[Arrival, asyncio.Task[Any]] = {}
        self.held = 0
        """What counts as held, as of the last look."""
        self._looks = [Look(0, 0)]
        """The looks that open calls refer to, and the last two."""
        self._inode = 0
        self._unfinished = 0
        """An upper bound of the bytes of incomplete messages, at the last look."""
        self._whole = self._beside = self._counted = self._allowed = 0
        self._marked: tuple[int, int, int] | None = None

    def before(self) -> Look:
        """Returns the last look but one, since gRPC may have taken bytes of a new call shortly before it shows the call."""
        return self._looks[-2] if len(self._looks) > 1 else self._looks[-1]

    @property
    def active(self) -> bool:
        """Tells whether another look can find anything."""
        return bool(self.calls or self._unfinished)

    def joined(self, call: Arrival) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._beside += CALL_BYTES
        self.calls[call] = task

    def left(self, call: Arrival) -> None:
        self.calls.pop(call, None)
        if not self.calls:
            self.held = 0

    def delivered(self, nbytes: int, since: Look) -> None:
        """Counts a complete message, whose bytes came after `since`."""
        since.whole += nbytes
        self._whole += nbytes
        self._beside += MESSAGE_BYTES + nbytes // MESSAGE_SHARE

    def mark(self) -> None:
        """Notes the complete messages. The next count of the kernel has all their bytes."""
        needed = {look.number for call in self.calls for look in (call.since, call.following)}
        oldest = min(needed, default=self._looks[-1].number)
        kept: list[Look] = []
        for look in self._looks:
            if look.number in needed or look.number + 1 >= self._looks[-1].number:
                kept.append(look)
            elif look.number > oldest:
                kept[-1].whole += look.whole
        self._looks = kept
        since = [look for look in kept if look.number >= oldest]
        self._marked = since[0].received + sum(look.whole for look in since), self._whole, self._beside

    def sample(self, found: sockets.Connection, slack: int) -> None:
        """Updates the count. slack: the number of bytes that do not count."""
        if self._marked is None:  # the connection is newer than the last mark
            return
        (least, whole, beside), last, received = self._marked, self._looks[-1], found.received
        came = received - last.received - (whole - self._counted)
        if received < last.received or self._inode not in (
            0,
            found.inode,
        ):  # it is another connection from the same port
            self._unfinished, least, came = 0, 0, received
            self._looks = [Look(last.number, 0)]
            for call in self.calls:
                call.since = call.following = self._looks[-1]
        allowed = min(max(came, 0), beside - self._allowed)
        self._unfinished = min(max(self._unfinished + came - allowed, 0), max(received - least, 0))
        self._counted, self._allowed, self._marked, self._inode = whole, beside, None, found.inode
        self._looks.append(Look(last.number + 1, received))
        self.held = max(self._unfinished - slack, 0) if self.calls else 0

    def shed(self, error: Overloaded) -> None:
        """Ends all calls, since each could hold a part of a message."""
        for call in self.calls:
            call.fail(error)
        self.calls.clear()
        self.held = 0


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
        return sum(call.waits for peer in self._peers.values() for call in peer.calls)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of incomplete messages at the last look."""
        return sum(peer.held for peer in self._peers.values())

    def begin(self, name: str) -> Arrival:
        """Counts a call of this task, which came over the connection `name`."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name)
        call = Arrival(peer)
        peer.joined(call)
        return call

    def end(self, call: Arrival) -> None:
        call.peer.left(call)
        if self._blind and not call.peer.calls:
            self._peers.pop(call.peer.name, None)

    async def watch(self) -> None:
        """Looks at the connections until cancelled."""
        for number in itertools.count(1):
            await asyncio.sleep(SAMPLE_S)
            active = any(peer.active for peer in self._peers.values())
            if not active and (number % IDLE_SAMPLES or not self._peers):
                continue
            self.mark()
            try:
                found = await asyncio.to_thread(sockets.connections, source_port=self.port)
            except OSError as error:
                text = "messages that are not whole are not counted, only their time is limited: no netlink here: %s"
                log.warning(text, error)
                self._blind = True
                return
            self.take(found)

    def mark(self) -> None:
        """Notes all complete messages. It runs before the kernel is asked for what `take` gets."""
        for peer in self._peers.values():
            peer.mark()

    def take(self, found: Iterable[sockets.Connection]) -> None:
        """Counts again. Above the limit, the connections with most bytes lose their calls."""
        ends = {end.peer: end for end in found}
        slack = min(SLACK_BYTES, self._limit // SLACK_SHARE // max(len(ends), 1))
        for name, peer in list(self._peers.items()):
            if name in ends:
                peer.sample(ends[name], slack)
            elif not peer.calls:
                del self._peers[name]
        self._enforce()

    def _enforce(self) -> None:
        held = self.nbytes
        excess, ended = held - self._limit, []
        for peer in sorted(self._peers.values(), key=lambda peer: peer.held, reverse=True):
            if excess <= 0:
                break
            text = f"{peer.held} bytes of this connection's messages are here, none of them whole"
            excess -= peer.held
            ended.append(f"{peer.name} ({peer.held})")
            peer.shed(Overloaded(f"{text} (server.max_buffered_bytes); send fewer at once, or faster", retry_after_s=1))
        if ended:
            more = f" and {len(ended) - SHOWN} more" if len(ended) > SHOWN else ""
            text = "%d bytes of messages that are not whole, the limit is %d: the calls of %s%s are ended"
            log.warning(text, held, self._limit, ", ".join(ended[:SHOWN]), more)
