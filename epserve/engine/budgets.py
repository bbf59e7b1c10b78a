"""The use that clients make of their limits, over all front ends of a service.

The process that orders the steps has the exact numbers. Each request that a front end sends there brings its claim along, and is
refused there if the client has used up its limit elsewhere. That takes no further message. Each side also reports its own bytes
to the other side, at most every `REPORT_S`, so that doors refuse early and count requests that have not gone on yet.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from epserve.errors import Overloaded

REPORT_S = 0.05
"""Seconds by which a front end's knowledge of the others may be late, beside the time of a message."""
BUSY_RETRY_S = 0.05
"""Wait that a client over its bytes is told: about one request's time."""
HERE = "here"
"""This process as the holder of bytes. Other holders are peers."""
MOST_IDLE = 1000
"""Number of clients from which idle ones are forgotten. A full bucket is worth no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request's use of its client's limits.

    Its `nbytes` count against `bytes_in_flight` (bytes), its tokens against `tokens_per_s` (model tokens a second). Infinity is
    no limit.
    """

    tokens_per_s: float
    bytes_in_flight: float
    nbytes: int

    def as_json(self) -> list[Any]:
        return [None if value == math.inf else value for value in (self.tokens_per_s, self.bytes_in_flight)] + [
            self.nbytes
        ]

    @classmethod
    def from_json(cls, value: list[Any]) -> Claim:
        """Raises ValueError or TypeError for data that `as_json` does not make."""
        rate, most, nbytes = (math.inf if each is None else float(each) for each in value)
        if not (rate > 0 and most > 0 and 0 <= nbytes < math.inf):
            raise ValueError(f"a claim of {value}")
        return cls(tokens_per_s=rate, bytes_in_flight=most, nbytes=int(nbytes))


class _Bucket:
    """A bucket with one second's worth of a rate.

    Its level is in seconds of the rate, so that it keeps its meaning when the rate changes. Below 0 it is a debt.
    """

    __slots__ = ("_at", "_level")

    def __init__(self, level: float = 1.0):
        self._level, self._at = level, time.monotonic()

    @property
    def level(self) -> float:
        now = time.monotonic()
        self._level, self._at = min(1.0, self._level + now - self._at), now
        return self._level

    def add(self, seconds: float) -> None:
        self._level += seconds


class Budget:
    """One client's use of its limits. All calls come from one event loop."""

    def __init__(self, name: str, changed: Callable[[str], None] = lambda name: None):
        """changed: is called with the client's name when there is news for other processes."""
        self.name, self._changed = name, changed
        self._own = _Bucket()
        self._told: _Bucket | None = None  # the bucket of the process that orders the steps, if that is another one
        self._held: Counter[Any] = Counter()  # holder -> bytes of its requests
        self._reported: dict[Any, int] = {}  # holder -> bytes at its door, including those that it holds here

    @property
    def level(self) -> float:
        """Returns the level of the bucket, in seconds of the rate."""
        return self._own.level

    def held(self, holder: Any = HERE) -> int:
        return self._held.get(holder, 0)

    def elsewhere(self, holder: Any = HERE) -> int:
        """Returns the bytes of all other holders, as far as this process knows them."""
        others = {*self._held, *self._reported} - {holder}
        return sum(max(self.held(each), self._reported.get(each, 0)) for each in others)

    @property
    def idle(self) -> bool:
        full = self.level >= 1.0 and (self._told is None or self._told.level >= 1.0)
        return full and not self._held and not self._reported

    def spend(self, tokens: int, rate: float) -> None:
        """Takes tokens from the bucket. A request above one second's worth needs a full bucket and leaves a debt.

        Raises Overloaded with the time after which the client may come again.
        """
        if rate == math.inf or not tokens:
            return
        cost = tokens / rate
        buckets = [self._own] if self._told is None else [self._own, self._told]
        missing = min(cost, 1.0) - min(bucket.level for bucket in buckets)
        if missing > 1e-9:
            raise Overloaded(
                f"client {self.name!r}: {tokens} tokens would pass its limit of {rate:g} a second (tokens_per_s)",
                retry_after_s=missing,
            )
        for bucket in buckets:
            bucket.add(-cost)
        self._changed(self.name)

    def give_back(self, tokens: int, rate: float) -> None:
        """Gives back the tokens of a request that the service refused."""
        if rate == math.inf or not tokens:
            return
        for bucket in (self._own, self._told):
            if bucket is not None:
                bucket.add(tokens / rate)
        self._changed(self.name)

    def hold(self, nbytes: int, limit: float) -> None:
        """Counts bytes at this process's own door until `release`. A single request of any size passes. Raises Overloaded."""
        self._hold(nbytes, limit, HERE, self.held() + self.elsewhere())

    def hold_for(self, holder: Any, nbytes: int, limit: float) -> None:
        """Counts bytes of a request that another front end has sent here. Raises Overloaded.

        The limit covers requests that are here, not those at doors. Otherwise two simultaneous requests would refuse each other.
        """
        self._hold(nbytes, limit, holder, sum(self._held.values()))

    def _hold(self, nbytes: int, limit: float, holder: Any, held: int) -> None:
        if held and held + nbytes > limit:
            raise Overloaded(
                f"client {self.name!r}: {held} bytes of its requests are here, {nbytes} more would pass its"
                f" limit of {limit:.0f} (bytes_in_flight)",
                retry_after_s=BUSY_RETRY_S,
            )
        self._held[holder] += nbytes
        self._changed(self.name)

    def release(self, nbytes: int, holder: Any = HERE) -> None:
        self._held[holder] -= nbytes
        if not self._held[holder]:
            del self._held[holder]
        self._changed(self.name)

    # Messages of other processes.

    def report(self, holder: Any, nbytes: int) -> None:
        """Takes a front end's report: bytes at its door and bytes that it has sent on."""
        if nbytes:
            self._reported[holder] = nbytes
        else:
            self._reported.pop(holder, None)
        self._changed(self.name)

    def told(self, holder: Any, nbytes: int, level: float) -> None:
        """Takes the report of the process that orders the steps: bytes of all other holders, and the level of its bucket."""
        self._told = _Bucket(min(level, 1.0)) if level < 1.0 else None
        if nbytes:
            self._reported[holder] = nbytes
        else:
            self._reported.pop(holder, None)

    def forget(self, holder: Any) -> None:
        """Forgets a holder that is gone, with its reports."""
        self._told = None
        if self._reported.pop(holder, None) is not None:
            self._changed(self.name)


class Budgets:
    """The budgets of all clients that have limits, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Budget] = {}
        self._watchers: list[Callable[[str], None]] = []

    def of(self, name: str) -> Budget:
        if name not in self._by_name:
            if len(self._by_name) >= MOST_IDLE:
                self._by_name = {known: each for known, each in self._by_name.items() if not each.idle}
            self._by_name[name] = Budget(name, self._changed)
        return self._by_name[name]

    def watch(self, watcher: Callable[[str], None]) -> Callable[[], None]:
        """Calls `watcher(name)` after each change. Returns the function that ends that."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def forget(self, holder: Any) -> None:
        for budget in self:
            budget.forget(holder)

    def __iter__(self) -> Iterator[Budget]:
        return iter(list(self._by_name.values()))

    def _changed(self, name: str) -> None:
        for watcher in self._watchers:
            watcher(name)
