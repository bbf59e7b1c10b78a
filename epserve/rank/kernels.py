"""The kernels of one rank for layers of one kind: one kernel for each all-to-all path, and the choice of a step's path.

Most services have one path. With `engine.all2all: measured` there are several, which share their workspaces. A step takes
the path that was fastest for its number of tokens (`measured/crossover.py`). A path runs a step as a CUDA graph if one was
captured for it, as two halves in flight if that is configured, and otherwise eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import torch

from epserve import all2all
from epserve.config import Config
from epserve.models import LayerWeights
from epserve.modular_kernel import (
    ExpertWeights,
    FusedMoEExpertsModular,
    FusedMoEModularKernel,
    RankContext,
    Routing,
    Workspaces,
)
from epserve.modular_kernel.kernel import SharedExperts
from epserve.modular_kernel.measured.crossover import Crossover, agree, example, measure
from epserve.modular_kernel.measured.known_times import KnownTimes
from epserve.modular_kernel.measured.selection import Choice, MeasuredExperts
from epserve.modular_kernel.steps.graphs import StepGraphs, why_no_graphs
from epserve.modular_kernel.steps.in_flight import TwoInFlight, why_not_two

from .setup.groups import LayerGroup, PathPlan
from .setup.plan import measuring, tuning

log = logging.getLogger(__name__)

OnPhase = Callable[[str], object]


def _no_phase(phase: str) -> None:
    """Ignores phases of steps that are not timed. NOTE: a clock's events must not be recorded inside a capture."""


class Path:
    """One all-to-all with its experts. The experts object and the workspaces outlive a process group."""

    def __init__(self, plan: LayerGroup, path: PathPlan, config: Config, known: KnownTimes):
        self.plan, self.config = path, config
        tiles = tuning(config)
        if known.started:
            tiles = replace(tiles, budget_s=0.0)
        self.method = plan.method(path.spec, path.chosen.as_backends(replace(measuring(config), known=known), tiles))
        self.kernel: FusedMoEModularKernel | None = None
        self.two: TwoInFlight | None = None
        self.graphs: StepGraphs | None = None
        self.notes: list[str] = []

    @property
    def name(self) -> str:
        return self.plan.chosen.all2all

    @property
    def experts(self) -> FusedMoEExpertsModular | None:
        return self.method.experts

    def build(self, ranks: RankContext, first: Workspaces, second: Workspaces) -> None:
        """Collective."""
        if self.kernel is not None:
            return
        self.kernel = self.method.init_prepare_finalize(ranks, self.plan.options, workspaces=first)
        prepare_finalize = self.kernel.prepare_finalize
        assert self.experts is not None
        self.notes.clear()
        engine = self.config.engine
        if engine.batches_in_flight > 1:
            if reason := why_not_two(prepare_finalize):
                self.notes.append(f"{self.name}: one batch in flight: {reason}")
            else:
                self.two = TwoInFlight(self.kernel, second=second, from_tokens=engine.overlap_min_tokens)
        if engine.cuda_graph_tokens:
            graphs = prepare_finalize.capability.cuda_graph, self.experts.capability.cuda_graph
            names = self.name, self.plan.chosen.experts
            if reason := why_no_graphs(self.plan.spec, *graphs, names):
                self.notes.append(f"{self.name}: no CUDA graphs: {reason}")
            else:
                buckets = [each for each in engine.cuda_graph_tokens if self.plan.cap is None or each <= self.plan.cap]
                self.graphs = StepGraphs(self._eager, ranks, self.plan.spec, buckets) if buckets else None

    def leave(self) -> None:
        """Drops everything that was built on a broken group. Not collective."""
        self.kernel = self.two = self.graphs = self.method.kernel = None
        manager, self.method.manager = self.method.manager, None
        if manager is not None:
            manager.abandon()
            manager.destroy()

    def destroy(self) -> None:
        """Collective."""
        self.kernel = self.two = self.graphs = self.method.kernel = None
        manager, self.method.manager = self.method.manager, None
        if manager is not None:
            manager.destroy()

    def forward(
        self, key: Hashable, x_MK, routing: Routing, *, weights: ExpertWeights, tokens_per_rank, shared_experts
    ) -> torch.Tensor:
        assert self.kernel is not None
        shared = shared_experts is not None
        bucket = self.graphs.bucket(tokens_per_rank) if self.graphs is not None else None
        # Captured on all ranks or on none: at warm-up, or before a staged placement is used.
        if self.graphs is not None and bucket is not None and self.graphs.has(key, shared, bucket):
            self.kernel.on_phase("experts")
            return self.graphs.replay(key, x_MK, routing, shared=shared, bucket=bucket)
        return self._eager(
            x_MK, routing, weights=weights, tokens_per_rank=tokens_per_rank, shared_experts=shared_experts
        )

    def capture(self, key: Hashable, weights: LayerWeights) -> None:
        """Captures graphs of these weights for every bucket, with and without shared experts. Collective."""
        if self.graphs is None:
            return
        assert self.kernel is not None
        on_phase, self.kernel.on_phase = self.kernel.on_phase, _no_phase
        try:
            for shared in {id(each): each for each in (None, weights.shared)}.values():
                self.graphs.capture(key, weights.experts, shared)
        finally:
            self.kernel.on_phase = on_phase

    def _eager(self, x_MK, routing, **arguments) -> torch.Tensor:
        runner = self.two or self.kernel
        assert runner is not None
        return runner.forward(x_MK, routing, **arguments)


class RankKernels:
    """Holds all paths of one rank. `build`, `warm_up` and `forward` are collective."""

    def __init__(self, plan: LayerGroup, config: Config, ranks: RankContext, known: KnownTimes | None = None):
        """`known`: times of former arrangements. New measurements are added to it."""
        self.plan = plan
        self.known = known if known is not None else KnownTimes()
        self.paths = {path.chosen.all2all: Path(plan, path, config, self.known) for path in plan.paths}
        self.first = next(iter(self.paths.values()))
        self.workspaces, self.second = Workspaces(ranks.device), Workspaces(ranks.device)
        self.crossover: Crossover | None = None
        self.ranks = ranks

    @property
    def built(self) -> bool:
        return self.first.kernel is not None

    @property
    def ready(self) -> bool:
        """Whether the experts objects exist, so that weights can be prepared for them."""
        return self.first.experts is not None

    @property
    def caps(self) -> dict[str, int | None]:
        return {name: path.plan.cap for name, path in self.paths.items()}

    def build(self, ranks: RankContext) -> None:
        """Builds every path's kernel on the present group. Collective."""
        self.ranks = ranks
        for path in self.paths.values():
            path.build(ranks, self.workspaces, self.second)

    @property
    def packs_weights(self) -> bool:
        return any(path.experts is not None and path.experts.capability.packs_weights for path in self.paths.values())

    def prepare_weights(self, experts: ExpertWeights) -> ExpertWeights:
        """Returns the weights as every path's experts class prepares them: one set of tensors with everything derived."""
        for path in self.paths.values():
            experts = path.method.process_weights_after_loading(experts)
        return experts

    def warm_up(self, weights: LayerWeights, on_phase: OnPhase) -> None:
        """Compiles, reserves memory, runs every path and agrees on the path for each number of tokens. Collective.

        `weights` may be those of any layer.
        """
        kernels = [path.kernel for path in self.paths.values() if path.kernel is not None]
        for kernel in kernels:  # set on all kernels before the first one locks the shared workspaces
            kernel.on_phase = on_phase
            kernel.fused_experts.tune(weights.experts, kernel.prepare_finalize.max_rows())
            self.workspaces.reserve(kernel.workspace_shapes())
        for path in self.paths.values():
            assert path.kernel is not None
            path.kernel.warm_up(weights.experts)
        for path in self.paths.values():
            if path.two is not None:
                self.second.reserve(path.two.kernel.workspace_shapes())
        self.second.lock()
        for path in self.paths.values():
            self._touch(path, weights)
        if len(self.paths) > 1:
            self._choose_paths(weights)
        measured = [each for path in self.paths.values() if isinstance(each := path.experts, MeasuredExperts)]
        self.known.add(table for each in measured if (table := each.table(weights.experts)) is not None)
        self.known.started = True
        for line in self.notes():
            log.info(line)

    def capture(self, layers: Iterable[tuple[Hashable, LayerWeights]]) -> None:
        """Captures these layers' graphs on every path that has graphs. The key of the weights is the same on all ranks."""
        for key, weights in layers:
            for path in self.paths.values():
                path.capture(key, weights)

    def keep_graphs(self, keys: set[Hashable]) -> None:
        """Forgets the graphs of all weights but these."""
        for graphs in [path.graphs for path in self.paths.values() if path.graphs is not None]:
            for key in graphs.weight_keys() - keys:
                graphs.drop(key)

    def forward(
        self,
        key: Hashable,
        x_MK: torch.Tensor,
        routing: Routing,
        *,
        weights: ExpertWeights,
        tokens_per_rank: Sequence[int],
        shared_experts: SharedExperts | None,
    ) -> torch.Tensor:
        """Runs one step. Collective. `key` is the key under which these weights' graphs were captured."""
        path = self.first
        if self.crossover is not None:
            path = self.paths[self.crossover.choice(tokens_per_rank)]
        return path.forward(
            key, x_MK, routing, weights=weights, tokens_per_rank=tokens_per_rank, shared_experts=shared_experts
        )

    def check(self) -> None:
        """Raises RankFailed as FusedMoEPrepareAndFinalizeModular.check does."""
        for path in self.paths.values():
            if path.kernel is not None:
                path.kernel.prepare_finalize.check()

    def notes(self) -> list[str]:
        """Returns lines for the log and GetStatus: measurements, and why a configured feature is off."""
        lines = [note for path in self.paths.values() for note in path.notes]
        for path in self.paths.values():
            if path.graphs is not None:
                lines.append(
                    f"{path.name}: CUDA graphs for up to {', '.join(map(str, path.graphs.buckets))} tokens a rank"
                )
            if path.two is not None:
                lines.append(f"{path.name}: two batches in flight from {path.two.from_tokens} tokens a rank")
        lines += self.crossover.explain() if self.crossover is not None else []
        if self.crossover is not None and self.crossover.num_ranks not in (0, self.ranks.world_size):
            lines.append(f"all-to-all: chosen by times that were measured with {self.crossover.num_ranks} ranks")
        several = len(self.paths) > 1
        for name, path in self.paths.items():
            explained = path.experts.explain() if path.experts is not None else []
            lines += [f"{name}, {line}" if several else line for line in explained]
        return lines

    def experts_choices(self) -> tuple[Choice, ...]:
        """Returns the first path's experts backend for each range of rows on this rank. Empty: one backend computes all."""
        experts = self.first.experts
        return experts.choices() if isinstance(experts, MeasuredExperts) else ()

    def time_experts(self, weights: ExpertWeights, again: bool) -> list[str]:
        """Times the experts backends of every path and fills the file of times. Replaces build(), not collective."""
        for path in self.paths.values():
            backends = path.method.backends
            path.method.backends = replace(backends, tuning=replace(backends.tuning, again=again, thorough=True))
            path.method.experts = path.method.make_experts(all2all.REGISTRY.get(path.name).prepare_finalize)
            assert path.experts is not None
            prepared = path.method.process_weights_after_loading(weights)
            most = path.plan.options.max_tokens_per_rank * self.ranks.world_size
            path.experts.tune(prepared, most)
            if isinstance(path.experts, MeasuredExperts):
                path.experts.measuring = replace(path.experts.measuring, again=again)
                path.experts.warm_up(prepared, most)
        return self.notes()

    def interrupt(self) -> None:
        """Ends waits on the device for a rank that is gone. Called from another thread."""
        for path in self.paths.values():
            if (manager := path.method.manager) is not None:
                manager.interrupt()

    def leave(self) -> None:
        """Calls Path.leave of every path."""
        for path in self.paths.values():
            path.leave()
        self.ranks = replace(self.ranks, group=None)

    def destroy(self) -> None:
        """Destroys every path, also when an earlier one fails. Collective."""
        errors = []
        for path in self.paths.values():
            try:
                path.destroy()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _touch(self, path: Path, weights: LayerWeights) -> None:
        """Runs each path's first steps, which set up connections and the state that a capture needs."""
        x_MK, routing = self._example(2)
        counts = (2,) * self.ranks.world_size
        for shared in {id(each): each for each in (None, weights.shared)}.values():
            path.forward(None, x_MK, routing, weights=weights.experts, tokens_per_rank=counts, shared_experts=shared)
            if path.graphs is not None:
                path.graphs.warm(weights.experts, shared)

    def _choose_paths(self, weights: LayerWeights) -> None:
        """Agrees on one table of paths. Collective.

        A new rank has no table, and the others may have one for another number of ranks. All ranks take the same one.
        """
        own = self.crossover or self.known.crossover(self.ranks.world_size)
        self.crossover = agree(self.ranks, own, self.caps) or self._measure(weights)
        self.known.add_crossover(self.crossover)

    def _measure(self, weights: LayerWeights) -> Crossover:
        if any(path.graphs is not None for path in self.paths.values()):
            self.capture([("measure", weights)])  # steps of these sizes will run as graphs
        runs = {
            name: lambda x, routing, counts, path=path: path.forward(
                "measure", x, routing, weights=weights.experts, tokens_per_rank=counts, shared_experts=None
            )
            for name, path in self.paths.items()
        }
        most = max(path.plan.options.max_tokens_per_rank for path in self.paths.values())
        table = measure(self.ranks, self.plan.spec, runs, self.caps, most=most)
        self.keep_graphs(set())
        return table

    def _example(self, num_tokens: int) -> tuple[torch.Tensor, Routing]:
        return example(self.plan.spec, num_tokens, self.ranks)
