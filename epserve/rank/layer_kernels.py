"""All kernels of one rank: the kernels of each group of layers, behind one interface for any layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

from epserve.config import Config
from epserve.models import LayerWeights
from epserve.modular_kernel import ExpertWeights, RankContext, Routing
from epserve.modular_kernel.kernel import SharedExperts
from epserve.modular_kernel.measured.known_times import KnownTimes
from epserve.modular_kernel.measured.selection import Choice

from .kernels import OnPhase, RankKernels
from .setup.plan import RankPlan

Key = tuple[int, Hashable]
"""A layer, and the version of its placement."""


class LayerKernels:
    """Holds `groups` in the plan's order. Methods are collective as in RankKernels. Each group has its own workspaces."""

    def __init__(self, plan: RankPlan, config: Config, ranks: RankContext, known: KnownTimes):
        self.groups = tuple(RankKernels(group, config, ranks, known) for group in plan.groups)
        self._of = {
            layer: kernels for group, kernels in zip(plan.groups, self.groups, strict=True) for layer in group.layers
        }

    def of(self, layer: int) -> RankKernels:
        return self._of[layer]

    @property
    def first(self) -> RankKernels:
        """Returns the kernels of the group with most layers."""
        return self.groups[0]

    @property
    def built(self) -> bool:
        return all(kernels.built for kernels in self.groups)

    @property
    def ready(self) -> bool:
        """Whether the experts objects exist, so that weights can be prepared for them."""
        return all(kernels.ready for kernels in self.groups)

    @property
    def packs_weights(self) -> bool:
        return any(kernels.packs_weights for kernels in self.groups)

    def build(self, ranks: RankContext) -> None:
        """Builds every path's kernel on the present group. Collective."""
        for kernels in self.groups:
            kernels.build(ranks)

    def prepare_weights(self, layer: int, experts: ExpertWeights) -> ExpertWeights:
        return self.of(layer).prepare_weights(experts)

    def warm_up(self, layers: Mapping[int, LayerWeights], on_phase: OnPhase) -> None:
        """Warms up each group with any of its layers. Collective."""
        for kernels, layer in self._examples(layers):
            kernels.warm_up(layers[layer], on_phase)

    def time_experts(self, layers: Mapping[int, LayerWeights], again: bool) -> list[str]:
        """Times the experts backends. It replaces build() and is not collective."""
        return [
            line
            for kernels, layer in self._examples(layers)
            for line in kernels.time_experts(layers[layer].experts, again)
        ]

    def _examples(self, layers: Mapping[int, LayerWeights]) -> list[tuple[RankKernels, int]]:
        found: dict[int, tuple[RankKernels, int]] = {}
        for layer in layers:
            found.setdefault(id(self.of(layer)), (self.of(layer), layer))
        return list(found.values())

    def capture(self, layers: Iterable[tuple[Key, LayerWeights]]) -> None:
        for key, weights in layers:
            self.of(key[0]).capture([(key, weights)])

    def keep_graphs(self, keys: set[Hashable]) -> None:
        for kernels in self.groups:
            kernels.keep_graphs(keys)

    def forward(
        self,
        key: Key,
        x_MK: torch.Tensor,
        routing: Routing,
        *,
        weights: ExpertWeights,
        tokens_per_rank: Sequence[int],
        shared_experts: SharedExperts | None,
    ) -> torch.Tensor:
        """Runs one step on the kernels of the key's layer. Collective."""
        return self.of(key[0]).forward(
            key, x_MK, routing, weights=weights, tokens_per_rank=tokens_per_rank, shared_experts=shared_experts
        )

    def check(self) -> None:
        """Raises RankFailed."""
        for kernels in self.groups:
            kernels.check()

    def notes(self) -> list[str]:
        several = len(self.groups) > 1
        return [
            f"{kernels.plan.spec.quant.scheme}: {line}" if several else line
            for kernels in self.groups
            for line in kernels.notes()
        ]

    def experts_choices(self) -> tuple[Choice, ...]:
        return self.first.experts_choices()

    def interrupt(self) -> None:
        for kernels in self.groups:
            kernels.interrupt()

    def leave(self) -> None:
        for kernels in self.groups:
            kernels.leave()

    def destroy(self) -> None:
        """Destroys every group, also when an earlier one fails. Collective."""
        errors = []
        for kernels in self.groups:
            try:
                kernels.destroy()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
