"""Messages between a rank and the planner of its steps: steps, arrangements of experts, load reports and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from epserve.config import Config
from epserve.errors import InternalError
from epserve.link.wire import DTYPES, NAMES
from epserve.models import LayerWeights
from epserve.modular_kernel import ExpertShape, RankContext

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

    def as_json(self) -> list[Any]:
        return [self.region, self.offset, NAMES[self.dtype]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> RegionRows:
        """Raises ValueError, TypeError or KeyError for data that `as_json` does not make."""
        region, offset, dtype = value
        return cls(region=int(region), offset=int(offset), dtype=DTYPES[dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRows:
    """A number of rows of one request, in one rank's share of a step.

    `part` numbers the requests of the step. `source` and `target` are the places of the rows and of their result on the rank's
    GPU. None: the step's own tensors.
    """

    rows: int
    part: int = 0
    source: RegionRows | None = None
    target: RegionRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One rank's share of a step.

    In mode "block" the rank gates its tokens and adds the shared experts. In mode "routed" the step brings logical ids and
    weights, and only the routed experts run. A backward step also brings the gradients of the forward's results, and its result
    has gradients in place of rows (`joined_gradients`).

    Attributes:
        step: number of the step.
        layer: number of the MoE layer.
        mode: "block" or "routed".
        tokens_per_rank: M of each rank, zero allowed. It is the same on all ranks.
        backward: the step is a backward one.
        columns: columns of the result. 0: the model's hidden size. The ranks do not need it.
        generation: the group that runs the step.
        placement: version of the layer's placement. No step mixes two versions.
        parts: the rank's rows by request, in their order. Empty: all rows are of one request.
    """

    step: int
    layer: int
    mode: str
    tokens_per_rank: tuple[int, ...]
    backward: bool = False
    columns: int = 0
    generation: int = -1
    placement: int = 0
    parts: tuple[PartRows, ...] = ()

    @property
    def on_device(self) -> bool:
        """Whether some rows come from, or go to, a region of the rank's GPU."""
        return any(part.source is not None or part.target is not None for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        """Returns a frame's header. The numbers of the parts stay here, since a rank counts its own."""
        places = [
            [number, *(None if where is None else where.as_json() for where in (part.source, part.target))]
            for number, part in enumerate(self.parts)
            if part.source is not None or part.target is not None
        ]
        return {
            "step": self.step,
            "layer": self.layer,
            "mode": self.mode,
            "tokens_per_rank": self.tokens_per_rank,
            "backward": self.backward,
            "generation": self.generation,
            "placement": self.placement,
            "parts": [part.rows for part in self.parts],
            "on_device": places,
        }

    @classmethod
    def from_json(cls, header: Mapping[str, Any]) -> StepPlan:
        """Raises ValueError, TypeError, KeyError or IndexError for data that `as_json` does not make."""
        parts = [PartRows(part=number, rows=int(rows)) for number, rows in enumerate(header["parts"])]
        for number, *places in header["on_device"]:
            source, target = (None if place is None else RegionRows.from_json(place) for place in places)
            parts[number] = replace(parts[number], source=source, target=target)
        return cls(
            step=header["step"],
            layer=header["layer"],
            mode=header["mode"],
            tokens_per_rank=tuple(header["tokens_per_rank"]),
            backward=header["backward"],
            generation=header["generation"],
            placement=header["placement"],
            parts=tuple(parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one step on all ranks.

    Attributes:
        out_MK: the rows whose result comes to the host, in the order of ranks and parts. In a backward step they are gradients.
        left_out: part -> experts that its tokens chose and that no rank holds.
        refused: part -> the reason why a rank could not read it from, or write it to, a region of its GPU.
        not_finite: part whose result went into a GPU region -> its rows that are not finite.
        phases: seconds of each rank by phase.
    """

    out_MK: torch.Tensor
    left_out: Mapping[int, frozenset[int]] = field(default_factory=dict)
    refused: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    not_finite: Mapping[int, Sequence[int]] = field(default_factory=dict)
    phases: tuple[Mapping[str, float], ...] = ()


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
    """Steps and tokens that this rank has finished since the start, and (token, expert) slots that it has sent.

    `network_bytes` went to other hosts. An all-to-all that does not count its bytes adds none.
    """

    steps: int = 0
    tokens: int = 0
    slots: int = 0
    network_bytes: int = 0

    def after(self, *, tokens: int, top_k: int, sent: int) -> Counters:
        """Returns the counts after one more step."""
        return Counters(
            steps=self.steps + 1, tokens=self.tokens + tokens, slots=self.slots + tokens * top_k,
            network_bytes=self.network_bytes + sent,
        )  # fmt: skip


def check_tensors(
    plan: StepPlan,
    ranks: RankContext,
    shape: ExpertShape,
    tensors: tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Raises InternalError unless the rows, ids, weights and gradients of a rank are those that its plan announces."""
    x_MK, ids_Mt, weights_Mt, gradient_MK = tensors
    if len(plan.tokens_per_rank) != ranks.world_size:
        raise InternalError(f"plan for {len(plan.tokens_per_rank)} ranks, there are {ranks.world_size}")
    expected = (plan.tokens_per_rank[ranks.rank], shape.hidden)
    if tuple(x_MK.shape) != expected or x_MK.dtype != shape.dtype:
        raise InternalError(f"hidden states {tuple(x_MK.shape)} {x_MK.dtype}, planned {expected} {shape.dtype}")
    if plan.backward != (gradient_MK is not None):
        raise InternalError(f"backward {plan.backward} with gradients {gradient_MK is not None}")
    if gradient_MK is not None and (tuple(gradient_MK.shape), gradient_MK.dtype) != (expected, shape.dtype):
        raise InternalError(f"gradients {tuple(gradient_MK.shape)} {gradient_MK.dtype}, planned {expected}")
    if plan.mode not in ("block", "routed"):
        raise InternalError(f"mode {plan.mode!r} is not 'block' or 'routed'")
    if (plan.mode == "routed") != (ids_Mt is not None and weights_Mt is not None):
        raise InternalError(f"mode {plan.mode!r} with ids {ids_Mt is not None}, weights {weights_Mt is not None}")


def gradient_columns(hidden: int, top_k: int, dtype: torch.dtype) -> int:
    """Returns the columns of `joined_gradients`."""
    return hidden + top_k * torch.float32.itemsize // dtype.itemsize


def joined_gradients(dx_MK: torch.Tensor, dw_Mt: torch.Tensor) -> torch.Tensor:
    """Returns the gradients of rows, and behind them the bits of those of the routing weights, as one tensor.

    A step has one result, whose rows are handed out to requests. The weights' gradients stay float32.
    """
    return torch.cat((dx_MK, dw_Mt.contiguous().view(dx_MK.dtype)), dim=1)


def split_gradients(joined: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Undoes `joined_gradients`."""
    return joined[:, :hidden], joined[:, hidden:].contiguous().view(torch.float32)
