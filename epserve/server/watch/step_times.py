"""Finds each request's wait for its step and the time of its steps in the engine's records, for the reply's timings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epserve.engine.records import StepRecord


@dataclass(slots=True)
class Times:
    """Holds seconds. A long request runs in several steps, which may overlap: `steps` is from the first start to the last end."""

    queued: float = 0.0
    steps: float = 0.0
    _started: float | None = None

    def add(self, record: StepRecord, queued_at: float) -> None:
        if self._started is None:
            self._started, self.queued = record.started, record.started - queued_at
        self.steps = max(self.steps, record.ended - self._started)


class StepTimes:
    """Collects times of requests in flight by their id. If two have one id, against the rules, the later gets both times."""

    def __init__(self) -> None:
        self._open: dict[str, Times] = {}

    @contextmanager
    def of(self, request_id: str) -> Iterator[Times]:
        times = self._open[request_id] = Times()
        try:
            yield times
        finally:
            if self._open.get(request_id) is times:
                del self._open[request_id]

    def record(self, record: StepRecord) -> None:
        """Receives a record from the engine, before the results of that step."""
        for part in record.parts:
            if part.request_id in self._open:
                self._open[part.request_id].add(record, part.queued)
