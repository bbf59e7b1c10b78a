"""The facts that a running service gives to a new rank, and the new rank's source of weights without files.

The checkpoint of the service's start may be absent on the new rank's host, or may have been replaced since. If the serving
ranks hold every expert that the new rank needs, it takes all of its weights from them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from epserve.config import ModelConfig
from epserve.errors import CheckpointError, NotReady
from epserve.link.door import LinkAddress
from epserve.models import LateCheckpoint, LayerWeights, ModelInfo, SharedExperts, Stamp, UnchangedCheckpoint
from epserve.modular_kernel import ExpertWeights, GateWeights
from epserve.modular_kernel.measured.known_times import KnownTable
from epserve.rank.step import LayerSource

from .hand_over import Peers

log = logging.getLogger(__name__)

Holders = Mapping[int, Mapping[int, Sequence[LinkAddress]]]
"""Layer -> logical expert -> addresses of ranks that hand it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The facts that a new rank gets.

    Attributes:
        start: the state of the checkpoint at the service's start.
        info: the model's description.
        times: times that ranks have measured. None: the service is starting.
        holders: holders of experts for each slice (one slice when ranks share no experts). Empty: not known yet.
        hurry: no step runs meanwhile.
    """

    start: Stamp
    info: ModelInfo
    times: tuple[KnownTable, ...] | None = None
    holders: tuple[Holders, ...] = ()
    hurry: bool = field(default=False, compare=False)


class RanksSource(LayerSource):
    """Takes whole layers, with gate and shared experts, from ranks that serve them."""

    def __init__(self, info: ModelInfo, holders: Holders, *, hurry: bool):
        self._info, self._holders, self._hurry = info, holders, hurry

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights:
        """Returns the layer's weights. Raises NotReady for an expert that no rank gives."""
        holders = self._holders.get(layer, {})
        everybody = list(dict.fromkeys(address for each in holders.values() for address in each))
        common: dict[str, torch.Tensor] = {}
        of_an_expert: dict[str, Any] = {}

        def take_common(answer: dict[str, Any]) -> Mapping[str, torch.Tensor]:
            common.clear()
            common.update(_rooms(answer["tensors_of"], device))
            of_an_expert.update(answer["of_an_expert"])
            return common

        with Peers(hurry=self._hurry) as peers:
            if not peers.fetch(everybody, {"layer": layer}, take_common):
                raise NotReady(f"no rank hands over gate and shared experts of layer {layer}")
            stacked = _rooms(
                {name: [dtype, [len(experts), *shape]] for name, (dtype, shape) in of_an_expert.items()}, device
            )
            for slot, expert in enumerate(experts):
                targets = {name: each[slot] for name, each in stacked.items()}
                asked = {"layer": layer, "expert": expert}
                if not peers.fetch(holders.get(expert, ()), asked, lambda _, targets=targets: targets):  # type: ignore[misc]
                    raise NotReady(f"no rank hands over expert {expert} of layer {layer}")
        shared, tensors = _part(common, "shared"), _part(common, "experts") | stacked
        return LayerWeights(
            experts=ExpertWeights(activation=self._info.activation, **tensors),
            gate=GateWeights(**_part(common, "gate")),
            shared=SharedExperts(activation=self._info.activation, **shared) if shared else None,
        )


def open_unchanged(model: ModelConfig, start: Stamp | None) -> UnchangedCheckpoint:
    """Opens the checkpoint. Raises CheckpointError when it differs from the checkpoint of the service's start."""
    return UnchangedCheckpoint(model.path, model.dtype, start=start)


def sources_for(
    model: ModelConfig, rank: int, welcome: Welcome | None, opened: UnchangedCheckpoint | None
) -> tuple[UnchangedCheckpoint | LateCheckpoint, RanksSource | None]:
    """Returns the checkpoint, and the ranks that give the weights if it cannot be read here. Raises CheckpointError."""
    start, holders = (welcome.start, welcome.holders) if welcome is not None else (None, ())
    try:
        checkpoint = opened or open_unchanged(model, start)
        if holders:
            checkpoint.check()
        return checkpoint, None
    except CheckpointError as error:
        if welcome is None or not holders:
            raise
        log.warning("rank %d takes its weights from other ranks: %s", rank, error)
    late = LateCheckpoint(model.path, model.dtype, start=welcome.start, info=welcome.info)
    return late, RanksSource(welcome.info, holders[rank % len(holders)], hurry=welcome.hurry)


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    """Returns the tensors of one dataclass, by its own names."""
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def _rooms(described: Mapping[str, Sequence[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns tensors with undefined contents. Raises ValueError for a name that is not a dtype."""
    made = {}
    for name, (dtype, shape) in described.items():
        kind = getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{name} is of {dtype!r}, which is no dtype")
        made[name] = torch.empty(tuple(shape), dtype=kind, device=device)
    return made
