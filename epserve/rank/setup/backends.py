"""Pure functions that choose a layer's backends and method class: those of the configuration, or the first that fit."""

from __future__ import annotations

from dataclasses import dataclass

from epserve import all2all, experts
from epserve.all2all.tensor_parallel import TensorParallelManager
from epserve.config import EngineConfig
from epserve.errors import Incompatible
from epserve.modular_kernel import (
    Backends,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    LayerSpec,
    Registry,
    TopKWeightAndReduceNoOP,
    Tuning,
    why_not,
)
from epserve.modular_kernel.measured.selection import Measuring

from .topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Names of the two backends, and the reasons why earlier ones in the order of trial were passed over."""

    all2all: str
    experts: str
    passed_over: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    """Further pairs. Each step takes the pair that was measured as fastest for it."""
    rivals: tuple[str, ...] = ()
    """Further experts backends of the same format. Each rank takes the fastest for its number of rows."""

    @property
    def names(self) -> tuple[str, str]:
        """Returns the names of all pairs, to compare between ranks and to show."""
        pairs = [(self.all2all, self.experts), *self.others]
        all2alls, experts_names = zip(*pairs, strict=True)
        return "/".join(all2alls), "/".join(dict.fromkeys(experts_names))

    def as_backends(self, measuring: Measuring | None = None, tuning: Tuning = Tuning()) -> Backends:  # noqa: B008 (frozen)
        return Backends(
            all2all=all2all.REGISTRY,
            experts=experts.REGISTRY,
            by_slices=TensorParallelManager,
            prefer_all2all=(self.all2all,),
            prefer_experts=(self.experts, *self.rivals),
            measuring=measuring if self.rivals else None,
            tuning=tuning,
        )

    def explain(self) -> str:
        """Returns lines for the log: the choice, and one line for each pair that was passed over."""
        passed = "".join(f"\n  - not {reason}" for reason in self.passed_over)
        timed = f" (each rank times it against {', '.join(self.rivals)})" if self.rivals else ""
        return "all-to-all {}, experts {}".format(*self.names) + timed + passed


def choose_backends(
    spec: LayerSpec,
    *,
    all2all_name: str = "auto",
    experts_name: str = "auto",
    combine_order: str = "rank",
    here: bool = True,
    topology: Topology | None = None,
) -> Chosen:
    """Returns the first pair in order of preference that fits the layer and the places of the ranks, and can run there.

    Args:
        spec: the layer.
        all2all_name: a backend, or "auto".
        experts_name: a backend, or "auto".
        combine_order: the order of sums that the all-to-all must keep.
        here: whether backends that cannot run in this process are left out, as far as the topology does not know.
        topology: where the ranks are. None: unknown, so that all backends count as connecting them.

    Raises:
        Incompatible: no pair fits. It lists the reasons for each.
    """
    passed = []
    far = topology is not None and max(topology.num_hosts if spec.device == "cpu" else 1, topology.num_domains) > 1
    for outer in _order(all2all.REGISTRY, all2all_name, spec.device, far):
        manager = all2all.REGISTRY.get(outer)
        record = manager.prepare_finalize.capability
        missing = topology.why_not(outer, record) if topology is not None else None
        if topology is not None and all2all_name == "auto":
            missing = missing or topology.no_gain(record)
        missing = missing or _missing("all2all", outer, manager, here, topology)
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
        for inner in _order(experts.REGISTRY, experts_name, spec.device):
            backend = experts.REGISTRY.get(inner)
            missing = _missing("experts", inner, backend, here, topology)
            reasons = (missing,) if missing else why_not(manager.prepare_finalize.capability, backend.capability, spec)
            # A backend that packs weights on some hosts only gives other bits there, with one rank too.
            if (
                not reasons
                and combine_order == "slot"
                and (spec.layout.num_ranks > 1 or backend.capability.packs_weights)
            ):
                reasons = _slot_reasons(backend(spec))
            if not reasons:
                # Slot order promises the same bits everywhere. Two backends do not give the same bits.
                timed = (here or topology is not None) and experts_name == "auto" and combine_order == "rank"
                rivals = _rivals(spec, outer, inner, topology) if timed else ()
                return Chosen(all2all=outer, experts=inner, passed_over=tuple(passed), rivals=rivals)
            passed += [f"{outer} + {inner}: {reason}" for reason in reasons]
    raise Incompatible(f"no pair of backends can serve this layer ({describe(spec)}):", tuple(passed))


def activation_format(chosen: Chosen) -> FusedMoEActivationFormat:
    return all2all.REGISTRY.get(chosen.all2all).prepare_finalize.capability.activation_format


def names_asked(engine: EngineConfig, device: str) -> dict[str, tuple[str, ...]]:
    """Returns the backends of each kind that come into question, so that each rank is asked whether it can run them."""
    managers, classes = all2all.REGISTRY, experts.REGISTRY
    asked: tuple[str, ...] = (engine.all2all,)
    if engine.all2all == "auto":
        asked = managers.early(device, far=True) + managers.early(device)
    elif engine.all2all == "measured":
        asked = engine.all2all_candidates or managers.timed(device)
    named: tuple[str, ...] = (engine.experts,)
    if engine.experts == "auto":
        named = classes.early(device) + classes.timed(device)
    kinds = (("all2all", managers, asked), ("experts", classes, named))
    return {kind: tuple(name for name in dict.fromkeys(of) if name in registry.names()) for kind, registry, of in kinds}


def _missing(kind: str, name: str, backend, here: bool, topology: Topology | None) -> str | None:
    """Returns the reason why a backend cannot run: that of the ranks, or of this process when they were not asked."""
    if topology is not None and topology.knows(kind, name):
        return topology.unavailable(kind, name)
    return backend.unavailable() if here else None


def _rivals(spec: LayerSpec, all2all_name: str, chosen: str, topology: Topology | None) -> tuple[str, ...]:
    """Returns the experts backends that fit and run here beside the chosen one."""
    record = all2all.REGISTRY.get(all2all_name).prepare_finalize.capability
    names = experts.REGISTRY.timed(spec.device)
    if chosen not in names:
        return ()
    backends = {name: experts.REGISTRY.get(name) for name in names if name != chosen}
    return tuple(name for name, backend in backends.items()
                 if not _missing("experts", name, backend, True, topology)
                 and not why_not(record, backend.capability, spec))  # fmt: skip


def _slot_reasons(backend: FusedMoEExpertsModular) -> tuple[str, ...]:
    if isinstance(backend.finalize_weight_and_reduce_impl(), TopKWeightAndReduceNoOP):
        return ("combine_order 'slot' needs a row for each slot, these experts add a rank's slots up themselves",)
    return ()


def _order(registry: Registry, name: str, device: str, far: bool = False) -> tuple[str, ...]:
    return registry.in_order(device, far=far) if name == "auto" else (registry.entry(name).name,)


def describe(spec: LayerSpec) -> str:
    shape, ranks = spec.shape, spec.layout.num_ranks * spec.layout.slices
    return (
        f"hidden {shape.hidden}, intermediate {shape.intermediate}, {shape.num_experts} experts on"
        f" {ranks} ranks, top-k {shape.top_k}, {str(shape.dtype).removeprefix('torch.')}, {spec.device}"
    )
