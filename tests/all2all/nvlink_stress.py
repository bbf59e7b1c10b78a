"""A program: random steps of the NVLink all-to-all through its contract, on GPUs or, in Triton's interpreter, on CPU ranks.

    TRITON_INTERPRET=1 python tests/all2all/nvlink_stress.py --world 2 --steps 12
    python tests/all2all/nvlink_stress.py --world 2 --steps 100 --device cuda

"Expert" e multiplies by e + 1, so a slot that reaches the wrong expert, or a row that reaches the wrong token, shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))

from epserve.all2all.nvlink import NvlinkPrepareAndFinalize, Tiling, Tilings
from epserve.all2all.transport import symmetric
from epserve.errors import EpserveError, HandleError, RankFailed
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNoOP,
)
from epserve.modular_kernel.quantization import dequantise_blocks
from tests.all2all.shared_files import SharedFiles

SMALL = Tiling(programs=3, warps=4, block=128)
PROVIDERS = {
    provider.name: provider
    for provider in (symmetric.CudaSharedMemory, symmetric.NvshmemHeap, symmetric.TorchSymmetricMemory)
}


class InterpretedNvlink(NvlinkPrepareAndFinalize):
    """The same kernels on CPU ranks."""

    capability = dataclasses.replace(NvlinkPrepareAndFinalize.capability, devices=frozenset({"cpu"}))
    providers = (SharedFiles,)
    tilings = Tilings(
        few_tokens=2,
        dispatch_few=SMALL,
        dispatch_many=dataclasses.replace(SMALL, tile=2),
        dispatch_many_fp8=dataclasses.replace(SMALL, tile=2),
        combine_few=SMALL,
        combine_many=dataclasses.replace(SMALL, tile=4, block=256),
        dispatch_narrow=dataclasses.replace(SMALL, programs=1, block=256),
        combine_narrow=dataclasses.replace(SMALL, programs=1),
    )


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def expected(x_MK: torch.Tensor, routing: Routing, fp8: bool) -> torch.Tensor:
    scale = torch.where(routing.ids_Mt >= 0, routing.weights_Mt * (routing.ids_Mt + 1), 0.0).sum(1, keepdim=True)
    return x_MK.float() * scale


def run_experts(prepared, spec: LayerSpec, rank: int, fused: bool):
    """(y, reduce): weighted and reduced in place where peers read it, or one row a slot."""
    x_MK = prepared.x if prepared.scales is None else dequantise_blocks(prepared.x, prepared.scales)
    ids_Mt, weights_Mt = prepared.routing.ids_Mt, prepared.routing.weights_Mt
    assert not ids_Mt.numel() or int(ids_Mt.max()) < spec.layout.counts[rank]
    factor_Mt = ids_Mt + 1 + spec.layout.offsets[rank]
    if fused:
        share = torch.where(ids_Mt >= 0, weights_Mt * factor_Mt, 0.0).sum(1, keepdim=True)
        mine = (ids_Mt >= 0).any(1, keepdim=True)
        prepared.output.copy_(torch.where(mine, x_MK.float() * share, float("nan")))
        return prepared.output, TopKWeightAndReduceNoOP()
    y = torch.where((ids_Mt >= 0)[..., None], x_MK.float()[:, None] * factor_Mt[..., None], float("nan"))
    return y.to(spec.shape.dtype), TopKWeightAndReduceContiguous()


def refused(error: type[EpserveError], call) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


class Rank:
    def __init__(self, rank: int, args):
        self.rank, self.args, self.random = rank, args, random.Random(1000 * args.seed + rank)
        self.together = random.Random(args.seed)  # draws that all ranks share
        cuda = args.device == "cuda"
        self.device = torch.device("cuda", 0 if args.one_gpu else rank) if cuda else torch.device("cpu")
        torch.set_num_threads(1)
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if cuda and not args.one_gpu else "gloo",
            init_method=f"file://{args.meet}",
            rank=rank,
            world_size=args.world,
        )
        self.ranks = RankContext(
            rank=rank, world_size=args.world, device=self.device, group=dist.group.WORLD, timeout_s=args.timeout_s
        )

    def pause(self) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(self.random.randrange(300_000))
        else:
            time.sleep(self.random.random() * 0.01)

    def make(self, **options) -> NvlinkPrepareAndFinalize:
        args = self.args
        if self.device.type == "cpu":
            kind: type[NvlinkPrepareAndFinalize] = InterpretedNvlink
        else:
            kind = NvlinkPrepareAndFinalize
        if args.provider:
            kind = type("Provided", (kind,), {"providers": (PROVIDERS[args.provider],)})
        counts = args.counts or ExpertLayout.even(args.experts, args.world).counts
        spec = LayerSpec(
            shape=ExpertShape(
                hidden=args.hidden,
                intermediate=args.hidden,
                num_experts=sum(counts),
                top_k=args.top_k,
                dtype=getattr(torch, args.dtype),
            ),
            layout=ExpertLayout(counts=tuple(counts)),
            device=args.device,
            quant=QuantConfig(scheme="fp8_block") if args.fp8 else QuantConfig(),
        )
        return kind(self.ranks, spec, PrepareFinalizeOptions(max_tokens_per_rank=args.cap, **options))

    def batch(self, spec: LayerSpec, num_tokens: int, seed: int):
        generator = torch.Generator(self.device).manual_seed(seed)
        on = {"generator": generator, "device": self.device}
        shape = spec.shape
        x = torch.randn((num_tokens, shape.hidden), **on).to(shape.dtype)
        ids = torch.randint(-1, shape.num_experts, (num_tokens, shape.top_k), dtype=torch.int32, **on)
        ids[torch.rand((num_tokens,), **on) < 0.2] = -1  # some tokens go nowhere
        weights = torch.rand((num_tokens, shape.top_k), **on) + 0.1
        weights[ids < 0] = float("nan")
        return x, Routing(ids_Mt=ids, weights_Mt=weights)

    def counts(self) -> list[int]:
        cap = self.args.cap
        choices = [0, 0, 1, 2, 3, cap // 2, cap - 1, cap]
        return [self.together.choice(choices) for _ in range(self.args.world)]

    def step(self, pf: NvlinkPrepareAndFinalize, step: int) -> float:
        """Up to batches_in_flight batches, started and finalised in orders that all ranks share. The worst error."""
        draw, spec = self.together, pf.spec
        waiting, worst = [], 0.0
        for lane in range(draw.randint(1, pf.options.batches_in_flight)):
            counts = self.counts()
            known = counts if draw.random() < 0.5 else None
            x, routing = self.batch(spec, counts[self.rank], (step * 8 + lane) * self.args.world + self.rank)
            self.pause()
            if draw.random() < 0.5:
                receive = pf.prepare_no_receive(x, routing, quant=spec.quant, tokens_per_rank=known)
                self.pause()
                prepared = receive()
            else:
                prepared = pf.prepare(x, routing, quant=spec.quant, tokens_per_rank=known)
            assert prepared.x.shape[0] == (sum(counts) if known else self.args.world * self.args.cap)
            waiting.append((x, routing, prepared))
        draw.shuffle(waiting)
        for x, routing, prepared in waiting:
            y, reduce = run_experts(prepared, spec, self.rank, fused=draw.random() < 0.5)
            self.pause()
            out = torch.full_like(x, float("nan"))
            if draw.random() < 0.5:
                receive = pf.finalize_no_wait(prepared.handle, y, reduce=reduce, out_MK=out)
                self.pause()
                out = receive()
            else:
                out = pf.finalize(prepared.handle, y, reduce=reduce, out_MK=out)
            want = expected(x, routing, self.args.fp8)
            if x.shape[0]:
                error = ((out.float() - want).norm() / want.norm().clamp(min=1e-6)).item()
                assert error < self.args.tolerance, (self.rank, step, x.shape, error)
                worst = max(worst, error)
        return worst

    def poison(self, pf: NvlinkPrepareAndFinalize) -> None:
        """Every byte that a step does not write becomes NaN: what is stale must change nothing."""
        self.settle()
        dist.barrier()
        for slot in pf.heap.slots:
            for part in (slot.x.view(torch.uint8), slot.y.view(torch.uint8), slot.weights.view(torch.uint8)):
                part.fill_(0xFF)
        self.settle()
        dist.barrier()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def stress(self) -> None:
        pf = self.make(batches_in_flight=self.args.in_flight)
        if self.args.first_step:
            self.settle()
            dist.barrier()
            for slot in pf.heap.slots:
                slot.ctl[0] = self.args.first_step
                slot.flags[0].fill_(_int32(self.args.first_step * 4096))
                slot.flags[1].fill_(self.args.first_step)
            self.settle()
            dist.barrier()
        worst, began = 0.0, time.monotonic()
        for step in range(self.args.steps):
            if step % 5 == 0:
                self.poison(pf)
            worst = max(worst, self.step(pf, step))
        self.settle()
        pf.check()
        self.too_many(pf)
        pf.close()
        took = time.monotonic() - began
        print(
            f"rank {self.rank}: {self.args.steps} steps, worst error {worst:.2e}, {took:.1f} s, {pf.heap.region.provider}"
        )

    def replay(self) -> None:
        """A graph of three dispatches and combines, replayed with ids that change each time, some rows going nowhere."""
        pf, banks = self.make(batches_in_flight=2), 64
        spec = pf.spec
        batches = [self.batch(spec, self.args.cap, 8 * self.rank + lane) for lane in range(3)]
        bank = torch.stack([self.batch(spec, self.args.cap, 1000 + 99 * self.rank + i)[1].ids_Mt for i in range(banks)])
        outs = [torch.empty_like(x) for x, _ in batches]
        counts = (self.args.cap,) * self.args.world

        def steps() -> None:
            for lane, ((x, routing), out) in enumerate(zip(batches, outs, strict=True)):
                known = counts if lane != 1 else None
                prepared = pf.prepare(x, routing, quant=spec.quant, tokens_per_rank=known)
                ids_Mt, weights_Mt = prepared.routing.ids_Mt, prepared.routing.weights_Mt
                factor_Mt = (ids_Mt + 1 + spec.layout.offsets[self.rank]) * weights_Mt
                share = torch.where(ids_Mt >= 0, factor_Mt, 0.0).sum(1, keepdim=True)
                prepared.output.copy_(prepared.x.float() * share)
                pf.finalize(prepared.handle, prepared.output, reduce=TopKWeightAndReduceNoOP(), out_MK=out)

        for _, routing in batches:
            routing.weights_Mt.nan_to_num_(0.5)  # the ids under them change
        steps()
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            steps()
        worst, began = torch.zeros((), device=self.device), time.monotonic()
        for turn in range(self.args.replays):
            for lane, (_, routing) in enumerate(batches):
                routing.ids_Mt.copy_(bank[self.random.randrange(banks) if lane else turn % banks])
            graph.replay()
            lane = turn % 3
            want = expected(*batches[lane], False)
            error = (outs[lane].float() - want).norm() / want.norm().clamp(min=1e-6)
            worst = torch.maximum(worst, error.nan_to_num(nan=float("inf")))
            if turn % 1000 == 999:
                self.settle()
                pf.check()
        self.settle()
        pf.check()
        took = time.monotonic() - began
        assert worst.item() < self.args.tolerance, worst.item()
        pf.close()
        print(f"rank {self.rank}: {self.args.replays} replays of 3 steps, worst error {worst.item():.2e}, {took:.1f} s")

    def too_many(self, pf: NvlinkPrepareAndFinalize) -> None:
        """One batch more than batches_in_flight is refused on every rank, before anything is sent."""
        x, routing = self.batch(pf.spec, 1, 1)
        held = [pf.prepare(x, routing, quant=pf.spec.quant) for _ in range(self.args.in_flight)]
        refused(HandleError, lambda: pf.prepare(x, routing, quant=pf.spec.quant))
        for prepared in held:
            y, reduce = run_experts(prepared, pf.spec, self.rank, fused=True)
            pf.finalize(prepared.handle, y, reduce=reduce, out_MK=torch.empty_like(x))

    def lose_one(self) -> None:
        """The last rank dies before a dispatch, or after it: the others get an error that names it, within the limit."""
        pf = self.make()
        x, routing = self.batch(pf.spec, self.args.cap, self.rank)
        x2, routing2 = self.batch(pf.spec, 1, self.rank)
        self.full_step(pf, x, routing)
        self.settle()
        dist.barrier()
        dying = self.rank == self.args.world - 1
        if dying and self.args.lose == "dispatch":
            os._exit(7)
        began, phase = time.monotonic(), "never"
        if self.args.interrupt_s:
            threading.Timer(self.args.interrupt_s, pf.interrupt).start()
        try:
            prepared = pf.prepare(x, routing, quant=pf.spec.quant)
            self.settle()
            if dying:
                os._exit(7)
            y, reduce = run_experts(prepared, pf.spec, self.rank, fused=True)
            pf.finalize(prepared.handle, y, reduce=reduce, out_MK=torch.empty_like(x))
            self.settle()
            pf.check()
        except RankFailed as error:
            took, phase = time.monotonic() - began, str(error)
        if self.args.interrupt_s:
            assert phase.startswith("interrupted: another rank is gone"), phase
            assert took < self.args.interrupt_s + self.args.slack_s < self.args.timeout_s, took
        else:
            assert f"rank {self.args.world - 1} did not reach" in phase, phase
            assert phase.startswith(self.args.lose), phase
            assert took < self.args.timeout_s + self.args.slack_s, took
        refused(RankFailed, lambda: pf.prepare(x2, routing2, quant=pf.spec.quant))
        pf.abandon()
        pf.close()
        survivors = list(range(self.args.world - 1))
        if self.device.type == "cuda":
            torch.ones(8, device=self.device).sum().item()  # the context works
        if len(survivors) > 1 or self.device.type == "cuda":
            self.regroup(len(survivors))
        print(f"rank {self.rank}: {phase} (after {took:.2f} s)", flush=True)
        os._exit(0)  # the process group still waits for the dead rank

    def regroup(self, size: int) -> None:
        """The survivors serve again, in the same processes."""
        group = None
        if size > 1:
            dist.distributed_c10d._world = dist.distributed_c10d._World()
            dist.distributed_c10d.GroupMember.WORLD = None
            dist.init_process_group(
                "gloo", init_method=f"file://{self.args.meet}.again", rank=self.rank, world_size=size
            )
            group = dist.group.WORLD
        self.ranks = dataclasses.replace(self.ranks, world_size=size, group=group)
        self.args.world, self.args.counts = size, None
        pf = self.make()
        x, routing = self.batch(pf.spec, 2, self.rank)
        self.full_step(pf, x, routing)
        pf.close()

    def full_step(self, pf, x, routing) -> None:
        prepared = pf.prepare(x, routing, quant=pf.spec.quant)
        y, reduce = run_experts(prepared, pf.spec, self.rank, fused=True)
        out = pf.finalize(prepared.handle, y, reduce=reduce, out_MK=torch.empty_like(x))
        want = expected(x, routing, self.args.fp8)
        assert ((out.float() - want).norm() / want.norm()).item() < self.args.tolerance


def main(rank: int, args) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.experts.triton_interpreter import exact_casts  # noqa: F401, bf16 and e4m3 as the hardware converts them
    try:
        here = Rank(rank, args)
        if args.lose:
            here.lose_one()
        if args.replays:
            here.replay()
        else:
            here.stress()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other ranks must not be waited for


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="+", help="experts of each rank")
    parser.add_argument("--top-k", type=int, default=3)
    parser.add_argument("--cap", type=int, default=5)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--in-flight", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=30)
    parser.add_argument("--slack-s", type=float, default=10, help="how late an error may come, on a busy machine")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-step", type=int, default=0, help="2**31 - 3 or 2**19 - 3: flags of a phase wrap soon")
    parser.add_argument("--lose", choices=("dispatch", "combine"), help="kill the last rank before this phase")
    parser.add_argument(
        "--interrupt-s", type=float, default=0, help="with --lose: tell the others so many seconds later"
    )
    parser.add_argument("--replays", type=int, default=0, help="replays of a CUDA graph, instead of random steps")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU, which they share by turns")
    parser.add_argument("--provider", choices=tuple(PROVIDERS))
    parser.add_argument("--meet", help="a path that does not exist, where the ranks find each other")
    args = parser.parse_args()
    args.meet = args.meet or str(Path(tempfile.mkdtemp(prefix="nvlink_stress")) / "meet")
    return args


if __name__ == "__main__":
    arguments = parse()
    context = mp.spawn(main, (arguments,), arguments.world, join=False)
    codes = []
    for process in context.processes:
        process.join()
        codes.append(process.exitcode)
    wanted = [0] * arguments.world
    if arguments.lose:
        wanted[-1] = 7
    print("exit codes", codes)
    sys.exit(codes != wanted)
