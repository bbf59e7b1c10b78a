"""Reports of an engine: its state, its status, and one record for each finished step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from epserve.modular_kernel.measured.selection import Choice

State = Literal["starting", "serving", "recovering", "resizing", "draining", "stopped"]
UP: tuple[State, ...] = ("serving", "recovering", "resizing")
"""States in which requests are accepted. In the last two they wait in the queue for the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The status of one rank.

    Attributes:
        experts: logical ids in slot order, of the first served layer.
        alive: its process answers on the data path.
        experts_choices: the experts backend for each range of rows. Empty: one backend computes all batches.
        layer_experts: layer -> experts, of layers that differ from the first one.
        network_bytes: sent to ranks of other hosts, since the rank's process started.
    """

    rank: int
    node: str
    pid: int
    device: str
    gpu_uuid: str
    experts: tuple[int, ...]
    tokens_done: int
    weights_bytes: int
    alive: bool
    phase: str
    late_compiles: int = 0
    experts_choices: tuple[Choice, ...] = ()
    layer_experts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    network_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The status of an engine.

    Attributes:
        generation: generation of the process group. Each recovery adds one.
        backends: the chosen backends, and the reasons against the others.
        expert_tokens: layer -> tokens of each logical expert, seconds old.
        slots: layer -> logical expert of each slot, in the order of ranks. All layers have as many slots on a rank.
        missing_experts: layer -> experts that are on no rank while the others go on (engine.when_experts_missing).
        spares: number of processes that are ready to take over from a rank.
        rebalances_skipped: number of layers that stayed as they were for want of memory.
        front_ends: number of front ends that have joined.
    """

    state: State
    generation: int
    steps: int
    ranks: tuple[RankStatus, ...]
    queue_tokens: int
    backends: str
    recoveries: int
    replayed_requests: int
    expert_tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    slots: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    missing_experts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    spares: int = 0
    rebalances: int = 0
    rebalances_skipped: int = 0
    front_ends: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A request's part of a step. `queued`: time when it was accepted. `trace`: the trace of its Batch, unread."""

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
