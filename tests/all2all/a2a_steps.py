"""A program: thousands of steps of one all-to-all backend with random numbers of tokens, each rank's its own, none included.

    python -m tests.all2all.a2a_steps --backend nvlink --device cuda --steps 10000
    python -m tests.all2all.a2a_steps --backend deepep_ll --device cuda --steps 10000 --scheme fp8_block
    python -m tests.all2all.a2a_steps --backend all_to_all --steps 50

Every rank draws 0 .. cap tokens for each step. Some ids are -1, some of whose weights are NaN; half of the steps know the numbers
of all ranks, half of them leave the backend to find out; plain and no-wait calls take turns. "Expert" e multiplies by e + 1,
so that a slot at the wrong expert, or a row that went to the wrong token, shows. A sample of the steps, the first and the last
among them, is compared with that; memory is read after a tenth of the steps and at the end. Exit status 0: every sample
right, errors of the second half no larger than those of the first, memory flat, and no rank late.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from epserve import all2all
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
from tests.support.ranks import RANKS_PER_GPU, take_gpu

BANK = 32  # sets of ids and weights that steps draw from
MIB = 1 << 20
TOLERANCE = {"none": 1e-2, "fp8_block": 5e-2}  # relative L2 error of bf16 rows
SLACK = {
    "cpu": 48 * MIB,
    "cuda": 4 * MIB,
}  # of memory that comes and goes: the process's, or what torch holds on the device


class Rank:
    def __init__(self, rank: int, args):
        self.rank, self.args = rank, args
        cuda = args.device == "cuda"
        self.device = take_gpu(rank) if cuda else torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=f"file://{args.meet}", rank=rank, world_size=args.world,
            timeout=timedelta(seconds=args.timeout_s), **({"device_id": self.device} if cuda else {}),
        )  # fmt: skip
        self.ranks = RankContext(
            rank=rank, world_size=args.world, device=self.device, group=dist.group.WORLD, timeout_s=args.timeout_s
        )
        shape = ExpertShape(hidden=args.hidden, intermediate=128, num_experts=args.experts, top_k=args.top_k)
        layout = ExpertLayout.even(args.experts, args.world)
        self.spec = LayerSpec(shape=shape, layout=layout, device=args.device, quant=QuantConfig(scheme=args.scheme))
        self.manager = all2all.REGISTRY.get(args.backend)(self.ranks)
        self.pf = self.manager.get_handle(self.spec, PrepareFinalizeOptions(max_tokens_per_rank=args.cap))
        self.batched = self.pf.activation_format() is FusedMoEActivationFormat.BatchedExperts
        self.together = random.Random(args.seed)  # draws that all ranks share
        self._fill_bank()

    def _fill_bank(self) -> None:
        args = self.args
        on = {
            "generator": torch.Generator(self.device).manual_seed(1000 * args.seed + self.rank),
            "device": self.device,
        }
        self.x = torch.randn((args.cap + BANK, args.hidden), **on).bfloat16()
        self.routings = []
        for _ in range(BANK):
            ids = torch.rand((args.cap, args.experts), **on).topk(args.top_k).indices.int()
            ids[torch.rand(ids.shape, **on) < 0.1] = -1
            ids[torch.rand((args.cap,), **on) < 0.1] = -1  # tokens that go nowhere
            weights = torch.rand(ids.shape, **on) + 0.1
            weights[ids < 0] = float("nan")
            routing = Routing(ids_Mt=ids.contiguous(), weights_Mt=weights)
            self.routings.append(routing.with_ids(self.pf.topk_indices_dtype()))

    def step(self, check: bool) -> float | None:
        """One step; the relative L2 error of a checked one. Draws the same numbers on every rank."""
        args, draw = self.args, self.together
        counts = [
            draw.choice((0, draw.randint(0, args.cap), draw.randint(0, min(4, args.cap)), args.cap))
            for _ in range(args.world)
        ]
        known, early, late = draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5
        start, bank, mine = draw.randrange(BANK), draw.randrange(BANK), counts[self.rank]
        x, routing = self.x[start : start + mine], self.routings[bank].rows(0, mine)
        sizes = tuple(counts) if known else None
        if early and self.pf.has_prepare_no_receive():
            prepared = self.pf.prepare_no_receive(x, routing, quant=self.spec.quant, tokens_per_rank=sizes)()
        else:
            prepared = self.pf.prepare(x, routing, quant=self.spec.quant, tokens_per_rank=sizes)
        y, reduce = self.experts(prepared)
        out = torch.full_like(x, float("nan"))
        if late:
            out = self.pf.finalize_no_wait(prepared.handle, y, reduce=reduce, out_MK=out)()
        else:
            out = self.pf.finalize(prepared.handle, y, reduce=reduce, out_MK=out)
        if not check or not mine:
            return None
        ids, weights = routing.ids_Mt, routing.weights_Mt
        want = x.float() * torch.where(ids >= 0, weights * (ids + 1), 0.0).sum(1, keepdim=True)
        error = ((out.float() - want).norm() / want.norm().clamp(min=1e-6)).item()
        return error if error == error else float("inf")

    def experts(self, prepared):
        x = prepared.x if prepared.scales is None else dequantise_blocks(prepared.x, prepared.scales)
        first = self.spec.layout.offsets[self.rank]
        if self.batched:  # (e, T, K); rows past the count are undefined and stay so
            factor = torch.arange(first + 1, first + 1 + x.shape[0], device=x.device)[:, None, None]
            return (x.float() * factor).bfloat16(), TopKWeightAndReduceDelegate()
        ids, weights = prepared.routing.ids_Mt, prepared.routing.weights_Mt
        share = torch.where(ids >= 0, weights * (ids + 1 + first), 0.0).sum(1, keepdim=True)
        y = torch.where((ids >= 0).any(1, keepdim=True), x.float() * share, 0.0).bfloat16()
        return (y if prepared.output is None else prepared.output.copy_(y)), TopKWeightAndReduceNoOP()

    def memory(self) -> int:
        """Bytes: of the process, or of this process's tensors on the device."""
        if self.device.type == "cpu":
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(self.device)

    def run(self) -> dict:
        args, began = self.args, time.monotonic()
        errors: tuple[list[float], list[float]] = ([], [])  # of the first half of the steps, of the second
        before, free = 0, 0
        warm = max(1, args.steps // 10)
        for number in range(args.steps):
            check = number % args.check_every == 0 or number == args.steps - 1
            error = self.step(check)
            if error is not None:  # this rank had tokens
                assert error < TOLERANCE[args.scheme], f"rank {self.rank}, step {number}: relative L2 error {error:.3g}"
                errors[number >= args.steps // 2].append(error)
            if number + 1 == warm:
                before = self.memory()
                free = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0
            if self.rank == 0 and (number + 1) % max(1, args.steps // 10) == 0:
                worst = max(errors[0] + errors[1], default=0.0)
                print(f"{number + 1} steps, {time.monotonic() - began:.1f} s, worst error {worst:.2e}", flush=True)
        growth = self.memory() - before
        taken = free - torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0
        self.pf.check()
        assert growth <= SLACK[args.device], f"rank {self.rank}: memory grew by {growth / MIB:.1f} MiB"
        if RANKS_PER_GPU == 1:  # the other rank's start takes memory of a GPU that they share
            assert taken <= 256 * MIB, f"rank {self.rank}: the device has {taken / MIB:.0f} MiB less free"
        early, late = (max(half, default=0.0) for half in errors)
        if min(map(len, errors)) >= 5:
            text = f"rank {self.rank}: errors drift from {early:.2e} to {late:.2e}"
            assert late <= 1.5 * early + 1e-3, text
        self.manager.destroy()
        took, samples = round(time.monotonic() - began, 1), sum(map(len, errors))
        found = {
            "rank": self.rank,
            "steps": args.steps,
            "seconds": took,
            "samples": samples,
            "worst_error": max(early, late),
        }
        return found | {"memory_growth": growth, "device_taken": taken}


def main(rank: int, args) -> None:
    try:
        result = Rank(rank, args).run()
        dist.barrier()
        dist.destroy_process_group()
        Path(f"{args.meet}.{rank}").write_text(json.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks must not be waited for


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=all2all.REGISTRY.names(), required=True)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scheme", choices=tuple(TOLERANCE), default="none")
    parser.add_argument("--hidden", type=int, help="default 7168, on the CPU 256")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--cap", type=int, help="most tokens of a rank; default 512, batched formats 128, on the CPU 8")
    parser.add_argument("--check-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=30, help="the longest that a rank waits for another")
    parser.add_argument("--limit-s", type=float, default=300, help="of the whole run")
    args = parser.parse_args()
    manager = all2all.REGISTRY.get(args.backend)
    capability = manager.prepare_finalize.capability
    if args.device not in capability.devices or (missing := manager.unavailable()):
        parser.error(
            f"{args.backend} cannot run on {args.device} here" + (f": {missing}" if args.device != "cpu" else "")
        )
    on_cpu, batched = args.device == "cpu", capability.activation_format is FusedMoEActivationFormat.BatchedExperts
    args.hidden = args.hidden or (256 if on_cpu else 7168)
    args.cap = args.cap or (8 if on_cpu else 128 if batched else 512)
    return args


def supervise(args) -> int:
    with tempfile.TemporaryDirectory() as folder:
        args.meet = f"{folder}/meet"
        processes = mp.spawn(main, (args,), args.world, join=False).processes
        deadline = time.monotonic() + args.limit_s
        while time.monotonic() < deadline and any(process.exitcode is None for process in processes):
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + 5)  # what the others have to say
            time.sleep(0.1)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("meet.*"))]
    print(json.dumps({"backend": args.backend, "device": args.device, "scheme": args.scheme, "cap": args.cap,
                      "hidden": args.hidden, "ranks": results}))  # fmt: skip
    late = [rank for rank, code in enumerate(codes) if code is None]
    if late:
        print(f"ranks {late} had not ended after {args.limit_s:g} s or another's failure")
    return 0 if codes == [0] * args.world else 1


if __name__ == "__main__":
    sys.exit(supervise(parse()))
