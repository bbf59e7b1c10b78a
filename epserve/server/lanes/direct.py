"""This module decides who serves a lane in host memory: a rank itself, or the thread of this process.

A rank serves lanes while it is the only one, which saves a call two of four wake-ups and most of its Python. All that is rare is
done here, after the lane has come back: refusals, limits, withdrawn tokens, traces, calls whose rank has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epserve.engine.face import LaneServer
from epserve.errors import EpserveError
from epserve.protocol import lane_words as lw
from epserve.server.calls import Calls

from .lane import Lane
from .poller import Poller

log = logging.getLogger("epserve.server")

LOOK_S = 0.25
"""The pause between two looks at the lanes: rights and counts are so old at most."""
BACK_S = 5.0
"""Longest wait for a lane that was asked back, when the service stops."""


Keep = Callable[[socket.socket], bool]
"""Takes the connection over which a rank gets a lane's memory. Returns False where the rank comes too late."""


@dataclass(slots=True, eq=False)
class _Held:
    """A lane at a rank. `held`: the connection that lasts as long. `rung`: the sum of its bells at the last look."""

    lane: Lane
    served: Any
    held: socket.socket
    asked: bool = False
    rung: int = -1


class DirectLanes:
    """In the server's loop. `calls` and `joined` count since the start."""

    def __init__(self, calls: Calls, poller: Poller, key: Callable[[Lane, Keep], tuple[str, str]]):
        """key: returns the socket that hands a lane's memory out, and a key for it. `Keep` takes its connection."""
        self._calls, self._poller, self._key = calls, poller, key
        self._held: dict[Lane, _Held] = {}
        self._giving: set[Lane] = set()
        self._looking: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self.calls = self.joined = 0

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._held)

    async def give(self, lane: Lane) -> None:
        """Lets the rank serve a lane, if it may and can. Otherwise the thread goes on with it."""
        server = self._calls.engine.direct_lanes
        if server is None or lane in self._held or lane in self._giving or not self._may(lane, server):
            return
        self._giving.add(lane)
        try:
            if await self._poller.release(lane):
                await self._give(lane, server)
        finally:
            self._giving.discard(lane)

    async def _give(self, lane: Lane, server: LaneServer) -> None:
        brought: list[socket.socket] = []
        waiting = True

        def keep(sock: socket.socket) -> bool:
            if waiting:
                brought.append(sock)
            return waiting

        served = None
        try:
            name, key = self._key(lane, keep)
            served = await server.give({**_described(lane), "socket": name, "key": key}, lane.name, self._count)
        finally:
            waiting = False
            if brought:  # without `served` the rank is about to let it go
                self._watch(lane, served, brought[0])
            else:
                self._back(lane)
        if lane.closed:
            self.take(lane)

    def _watch(self, lane: Lane, served: Any, sock: socket.socket) -> None:
        held = self._held[lane] = _Held(lane, served, sock, asked=False)
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable, held)

    def _readable(self, held: _Held) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                if held.held.recv(1 << 12):
                    return
            except ConnectionError:
                pass
            self._loop.remove_reader(held.held)
            held.held.close()
            self.take(held.lane)  # for the news of its last calls
            self._held.pop(held.lane, None)
            self._back(held.lane)

    def _back(self, lane: Lane) -> None:
        """The thread serves the lane again, with the calls that have no answer yet."""
        if not lane.closed:
            lane.resume()
            self._poller.add(lane)

    def take(self, lane: Lane) -> None:
        """Asks for a lane back, once. It comes after the step that the rank is at."""
        held = self._held.get(lane)
        if (
            held is not None
            and not held.asked
            and held.served is not None
            and (server := self._calls.engine.direct_lanes) is not None
        ):
            held.asked = True
            server.take(held.served)

    async def take_all(self) -> None:
        """Returns when the thread serves all lanes. None is given any more."""
        self._stopped = True
        if self._looking is not None:
            self._looking.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BACK_S):
                while self._held or self._giving:
                    for lane in self.lanes:
                        self.take(lane)
                    await asyncio.sleep(0.002)

    async def stop(self) -> None:
        await self.take_all()
        for held in self._held.values():
            self._loop.remove_reader(held.held)
            held.held.close()
        self._held.clear()

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look())

    def _may(self, lane: Lane, server: LaneServer) -> bool:
        """Returns whether the rank may serve a lane. A client's limits and traces are counted in this process."""
        try:
            lane.caller.account.current()
        except EpserveError:
            return False
        return (
            server.possible
            and not self._stopped
            and not lane.closed
            and not lane.layout.on_gpu
            and lane.layout.cap <= server.max_tokens
            and not self._calls.draining.is_set()
            and not self._calls.observer.tracing.on
            and lane.caller.account.claim(0) is None
        )

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            server = self._calls.engine.direct_lanes
            try:
                for lane in self.lanes:
                    lane.beat(int(time.monotonic()))
                    if server is None or not self._may(lane, server):
                        self.take(lane)
                for lane in self._poller.lanes:
                    await self.give(lane)
                if server is not None and self._have_rung():
                    await server.news()
            except Exception:  # a defect must not end the look at rights
                log.exception("looking after lanes")

    def _have_rung(self) -> bool:
        """Returns whether any bell has another word than at the last look. An idle lane costs a rank nothing."""
        found = False
        for held in self._held.values():
            rung, held.rung = held.rung, held.lane.rung_sum()
            found |= held.rung != rung
        return found

    def _count(self, call: Any) -> None:
        """Counts a call (`engine.direct_lanes.DoneCall`) as any request."""
        observer, info = self._calls.observer, self._calls.engine.info
        self.calls += 1
        self.joined += call.joined
        size, seconds = call.tokens * info.hidden * info.dtype.itemsize, call.ended - call.seen
        observer.metrics.request("OK", seconds, tokens=call.tokens, received=size, sent=size)
        observer.history.request(seconds)


def _described(lane: Lane) -> dict[str, Any]:
    """Returns what the rank needs (`rank.lanes.direct.DirectLanes.told`)."""
    layout = lane.layout
    slots = [
        {"bell": lw.bell_at(number), "answer": lw.answer_at(number), "last": slot.last,
         **{name: layout.part(number, name)[0] for name in ("x", "y", "ids", "weights")}}
        for number, slot in enumerate(lane.slots)
    ]  # fmt: skip
    return {
        "size": layout.shared, "layers": sorted(lane.layers), "cap": layout.cap, "hidden": layout.hidden, "top_k": layout.top_k,
        "slots": slots,
    }  # fmt: skip
