"""What the runtime tells whoever watches it: one record for each finished step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A request's share of a step. `queued`: when it was accepted. `trace`: what its Batch brought along, unread."""

    request_id: str
    tokens: int
    queued: float
    trace: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step that all ranks finished. Times are time.monotonic() seconds.

    phases: for each rank, seconds by phase (`epserve.process.phases`), on that rank's own clock.
    """

    step: int
    layer: int
    mode: str
    tokens_per_rank: tuple[int, ...]
    started: float
    ended: float
    parts: tuple[StepPart, ...]
    phases: tuple[Mapping[str, float], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.tokens_per_rank)

    @property
    def seconds(self) -> float:
        return self.ended - self.started
