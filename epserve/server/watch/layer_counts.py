"""Counts requests and steps by layer since the start, for clients that ask for the statistics of a model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Total:
    """A number of events and the seconds that they took together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of one answered request: its wait for a step, its decoding, its steps and the encoding of its reply."""

    queue: float
    decoding: float
    steps: float
    encoding: float


@dataclass(slots=True)
class LayerCount:
    """The counts of one layer. `last_at` is the Unix time of the last answer in seconds, 0 before the first."""

    tokens: int = 0
    steps: int = 0
    last_at: float = 0.0
    answered: Total = field(default_factory=Total)
    failed: Total = field(default_factory=Total)
    queue: Total = field(default_factory=Total)
    decoding: Total = field(default_factory=Total)
    running: Total = field(default_factory=Total)
    encoding: Total = field(default_factory=Total)


class LayerCounts:
    """Counts by layer. Every method runs in the server's event loop."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, LayerCount] = defaultdict(LayerCount)

    def request(self, layer: int, *, tokens: int, seconds: float, spent: Spent | None) -> None:
        """Counts a request that has ended.

        Args:
            seconds: from its accepted header to its end.
            spent: the parts of that time, or None for a request that failed.
        """
        count = self._counts[layer]
        if spent is None:
            count.failed.add(seconds)
            return
        count.tokens += tokens
        count.last_at = time.time()
        count.answered.add(seconds)
        count.queue.add(spent.queue)
        count.decoding.add(spent.decoding)
        count.running.add(spent.steps)
        count.encoding.add(spent.encoding)

    def step(self, layer: int) -> None:
        self._counts[layer].steps += 1

    def of(self, layer: int) -> LayerCount:
        """Returns the counts of `layer`, which are zeros when it was never asked for."""
        counts: Mapping[int, LayerCount] = self._counts
        return counts.get(layer) or LayerCount()
