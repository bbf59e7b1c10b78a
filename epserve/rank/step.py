"""What passes between a rank and whoever plans its steps: a step, an arrangement of experts, what was loaded, what was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from epserve.config import Config
from epserve.models import LayerWeights

from .placement import Placement


class LayerSource(Protocol):
    """A checkpoint, or copies of it."""

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights: ...


class Rows(Protocol):
    """Hidden states `(m, K)` that do not lie in one tensor before a rank brings them together on its device."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def to(self, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        """On the device's current stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRows:
    """Rows of `dtype`, one behind the other from byte `offset` of a region that a rank has open on its GPU (its number)."""

    region: int
    offset: int
    dtype: torch.dtype

    def row(self, number: int, columns: int) -> RegionRows:
        """From that row on."""
        return replace(self, offset=self.offset + number * columns * self.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """So many of a rank's rows: where they come from and where their result goes; None: with the step's own tensors."""

    rows: int
    source: RegionRows | None = None
    target: RegionRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, the same on all ranks.

    mode "block": the rank gates its tokens and adds the shared experts. "routed": logical ids and weights come along and
    only the routed experts run. tokens_per_rank: M of each rank, zero allowed.
    """

    step: int
    layer: int
    mode: str
    tokens_per_rank: tuple[int, ...]
    placement: int = 0
    """Version of the layer's placement: no step mixes two."""
    parts: tuple[int, ...] = ()
    """Tokens of each request in the step, in order; on a rank: of its share. Needed where experts are missing only."""
    shares: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each rank the (part, rows) that its tokens are, in order."""
    device_rows: tuple[tuple[DeviceRows, ...], ...] = ()
    """For each rank, as its shares, where some lie on its GPU; empty: none do on any, or on this one."""
    refused: dict[int, dict[str, Any]] = field(default_factory=dict, compare=False)
    """Filled while the step runs: parts that a rank could not take from, or put into, a region of its GPU, and why."""
    not_finite: dict[int, list[int]] = field(default_factory=dict, compare=False)
    """Filled while the step runs: parts whose results went into a region of a GPU -> rows of them that are not finite."""
    left_out: dict[int, set[int]] = field(default_factory=dict, compare=False)
    """Filled while the step runs: parts whose tokens chose experts that are on no rank, and which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How many ranks there are and which experts each holds, layer by layer. All layers share one layout."""

    config: Config
    placements: Mapping[int, Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank holds after load(). `experts`: logical ids in slot order. Sizes in bytes."""

    rank: int
    experts: tuple[int, ...]
    num_layers: int
    weights_bytes: int
    peak_bytes: int
    seconds: float
    backends: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Since the start: steps and tokens that this rank finished, and (token, expert) slots that it sent out."""

    steps: int = 0
    tokens: int = 0
    slots: int = 0
