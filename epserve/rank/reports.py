"""Reports of a rank: its location, its health, and the outcome of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epserve.link.failure import Failure
from epserve.modular_kernel.measured.known_times import KnownTable
from epserve.modular_kernel.measured.selection import Choice

from .setup.topology import Location
from .step import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """The location of a rank's process. `gpu_uuid` and `visible` (its CUDA_VISIBLE_DEVICES) are empty on CPU.

    `started` counts clock ticks after the machine's start. Together with `pid` it identifies one process for good.
    `location` is None for a process that has no device yet.
    """

    rank: int
    pid: int
    node_id: str
    node_ip: str
    device: str
    gpu_uuid: str = ""
    visible: str = ""
    started: int = 0
    location: Location | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How far a rank has read its weights: layers of all of its layers, bytes of their experts, seconds since the start."""

    layers: int
    of_layers: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A rank's health report. The rank answers while its step thread computes."""

    phase: str
    step: int
    step_seconds: float
    counters: Counters
    late_compiles: int = 0
    loading: Loading | None = None
    """How far the rank has read its weights, while it reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A rank's part in the present arrangement: its backends, its experts' bytes, and `notes` on measurements and choices.

    `times` holds all measured times that the rank knows.
    """

    notes: tuple[str, ...]
    choices: tuple[Choice, ...]
    backends: tuple[str, str]
    weights_bytes: int
    times: tuple[KnownTable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an actor method. Methods return it instead of raising, so that the reports of all ranks can be compared."""

    value: Any = None
    failure: Failure | None = None
