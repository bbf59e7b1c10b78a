"""The kernels of one rank for layers of one kind: one kernel for each all-to-all path, and the choice of a step's path.

Most services have one path. With `engine.all2all: measured` there are several, which share their workspaces. A step takes
the path that was fastest for its number of tokens (`measured/crossover.py`). A path replays a whole step, gate included, as a
CUDA graph if one was captured for it. Other steps run eagerly, as two halves in flight if that is configured.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from epserve import all2all
from epserve.config import Config
from epserve.modular_kernel import (
    ExpertWeights,
    FusedMoEExpertsModular,
    FusedMoEModularKernel,
    RankContext,
    Routing,
    Workspaces,
)
from epserve.modular_kernel.measured.crossover import Crossover, agree, example, measure
from epserve.modular_kernel.measured.known_times import KnownTimes
from epserve.modular_kernel.measured.selection import Choice, MeasuredExperts
from epserve.modular_kernel.steps import worth
from epserve.modular_kernel.steps.graphs import StepGraphs, kernel_step, why_no_graphs
from epserve.modular_kernel.steps.in_flight import TwoInFlight, why_not_two

from .backward.kernel import RankGradients
from .device_facts import free_bytes
from .layer_step import LayerStep
from .setup.groups import LayerGroup, PathPlan
from .setup.plan import graph_tokens, measuring, tuning

log = logging.getLogger(__name__)

OnPhase = Callable[[str], object]
Replay = Callable[[torch.Tensor, Routing | None, int], torch.Tensor]
"""(rows, logical routing unless the step has a gate, number of the first row among all ranks' tokens) -> result. Collective."""


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
        self.ranks = RankContext()
        self.two: TwoInFlight | None = None
        self.graphs: StepGraphs | None = None
        self.auto_graphs = config.engine.cuda_graph_tokens == "auto"
        self.notes: list[str] = []

    @property
    def name(self) -> str:
        return self.plan.chosen.all2all

    @property
    def ids_dtype(self) -> torch.dtype:
        """Returns the dtype of ids that this path's prepare/finalize takes."""
        assert self.kernel is not None
        return self.kernel.prepare_finalize.topk_indices_dtype()

    @property
    def experts(self) -> FusedMoEExpertsModular | None:
        return self.method.experts

    def build(self, ranks: RankContext, first: Workspaces, second: Workspaces) -> None:
        """Collective."""
        if self.kernel is not None:
            return
        self.ranks = ranks
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
        if buckets := graph_tokens(engine, self.plan):
            graphs = prepare_finalize.capability.cuda_graph, self.experts.capability.cuda_graph
            names = self.name, self.plan.chosen.experts
            if (reason := why_no_graphs(self.plan.spec, *graphs, names)) is None:
                self.graphs = StepGraphs(ranks, self.plan.spec, buckets, ids_dtype=self.ids_dtype)
            elif self.plan.spec.device == "cuda" or not self.auto_graphs:
                self.notes.append(f"{self.name}: no CUDA graphs: {reason}")

    def leave(self) -> None:
        """Drops everything that was built on a broken group. Not collective."""
        self.kernel = self.two = self.graphs = self.method.kernel = None
        self.ranks = replace(self.ranks, group=None)
        manager, self.method.manager = self.method.manager, None
        if manager is not None:
            manager.abandon()
            manager.destroy()

    def destroy(self) -> None:
        """Collective."""
        self.kernel = self.two = self.graphs = self.method.kernel = None
        self.ranks = replace(self.ranks, group=None)
        manager, self.method.manager = self.method.manager, None
        if manager is not None:
            manager.destroy()

    def graph(self, key: Hashable, tokens_per_rank: Sequence[int]) -> Replay | None:
        """Returns what replays the graph of a step. None: there is none, on all ranks alike."""
        # Captured on all ranks or on none: at warm-up, or before a staged placement is used.
        bucket = self.graphs.bucket(tokens_per_rank) if self.graphs is not None else None
        if self.graphs is None or bucket is None or not self.graphs.has(key, bucket):
            return None
        return partial(self._replay, self.graphs, key, bucket)

    def _replay(
        self, graphs: StepGraphs, key: Hashable, bucket: int, x_MK: torch.Tensor, routing: Routing | None, first: int
    ) -> torch.Tensor:
        assert self.kernel is not None
        self.kernel.on_phase("experts")
        return graphs.replay(key, bucket, x_MK, routing, first=first)

    def capture(self, step: LayerStep) -> None:
        """Captures graphs of a step for every bucket."""
        if self.graphs is not None:
            with self.unclocked():
                self.graphs.capture(step.key, self.as_run(step))

    def as_run(self, step: LayerStep):
        return step.as_run(self.eager, self.ranks.world_size, self.ranks.device, self.ids_dtype)

    def choose_graphs(self, steps: Sequence[LayerStep]) -> None:
        """Keeps the graphs that pay, where the configuration leaves that to measurement. Collective."""
        if self.graphs is None or not self.auto_graphs:
            return
        step, graphs = steps[0], self.graphs
        with self.unclocked():
            reason = worth.try_capture(self.ranks, graphs, step.key, self.as_run(step))
        if reason is not None:
            self.drop_graphs(reason)
            return
        example_of = partial(step.example, self.plan.spec, self.ranks)
        found = worth.times(self.ranks, graphs, step.key, partial(step.eager, self.eager, self.ids_dtype), example_of)
        self.notes += [f"{self.name}: {each.explain()}" for each in found]
        if kept := [each.bucket for each in found if each.pays]:
            graphs.keep(kept)
        else:
            self.drop_graphs("none is faster than the eager step")

    def drop_graphs(self, reason: str) -> None:
        self.graphs = None
        self.notes.append(f"{self.name}: no CUDA graphs: {reason}")

    def eager(self, x_MK, routing, **arguments) -> torch.Tensor:
        """Runs the kernel, with physical ids. Collective."""
        runner = self.two or self.kernel
        assert runner is not None
        return runner.forward(x_MK, routing, **arguments)

    @contextlib.contextmanager
    def unclocked(self) -> Iterator[None]:
        """Within, the kernel's phases are not told to the clock."""
        assert self.kernel is not None
        on_phase, self.kernel.on_phase = self.kernel.on_phase, _no_phase
        try:
            yield
        finally:
            self.kernel.on_phase = on_phase


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
        self.gradients: RankGradients | None = None
        self.ranks = ranks
        self.graph_bytes, self.graph_seconds = 0, 0.0
        """Memory of the device that went into graphs since the last warm-up, by the driver's account, and time."""

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
        self.gradients = RankGradients(ranks, self.first.plan.spec, self.first.plan.options)

    @property
    def packs_weights(self) -> bool:
        return any(path.experts is not None and path.experts.capability.packs_weights for path in self.paths.values())

    def prepare_weights(self, experts: ExpertWeights) -> ExpertWeights:
        """Returns the weights as every path's experts class prepares them: one set of tensors with everything derived."""
        for path in self.paths.values():
            experts = path.method.process_weights_after_loading(experts)
        return experts

    def warm_up(self, steps: Sequence[LayerStep], on_phase: OnPhase) -> None:
        """Compiles, reserves memory, runs every path and agrees on the path for each number of tokens. Collective.

        `steps` holds those of any layer, in every mode.
        """
        weights = steps[0].weights
        self.graph_bytes, self.graph_seconds = 0, 0.0
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
            self._touch(path, steps)
            path.choose_graphs(steps)
        if len(self.paths) > 1:
            self._choose_paths(weights.experts)
        assert self.gradients is not None
        self.gradients.warm_up(weights.experts)
        measured = [each for path in self.paths.values() if isinstance(each := path.experts, MeasuredExperts)]
        self.known.add(table for each in measured if (table := each.table(weights.experts)) is not None)
        self.known.started = True
        for line in self.notes():
            log.info(line)

    def capture(self, steps: Iterable[LayerStep]) -> None:
        """Captures these steps' graphs on every path that has graphs."""
        before, start = self._free_bytes(), time.monotonic()
        for step in steps:
            if step.placement.missing:
                continue  # the experts that its tokens miss are found by waiting for the device
            for path in self.paths.values():
                path.capture(step)
        self.graph_bytes += max(before - self._free_bytes(), 0)
        self.graph_seconds += time.monotonic() - start

    def drop_graphs(self, reason: str) -> None:
        """Goes on without graphs. All ranks must."""
        for path in self.paths.values():
            if path.graphs is not None:
                path.drop_graphs(reason)

    @property
    def has_graphs(self) -> bool:
        return any(path.graphs is not None for path in self.paths.values())

    def _free_bytes(self) -> int:
        if not self.has_graphs or self.ranks.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()  # else what a capture gives back of it hides what the graphs take
        return free_bytes(self.ranks.device)

    def keep_graphs(self, keys: set[Hashable]) -> None:
        """Forgets the graphs of all weights but these."""
        for graphs in [path.graphs for path in self.paths.values() if path.graphs is not None]:
            for key in graphs.step_keys() - keys:
                graphs.drop(key)

    def path_of(self, tokens_per_rank: Sequence[int]) -> Path:
        """Returns the path of a step, the same on all ranks."""
        return self.first if self.crossover is None else self.paths[self.crossover.choice(tokens_per_rank)]

    def backward(
        self, x_MK: torch.Tensor, g_MK: torch.Tensor, routing: Routing, *, weights: ExpertWeights, tokens_per_rank
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one backward step (`RankGradients.backward`). Collective."""
        assert self.gradients is not None
        assert self.first.kernel is not None
        on_phase = self.first.kernel.on_phase
        return self.gradients.backward(
            x_MK, g_MK, routing, weights=weights, tokens_per_rank=tokens_per_rank, on_phase=on_phase
        )

    @property
    def network_bytes(self) -> int:
        """Returns the bytes that this rank has sent to other hosts, over all paths, since the present group was made."""
        kernels = [path.kernel for path in self.paths.values() if path.kernel is not None]
        return sum(kernel.prepare_finalize.network_bytes() for kernel in kernels)

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
                sizes = ", ".join(map(str, path.graphs.buckets))
                lines.append(f"{path.name}: CUDA graphs for up to {sizes} tokens a rank")
            if path.two is not None:
                lines.append(f"{path.name}: two batches in flight from {path.two.from_tokens} tokens a rank")
        lines += self.graph_notes()
        lines += self.crossover.explain() if self.crossover is not None else []
        if self.crossover is not None and self.crossover.num_ranks not in (0, self.ranks.world_size):
            lines.append(f"all-to-all: chosen by times that were measured with {self.crossover.num_ranks} ranks")
        several = len(self.paths) > 1
        for name, path in self.paths.items():
            explained = path.experts.explain() if path.experts is not None else []
            lines += [f"{name}, {line}" if several else line for line in explained]
        return lines

    def graph_notes(self) -> list[str]:
        """Returns what the graphs that were captured take."""
        count = sum(len(path.graphs) for path in self.paths.values() if path.graphs is not None)
        taken = f"{self.graph_bytes / (1 << 20):.0f} MiB, captured in {self.graph_seconds:.1f} s"
        return [f"{count} CUDA graphs take {taken}"] if count else []

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
        self.gradients = None
        for path in self.paths.values():
            path.leave()
        self.ranks = replace(self.ranks, group=None)

    def destroy(self) -> None:
        """Destroys every path, also when an earlier one fails. Collective."""
        self.gradients = None
        errors = []
        for path in self.paths.values():
            try:
                path.destroy()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _touch(self, path: Path, steps: Sequence[LayerStep]) -> None:
        """Runs each path's first steps, which set up connections and the state that a capture needs."""
        x_MK, routing = self._example(2)
        counts = (2,) * self.ranks.world_size
        for step in steps:
            weights, shared = step.weights.experts, step.shared
            path.eager(x_MK, routing, weights=weights, tokens_per_rank=counts, shared_experts=shared)
            if path.graphs is not None:
                path.graphs.warm(path.as_run(step))

    def _choose_paths(self, weights: ExpertWeights) -> None:
        """Agrees on one table of paths. Collective.

        A new rank has no table, and the others may have one for another number of ranks. All ranks take the same one.
        """
        own = self.crossover or self.known.crossover(self.ranks.world_size)
        self.crossover = agree(self.ranks, own, self.caps) or self._measure(weights)
        self.known.add_crossover(self.crossover)

    def _measure(self, weights: ExpertWeights) -> Crossover:
        """Times the kernels of all paths. Steps of sizes that have graphs run as graphs, here too."""
        for path in self.paths.values():
            if path.graphs is not None:
                with path.unclocked():
                    path.graphs.capture("measure", kernel_step(path.eager, weights, None, self.ranks.world_size))

        def run(path: Path, x_MK: torch.Tensor, routing: Routing, counts: Sequence[int]) -> object:
            if (replay := path.graph("measure", counts)) is not None:
                return replay(x_MK, routing, 0)
            return path.eager(x_MK, routing, weights=weights, tokens_per_rank=counts, shared_experts=None)

        runs = {name: partial(run, path) for name, path in self.paths.items()}
        most = max(path.plan.options.max_tokens_per_rank for path in self.paths.values())
        table = measure(self.ranks, self.plan.spec, runs, self.caps, most=most)
        self.keep_graphs(set())
        return table

    def _example(self, num_tokens: int) -> tuple[torch.Tensor, Routing]:
        return example(self.plan.spec, num_tokens, self.ranks)
