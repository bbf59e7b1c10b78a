"""`epserve plan`: bytes that each rank will need, from headers and shapes alone, and the largest cap that fits.

Weights, workspaces and all-to-all buffers are exact: the functions that allocate them compute the sizes. The memory of a
batch in flight and of the runtime is stated separately.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from epserve.config import Config
from epserve.errors import ConfigError
from epserve.experts import rows
from epserve.models import ModelInfo, open_checkpoint
from epserve.modular_kernel import FusedMoEActivationFormat
from epserve.modular_kernel.steps.graphs import graph_memory
from epserve.rank.gate import modes_of
from epserve.rank.setup import machine

from . import backends as backend_choice
from . import plan as rank_plan
from .plan import RankPlan
from .topology import Topology

MIB = 1 << 20
# Code, allocator and libraries of a process. CPU: 277 MB resident after `import torch` (measured, torch 2.13). CUDA: an
# allowance for the context, NCCL and the caching allocator, not a measurement; `--reserve-gib` replaces it.
RUNTIME_BYTES = {"cpu": 300 * MIB, "cuda": 2048 * MIB}
RANK_THREADS, BASE_THREADS = 32, 200
"""Threads of one rank, and of the service with Ray's own processes, counted on two cores. More cores have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank. `dense` counts gates and shared experts, which every rank holds. `in_flight` counts a step's rows.

    `graphs` counts CUDA graphs of steps: an estimate, if the configuration leaves it to measurement which ones are kept.
    """

    rank: int
    experts: int
    weights: int
    dense: int
    workspaces: int
    buffers: int
    in_flight: int
    graphs: int
    runtime: int

    @property
    def total(self) -> int:
        held = self.weights + self.dense + self.workspaces + self.buffers
        return held + self.in_flight + self.graphs + self.runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of all ranks. `memory` is the limit of one rank, 0 when unknown.

    `largest_cap` is the largest max_tokens_per_rank that fits. 0: none fits.
    """

    model: str
    device: str
    backends: str
    max_tokens_per_rank: int
    ranks: tuple[RankMemory, ...]
    memory: int
    largest_cap: int
    layers: tuple[str, ...] = ()
    """A line for each group of layers: stored as, served as, kernel, bytes of a rank."""
    passed_over: tuple[str, ...] = ()
    """The reasons why backends that come earlier in the order of trial are not taken."""

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.memory


def plan_memory(
    config: Config, *, memory: int = 0, reserve: int | None = None, topology: Topology | None = None
) -> MemoryPlan:
    """Plans the memory from config.json and the safetensors headers, without allocating.

    `memory` is the limit of one rank in bytes. 0: this machine's memory, if it has the device. `reserve` replaces
    RUNTIME_BYTES. `topology` is where the ranks will be. Raises the errors of serving: ConfigError, CheckpointError,
    Incompatible.
    """
    info = open_checkpoint(config.model.path, config.model.dtype, config.model.layers).info
    device = rank_plan.resolve_device(config.engine.device)
    here = device == "cpu" or torch.cuda.is_available()
    plan = rank_plan.plan_ranks(config, info, device=device, here=here, topology=topology)
    memory = memory or _memory_here(config, device)
    return _memory_plan(config, info, plan, memory, RUNTIME_BYTES[device] if reserve is None else reserve)


def check_machine(config: Config, info: ModelInfo, plan: RankPlan) -> None:
    """Raises ConfigError when this machine has too little memory for the ranks, or may not run so many processes.

    It is for ranks that all run here, before anything is started. It takes milliseconds.
    """
    engine, device = config.engine, plan.spec.device
    processes = engine.ranks + engine.spares + engine.standbys
    threads, most = processes * RANK_THREADS + BASE_THREADS, machine.most_threads()
    if threads > most:
        raise ConfigError(
            f"engine.ranks {engine.ranks}, with spares and standbys {processes} processes, have some {threads} threads, this"
            f" user or container may have {most} (ulimit -u, pids.max); lower engine.ranks or raise the limit"
        )
    # On a GPU the allowance for the runtime is not a measurement, so it must not refuse a service. A service whose graphs find no
    # room runs without them.
    if engine.cuda_graph_tokens == "auto":
        config = config.model_copy(update={"engine": engine.model_copy(update={"cuda_graph_tokens": ()})})
    memory = _memory_here(config, device)
    found = _memory_plan(config, info, plan, memory, 0 if device == "cuda" else RUNTIME_BYTES[device])
    if not memory or found.fits:
        return
    need, have = (f"{size / MIB:.0f} MiB" for size in (found.worst.total, memory))
    cap, where = found.largest_cap, "GPU" if device == "cuda" else "machine's memory"
    remedy = f"engine.max_tokens_per_rank to at most {cap}" if cap else "engine.ranks, or join a larger cluster"
    raise ConfigError(
        f"engine.ranks {engine.ranks}: rank {found.worst.rank} needs {need}, its share of this {where} is {have}; lower {remedy}"
        " (`epserve plan` shows what takes it)"
    )


def _memory_plan(config: Config, info: ModelInfo, plan: RankPlan, memory: int, runtime: int) -> MemoryPlan:
    ranks = _every_rank(config, info, plan, runtime)
    return MemoryPlan(
        model=info.name,
        device=plan.spec.device,
        backends=" + ".join(plan.chosen.names),
        max_tokens_per_rank=config.engine.max_tokens_per_rank,
        ranks=ranks,
        memory=memory,
        layers=tuple(group.describe() for group in plan.groups),
        passed_over=plan.chosen.passed_over,
        largest_cap=_largest_cap(config, info, plan, runtime, memory) if memory else 0,
    )


def dense_bytes(info: ModelInfo, device: str) -> int:
    """Returns the bytes of one layer's gate and shared experts."""
    hidden, inner = (rows.padded(size, info.dtype, device) for size in (info.hidden, info.shared_intermediate))
    gate_row = info.hidden * 4 if info.gate.logits_float32 else hidden * info.dtype.itemsize
    shared = 2 * info.shared_intermediate * hidden + info.hidden * inner
    return info.num_experts * (gate_row + 4) + shared * info.dtype.itemsize


def graph_bytes(config: Config, info: ModelInfo, plan: RankPlan) -> int:
    """Returns the bytes of the CUDA graphs of one rank."""
    total, modes = 0, len(modes_of(info.gate))
    for group in plan.groups:
        for path in group.paths:
            if rank_plan.why_eager(path) is None:
                sizes = rank_plan.graph_tokens(config.engine, path)
                total += graph_memory(path.spec, sizes, modes * len(group.layers), info.shared_intermediate)
    return total


def _every_rank(config: Config, info: ModelInfo, plan: RankPlan, runtime: int) -> tuple[RankMemory, ...]:
    engine, shape = config.engine, plan.spec.shape
    layers, most = len(plan.layers), engine.max_tokens_per_rank * engine.ranks
    row = shape.hidden * shape.dtype.itemsize
    dense = dense_bytes(info, plan.spec.device) * layers

    graphs = graph_bytes(config, info, plan)

    @functools.cache
    def one(count: int, rank: int) -> RankMemory:
        asked = [rank_plan.memory_asked(group.paths, rank) for group in plan.groups]
        shared = sum(each.pop("workspaces") for each in asked)
        buffers = sum(size for each in asked for size in each.values())
        # Rows in and out of the rank. If no buffer holds them, also all ranks' rows as they arrive and as they return.
        standard = backend_choice.activation_format(plan.chosen) is FusedMoEActivationFormat.Standard
        received = most if standard else most * count
        in_flight = 2 * engine.max_tokens_per_rank * row + (0 if buffers else 2 * received * row)
        return RankMemory(
            rank=rank,
            experts=count,
            weights=sum(group.expert_bytes(count) * len(group.layers) for group in plan.groups),
            dense=dense,
            workspaces=shared,
            buffers=buffers,
            in_flight=in_flight,
            graphs=graphs,
            runtime=runtime,
        )

    layout = plan.placement.layout
    counts = [layout.counts[rank // layout.slices] for rank in range(engine.ranks)]
    first = {
        count: rank for rank, count in reversed(list(enumerate(counts)))
    }  # ranks with as many experts need the same
    return tuple(replace(one(count, first[count]), rank=rank) for rank, count in enumerate(counts))


def _largest_cap(config: Config, info: ModelInfo, plan: RankPlan, runtime: int, memory: int) -> int:
    """Finds the largest cap by bisection, since need grows with the cap. 2^20 bounds it: no interconnect serves more a step."""
    low, high = 0, 1 << 20
    while low < high:
        middle = (low + high + 1) // 2
        engine = config.engine.model_copy(update={"max_tokens_per_rank": middle})
        groups = (replace(group, paths=rank_plan.with_cap(group.paths, engine)) for group in plan.groups)
        capped = replace(plan, groups=tuple(groups))
        ranks = _every_rank(config.model_copy(update={"engine": engine}), info, capped, runtime)
        low, high = (middle, high) if max(rank.total for rank in ranks) <= memory else (low, middle - 1)
    return low


def _memory_here(config: Config, device: str) -> int:
    """Returns one rank's share of a GPU's or of this host's memory in bytes. 0: unknown."""
    if device == "cpu":
        return machine.memory_bytes() // config.engine.ranks
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory // config.cluster.ranks_per_gpu


def parse_gib(value: float | None) -> int | None:
    if value is not None and value <= 0:
        raise ConfigError(f"{value:g} GiB is not an amount of memory")
    return None if value is None else int(value * (1 << 30))
