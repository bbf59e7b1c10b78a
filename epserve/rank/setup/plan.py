"""Plans the kernels of every rank from the configuration and the model before any weight is read. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
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
from epserve.modular_kernel.steps.graphs import why_no_graphs
from epserve.modular_kernel.workspace import WorkspaceShapes
from epserve.process import ranges
from epserve.rank.placement import Placement

from .backends import Chosen, activation_format, choose_backends, describe
from .groups import LayerGroup, PathPlan, choose_group, kinds_of
from .topology import Topology

AUTO_GRAPH_TOKENS = (1, 8, 32, 128, 512)
"""Sizes that are tried as CUDA graphs when the configuration says "auto". Ranks keep those that are faster than eager steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The plan of all ranks. `layers` lists the MoE layers to serve. `groups` holds groups of like layers, largest first."""

    layers: tuple[int, ...]
    placement: Placement
    groups: tuple[LayerGroup, ...]

    @property
    def first(self) -> LayerGroup:
        return self.groups[0]

    @property
    def spec(self) -> LayerSpec:
        """Returns the spec of the first group. Other groups differ only in their quantisation."""
        return self.first.spec

    @property
    def chosen(self) -> Chosen:
        return self.first.chosen

    @property
    def paths(self) -> tuple[PathPlan, ...]:
        """Returns the paths of all groups."""
        return tuple(path for group in self.groups for path in group.paths)

    @property
    def served(self) -> dict[int, QuantConfig]:
        """Returns the scheme of each layer's experts on the ranks."""
        return {layer: group.spec.quant for group in self.groups for layer in group.layers}

    def runs_as(self, other: RankPlan) -> bool:
        """Returns whether kernels of the other plan serve this one. Reasons for what was passed over do not matter."""
        return [_without_reasons(group) for group in self.groups] == [_without_reasons(group) for group in other.groups]


def _without_reasons(group: LayerGroup) -> LayerGroup:
    paths = (replace(path, chosen=replace(path.chosen, passed_over=())) for path in group.paths)
    return replace(group, paths=tuple(paths), why="")


def resolve_device(device: str) -> str:
    """Returns the device. "auto" means cuda if torch sees a GPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def plan_ranks(
    config: Config, info: ModelInfo, *, device: str, here: bool = True, topology: Topology | None = None
) -> RankPlan:
    """Returns the plan. Raises ConfigError or Incompatible, with every reason. It takes milliseconds.

    With `here` this machine runs the plan. False plans another machine, as if it had every package and link. What the ranks
    told of their machines, in `topology`, comes before both.
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
                     paths_of=lambda asked: choose_paths(asked, config, here=here, topology=topology))
        for kind, of in kinds_of(info, layers)
    )  # fmt: skip
    # This check finds a wrong file before any weight is read.
    if here and engine.experts_tiles not in ("auto", "shipped"):
        for path in (path for group in groups for path in group.paths):
            for name in (path.chosen.experts, *path.chosen.rivals):
                experts.REGISTRY.get(name)(path.spec).use(tuning(config))
    return RankPlan(layers=layers, placement=placement, groups=groups)


def choose_paths(
    spec: LayerSpec, config: Config, *, here: bool = True, topology: Topology | None = None
) -> tuple[PathPlan, ...]:
    """Returns one path, or one for each candidate with all2all "measured". Raises ConfigError or Incompatible."""
    engine, order = config.engine, config.engine.combine_order
    options = kernel_options(config)
    # With sizes for graphs, a backend that waits on the host is refused if it is named, and passed over otherwise. On the CPU
    # all steps are eager.
    auto = engine.cuda_graph_tokens == "auto"
    graphs = bool(engine.cuda_graph_tokens) and spec.device == "cuda" and not auto
    choose = partial(choose_backends, experts_name=engine.experts, combine_order=order, here=here, topology=topology)
    if engine.all2all != "measured":
        spec = replace(spec, cuda_graph=graphs)
        chosen = choose(spec, all2all_name=engine.all2all)
        _check_cap(chosen, spec, options.max_tokens_per_rank, "max_tokens_per_rank")
        path = PathPlan(chosen=chosen, spec=spec, options=options)
        # Whatever serves here is timed as it will run.
        if auto and spec.device == "cuda" and why_eager(path) is None and engine.tensor_parallel == 1:
            path = replace(path, spec=replace(spec, cuda_graph=True))
        return (path,)
    named = bool(engine.all2all_candidates)
    passed: list[str] = []
    found: list[PathPlan] = []
    for name in engine.all2all_candidates or all2all.REGISTRY.timed(spec.device):
        if not named and _idle(name, spec, topology):
            continue
        try:
            chosen = choose(spec, all2all_name=name)
        except Incompatible as error:
            if named:
                raise
            passed += error.reasons
            continue
        found.append(_candidate(chosen, spec, options, engine.low_latency_max_tokens))
        if name == "local" and not named:
            break  # nothing is sent, so there is no choice
    if not found:
        raise Incompatible(
            f"no candidate of all2all 'measured' can serve this layer ({describe(spec)}):", tuple(passed)
        )
    if all(path.cap is not None for path in found):
        names = ", ".join(path.chosen.all2all for path in found)
        raise ConfigError(f"all2all_candidates {names}: all have a cap on a step's tokens; add one that has none")
    found = _packed_alike(found)
    found.sort(key=lambda path: path.cap is not None)  # the first path serves all sizes that were not measured
    others = tuple((path.chosen.all2all, path.chosen.experts) for path in found[1:])
    first = replace(found[0].chosen, others=others, passed_over=tuple(passed))
    paths = (replace(found[0], chosen=first), *found[1:])
    if limit := engine.all2all_budget_mib << 20:
        busiest = max(range(spec.layout.num_ranks), key=lambda entry: spec.layout.counts[entry])
        crossover.check_budget(
            memory_asked(paths, busiest * spec.layout.slices), limit, setting="engine.all2all_budget_mib"
        )
    return paths


def why_eager(path: PathPlan) -> str | None:
    """Returns why no step of this path can be a CUDA graph, or None."""
    names = path.chosen.all2all, path.chosen.experts
    backends = (path.chosen.experts, *path.chosen.rivals)
    every = all(experts.REGISTRY.get(name).capability.cuda_graph for name in backends)
    return why_no_graphs(path.spec, all2all.REGISTRY.get(names[0]).prepare_finalize.capability.cuda_graph, every, names)


def graph_tokens(engine: EngineConfig, path: PathPlan) -> tuple[int, ...]:
    """Returns the sizes whose steps are to be captured on this path, if it can be. Empty: none."""
    if engine.tensor_parallel > 1:
        return ()
    sizes, most = engine.cuda_graph_tokens, path.cap
    if sizes == "auto":
        sizes, most = AUTO_GRAPH_TOKENS, min(engine.max_tokens_per_rank, path.cap or engine.max_tokens_per_rank)
    return tuple(each for each in sizes if most is None or each <= most)


def _idle(all2all_name: str, spec: LayerSpec, topology: Topology | None) -> bool:
    """Returns whether a candidate that nobody named has nothing to do between these ranks."""
    if all2all_name == "local":
        return spec.layout.num_ranks > 1
    record = all2all.REGISTRY.get(all2all_name).prepare_finalize.capability
    return record.spans_hosts and (topology is None or topology.no_gain(record) is not None)


def _packed_alike(paths: list[PathPlan]) -> list[PathPlan]:
    """Makes all paths compute with the same weights. If one reads only plain weights, no class packs them."""
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
    """Returns the same paths with another `max_tokens_per_rank`, sized as by `choose_paths`."""
    made = []
    for path in paths:
        cap = engine.max_tokens_per_rank
        if path.cap is not None:
            cap = min(cap, engine.low_latency_max_tokens)
        options = replace(path.options, max_tokens_per_rank=cap)
        made.append(replace(path, options=options, cap=None if path.cap is None else cap))
    return tuple(made)


def memory_asked(paths: Iterable[PathPlan], rank: int) -> dict[str, int]:
    """Returns the bytes of each path's buffers and of the shared workspaces (twice with two batches in flight)."""
    asked, shared = {}, 0
    for path in paths:
        manager = all2all.REGISTRY.get(path.chosen.all2all)
        asked[path.chosen.all2all] = manager.buffer_bytes(path.spec, path.inner_options)
        shared = max(shared, workspaces(path, rank).nbytes * path.options.batches_in_flight)
    return {**asked, "workspaces": shared}


def workspaces(path: PathPlan, rank: int) -> WorkspaceShapes:
    """Returns the workspaces of the largest batch that prepare can return. The kernel reserves them at warm-up.

    Without the GPU the shapes are those of an untuned device. A tuned device may split its sums less.
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
    """Returns a path. Batched formats have blocks of fixed capacity and a separate cap. Other formats make rounds."""
    if activation_format(chosen) is not FusedMoEActivationFormat.BatchedExperts:
        return PathPlan(chosen=chosen, spec=spec, options=options)
    cap = min(options.max_tokens_per_rank, low)
    _check_cap(chosen, spec, cap, "low_latency_max_tokens")
    return PathPlan(chosen=chosen, spec=spec, options=replace(options, max_tokens_per_rank=cap), cap=cap)


def first_placement(config: Config, info: ModelInfo) -> Placement:
    """Returns the placement of every layer before any load is known."""
    engine, slots = config.engine, info.num_experts + config.engine.redundant_experts
    slices = engine.tensor_parallel
    entries = engine.ranks // slices
    if not engine.redundant_experts:
        return Placement.identity(info.num_experts, engine.experts_per_rank or entries, slices=slices)
    layout = ExpertLayout.even(slots, entries, slices=slices)
    if engine.experts_per_rank:
        layout = ExpertLayout(counts=engine.experts_per_rank, slices=slices)
    if 0 < layout.num_experts == slots < info.num_experts:  # the rest of a service that lost a rank
        left = tuple(range(slots))
        return Placement(num_logical=info.num_experts, layout=layout, physical_to_logical=left, partial=True)
    if layout.num_experts != slots:
        raise ConfigError(
            f"experts_per_rank {layout.counts} holds {layout.num_experts} experts, the model has {info.num_experts} and"
            f" redundant_experts is {engine.redundant_experts}; make it add up to {slots} or leave it empty"
        )
    return Placement.spread(info.num_experts, layout)


def check_layout(config: Config, plan: RankPlan, layout: ExpertLayout) -> None:
    """Raises Incompatible when no pair of backends serves the planned layers with this layout."""
    shape = replace(plan.spec.shape, num_experts=layout.num_experts)
    for group in plan.groups:
        choose_paths(replace(group.spec, shape=shape, layout=layout), config, here=False)


def resized(config: Config, counts: tuple[int, ...], num_experts: int) -> Config:
    """Returns the configuration of the same service on `len(counts)` ranks that hold `counts` physical experts.

    With tensor parallelism each entry stands for the ranks that share it. A single rank has no peers and needs no
    all-to-all, so the configured one does not apply.
    """
    update = {
        "ranks": len(counts) * config.engine.tensor_parallel,
        "experts_per_rank": tuple(counts),
        "redundant_experts": sum(counts) - num_experts,
    }
    if len(counts) == 1 and config.engine.all2all not in ("auto", "measured"):
        update["all2all"] = "local"
    # A candidate that cannot serve this number of ranks is left out. The service goes on with the rest.
    kept = [name for name in config.engine.all2all_candidates if _knows(name, len(counts))]
    update["all2all_candidates"] = tuple(kept)
    engine = config.engine.model_copy(update=update)
    return config.model_copy(update={"engine": engine})


def _knows(all2all_name: str, num_ranks: int) -> bool:
    record = all2all.REGISTRY.get(all2all_name).prepare_finalize.capability
    most = record.max_ranks is None or num_ranks <= record.max_ranks
    return most and (not record.rank_counts or num_ranks in record.rank_counts)


def served_layers(config: Config, info: ModelInfo) -> tuple[int, ...]:
    """Returns `model.layers`, or all layers, ascending. Raises ConfigError for layers that the model does not have."""
    unknown = sorted(set(config.model.layers) - set(info.layers))
    if unknown:
        raise ConfigError(
            f"model.layers: {unknown} are not MoE layers of {info.name} (those are {ranges.shown(info.layers)})"
        )
    return tuple(sorted(set(config.model.layers))) or info.layers


def measuring(config: Config) -> Measuring:
    """Returns the settings for timing a rank's experts backends against each other."""
    return Measuring(budget_s=config.engine.experts_timing_s, cache=config.engine.experts_times)


def tuning(config: Config) -> Tuning:
    """Returns the source of the tiles of a rank's kernels, and the time that a start may spend on them."""
    engine, tiles = config.engine, config.engine.experts_tiles
    return Tuning(
        folder=engine.experts_tiles_folder if tiles == "auto" else None,
        file=tiles if isinstance(tiles, Path) else None,
        budget_s=engine.experts_tiles_timing_s,
    )


def tunes(paths: Iterable[PathPlan]) -> bool:
    """Returns whether any backend that may serve chooses among tiles."""
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
