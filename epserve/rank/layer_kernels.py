"""All kernels of one rank: the kernels of each group of layers, behind one interface for any layer."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch

from epserve.config import Config
from epserve.models import LayerWeights
from epserve.modular_kernel import ExpertWeights, RankContext, Routing
from epserve.modular_kernel.gathering import gather
from epserve.modular_kernel.measured.known_times import KnownTimes
from epserve.modular_kernel.measured.selection import Choice
from epserve.modular_kernel.steps import worth

from .kernels import OnPhase, RankKernels, Replay
from .layer_step import Key, LayerStep
from .setup.plan import RankPlan

log = logging.getLogger(__name__)


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

    def warm_up(self, layers: Mapping[int, Sequence[LayerStep]], on_phase: OnPhase) -> None:
        """Warms up each group with the steps of any of its layers. Collective."""
        for kernels, layer in self._examples(layers):
            kernels.warm_up(layers[layer], on_phase)

    def time_experts(self, layers: Mapping[int, LayerWeights], again: bool) -> list[str]:
        """Times the experts backends. It replaces build() and is not collective."""
        return [
            line
            for kernels, layer in self._examples(layers)
            for line in kernels.time_experts(layers[layer].experts, again)
        ]

    def _examples(self, layers: Iterable[int]) -> list[tuple[RankKernels, int]]:
        found: dict[int, tuple[RankKernels, int]] = {}
        for layer in layers:
            found.setdefault(id(self.of(layer)), (self.of(layer), layer))
        return list(found.values())

    def capture(self, steps: Iterable[LayerStep]) -> None:
        """Captures the graphs of these steps. Not collective, but every rank has to."""
        of_group: dict[int, list[LayerStep]] = {}
        for step in steps:
            of_group.setdefault(id(self.of(step.layer)), []).append(step)
        for kernels in self.groups:
            kernels.capture(of_group.get(id(kernels), []))
            for line in kernels.graph_notes():
                log.info(line)

    def capture_all(self, steps: Iterable[LayerStep], ranks: RankContext) -> None:
        """Captures all graphs of a start. Collective.

        Where the configuration asks for no graphs by size, ranks go on without any when one of them cannot capture them all.
        """
        if not any(kernels.has_graphs for kernels in self.groups):
            return
        reason = None
        try:
            self.capture(steps)
        except Exception as error:
            if not self.first.first.auto_graphs:
                raise
            log.warning("graphs cannot be captured", exc_info=True)
            reason = f"rank {ranks.rank} cannot capture them all ({worth.short(error)})"
        if not self.first.first.auto_graphs:
            return
        found = next((each for each in gather(ranks, reason) if each is not None), None)
        if found is not None:
            for kernels in self.groups:
                kernels.drop_graphs(found)

    def keep_graphs(self, keys: set[Hashable]) -> None:
        for kernels in self.groups:
            kernels.keep_graphs(keys)

    def graph(self, key: Key, tokens_per_rank: Sequence[int]) -> Replay | None:
        """Returns what replays the graph of a step. None: there is none, on all ranks alike."""
        return self.of(key[0]).path_of(tokens_per_rank).graph(key, tokens_per_rank)

    def ids_dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes of ids that the gates of any step may have to write."""
        return {torch.int32} | {path.ids_dtype for kernels in self.groups for path in kernels.paths.values()}

    def ids_dtype(self, layer: int, tokens_per_rank: Sequence[int], *, backward: bool = False) -> torch.dtype:
        """Returns the dtype of ids that a step's prepare/finalize takes. Backward steps have an exchange of their own."""
        return torch.int32 if backward else self.of(layer).path_of(tokens_per_rank).ids_dtype

    def eager(self, layer: int, x_MK: torch.Tensor, routing: Routing, **arguments) -> torch.Tensor:
        """Runs a step behind its gate, by physical ids, on the kernels of its layer. Collective."""
        return self.of(layer).path_of(arguments["tokens_per_rank"]).eager(x_MK, routing, **arguments)

    def backward(
        self, layer: int, x_MK: torch.Tensor, g_MK: torch.Tensor, routing: Routing, *, weights: ExpertWeights,
        tokens_per_rank: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Runs one backward step. Collective."""
        return self.of(layer).backward(x_MK, g_MK, routing, weights=weights, tokens_per_rank=tokens_per_rank)

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
