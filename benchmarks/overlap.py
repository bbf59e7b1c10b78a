"""Times a shared expert beside the all-to-all on all GPUs of one host: one after the other, or inside the receiver windows.

    python -m benchmarks.overlap --json overlap.json --traces folder       # the cases below, a Chrome trace of each
    python -m benchmarks.overlap --cases nvlink:4096 deepep_ll:128:fp8      # backend, tokens a rank, fp8 rows
    python -m benchmarks.overlap --cpu                                       # gloo ranks, small sizes: the plumbing alone

Sequential: prepare, shared expert, finalize. Overlapped: prepare_no_receive, first half of the shared expert, receive,
finalize_no_wait, second half, receive. Routed experts are left out: both orders have the same. The shared expert has
DeepSeek-V3's size (hidden 7,168, intermediate 2,048, bf16). Times are the slowest rank's median. The outputs of both orders
must be equal bit for bit. A backend that can be captured is replayed from a CUDA graph, the others run eagerly. In a trace the
two orders are the ranges "sequential" and "overlapped", each after a synchronisation.
Every order is timed in several rounds, in turn, and the best round counts: eager steps are short for the host, which may be busy.
host = the host's time to start a step. If that is as long as the step, the step waits for the host.
plain = sequential with torch's own products. ratio = overlapped / the faster of the two. bound = the limit of every overlap,
the longer of communication and computation alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import reports
from benchmarks.all2all import UNAVAILABLE, Ranks, Unavailable, supervise
from benchmarks.ep_layer import time_call
from epserve import all2all
from epserve.cli.layer.synthetic import LayerSizes, shared_expert
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    FusedMoEActivationFormat,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from epserve.modular_kernel.quantization import dequantise_blocks

GPU = {"hidden": 7168, "intermediate": 2048, "top_k": 8, "experts": 64}
CPU = {"hidden": 256, "intermediate": 128, "top_k": 3, "experts": 8}
GPU_CASES = ("nvlink:4096", "nvlink:128", "nvlink:4096:fp8", "deepep_ht:4096", "deepep_ht:4096:fp8", "deepep_ll:128",
             "deepep_ll:128:fp8", "all_to_all:4096")  # fmt: skip
CPU_CASES = ("all_to_all:16", "all_to_all_batched:8:fp8", "allgather_reducescatter:16")
GOALS = {("deepep_ht", 4096): 0.75, ("deepep_ll", 128): 0.85}
ORDERS = ("communicate", "compute", "plain", "sequential", "overlapped")
ROUNDS = 3
HOST_CALLS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    backend: str
    tokens: int
    """The tokens of each rank."""
    fp8: bool

    @classmethod
    def of(cls, text: str) -> Case:
        """Parses a case. Raises ValueError that names the wrong part of `text`."""
        backend, *rest = text.split(":")
        if backend not in all2all.REGISTRY.names():
            raise ValueError(f"{text}: {backend!r} is not one of {', '.join(all2all.REGISTRY.names())}")
        if not rest or not rest[0].isdigit() or rest[1:] not in ([], ["fp8"]):
            raise ValueError(f"{text!r} is not backend:tokens or backend:tokens:fp8")
        return cls(backend=backend, tokens=int(rest[0]), fp8=len(rest) == 2)


def _widen(prepared) -> torch.Tensor:
    x, scales = prepared.x, prepared.scales
    return x.bfloat16() if scales is None else dequantise_blocks(x, scales).bfloat16()


class Step:
    timed = False
    """False: rows are copied and widened on their way, so that results can be compared."""

    def __init__(self, ranks: RankContext, case: Case, options):
        hidden, top_k, tokens = options.hidden, options.top_k, case.tokens
        shape = ExpertShape(
            hidden=hidden, intermediate=options.intermediate, num_experts=options.experts, top_k=top_k
        )  # fmt: skip
        quant = QuantConfig(scheme="fp8_block") if case.fp8 else QuantConfig()
        layout = ExpertLayout.even(options.experts, ranks.world_size)
        self.spec = LayerSpec(shape=shape, layout=layout, device=ranks.device.type, quant=quant)
        self.manager = all2all.REGISTRY.get(case.backend)(ranks)
        self.pf = self.manager.get_handle(self.spec, PrepareFinalizeOptions(max_tokens_per_rank=tokens))
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        on = {"device": ranks.device, "generator": generator}
        self.x = torch.randn((tokens, hidden), **on).bfloat16()
        ids = torch.rand((tokens, options.experts), **on).topk(top_k).indices.to(self.pf.topk_indices_dtype())
        self.routing = Routing(ids_Mt=ids, weights_Mt=torch.rand((tokens, top_k), **on))
        self.counts = (tokens,) * ranks.world_size
        self.shared = shared_expert(LayerSizes(hidden=hidden, shared=options.intermediate), ranks.device)
        batched = self.pf.activation_format() is FusedMoEActivationFormat.BatchedExperts
        self.reduce = TopKWeightAndReduceDelegate() if batched else TopKWeightAndReduceNoOP()
        self.wide: torch.Tensor | None = None

    def _experts(self, prepared) -> torch.Tensor:
        """In the experts' place, at no cost to speak of: every row as it came. Their order may differ from call to call."""
        rows = prepared.x
        if rows.dtype is torch.bfloat16 and prepared.output is None:
            return rows
        if prepared.output is not None:
            return prepared.output if self.timed else prepared.output.copy_(_widen(prepared))
        if not self.timed:
            return _widen(prepared)
        if self.wide is None or self.wide.shape != rows.shape:
            self.wide = torch.randn(rows.shape, device=rows.device).bfloat16()
        return self.wide

    def _prepare(self):
        return self.pf.prepare(self.x, self.routing, quant=self.spec.quant, tokens_per_rank=self.counts)

    def communicate(self) -> torch.Tensor:
        out, prepared = torch.empty_like(self.x), self._prepare()
        return self.pf.finalize(prepared.handle, self._experts(prepared), reduce=self.reduce, out_MK=out)

    def compute(self) -> torch.Tensor:
        return self.shared(self.x)

    def plain(self) -> torch.Tensor:
        """One after the other too, with torch's own products: the shared expert as others run it."""
        out, prepared = torch.empty_like(self.x), self._prepare()
        gate, up = F.linear(self.x, self.shared.w13_SK).chunk(2, dim=-1)
        shared = F.linear(F.silu(gate) * up, self.shared.w2_KS)
        return self.pf.finalize(prepared.handle, self._experts(prepared), reduce=self.reduce, out_MK=out) + shared

    def sequential(self) -> torch.Tensor:
        out, prepared = torch.empty_like(self.x), self._prepare()
        shared = self.compute()
        return self.pf.finalize(prepared.handle, self._experts(prepared), reduce=self.reduce, out_MK=out) + shared

    def overlapped(self) -> torch.Tensor:
        out = torch.empty_like(self.x)
        receive = self.pf.prepare_no_receive(self.x, self.routing, quant=self.spec.quant, tokens_per_rank=self.counts)
        finish = self.shared.begin(self.x)
        prepared = receive()
        receive_out = self.pf.finalize_no_wait(prepared.handle, self._experts(prepared), reduce=self.reduce, out_MK=out)
        shared = finish()
        return receive_out() + shared


def run(name: str, ranks: Ranks, options):
    """One case: a cell, and on rank 0 a trace."""
    case = Case.of(name)
    manager = all2all.REGISTRY.get(case.backend)
    devices = manager.prepare_finalize.capability.devices
    if ranks.device.type not in devices:
        raise Unavailable(f"{case.backend} needs {' or '.join(sorted(devices))}")
    if missing := manager.unavailable():
        raise Unavailable(missing)
    if not manager.prepare_finalize.capability.async_receive:
        raise Unavailable(f"{case.backend} has no asynchronous dispatch: nothing can run beside it")
    context = RankContext(rank=ranks.rank, world_size=ranks.world, device=ranks.device, group=dist.group.WORLD)
    step = Step(context, case, options)
    if not all(ranks.gather(torch.equal(step.sequential(), step.overlapped()))):
        raise ValueError("the order of the work changed the result")
    step.timed = True
    graphed = step.pf.capability.cuda_graph and ranks.device.type == "cuda"
    rounds = 1 if graphed else ROUNDS
    found = [
        {order: time_call(getattr(step, order), ranks, graphed=graphed)[0] for order in ORDERS} for _ in range(rounds)
    ]
    times = {order: min(each[order] for each in found) for order in ORDERS}
    host = {} if graphed else {order: host_us(getattr(step, order), ranks) for order in ("sequential", "overlapped")}
    if options.traces:
        trace(step, ranks, options.traces / f"overlap_{name.replace(':', '_')}.json")
    cell = {"backend": case.backend, "tokens": case.tokens, "fp8": case.fp8, "graph": graphed, "us": times}
    cell |= {"rounds_us": found, "host_us": host}
    best = min(times["sequential"], times["plain"])
    cell |= {"ratio": times["overlapped"] / best, "goal": GOALS.get((case.backend, case.tokens))}
    yield cell | {"bound": max(times["communicate"], times["compute"]) / best}
    step.manager.destroy()


def host_us(call, ranks: Ranks) -> float:
    """Until a call has returned, the device idle before: the slowest rank's median."""
    spent = []
    for _ in range(HOST_CALLS):
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        ranks.gather(None)
        begin = time.perf_counter()
        call()
        spent.append((time.perf_counter() - begin) * 1e6)
    return max(ranks.gather(statistics.median(spent)))


def trace(step: Step, ranks: Ranks, path: Path) -> None:
    """Collective: every rank runs both orders, rank 0 writes what its device did."""
    cuda = ranks.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=[*kinds, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    ) as profile:
        for order in ("sequential", "overlapped", "sequential", "overlapped"):  # the first two set the tracer up
            if cuda:
                torch.cuda.synchronize()
            ranks.gather(None)
            with torch.profiler.record_function(order):
                getattr(step, order)()
        if cuda:
            torch.cuda.synchronize()
    if ranks.rank == 0:
        profile.export_chrome_trace(str(path))


def print_cells(cells: list[dict]) -> None:
    print(
        "| backend | tokens | rows | communication | shared expert | plain | sequential | overlapped | host | ratio | bound"
        " | goal |"
    )
    print("|---" * 12 + "|")
    for cell in cells:
        times = " | ".join(f"{cell['us'][order]:.1f}" for order in ORDERS)
        rows = ("fp8" if cell["fp8"] else "bf16") + (", graph" if cell["graph"] else "")
        goal = f"{cell['goal']:.2f}" if cell["goal"] else "-"
        host = f"{cell['host_us']['overlapped']:.0f}" if cell["host_us"] else "-"
        ratio = f"{cell['ratio']:.2f} | {cell['bound']:.2f} | {goal}"
        print(f"| {cell['backend']} | {cell['tokens']} | {rows} | {times} | {host} | {ratio} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", help="backend:tokens or backend:tokens:fp8")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--world", type=int, help="ranks; default: every GPU, or 2 with --cpu")
    parser.add_argument("--cpu", action="store_true", help="gloo ranks, small sizes")
    parser.add_argument("--limit-s", type=float, default=100, help="the longest that a rank waits for another")
    parser.add_argument("--budget-s", type=float, default=400, help="what has not ended by then is left out")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--traces", type=Path, help="a folder for a Chrome trace of each case, rank 0's")
    parser.add_argument("--commit", default="", help="recorded in the result")
    options = parser.parse_args()
    for name, value in (CPU if options.cpu else GPU).items():
        setattr(options, name, getattr(options, name, None) or value)
    cases = options.cases or (CPU_CASES if options.cpu else GPU_CASES)
    for case in cases:
        try:
            Case.of(case)
        except ValueError as error:
            parser.error(str(error))
    options.world = options.world or (2 if options.cpu else torch.cuda.device_count())
    if options.world < 2 or (not options.cpu and options.world > torch.cuda.device_count()):
        parser.error(f"{options.world} ranks on {torch.cuda.device_count()} GPUs: 2 or more are needed, or --cpu")
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    out, options.json = options.json, None
    begin = time.monotonic()
    cells, failures = supervise(list(cases), options, run, stop=begin + options.budget_s)
    print_cells(cells)
    for name, error in failures.items():
        print(f"{name}: {error}")
    meta = {
        "gpu": None if options.cpu else torch.cuda.get_device_name(),
        "world": options.world,
        "torch": torch.__version__,
    }
    meta |= {name: getattr(options, name) for name in GPU} | {
        "commit": options.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    if out:
        reports.save(out, {"meta": meta, "cells": cells, "failures": failures})
    wrong = [error for error in failures.values() if not error.startswith(UNAVAILABLE)]
    return 1 if wrong or not cells else 0


if __name__ == "__main__":
    sys.exit(main())
