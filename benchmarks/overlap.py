"""A shared expert beside the all-to-all: one after the other, or inside the receiver windows. On all GPUs of one host.

    python benchmarks/overlap.py --backend nvlink --tokens 4096 --json overlap.json --trace overlap_trace.json

Sequential: prepare, shared expert, finalize. Overlapped: prepare_no_receive, first half of the shared expert, receive;
finalize_no_wait, second half, receive. Routed experts are left out: both orders have the same. The shared expert has
DeepSeek-V3's size (hidden 7,168, intermediate 2,048, bf16). Times are the slowest rank's median; the outputs of both orders
must be equal bit for bit. A backend that can be captured is replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import all2all
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

HIDDEN, INTERMEDIATE, TOP_K = 7168, 2048, 8
CALLS, REPEATS = 4, 20


class Shared:
    """SwiGLU; `start` is its first projection, `finish` the rest."""

    def __init__(self, device: torch.device):
        generator = torch.Generator(device).manual_seed(5)
        on = {"device": device, "generator": generator}
        self.w13 = torch.randn((2 * INTERMEDIATE, HIDDEN), **on).mul_(HIDDEN**-0.5).bfloat16()
        self.w2 = torch.randn((HIDDEN, INTERMEDIATE), **on).mul_(INTERMEDIATE**-0.5).bfloat16()

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w13)

    def finish(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w2)


def _widen(prepared) -> torch.Tensor:
    x, scales = prepared.x, prepared.scales
    return x.bfloat16() if scales is None else dequantise_blocks(x, scales).bfloat16()


class Step:
    timed = False
    """False: rows are copied and widened on their way, so that results can be compared."""

    def __init__(self, ranks: RankContext, args):
        shape = ExpertShape(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=args.experts, top_k=TOP_K)
        quant = QuantConfig(scheme="fp8_block") if args.fp8 else QuantConfig()
        layout = ExpertLayout.even(args.experts, ranks.world_size)
        self.spec = LayerSpec(shape=shape, layout=layout, device="cuda", quant=quant)
        self.manager = all2all.REGISTRY.get(args.backend)(ranks)
        self.pf = self.manager.get_handle(self.spec, PrepareFinalizeOptions(max_tokens_per_rank=args.tokens))
        generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
        on = {"device": ranks.device, "generator": generator}
        self.x = torch.randn((args.tokens, HIDDEN), **on).bfloat16()
        ids = torch.rand((args.tokens, args.experts), **on).topk(TOP_K).indices.int()
        self.routing = Routing(ids_Mt=ids, weights_Mt=torch.rand((args.tokens, TOP_K), **on))
        self.counts = (args.tokens,) * ranks.world_size
        self.shared = Shared(ranks.device)
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
        return self.shared.finish(self.shared.start(self.x))

    def sequential(self) -> torch.Tensor:
        out, prepared = torch.empty_like(self.x), self._prepare()
        shared = self.compute()
        return self.pf.finalize(prepared.handle, self._experts(prepared), reduce=self.reduce, out_MK=out) + shared

    def overlapped(self) -> torch.Tensor:
        out = torch.empty_like(self.x)
        receive = self.pf.prepare_no_receive(self.x, self.routing, quant=self.spec.quant, tokens_per_rank=self.counts)
        h = self.shared.start(self.x)
        prepared = receive()
        receive_out = self.pf.finalize_no_wait(prepared.handle, self._experts(prepared), reduce=self.reduce, out_MK=out)
        shared = self.shared.finish(h)
        return receive_out() + shared


def median_us(call, graphed: bool, device: torch.device) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    run, calls = call, 1
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        run, calls = graph.replay, CALLS
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    for mark in marks:
        run()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e3 / calls for start, end in itertools.pairwise(marks)]
    slowest = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def worker(rank: int, world: int, meet: str, args) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{meet}", rank=rank, world_size=world, device_id=device)
    step = Step(RankContext(rank=rank, world_size=world, device=device, group=dist.group.WORLD), args)
    assert torch.equal(step.sequential(), step.overlapped()), "the order of the work changed the result"
    step.timed = True
    graphed = step.pf.capability.cuda_graph
    orders = ("communicate", "compute", "sequential", "overlapped")
    times = {order: median_us(getattr(step, order), graphed, device) for order in orders}
    if args.trace:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step.sequential()
            step.overlapped()
            torch.cuda.synchronize()
        if rank == 0:
            profile.export_chrome_trace(str(args.trace))
    if rank == 0:
        ratio = times["overlapped"] / times["sequential"]
        row = {"backend": args.backend, "fp8": args.fp8, "tokens": args.tokens, "experts": args.experts, "ratio": ratio}
        row |= {"graph": graphed, "us": times, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        print(json.dumps(row), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    step.manager.destroy()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=all2all.REGISTRY.names(), default="nvlink")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--json", type=Path, help="one line is added")
    parser.add_argument("--trace", type=Path, help="a Chrome trace of both orders on rank 0")
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        parser.error(f"{world} GPUs: at least 2 are needed")
    mp.spawn(worker, (world, f"/tmp/overlap_{time.monotonic_ns()}", args), world)


if __name__ == "__main__":
    main()
