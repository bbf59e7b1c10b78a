"""Messages between a rank and the planner of its steps: steps, arrangements of experts, load reports and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from epserve.config import Config
from epserve.models import LayerWeights

from .placement import Placement
from .setup.topology import Topology


class LayerSource(Protocol):
    """A checkpoint, or copies of it."""

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights: ...


class Rows(Protocol):
    """Hidden states `(m, K)` in several places. A rank brings them together in one tensor on its device."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def to(self, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        """Gathers the rows on the device's current stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRows:
    """Contiguous rows of `dtype` from byte `offset` of a region, given by number, that a rank has open on its GPU."""

    region: int
    offset: int
    dtype: torch.dtype

    def row(self, number: int, columns: int) -> RegionRows:
        """Returns the place of the rows from that row on."""
        return replace(self, offset=self.offset + number * columns * self.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """A number of a rank's rows: the source of the rows and the target of their result. None: the step's own tensors."""

    rows: int
    source: RegionRows | None = None
    target: RegionRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, the same on all ranks.

    In mode "block" the rank gates its tokens and adds the shared experts. In mode "routed" the step brings logical ids and
    weights, and only the routed experts run. `tokens_per_rank` is M of each rank, zero allowed.
    """

    step: int
    layer: int
    mode: str
    tokens_per_rank: tuple[int, ...]
    placement: int = 0
    """Version of the layer's placement. No step mixes two versions."""
    parts: tuple[int, ...] = ()
    """Tokens of each request in the step (on a rank: in its share), in order. Used only while experts are missing."""
    shares: tuple[tuple[tuple[int, int], ...], ...] = ()
    """The (part, rows) pairs that make up each rank's tokens, in order."""
    device_rows: tuple[tuple[DeviceRows, ...], ...] = ()
    """Each rank's rows, in the order of its shares, when some lie on its GPU. Empty: no rank, or not this one, has such rows."""
    refused: dict[int, dict[str, Any]] = field(default_factory=dict, compare=False)
    """Part -> the reason why a rank could not read it from, or write it to, a region of its GPU. Filled while the step runs."""
    not_finite: dict[int, list[int]] = field(default_factory=dict, compare=False)
    """Part whose result went into a GPU region -> its rows that are not finite. Filled while the step runs."""
    left_out: dict[int, set[int]] = field(default_factory=dict, compare=False)
    """Part -> experts that its tokens chose and that no rank holds. Filled while the step runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The number of ranks and the experts of each, layer by layer. All layers share one layout.

    `topology` tells where the ranks are. None: unknown, before they have started.
    """

    config: Config
    placements: Mapping[int, Placement]
    topology: Topology | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The contents of one rank after load(). `experts` holds logical ids in slot order. Sizes are in bytes."""

    rank: int
    experts: tuple[int, ...]
    num_layers: int
    weights_bytes: int
    peak_bytes: int
    seconds: float
    backends: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Steps and tokens that this rank has finished since the start, and (token, expert) slots that it has sent."""

    steps: int = 0
    tokens: int = 0
    slots: int = 0
