"""The weights that one rank holds: the layers that it serves, and staged layers of placements to come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from epserve.errors import InternalError
from epserve.models import LayerWeights, ModelInfo
from epserve.modular_kernel import ExpertWeights
from epserve.rank.device_facts import held_bytes
from epserve.rank.gate import fitted
from epserve.rank.placement import Placement
from epserve.rank.step import LayerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A layer of the next placement. `experts` names the experts that were read, also after the rank's number changes."""

    placement: Placement
    experts: tuple[int, ...]
    weights: LayerWeights
    prepared: bool = True
    """Whether the experts class has prepared these weights."""


class HeldLayers:
    """Holds a rank's layers with their placements. `held` is for threads that serve other ranks, the rest for the rank's own."""

    def __init__(self, info: ModelInfo, placements: Mapping[int, Placement]):
        self.placements = dict(placements)
        self.layers: dict[int, LayerWeights] = {}
        self.staged: dict[int, Staged] = {}
        self._info = info
        self._experts: dict[int, tuple[int, ...]] = {}
        """Logical ids of the experts in `layers`, in slot order. They stay true when an arrangement fails halfway."""
        self.arranging = threading.Lock()
        """`held` waits for it."""
        self._unprepared: set[int] = set()  # layers whose experts the experts class has not seen yet

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all experts, each counted once. Gates and shared experts are small beside them."""
        return sum(held_bytes(layer) for layer in self.layers.values())

    @property
    def bytes_per_expert(self) -> float:
        return self.nbytes / max(sum(map(len, self._experts.values())), 1)

    def held(self, layer: int) -> tuple[Placement, tuple[int, ...], LayerWeights]:
        """Returns a layer's placement, the logical experts of this rank's slots, and their weights. Thread-safe."""
        with self.arranging:
            return self.placements[layer], self._experts[layer], self.layers[layer]

    def of(self, layer: int, version: int) -> tuple[Placement, LayerWeights]:
        """Returns the present or the staged placement of this version, with its weights. Raises InternalError without one."""
        if layer not in self.layers:
            raise InternalError(f"layer {layer} is not loaded (loaded: {sorted(self.layers)})")
        found = {self.placements[layer].version: (self.placements[layer], self.layers[layer])}
        if (staged := self.staged.get(layer)) is not None:
            found[staged.placement.version] = staged.placement, staged.weights
        if version not in found:
            raise InternalError(f"placement {version} of layer {layer} is not here (here: {sorted(found)})")
        return found[version]

    def versions(self) -> Iterator[tuple[int, int]]:
        """Yields the layer and the version of each present and staged placement."""
        yield from ((layer, self.placements[layer].version) for layer in self.layers)
        yield from ((layer, each.placement.version) for layer, each in self.staged.items())

    def read(self, source: LayerSource, layer: int, experts: tuple[int, ...], device: torch.device) -> LayerWeights:
        """Returns the weights from `source`, with the gate and the shared experts as the kernels take them."""
        read = source.load_layer(layer, experts, device)
        gate = fitted(read.gate, self._info.gate, self._info.dtype)
        return replace(read, gate=gate, shared=None if read.shared is None else read.shared.fitted())

    def take(self, source: LayerSource, layer: int, experts: tuple[int, ...], device: torch.device) -> None:
        """Reads a layer and holds it as the present one. A staged one is dropped."""
        self.layers[layer] = self.read(source, layer, experts, device)
        self._experts[layer] = experts
        self._unprepared.add(layer)
        self.staged.pop(layer, None)

    def prepare(self, prepared: Callable[[int, ExpertWeights], ExpertWeights]) -> None:
        """Passes the experts that were read since the last call to `prepared`, and keeps what it returns."""
        for layer in sorted(self._unprepared & set(self.layers)):
            weights = self.layers[layer]
            self.layers[layer] = replace(weights, experts=prepared(layer, weights.experts))
        self._unprepared.clear()

    def lacking(self, rank: int, placements: Mapping[int, Placement]) -> tuple[int, ...]:
        """Returns the layers of which the rank holds other experts than these placements give it."""
        return tuple(layer for layer, each in placements.items() if self._experts.get(layer) != each.experts_of(rank))

    def adopt(self, layer: int, version: int) -> bool:
        """Makes the staged placement the present one. Returns False when no placement of this version is staged."""
        staged = self.staged.get(layer)
        if staged is None or staged.placement.version != version:
            return False
        with self.arranging:
            self.placements[layer], self.layers[layer] = staged.placement, staged.weights
            self._experts[layer] = staged.experts
        del self.staged[layer]
        return True

    def settle(self, layer: int, experts: tuple[int, ...]) -> bool:
        """Returns whether the layer has these experts now. A staged layer is adopted when it holds them, and dropped otherwise.

        The caller has `arranging`. After False, `free` and `take` come next.
        """
        staged = self.staged.get(layer)
        if staged is not None and staged.experts == experts:
            self.layers[layer], self._experts[layer] = staged.weights, experts
            if not staged.prepared:
                self._unprepared.add(layer)
        elif self._experts.get(layer) != experts:
            return False
        self.staged.pop(layer, None)
        return True

    def free(self, layer: int) -> None:
        """Frees a layer's experts before others are read."""
        self.layers.pop(layer, None)
        self._experts.pop(layer, None)

    def clear(self) -> None:
        for held in (self.layers, self._experts, self.staged):
            held.clear()
