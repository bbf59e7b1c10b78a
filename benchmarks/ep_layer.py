"""What `layer.py` and `scaling.py` measure: a whole DeepSeek-V3 layer on every rank over one all-to-all backend.

A layer's time is from tokens and their routing to the result: dispatch, experts, combine and the shared expert, which runs
while the dispatch is under way. The gate is the same for all and is timed by itself. Each case is checked before and after it is
timed: four rows of every rank against float32 on the same weights.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from benchmarks.all2all import Ranks, Unavailable, elapsed_us, mark, time_graph
from epserve import all2all, experts
from epserve.cli.layer.synthetic import TOLERANCE, LayerSizes, SyntheticLayer, reasons
from epserve.modular_kernel import FusedMoEActivationFormat, LayerSpec, PrepareFinalizeOptions, RankContext

BATCHED_CAP = 128  # tokens a rank: batched formats lay out this many rows for every expert and rank
REPLICAS = "replicas"
_FIRST = ("nvlink", "allgather_reducescatter", "deepep_ht", "all_to_all")  # in the order in which experts can be shared
_LAST = ("deepep_ll", "nvlink_batched", "all_to_all_batched", "deepep_v2", "nvshmem")  # DeepEP has its own NVSHMEM
_KNOWN = all2all.REGISTRY.names()
BACKENDS = (
    *(name for name in _FIRST if name in _KNOWN),
    *(name for name in _KNOWN if name not in (*_FIRST, *_LAST, "local")),
    *(name for name in _LAST if name in _KNOWN),
)
"""Every all-to-all backend but `local`, those with the same experts one after the other."""
EAGER_CALLS = 20
KEPT: dict[tuple[LayerSpec, str], SyntheticLayer] = {}
"""By spec and experts, the latest layer of this process: its weights, compiled experts and workspaces serve the next one."""


def measure(
    backend: str, ranks: Ranks, sizes: LayerSizes, tokens: Sequence[int]
) -> Iterator[tuple[SyntheticLayer, dict]]:
    """A cell for each number of tokens. `replicas`: every rank runs all experts on its own tokens, nothing crosses."""
    context, all2all_name = RankContext(device=ranks.device), "local"
    if backend != REPLICAS:
        group = dist.group.WORLD if ranks.world > 1 else None
        all2all_name, context = backend, RankContext(
            rank=ranks.rank, world_size=ranks.world, device=ranks.device, group=group
        )  # fmt: skip
    experts_name = fitting_experts(all2all_name, sizes, context)
    batched = FusedMoEActivationFormat.BatchedExperts in experts.REGISTRY.get(experts_name).activation_formats()
    cap = min(BATCHED_CAP, max(tokens)) if batched else max(tokens)
    spec = sizes.spec(context.world_size, ranks.device.type)
    reuse = KEPT.get((spec, experts_name)) or next((kept for (of, _), kept in KEPT.items() if of == spec), None)
    options = PrepareFinalizeOptions(max_tokens_per_rank=cap)
    layer = SyntheticLayer(
        context, sizes, all2all_name=all2all_name, experts_name=experts_name, options=options, reuse=reuse
    )
    layer.warm_up()
    ranks.gather(None)
    for num_tokens in tokens:
        if batched and num_tokens > cap:
            continue
        counts = (num_tokens,) * context.world_size
        x = layer.tokens(num_tokens)
        routing = layer.gate(x)

        def call(x=x, routing=routing, counts=counts) -> torch.Tensor:
            return layer.routed(x, routing, counts)

        errors = [check(ranks, layer, x, routing, call())]
        graphed = layer.can_graph and ranks.device.type == "cuda"
        us, out = time_call(call, ranks, graphed=graphed)
        errors.append(check(ranks, layer, x, routing, out))
        cell = {"backend": backend, "experts": experts_name, "world": ranks.world, "scheme": sizes.scheme}
        cell |= {"tokens": num_tokens, "us": us, "graph": graphed, "error": max(errors)}
        yield layer, cell | {"tokens_per_s": num_tokens * ranks.world / us * 1e6}
    layer.close()
    KEPT[spec, experts_name] = layer


def fitting_experts(all2all_name: str, sizes: LayerSizes, context: RankContext) -> str:
    """Ours where they run, else torch's, else the oracle. Raises Unavailable with every reason."""
    manager = all2all.REGISTRY.get(all2all_name)
    devices = manager.prepare_finalize.capability.devices
    if context.device.type not in devices:
        raise Unavailable(f"{all2all_name} needs {' or '.join(sorted(devices))}")
    if missing := manager.unavailable():
        raise Unavailable(missing)
    why = []
    for name in ("triton", "triton_batched", "grouped_mm", "batched_mm", "loop", "batched_loop"):
        if name not in experts.REGISTRY.names():
            continue
        found = reasons(all2all_name, name, sizes.spec(context.world_size, context.device.type))
        if not found:
            return name
        if not found[0].startswith("prepare delivers"):
            why += [f"{name}: {reason}" for reason in found]
    raise Unavailable("; ".join(why))


def check(ranks: Ranks, layer: SyntheticLayer, x, routing, out: torch.Tensor) -> float:
    """Relative L2 error, the largest of all ranks. Raises ValueError above the scheme's tolerance."""
    error = layer.error(x, routing, out)
    worst = max(float("inf") if each != each else each for each in ranks.gather(error))
    if not worst <= TOLERANCE[layer.sizes.scheme]:
        raise ValueError(f"wrong output, relative L2 error {worst:.3g}, allowed {TOLERANCE[layer.sizes.scheme]:g}")
    return worst


def time_call(call: Callable[[], torch.Tensor], ranks: Ranks, *, graphed: bool) -> tuple[float, torch.Tensor]:
    """Returns us of one call (the slowest rank's median) and the last result. Calls are eager, or ten in a CUDA graph."""
    if graphed:
        us, out = time_graph(call, ranks)
        return max(ranks.gather(us)), out
    on_cpu = ranks.device.type == "cpu"
    for _ in range(1 if on_cpu else 3):
        out = call()
    ranks.gather(None)
    marks = [mark(ranks.device)]
    for _ in range(3 if on_cpu else EAGER_CALLS):
        out = call()
        marks.append(mark(ranks.device))
    if not on_cpu:
        torch.cuda.synchronize()
    median = statistics.median(elapsed_us(start, end) for start, end in itertools.pairwise(marks))
    return max(ranks.gather(median)), out
