"""The board of the front ends of one host: one of them posts an entry, and all of them then have it.

Posts go to the process that orders the steps. It may be elsewhere, and passes them on to the front ends of the same place. An
entry lives as long as the connection of its poster.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from epserve.process.boot import boot_id

log = logging.getLogger(__name__)

POST_S = 2.0
"""Seconds that a post waits for front ends that have not taken it yet."""
KINDS = ("post", "posted", "remove", "used")
Value = dict[str, Any]


def this_place() -> str:
    """Returns the name of this place. It is equal for processes with the same boot of one kernel and mount of /dev/shm."""
    try:
        return f"{boot_id()}/{os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""


class Neighbour(Protocol):
    """A process on the other side of a connection. `place` is its own. None: it passes entries of all places on."""

    place: str | None

    def ask(self, header: dict[str, Any]) -> asyncio.Future[Any]:
        """Sends a message. The future gets the other side's answer. A later `tell` arrives later."""

    def tell(self, header: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class _Entry:
    value: Value
    place: str
    source: Neighbour | None
    """The neighbour with whose connection it lives. None: it was posted here."""


@dataclass(slots=True)
class Handlers:
    """Callbacks of the owner of the entries, for entries that others have posted, removed or used."""

    posted: Callable[[str, Value], None] = lambda key, value: None
    removed: Callable[[str], None] = lambda key: None
    used: Callable[[list[str]], None] = lambda keys: None


@dataclass(slots=True)
class Board:
    """The board of one process. Both ends of a connection have this class."""

    place: str = field(default_factory=this_place)
    on: Handlers = field(default_factory=Handlers)
    _entries: dict[tuple[str, str], _Entry] = field(default_factory=dict)
    """By place and key."""
    _neighbours: list[Neighbour] = field(default_factory=list)

    def subscribe(self, handlers: Handlers) -> None:
        """Sets the callbacks, and calls `posted` for all present entries."""
        self.on = handlers
        for (place, key), entry in list(self._entries.items()):
            if entry.source is not None and place == self.place:
                handlers.posted(key, entry.value)

    async def post(self, key: str, value: Value) -> bool:
        """Posts an entry. Returns when all others of this place have it, or after `POST_S`. False: the key was posted before."""
        return await self._post(self.place, key, value, None)

    def remove(self, key: str) -> None:
        """Removes an entry of any poster."""
        self._remove(self.place, key, None)

    def use(self, keys: Iterable[str]) -> None:
        """Tells the others that these entries are in use."""
        if known := [key for key in keys if (self.place, key) in self._entries]:
            self._tell(self.place, {"kind": "used", "place": self.place, "keys": known}, None)

    # Calls of connections.

    def joined(self, neighbour: Neighbour) -> None:
        """Adds a neighbour and tells it all entries of its place."""
        self._neighbours.append(neighbour)
        for (place, key), entry in list(self._entries.items()):
            if entry.source is not neighbour and neighbour.place in (place, None):
                neighbour.tell({"kind": "post", "place": place, "key": key, "value": entry.value, "call": 0})

    def left(self, neighbour: Neighbour) -> None:
        """Forgets a neighbour and removes its entries."""
        if neighbour in self._neighbours:
            self._neighbours.remove(neighbour)
        for (place, key), entry in list(self._entries.items()):
            if entry.source is neighbour:
                self._remove(place, key, neighbour)

    async def came(self, neighbour: Neighbour, header: dict[str, Any]) -> bool:
        """Takes a message of kind post, remove or used. Raises KeyError for other messages."""
        kind, place = header["kind"], str(header["place"])
        if kind == "post":
            return await self._post(place, str(header["key"]), header["value"], neighbour)
        if kind == "remove":
            self._remove(place, str(header["key"]), neighbour)
        elif kind == "used":
            keys = [str(key) for key in header["keys"]]
            if place == self.place:
                self.on.used(keys)
            self._tell(place, header, neighbour)
        return True

    async def _post(self, place: str, key: str, value: Value, source: Neighbour | None) -> bool:
        if (place, key) in self._entries:
            return False
        entry = self._entries[place, key] = _Entry(value, place, source)
        if source is not None and place == self.place:
            self.on.posted(key, value)
        header = {"kind": "post", "place": place, "key": key, "value": value}
        asking = [each.ask(header) for each in self._others(place, source)]
        taken = [answer is not False for answer in await asyncio.gather(*(_answer(each, key) for each in asking))]
        # NOTE: only a neighbour that passes entries on can have one that this process lacks
        if not all(taken) and self._entries.get((place, key)) is entry:
            self._remove(place, key, source)
            return False
        return True

    def _remove(self, place: str, key: str, source: Neighbour | None) -> None:
        if self._entries.pop((place, key), None) is None:
            return
        if source is not None and place == self.place:
            self.on.removed(key)
        self._tell(place, {"kind": "remove", "place": place, "key": key}, source)

    def _tell(self, place: str, header: dict[str, Any], source: Neighbour | None) -> None:
        for each in self._others(place, source):
            each.tell(header)

    def _others(self, place: str, source: Neighbour | None) -> list[Neighbour]:
        return [each for each in self._neighbours if each is not source and each.place in (place, None)]


async def _answer(asked: asyncio.Future[Any], key: str) -> Any:
    """Returns the answer, or None when it is late, so that one slow front end does not hold up the others."""
    try:
        async with asyncio.timeout(POST_S):
            return await asked
    except TimeoutError:
        log.warning("%s: a front end of this host did not say within %g s that it knows it", key, POST_S)
        return None


class LinkNeighbour:
    """The process on the other side of a link. Call `close()` when the link has ended."""

    def __init__(self, board: Board, send: Callable[[dict[str, Any]], Any], place: str | None):
        """send: queues a message. place: the place of the other side, as in `Neighbour`."""
        self.place = place
        self._board, self._send = board, send
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, header: dict[str, Any]) -> asyncio.Future[Any]:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = future
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        self._send({**header, "call": number})
        return future

    def tell(self, header: dict[str, Any]) -> None:
        self._send(header)

    def came(self, header: dict[str, Any]) -> None:
        """Takes a message of a kind of `KINDS`. Raises KeyError for an incomplete one."""
        if header["kind"] == "posted":
            future = self._asked.get(header["call"])
            if future is not None and not future.done():
                future.set_result(header["value"])
            return
        task = asyncio.ensure_future(
            self._answer(header, header["place"])
        )  # tasks begin in the order of their creation
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, header: dict[str, Any], _place: str) -> None:
        try:
            taken = await self._board.came(self, header)
        except (KeyError, TypeError, ValueError):
            log.exception("a message for the board that is none")
            return
        if header.get("call"):
            self._send({"kind": "posted", "call": header["call"], "value": taken})

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for future in list(self._asked.values()):
            if not future.done():
                future.set_result(None)
        self._board.left(self)
