"""What every rank will run, decided from the configuration and the model before any weight is read. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from epserve import all2all, experts
from epserve.config import Config, EngineConfig
from epserve.errors import ConfigError, Incompatible
from epserve.models import ModelInfo
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    Tuning,
)
from epserve.modular_kernel.measured import crossover
from epserve.modular_kernel.measured.selection import MeasuredExperts, Measuring
from epserve.modular_kernel.measured.selection_batched import MeasuredBatchedExperts
from epserve.modular_kernel.workspace import WorkspaceShapes
from epserve.process import ranges
from epserve.rank.placement import Placement

from .backends import Chosen, activation_format, choose_backends, describe
from .groups import LayerGroup, PathPlan, choose_group, kinds_of

MEASURED = {
    "cpu": ("local", "all_to_all", "allgather_reducescatter"),
    "cuda": ("local", "nvlink", "all_to_all", "allgather_reducescatter", "deepep_ht", "deepep_ll"),
}
"""Candidates where the configuration says "measured" and names none; of several, the first one serves until times are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """`layers`: the MoE layers to serve. `groups`: those that are stored and served alike, the one with most layers first."""

    layers: tuple[int, ...]
    placement: Placement
    groups: tuple[LayerGroup, ...]

    @property
    def first(self) -> LayerGroup:
        return self.groups[0]

    @property
    def spec(self) -> LayerSpec:
        """Of the first group; others differ in their quantisation alone."""
        return self.first.spec

    @property
    def chosen(self) -> Chosen:
        return self.first.chosen

    @property
    def paths(self) -> tuple[PathPlan, ...]:
        """Of all groups."""
        return tuple(path for group in self.groups for path in group.paths)

    @property
    def served(self) -> dict[int, QuantConfig]:
        """In which scheme each layer's experts lie on the ranks."""
        return {layer: group.spec.quant for group in self.groups for layer in group.layers}


def resolve_device(device: str) -> str:
    """ "auto" is cuda where torch sees a GPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def plan_ranks(config: Config, info: ModelInfo, *, device: str, here: bool = True) -> RankPlan:
    """Raises ConfigError or Incompatible, with every reason. Takes milliseconds.

    here: this machine runs it. False plans another one, as if it had every package and link.
    """
    engine = config.engine
    entries, slices = engine.ranks // engine.tensor_parallel, engine.tensor_parallel
    if engine.experts_per_rank and len(engine.experts_per_rank) != entries:
        shared = f", of which {slices} each share experts: {entries} entries" if slices > 1 else ""
        raise ConfigError(
            f"experts_per_rank lists {len(engine.experts_per_rank)} ranks, engine.ranks is {engine.ranks}{shared}"
        )
    placement = first_placement(config, info)
    shape = ExpertShape(
        hidden=info.hidden,
        intermediate=info.intermediate // slices,
        num_experts=placement.layout.num_experts,
        top_k=info.top_k,
        dtype=info.dtype,
    )
    spec = LayerSpec(
        shape=shape,
        layout=placement.layout,
        device=device,
        activation=info.activation,
        bias=info.bias,
    )
    layers = served_layers(config, info)
    groups = tuple(
        choose_group(kind, of, spec, whole=info.sizes, named=engine.experts,
                     paths_of=lambda asked: choose_paths(asked, config, here=here))
        for kind, of in kinds_of(info, layers)
    )  # fmt: skip
    # A file that is wrong is found before any weight is read.
    if here and engine.experts_tiles not in ("auto", "shipped"):
        for path in (path for group in groups for path in group.paths):
            for name in (path.chosen.experts, *path.chosen.rivals):
                experts.REGISTRY.get(name)(path.spec).use(tuning(config))
    return RankPlan(layers=layers, placement=placement, groups=groups)


def choose_paths(spec: LayerSpec, config: Config, *, here: bool = True) -> tuple[PathPlan, ...]:
    """One path, or with all2all "measured" one for each candidate. Raises ConfigError or Incompatible with every reason."""
    engine, order = config.engine, config.engine.combine_order
    options = kernel_options(config)
    # A backend that waits on the host is refused where it is named and passed over where it is not; on the CPU all is eager.
    graphs = bool(engine.cuda_graph_tokens) and spec.device == "cuda"
    if engine.all2all != "measured":
        spec = replace(spec, cuda_graph=graphs)
        chosen = choose_backends(
            spec, all2all_name=engine.all2all, experts_name=engine.experts, combine_order=order, here=here
        )
        _check_cap(chosen, spec, options.max_tokens_per_rank, "max_tokens_per_rank")
        return (PathPlan(chosen=chosen, spec=spec, options=options),)
    named = bool(engine.all2all_candidates)
    passed: list[str] = []
    found: list[PathPlan] = []
    for name in engine.all2all_candidates or MEASURED[spec.device]:
        if name == "local" and spec.layout.num_ranks > 1 and not named:
            continue
        try:
            chosen = choose_backends(
                spec, all2all_name=name, experts_name=engine.experts, combine_order=order, here=here
            )
        except Incompatible as error:
            if named:
                raise
            passed += error.reasons
            continue
        found.append(_candidate(chosen, spec, options, engine.low_latency_max_tokens))
        if name == "local" and not named:
            break  # nothing is sent: there is nothing to choose
    if not found:
        raise Incompatible(
            f"no candidate of all2all 'measured' can serve this layer ({describe(spec)}):", tuple(passed)
        )
    if all(path.cap is not None for path in found):
        names = ", ".join(path.chosen.all2all for path in found)
        raise ConfigError(f"all2all_candidates {names}: all have a cap on a step's tokens; add one that has none")
    found = _packed_alike(found)
    found.sort(key=lambda path: path.cap is not None)  # the first serves whatever was not measured
    others = tuple((path.chosen.all2all, path.chosen.experts) for path in found[1:])
    first = replace(found[0].chosen, others=others, passed_over=tuple(passed))
    paths = (replace(found[0], chosen=first), *found[1:])
    if limit := engine.all2all_budget_mib << 20:
        busiest = max(range(spec.layout.num_ranks), key=lambda entry: spec.layout.counts[entry])
        crossover.check_budget(
            memory_asked(paths, busiest * spec.layout.slices), limit, setting="engine.all2all_budget_mib"
        )
    return paths


def _packed_alike(paths: list[PathPlan]) -> list[PathPlan]:
    """All paths compute with the same weights: with one that reads plain ones only, no class packs them."""
    if all(activation_format(path.chosen) is FusedMoEActivationFormat.Standard for path in paths):
        return paths
    return [replace(path, chosen=_without_packing(path.chosen)) for path in paths]


def _without_packing(chosen: Chosen) -> Chosen:
    kept = [
        name for name in (chosen.experts, *chosen.rivals) if not experts.REGISTRY.get(name).capability.packs_weights
    ]
    if not kept:
        raise ConfigError(
            f"engine.experts {chosen.experts}: it packs the weights, which an all-to-all of all2all_candidates with experts of"
            " the batched format cannot read; name candidates of one format, or other experts"
        )
    return replace(chosen, experts=kept[0], rivals=tuple(kept[1:]))


def _check_cap(chosen: Chosen, spec: LayerSpec, cap: int, setting: str) -> None:
    most = all2all.REGISTRY.get(chosen.all2all).prepare_finalize.capability.most_tokens
    slices = spec.layout.slices
    if most is not None and cap * slices > most:
        shared = f" of all {slices} ranks that share experts" if slices > 1 else ""
        raise ConfigError(f"{setting} {cap}: {chosen.all2all} takes at most {most} tokens a rank{shared}; lower it")


def with_cap(paths: Iterable[PathPlan], engine: EngineConfig) -> tuple[PathPlan, ...]:
    """The same paths with another `max_tokens_per_rank`, as `choose_paths` would have sized them."""
    made = []
    for path in paths:
        cap = engine.max_tokens_per_rank
        if path.cap is not None:
            cap = min(cap, engine.low_latency_max_tokens)
        options = replace(path.options, max_tokens_per_rank=cap)
        made.append(replace(path, options=options, cap=None if path.cap is None else cap))
    return tuple(made)


def memory_asked(paths: Iterable[PathPlan], rank: int) -> dict[str, int]:
    """Bytes of each path's buffers, and of the workspaces that all of them share (twice with two batches in flight)."""
    asked, shared = {}, 0
    for path in paths:
        manager = all2all.REGISTRY.get(path.chosen.all2all)
        asked[path.chosen.all2all] = manager.buffer_bytes(path.spec, path.inner_options)
        shared = max(shared, workspaces(path, rank).nbytes * path.options.batches_in_flight)
    return {**asked, "workspaces": shared}


def workspaces(path: PathPlan, rank: int) -> WorkspaceShapes:
    """For the largest batch that prepare can return: what the kernel reserves at warm-up.

    Without the GPU at hand the shapes are those of a device that nobody tuned for; a tuned one may split its sums less.
    """
    spec = path.spec
    here = spec.device == "cpu" or torch.cuda.is_available()
    spec = spec if here else replace(spec, device="cpu")
    names = (path.chosen.experts, *path.chosen.rivals)
    made = {name: experts.REGISTRY.get(name)(spec) for name in names}
    backend: FusedMoEExpertsModular = made[path.chosen.experts]
    if path.chosen.rivals:
        batched = activation_format(path.chosen) is FusedMoEActivationFormat.BatchedExperts
        backend = (MeasuredBatchedExperts if batched else MeasuredExperts)(spec, made)
    rows = path.inner_options.max_tokens_per_rank * spec.layout.num_ranks
    count = spec.layout.counts[rank // spec.layout.slices]
    if activation_format(path.chosen) is FusedMoEActivationFormat.Standard:
        return backend.workspace_shapes(rows, spec.shape.top_k, count)
    return backend.workspace_shapes(0, spec.shape.top_k, count, rows)


def _candidate(chosen: Chosen, spec: LayerSpec, options: PrepareFinalizeOptions, low: int) -> PathPlan:
    """Batched formats have blocks of fixed capacity, so that they get a cap of their own; others make rounds."""
    if activation_format(chosen) is not FusedMoEActivationFormat.BatchedExperts:
        return PathPlan(chosen=chosen, spec=spec, options=options)
    cap = min(options.max_tokens_per_rank, low)
    _check_cap(chosen, spec, cap, "low_latency_max_tokens")
    return PathPlan(chosen=chosen, spec=spec, options=replace(options, max_tokens_per_rank=cap), cap=cap)


def first_placement(config: Config, info: ModelInfo) -> Placement:
    """Of every layer, before any load is known."""
    engine, slots = config.engine, info.num_experts + config.engine.redundant_experts
    slices = engine.tensor_parallel
    entries = engine.ranks // slices
    if not engine.redundant_experts:
        return Placement.identity(info.num_experts, engine.experts_per_rank or entries, slices=slices)
    layout = ExpertLayout.even(slots, entries, slices=slices)
    if engine.experts_per_rank:
        layout = ExpertLayout(counts=engine.experts_per_rank, slices=slices)
    if 0 < layout.num_experts == slots < info.num_experts:  # what is left of a service that lost a rank
        left = tuple(range(slots))
        return Placement(num_logical=info.num_experts, layout=layout, physical_to_logical=left, partial=True)
    if layout.num_experts != slots:
        raise ConfigError(
            f"experts_per_rank {layout.counts} holds {layout.num_experts} experts, the model has {info.num_experts} and"
            f" redundant_experts is {engine.redundant_experts}; make it add up to {slots} or leave it empty"
        )
    return Placement.spread(info.num_experts, layout)


def check_layout(config: Config, plan: RankPlan, layout: ExpertLayout) -> None:
    """Raises Incompatible where no pair of backends serves the planned layers with this layout."""
    shape = replace(plan.spec.shape, num_experts=layout.num_experts)
    for group in plan.groups:
        choose_paths(replace(group.spec, shape=shape, layout=layout), config, here=False)


def resized(config: Config, counts: tuple[int, ...], num_experts: int) -> Config:
    """The same service on `len(counts)` ranks (times those that share each entry) that hold `counts` physical experts.

    A single rank has nobody to talk to, whatever all-to-all the others were told to use.
    """
    update = {
        "ranks": len(counts) * config.engine.tensor_parallel,
        "experts_per_rank": tuple(counts),
        "redundant_experts": sum(counts) - num_experts,
    }
    if len(counts) == 1 and config.engine.all2all not in ("auto", "measured"):
        update["all2all"] = "local"
    # A candidate that knows other numbers of ranks only is left out; the service goes on with the rest.
    kept = [name for name in config.engine.all2all_candidates if _knows(name, len(counts))]
    update["all2all_candidates"] = tuple(kept)
    engine = config.engine.model_copy(update=update)
    return config.model_copy(update={"engine": engine})


def _knows(all2all_name: str, num_ranks: int) -> bool:
    record = all2all.REGISTRY.get(all2all_name).prepare_finalize.capability
    most = record.max_ranks is None or num_ranks <= record.max_ranks
    return most and (not record.rank_counts or num_ranks in record.rank_counts)


def served_layers(config: Config, info: ModelInfo) -> tuple[int, ...]:
    """Ascending; `model.layers`, or all. Raises ConfigError for those that the model has not."""
    unknown = sorted(set(config.model.layers) - set(info.layers))
    if unknown:
        raise ConfigError(
            f"model.layers: {unknown} are not MoE layers of {info.name} (those are {ranges.shown(info.layers)})"
        )
    return tuple(sorted(set(config.model.layers))) or info.layers


def measuring(config: Config) -> Measuring:
    """How a rank's experts backends are timed against each other."""
    return Measuring(budget_s=config.engine.experts_timing_s, cache=config.engine.experts_times)


def tuning(config: Config) -> Tuning:
    """Where tiles of a rank's own kernels come from, and what a start may spend on them."""
    engine, tiles = config.engine, config.engine.experts_tiles
    return Tuning(
        folder=engine.experts_tiles_folder if tiles == "auto" else None,
        file=tiles if isinstance(tiles, Path) else None,
        budget_s=engine.experts_tiles_timing_s,
    )


def tunes(paths: Iterable[PathPlan]) -> bool:
    """Whether any backend that may serve chooses among tiles."""
    names = {name for path in paths for name in (path.chosen.experts, *path.chosen.rivals)}
    return any(experts.REGISTRY.get(name).tunes for name in names)


def kernel_options(config: Config) -> PrepareFinalizeOptions:
    engine = config.engine
    return PrepareFinalizeOptions(
        max_tokens_per_rank=engine.max_tokens_per_rank,
        combine_order=engine.combine_order,
        dispatch_quantised=engine.dispatch_quantised,
        batches_in_flight=engine.batches_in_flight,
    )
