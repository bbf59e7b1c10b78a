"""Times whole kernel steps by path and number of tokens: eager, as a CUDA graph, and as two halves in flight.

    python -m benchmarks.steps --json benchmarks/results/steps_h200x2.json
    python -m benchmarks.steps --cpu --hidden 64 --intermediate 32 --experts 8 --tokens 1 16

It uses all GPUs of one host. A step is prepare, experts and finalize of one layer (DeepSeek-V3's sizes by default), with even
random routing, the same tokens on every rank, and with `--shared` a shared expert of the same size. Times are microseconds, the
slowest rank's median: "eager" and "graph" of the whole batch, "halves" of two halves one after the other, "in flight" of the same
halves overlapped. Halves that overlap must have the bits of those that do not, and a graph those of the eager step. Otherwise the
run ends. The table that measured selection would use comes out beside it, from the same code that the service runs at start-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import reports
from epserve import all2all, experts
from epserve.cli.layer import synthetic
from epserve.models import SharedExperts
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    FusedMoEActivationFormat,
    FusedMoEModularKernel,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    why_not,
)
from epserve.modular_kernel.gathering import gather
from epserve.modular_kernel.measured.crossover import example, measure, meet
from epserve.modular_kernel.steps.graphs import StepGraphs, kernel_step
from epserve.modular_kernel.steps.in_flight import TwoInFlight

PATHS = (("nvlink", "triton"), ("all_to_all", "triton"), ("allgather_reducescatter", "triton"), ("deepep_ht", "triton"),
         ("deepep_ll", "triton_batched"), ("nvlink_batched", "triton_batched"))  # fmt: skip
CPU_PATHS = (("all_to_all", "grouped_mm"), ("allgather_reducescatter", "grouped_mm"))
LOW_LATENCY_TOKENS = 128
REPEATS, WARM = 20, 3


def spec_of(args, world: int) -> LayerSpec:
    shape = ExpertShape(
        hidden=args.hidden, intermediate=args.intermediate, num_experts=args.experts, top_k=args.top_k,
        dtype=torch.float32 if args.cpu else torch.bfloat16,
    )  # fmt: skip
    quant = QuantConfig(scheme="fp8_block", dynamic=True) if args.fp8 else QuantConfig()
    layout = ExpertLayout.even(args.experts, world)
    return LayerSpec(shape=shape, layout=layout, device="cpu" if args.cpu else "cuda", quant=quant)


def weights_of(spec: LayerSpec, ranks: RankContext) -> ExpertWeights:
    e, k, n = spec.layout.counts[ranks.rank], spec.shape.hidden, spec.shape.intermediate
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    on = {"device": ranks.device, "generator": generator}
    w13, w2 = torch.randn((e, 2 * n, k), **on).mul_(k**-0.5), torch.randn((e, k, n), **on).mul_(n**-0.5)
    if spec.quant.scheme != "fp8_block":
        return ExpertWeights(w13_eNK=w13.to(spec.shape.dtype), w2_eKN=w2.to(spec.shape.dtype))

    def quantised(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = w.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
        scales = blocks.abs().amax((2, 4)) / 448
        return (blocks / scales[:, :, None, :, None]).flatten(3).flatten(1, 2).to(torch.float8_e4m3fn), scales

    (q13, s13), (q2, s2) = quantised(w13), quantised(w2)
    return ExpertWeights(w13_eNK=q13, w2_eKN=q2, s13=s13, s2=s2)


class Candidate:
    """One path on one rank, with everything that a step may run as."""

    def __init__(self, ranks: RankContext, pf_name: str, experts_name: str, args):
        self.ranks, self.name, spec = ranks, pf_name, spec_of(args, ranks.world_size)
        manager = all2all.REGISTRY.get(pf_name)
        batched = manager.prepare_finalize.capability.activation_format is FusedMoEActivationFormat.BatchedExperts
        self.cap = min(max(args.tokens), LOW_LATENCY_TOKENS) if batched else max(args.tokens)
        in_flight = 2 if manager.prepare_finalize.capability.async_receive else 1
        options = PrepareFinalizeOptions(max_tokens_per_rank=self.cap, batches_in_flight=in_flight)
        self.manager = manager(ranks)
        pf = self.manager.get_handle(spec, options)
        self.kernel = FusedMoEModularKernel(pf, experts.REGISTRY.get(experts_name)(spec))
        self.spec = pf.spec
        self.weights = self.kernel.fused_experts.prepare_weights(weights_of(spec, ranks))
        self.kernel.warm_up(self.weights)
        self.two = TwoInFlight(self.kernel) if in_flight == 2 else None
        if self.two is not None:
            self.two.warm_up()
        self.shared = shared_expert(spec, ranks) if args.shared else None
        graphed = (
            ranks.device.type == "cuda" and pf.capability.cuda_graph and self.kernel.fused_experts.capability.cuda_graph
        )
        buckets = [each for each in args.tokens if each <= min(self.cap, args.graph_tokens)] if graphed else []
        self.graphs = StepGraphs(ranks, spec, buckets) if buckets else None
        if self.graphs is not None:
            step = kernel_step(self.kernel.forward, self.weights, self.shared, ranks.world_size)
            self.graphs.warm(step)
            self.graphs.capture("layer", step)

    def close(self) -> None:
        self.graphs = None
        self.manager.destroy()


def shared_expert(spec: LayerSpec, ranks: RankContext) -> SharedExperts:
    """Returns a shared expert as a service has it: in two halves, beside dispatch and beside combine."""
    shape = spec.shape
    made = synthetic.shared_expert(
        synthetic.LayerSizes(hidden=shape.hidden, shared=shape.intermediate, dtype=shape.dtype), ranks.device
    )
    made.warm_up()  # nothing may compile inside a capture
    return made


def one_size(candidate: Candidate, num_tokens: int) -> dict[str, float]:
    """Microseconds of each way to run the step. Collective."""
    ranks, weights, shared = candidate.ranks, candidate.weights, candidate.shared
    x, routing = example(candidate.spec, num_tokens, ranks)
    counts = (num_tokens,) * ranks.world_size
    named = {"weights": weights, "tokens_per_rank": counts, "shared_experts": shared}
    ways = {"eager": lambda: candidate.kernel.forward(x, routing, **named)}
    if candidate.two is not None and num_tokens >= 2:
        two = candidate.two
        ways["halves"] = lambda: two.forward(x, routing, overlap=False, **named)
        ways["in flight"] = lambda: two.forward(x, routing, **named)
    graphs = candidate.graphs
    if graphs is not None and num_tokens in graphs.buckets:
        ways["graph"] = lambda: graphs.replay("layer", num_tokens, x, routing)
    outs = {way: run() for way, run in ways.items()}
    for one, other in (("halves", "in flight"), ("eager", "graph")):
        if other in outs and not torch.equal(outs[one], outs[other]):
            raise AssertionError(f"{candidate.name}, {num_tokens} tokens: {other} has other bits than {one}")
    return {way: max(gather(ranks, median_us(run, ranks))) for way, run in ways.items()}


def median_us(run, ranks: RankContext) -> float:
    """Returns the median us of calls that follow each other, as a model's layers do, on the device's clock if it has one."""
    for _ in range(WARM):
        run()
    meet(ranks)
    cuda = ranks.device.type == "cuda"
    marks = []
    for _ in range(REPEATS + 1):
        mark = torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()
        if cuda:
            mark.record()
        marks.append(mark)
        run()
    if cuda:
        torch.cuda.synchronize()
    spans = [a.elapsed_time(b) * 1e3 if cuda else (b - a) * 1e6 for a, b in itertools.pairwise(marks)]
    return statistics.median(spans)


def worker(rank: int, world: int, meeting: str, args) -> None:
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
    torch.set_num_threads(1)
    if not args.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if args.cpu else "nccl", init_method=f"file://{meeting}", rank=rank, world_size=world,
        device_id=None if args.cpu else device, timeout=timedelta(seconds=args.limit_s),
    )  # fmt: skip
    ranks = RankContext(rank=rank, world_size=world, device=device, group=dist.group.WORLD, timeout_s=args.limit_s)
    cells, left_out, crossover = [], {}, {}
    for pf_name, experts_name in CPU_PATHS if args.cpu else PATHS:
        if args.only and pf_name not in args.only:
            continue
        manager, backend = all2all.REGISTRY.get(pf_name), experts.REGISTRY.get(experts_name)
        missing = manager.unavailable() or backend.unavailable()
        reasons = why_not(manager.prepare_finalize.capability, backend.capability, spec_of(args, world))
        if missing or reasons:
            left_out[pf_name] = missing or "; ".join(reasons)
            continue
        with torch.no_grad():
            candidate = Candidate(ranks, pf_name, experts_name, args)
            for num_tokens in [
                each for each in args.tokens if each <= candidate.cap or candidate.cap == max(args.tokens)
            ]:
                times = one_size(candidate, num_tokens)
                cells.append({"path": pf_name, "experts": experts_name, "tokens": num_tokens, "us": times})
                if rank == 0:
                    print(f"{pf_name:24} {num_tokens:6} tokens  " +
                          "  ".join(f"{way} {us:.0f} us" for way, us in times.items()), flush=True)  # fmt: skip

            def run(x, routing, counts, candidate=candidate):
                candidate.kernel.forward(x, routing, weights=candidate.weights, tokens_per_rank=counts)

            # One path at a time: its part of the table that a service with all of them would measure.
            table = measure(ranks, candidate.spec, {pf_name: run}, {pf_name: None}, most=candidate.cap)
            crossover[pf_name] = {str(bucket): times[pf_name] * 1e6 for bucket, times in table.times.items()}
            candidate.close()
        del candidate, run  # whose default argument holds the weights
    if rank == 0:
        report(args, world, cells, left_out, crossover)
    dist.destroy_process_group()


def report(args, world: int, cells: list[dict], left_out: dict[str, str], crossover: dict) -> None:
    for name, reason in left_out.items():
        print(f"{name}: left out: {reason}")
    print(f"start-up's table, us: {json.dumps(crossover)}")
    if args.json:
        sizes = {name: getattr(args, name) for name in ("hidden", "intermediate", "experts", "top_k", "fp8", "shared")}
        gpu = "" if args.cpu else torch.cuda.get_device_name()
        meta = {"world": world, "gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), **sizes}
        meta |= {"commit": args.commit, "date": time.strftime("%Y-%m-%d")}
        found = {"meta": meta, "cells": cells, "crossover_us": crossover, "left_out": left_out}
        reports.save(args.json, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 2048, 4096])
    parser.add_argument("--graph-tokens", type=int, default=128, help="largest size that is captured as a graph")
    parser.add_argument("--fp8", action="store_true", help="block-quantised weights and rows")
    parser.add_argument("--shared", action="store_true", help="with a shared expert")
    parser.add_argument("--only", nargs="+", help="all-to-all backends")
    parser.add_argument("--cpu", action="store_true", help="two gloo ranks: the plumbing alone")
    parser.add_argument("--limit-s", type=float, default=60, help="the longest that a rank waits for another")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.tokens = sorted(set(args.tokens))
    world = 2 if args.cpu else torch.cuda.device_count()
    if world < 2:
        parser.error(f"{world} GPUs: at least 2 are needed")
    mp.spawn(worker, (world, f"/tmp/steps_{time.monotonic_ns()}", args), world)


if __name__ == "__main__":
    main()
