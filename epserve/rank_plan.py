"""What every rank will run, decided from the configuration and the model before any weight is read. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

import all2all
import experts
from all2all.tensor_parallel import TensorParallelManager
from epserve.config import Config, EngineConfig
from epserve.errors import ConfigError, Incompatible
from epserve.models import ModelInfo
from epserve.models.slices import check_slices
from epserve.modular_kernel import (
    Backends,
    ExpertLayout,
    ExpertShape,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEMethodBase,
    LayerSpec,
    PrepareFinalizeOptions,
    Registry,
    TopKWeightAndReduceNoOP,
    UnquantizedFusedMoEMethod,
    crossover,
    methods_quant,
    why_not,
)
from epserve.modular_kernel.selection import MeasuredExperts, Measuring
from epserve.modular_kernel.selection_batched import MeasuredBatchedExperts
from epserve.modular_kernel.workspace import WorkspaceShapes
from epserve.placement import Placement

# Order of trial where the configuration says "auto"; backends named nowhere here come last, in registration order.
MEASURED = {
    "cpu": ("local", "all_to_all", "allgather_reducescatter"),
    "cuda": ("local", "nvlink", "all_to_all", "allgather_reducescatter", "deepep_ht", "deepep_ll"),
}
"""Candidates where the configuration says "measured" and names none; of several, the first one serves until times are known."""
PREFER_ALL2ALL = {
    "cpu": ("local", "all_to_all", "allgather_reducescatter"),
    "cuda": ("local", "nvlink", "all_to_all", "allgather_reducescatter"),
}
PREFER_EXPERTS = {"cpu": ("grouped_mm",), "cuda": ("triton", "grouped_mm", "triton_batched")}
RIVALS = {
    ("cpu", FusedMoEActivationFormat.Standard): ("grouped_mm", "loop"),
    ("cpu", FusedMoEActivationFormat.BatchedExperts): ("batched_loop", "batched_mm"),
    ("cuda", FusedMoEActivationFormat.Standard): ("triton", "cutlass", "deepgemm"),
    ("cuda", FusedMoEActivationFormat.BatchedExperts): ("triton_batched",),  # batched_mm would reserve far more memory
}
"""Experts backends that are timed against each other where the configuration says "auto", in order of preference."""

METHODS: tuple[type[FusedMoEMethodBase], ...] = (
    UnquantizedFusedMoEMethod,
    methods_quant.Fp8MoEMethod,
    methods_quant.CompressedTensorsW8A8Fp8MoEMethod,
    methods_quant.CompressedTensorsW8A8Int8MoEMethod,
    methods_quant.ModelOptFp8FusedMoE,
    methods_quant.ModelOptNvFp4FusedMoE,
    methods_quant.Mxfp4MoEMethod,
    methods_quant.CompressedTensorsW8A8Fp8MoECutlassMethod,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Names of the two backends, and why those before them in the order of trial were passed over."""

    all2all: str
    experts: str
    passed_over: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    """Further pairs, of which each step takes the one that was measured as fastest for it."""
    rivals: tuple[str, ...] = ()
    """Further experts backends of the same format: each rank takes the fastest for the rows that it has."""

    @property
    def names(self) -> tuple[str, str]:
        """Of all pairs, to be compared between ranks and shown."""
        pairs = [(self.all2all, self.experts), *self.others]
        all2alls, experts_names = zip(*pairs, strict=True)
        return "/".join(all2alls), "/".join(dict.fromkeys(experts_names))

    def as_backends(self, measuring: Measuring | None = None) -> Backends:
        return Backends(
            all2all=all2all.REGISTRY,
            experts=experts.REGISTRY,
            by_slices=TensorParallelManager,
            prefer_all2all=(self.all2all,),
            prefer_experts=(self.experts, *self.rivals),
            measuring=measuring if self.rivals else None,
        )

    def explain(self) -> str:
        passed = "".join(f"\n  - not {reason}" for reason in self.passed_over)
        timed = f" (each rank times it against {', '.join(self.rivals)})" if self.rivals else ""
        return "all-to-all {}, experts {}".format(*self.names) + timed + passed


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPlan:
    """One all-to-all with its experts. `cap`: most tokens of the busiest rank in a step that may take it; None: any."""

    chosen: Chosen
    spec: LayerSpec
    options: PrepareFinalizeOptions
    cap: int | None = None

    @property
    def inner_options(self) -> PrepareFinalizeOptions:
        """Of the all-to-all itself, to which ranks that share experts bring each other's tokens too."""
        return replace(self.options, max_tokens_per_rank=self.options.max_tokens_per_rank * self.spec.layout.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """`layers`: the MoE layers to serve. `spec`: their common shape, with physical experts."""

    layers: tuple[int, ...]
    placement: Placement
    spec: LayerSpec
    chosen: Chosen
    method: type[FusedMoEMethodBase]
    paths: tuple[PathPlan, ...]
    """One, or the candidates of measured selection; the first is `chosen`."""


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
    check_slices(info.intermediate, info.quant, info.activation, slices)
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
        quant=info.quant,
        activation=info.activation,
        bias=info.bias,
    )
    paths = choose_paths(spec, config, here=here)
    return RankPlan(
        layers=served_layers(config, info),
        placement=placement,
        spec=spec,
        chosen=paths[0].chosen,
        method=method_for(info.quant.scheme, engine.experts),
        paths=paths,
    )


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
            f"no candidate of all2all 'measured' can serve this layer ({_describe(spec)}):", tuple(passed)
        )
    if all(path.cap is not None for path in found):
        names = ", ".join(path.chosen.all2all for path in found)
        raise ConfigError(f"all2all_candidates {names}: all have a cap on a step's tokens; add one that has none")
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


def activation_format(chosen: Chosen) -> FusedMoEActivationFormat:
    return all2all.REGISTRY.get(chosen.all2all).prepare_finalize.capability.activation_format


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
    choose_paths(replace(plan.spec, shape=shape, layout=layout), config, here=False)


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
    unknown = sorted(set(config.model.layers) - set(info.layers))
    if unknown:
        raise ConfigError(
            f"model.layers: {unknown} are not MoE layers of {info.name} (those are {_ranges(info.layers)})"
        )
    return tuple(sorted(set(config.model.layers))) or info.layers


def choose_backends(
    spec: LayerSpec,
    *,
    all2all_name: str = "auto",
    experts_name: str = "auto",
    combine_order: str = "rank",
    here: bool = True,
) -> Chosen:
    """The first pair, in order of preference, that fits the layer and, unless `here` is False, can run here."""
    passed = []
    for outer in _order(all2all.REGISTRY, all2all_name, PREFER_ALL2ALL[spec.device]):
        manager = all2all.REGISTRY.get(outer)
        missing = manager.unavailable() if here else None
        if missing:
            passed.append(f"{outer}: {missing}")
            continue
        if combine_order not in manager.prepare_finalize.capability.combine_orders:
            passed.append(f"{outer}: it adds partial sums by rank, combine_order is {combine_order!r}")
            continue
        most = manager.prepare_finalize.capability.max_ranks
        if most is not None and spec.layout.num_ranks > most:  # before any experts class is imported
            passed.append(f"{outer}: {spec.layout.num_ranks} ranks, at most {most}")
            continue
        for inner in _order(experts.REGISTRY, experts_name, PREFER_EXPERTS[spec.device]):
            backend = experts.REGISTRY.get(inner)
            missing = backend.unavailable() if here else None
            reasons = (missing,) if missing else why_not(manager.prepare_finalize.capability, backend.capability, spec)
            if not reasons and combine_order == "slot" and spec.layout.num_ranks > 1:
                reasons = _slot_reasons(backend(spec))
            if not reasons:
                # Slot order promises the same bits everywhere, which two backends do not give.
                timed = here and experts_name == "auto" and combine_order == "rank"
                rivals = _rivals(spec, outer, inner) if timed else ()
                return Chosen(all2all=outer, experts=inner, passed_over=tuple(passed), rivals=rivals)
            passed += [f"{outer} + {inner}: {reason}" for reason in reasons]
    raise Incompatible(f"no pair of backends can serve this layer ({_describe(spec)}):", tuple(passed))


def measuring(config: Config) -> Measuring:
    """How a rank's experts backends are timed against each other."""
    return Measuring(budget_s=config.engine.experts_timing_s, cache=config.engine.experts_times)


def _rivals(spec: LayerSpec, all2all_name: str, chosen: str) -> tuple[str, ...]:
    """Experts backends that fit and run here beside the chosen one."""
    record = all2all.REGISTRY.get(all2all_name).prepare_finalize.capability
    names = RIVALS[spec.device, record.activation_format]
    if chosen not in names:
        return ()
    known = [name for name in names if name != chosen and name in experts.REGISTRY.names()]
    backends = {name: experts.REGISTRY.get(name) for name in known}
    return tuple(name for name, backend in backends.items()
                 if not backend.unavailable() and not why_not(record, backend.capability, spec))  # fmt: skip


def method_for(scheme: str, experts_name: str = "") -> type[FusedMoEMethodBase]:
    """The method class whose weights are stored in `scheme`; the first one in METHODS where several are. A class that
    multiplies with one experts backend alone is taken with that backend only."""
    found = [method for method in METHODS if scheme in {config.scheme for config in method.quant_configs()}]
    if not found:
        known = sorted({config.scheme for method in METHODS for config in method.quant_configs()})
        raise ConfigError(f"quantisation {scheme!r} has no method class yet (served: {', '.join(known)})")
    bound = [method for method in found if method.EXPERTS == experts_name != ""]
    return (bound or [method for method in found if not method.EXPERTS])[0]


def kernel_options(config: Config) -> PrepareFinalizeOptions:
    engine = config.engine
    return PrepareFinalizeOptions(
        max_tokens_per_rank=engine.max_tokens_per_rank,
        combine_order=engine.combine_order,
        dispatch_quantised=engine.dispatch_quantised,
        batches_in_flight=engine.batches_in_flight,
    )


def _slot_reasons(backend: FusedMoEExpertsModular) -> tuple[str, ...]:
    if isinstance(backend.finalize_weight_and_reduce_impl(), TopKWeightAndReduceNoOP):
        return ("combine_order 'slot' needs a row for each slot, these experts add a rank's slots up themselves",)
    return ()


def _order(registry: Registry, name: str, preferred: Iterable[str]) -> list[str]:
    if name != "auto":
        return [registry.entry(name).name]
    known = registry.names()
    first = [each for each in preferred if each in known]
    return first + [each for each in known if each not in first]


def _describe(spec: LayerSpec) -> str:
    shape, ranks = spec.shape, spec.layout.num_ranks * spec.layout.slices
    return (
        f"hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.num_experts} experts on"
        f" {ranks} ranks, top-k {shape.top_k}, {str(shape.dtype).removeprefix('torch.')}, {spec.device}"
    )


def _ranges(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)) and len(layers) > 2:
        return f"{layers[0]}..{layers[-1]}"
    return ", ".join(map(str, layers))
