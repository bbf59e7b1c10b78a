"""What every rank will run, decided from the configuration and the model before any weight is read. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

import all2all
import experts
from epserve.config import Config
from epserve.errors import ConfigError, Incompatible
from epserve.models import ModelInfo
from epserve.modular_kernel import (
    Backends,
    ExpertLayout,
    ExpertShape,
    FusedMoEExpertsModular,
    FusedMoEMethodBase,
    LayerSpec,
    PrepareFinalizeOptions,
    Registry,
    TopKWeightAndReduceNoOP,
    UnquantizedFusedMoEMethod,
    methods_quant,
    why_not,
)
from epserve.placement import Placement

# Order of trial where the configuration says "auto"; backends named nowhere here come last, in registration order.
PREFER_ALL2ALL = {
    "cpu": ("local", "all_to_all", "allgather_reducescatter"),
    "cuda": ("local", "nvlink", "all_to_all", "allgather_reducescatter"),
}
PREFER_EXPERTS = {"cpu": ("grouped_mm",), "cuda": ("triton", "grouped_mm", "triton_batched")}

METHODS: tuple[type[FusedMoEMethodBase], ...] = (
    UnquantizedFusedMoEMethod,
    methods_quant.Fp8MoEMethod,
    methods_quant.CompressedTensorsW8A8Fp8MoEMethod,
    methods_quant.CompressedTensorsW8A8Int8MoEMethod,
    methods_quant.ModelOptFp8FusedMoE,
    methods_quant.ModelOptNvFp4FusedMoE,
    methods_quant.Mxfp4MoEMethod,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Names of the two backends, and why those before them in the order of trial were passed over."""

    all2all: str
    experts: str
    passed_over: tuple[str, ...] = ()

    def as_backends(self) -> Backends:
        return Backends(
            all2all=all2all.REGISTRY,
            experts=experts.REGISTRY,
            prefer_all2all=(self.all2all,),
            prefer_experts=(self.experts,),
        )

    def explain(self) -> str:
        passed = "".join(f"\n  - not {reason}" for reason in self.passed_over)
        return f"all-to-all {self.all2all}, experts {self.experts}{passed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """`layers`: the MoE layers to serve. `spec`: their common shape, with physical experts."""

    layers: tuple[int, ...]
    placement: Placement
    spec: LayerSpec
    chosen: Chosen
    method: type[FusedMoEMethodBase]


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
    if engine.experts_per_rank and len(engine.experts_per_rank) != engine.ranks:
        raise ConfigError(
            f"experts_per_rank lists {len(engine.experts_per_rank)} ranks, engine.ranks is {engine.ranks}"
        )
    placement = first_placement(config, info)
    shape = ExpertShape(
        hidden=info.hidden,
        intermediate=info.intermediate,
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
    return RankPlan(
        layers=served_layers(config, info),
        placement=placement,
        spec=spec,
        chosen=choose_backends(
            spec,
            all2all_name=engine.all2all,
            experts_name=engine.experts,
            combine_order=engine.combine_order,
            here=here,
        ),
        method=method_for(info.quant.scheme),
    )


def first_placement(config: Config, info: ModelInfo) -> Placement:
    """Of every layer, before any load is known."""
    engine, slots = config.engine, info.num_experts + config.engine.redundant_experts
    if not engine.redundant_experts:
        return Placement.identity(info.num_experts, engine.experts_per_rank or engine.ranks)
    layout = ExpertLayout.even(slots, engine.ranks)
    if engine.experts_per_rank:
        layout = ExpertLayout(counts=engine.experts_per_rank)
    if layout.num_experts != slots:
        raise ConfigError(
            f"experts_per_rank {layout.counts} holds {layout.num_experts} experts, the model has {info.num_experts} and"
            f" redundant_experts is {engine.redundant_experts}; make it add up to {slots} or leave it empty"
        )
    return Placement.spread(info.num_experts, layout)


def check_layout(config: Config, plan: RankPlan, layout: ExpertLayout) -> None:
    """Raises Incompatible where no pair of backends serves the planned layers with this layout."""
    spec, engine = plan.spec, config.engine
    shape = replace(spec.shape, num_experts=layout.num_experts)
    choose_backends(
        replace(spec, shape=shape, layout=layout),
        all2all_name=engine.all2all,
        experts_name=engine.experts,
        combine_order=engine.combine_order,
        here=False,
    )


def resized(config: Config, counts: tuple[int, ...], num_experts: int) -> Config:
    """The same service on `len(counts)` ranks that hold `counts` physical experts."""
    redundant = sum(counts) - num_experts
    engine = config.engine.model_copy(
        update={"ranks": len(counts), "experts_per_rank": tuple(counts), "redundant_experts": redundant}
    )
    return config.model_copy(update={"engine": engine})


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
                return Chosen(all2all=outer, experts=inner, passed_over=tuple(passed))
            passed += [f"{outer} + {inner}: {reason}" for reason in reasons]
    raise Incompatible(f"no pair of backends can serve this layer ({_describe(spec)}):", tuple(passed))


def method_for(scheme: str) -> type[FusedMoEMethodBase]:
    """The method class whose weights are stored in `scheme`; the first one in METHODS where several are."""
    found = [method for method in METHODS if scheme in {config.scheme for config in method.quant_configs()}]
    if not found:
        known = sorted({config.scheme for method in METHODS for config in method.quant_configs()})
        raise ConfigError(f"quantisation {scheme!r} has no method class yet (served: {', '.join(known)})")
    return found[0]


def kernel_options(config: Config) -> PrepareFinalizeOptions:
    engine = config.engine
    return PrepareFinalizeOptions(
        max_tokens_per_rank=engine.max_tokens_per_rank,
        combine_order=engine.combine_order,
        dispatch_quantised=engine.dispatch_quantised,
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
    shape = spec.shape
    return (
        f"hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.num_experts} experts on"
        f" {spec.layout.num_ranks} ranks, top-k {shape.top_k}, {str(shape.dtype).removeprefix('torch.')}, {spec.device}"
    )


def _ranges(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)) and len(layers) > 2:
        return f"{layers[0]}..{layers[-1]}"
    return ", ".join(map(str, layers))
