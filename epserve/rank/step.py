"""Messages between a rank and the planner of its steps: steps, arrangements of experts, load reports and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from epserve.config import Config
from epserve.errors import InternalError
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

    A backward step brings the gradients of the forward's results too, and its result has gradients in place of rows
    (`joined_gradients`).
    """

    step: int
    layer: int
    mode: str
    tokens_per_rank: tuple[int, ...]
    backward: bool = False
    columns: int = 0
    """Columns of the result. 0: the model's hidden size."""
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
