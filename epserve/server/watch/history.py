"""Keeps the last minutes of a service in memory: a sample each second, latencies in buckets, expert load.

Memory is bounded under any traffic: 600 samples, at most about 350 latency buckets for each of the last 60 seconds, and 12
snapshots of the load.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SAMPLES = 600
"""The number of samples, one a second: ten minutes."""
RECENT_S = 60
"""The seconds that count as recent: percentiles and expert load are those of the last minute."""
LOAD_EVERY_S = 5
GROWTH = 1.05
"""Each latency bucket ends 5 % above the one before, so a percentile is at most 2.5 % off."""
SHORTEST_S = 1e-5
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Describes one second. Rates are per second. Latencies are in milliseconds, and None if no request ended."""

    at: float
    tokens: float
    requests: float
    errors: float
    steps: float
    queue_tokens: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Holds latencies in milliseconds. They are zero when `count` is zero."""

    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    count: int = 0


def bucket_of(seconds: float) -> int:
    return max(0, math.ceil(math.log(max(seconds, SHORTEST_S) / SHORTEST_S, GROWTH)))


def percentiles(buckets: Mapping[int, int]) -> Percentiles:
    """Returns percentiles of the latencies in `buckets` (bucket -> count): each is the middle of its bucket."""
    count = sum(buckets.values())
    if not count:
        return Percentiles()
    found: list[float] = []
    seen, wanted = 0, [math.ceil(count * p / 100) for p in PERCENTILES]
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        while len(found) < len(wanted) and seen >= wanted[len(found)]:
            found.append(SHORTEST_S * GROWTH ** (bucket - 0.5) * 1e3)
    return Percentiles(p50_ms=found[0], p90_ms=found[1], p99_ms=found[2], count=count)


class History:
    """Counts between samples. The loop that counts calls `sample` once a second."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._buckets: deque[Counter[int]] = deque(maxlen=RECENT_S)
        self._now: Counter[int] = Counter()
        self._tokens = self._requests = self._errors = self._steps = 0
        self._latest = np.zeros((0, 0), dtype=np.int64)
        self._loads: deque[np.ndarray] = deque(maxlen=RECENT_S // LOAD_EVERY_S)
        self._load_age = 0.0

    def request(self, seconds: float) -> None:
        """Counts an answered request."""
        self._now[bucket_of(seconds)] += 1
        self._requests += 1

    def error(self) -> None:
        self._errors += 1

    def step(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens

    def sample(self, now: float, seconds: float, *, queue_tokens: int, load: Mapping[int, tuple[int, ...]]) -> None:
        """Closes the second that ends `now` (Unix time) and took `seconds`."""
        these = percentiles(self._now)
        shown = (these.p50_ms, these.p90_ms, these.p99_ms) if these.count else (None, None, None)
        sample = Sample(
            at=now,
            tokens=self._tokens / seconds,
            requests=self._requests / seconds,
            errors=self._errors / seconds,
            steps=self._steps / seconds,
            queue_tokens=queue_tokens,
            p50_ms=shown[0],
            p90_ms=shown[1],
            p99_ms=shown[2],
        )
        self.samples.append(sample)
        self._buckets.append(self._now)
        self._now = Counter()
        self._tokens = self._requests = self._errors = self._steps = 0
        if load:
            self._latest = np.array(list(load.values()), dtype=np.int64)
            self._load_age += seconds  # `now` would jump when a user sets the clock
            if not self._loads or self._load_age >= LOAD_EVERY_S:
                self._loads.append(self._latest)
                self._load_age = 0.0

    def latency(self) -> Percentiles:
        """Returns the percentiles of the last minute."""
        total: Counter[int] = Counter()
        for buckets in list(self._buckets):
            total.update(buckets)
        return percentiles(total)

    def rate(self, name: str, seconds: int = 10) -> float:
        """Returns the mean of a sample's field over the last `seconds`."""
        last = list(self.samples)[-seconds:]
        return sum(getattr(sample, name) for sample in last) / len(last) if last else 0.0

    def recent_load(self) -> np.ndarray:
        """Returns `(layers, experts)` tokens of the last minute, or since the start if nothing came in that minute."""
        first, last = self._loads[0] if self._loads else self._latest, self._latest
        recent = last - first if first.shape == last.shape else last
        return recent if recent.sum() > 0 else last

    def series(self) -> dict[str, list[Any]]:
        """Returns the samples by field, oldest first, for plots."""
        return columns(asdict(sample) for sample in list(self.samples))


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {name: [] for name in Sample.__slots__}
    for row in rows:
        for name, value in row.items():
            made[name].append(round(value, 3) if isinstance(value, float) else value)
    return made
