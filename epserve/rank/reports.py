"""What a rank tells about itself: where it runs, how it fares, how a call ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epserve.link.failure import Failure
from epserve.modular_kernel.measured.known_times import KnownTable
from epserve.modular_kernel.measured.selection import Choice

from .step import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Where a rank's process runs. `gpu_uuid`, and `visible` (its CUDA_VISIBLE_DEVICES), are empty on CPU.

    started: in clock ticks after the machine's start; with `pid` it names one process for good.
    """

    rank: int
    pid: int
    node_id: str
    node_ip: str
    device: str
    gpu_uuid: str = ""
    visible: str = ""
    started: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a rank says when asked: it answers while its step thread computes."""

    phase: str
    step: int
    step_seconds: float
    counters: Counters
    late_compiles: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank is in the present arrangement: `notes` on what it measured and chose, its backends, its experts' bytes;
    `times`: all that it knows of measured ones."""

    notes: tuple[str, ...]
    choices: tuple[Choice, ...]
    backends: tuple[str, str]
    weights_bytes: int
    times: tuple[KnownTable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an actor method returns instead of raising, so that the reports of all ranks can be compared."""

    value: Any = None
    failure: Failure | None = None
