"""Time the kernels of the NVLink all-to-all with many tilings, on all GPUs of one host.

    python benchmarks/tune_nvlink.py --hidden 7168 --tokens 1 128 4096 --json tiles.json

Prints, for each number of tokens, the tilings in the order of their time: the slowest rank's median of a replayed graph of
10 calls, of dispatch alone and then of combine together with the best dispatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import reports
from epserve.all2all.nvlink import NvlinkPrepareAndFinalize, Tiling, Tilings
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
)

CALLS = 10


NARROW = [
    *((32, 8192, 1), (32, 8192, 2), (32, 8192, 4), (32, 1024, 8), (32, 1024, 16), (32, 1024, 32)),
    *((16, 1024, 8), (16, 1024, 16)),
]
"""With one program on each of 32 multiprocessors, the more bytes a program has under way, the less it waits between tiles."""


def candidates(phase: str, tokens: int, fp8: bool, narrow: bool) -> list[Tiling]:
    """Shapes whose tile keeps every thread at one to four 16-byte accesses."""
    if narrow:
        return [Tiling(programs=32, warps=warps, block=block, tile=tile) for warps, block, tile in NARROW]
    shapes = [(4, 1024, 1), (8, 2048, 1), (4, 2048, 1), (8, 1024, 2), (16, 4096, 1), (8, 4096, 1), (32, 8192, 1)]
    shapes += [(16, 4096, 2), (32, 8192, 2), (8, 1024, 4), (16, 2048, 4)]
    if tokens <= 128:
        shapes = [(2, 512, 1), (4, 512, 1), (1, 256, 1), (2, 256, 1), (2, 1024, 1), *shapes[:3]]
        limits = [2112, 1056, 264, 132]
    else:
        limits = [32, 132, 264, 528, 1056, 2112]
    found = []
    for warps, block, tile in shapes:
        for programs in limits:
            resident = programs * warps <= 132 * 64  # combine's programs all spin: they must all be on the device
            units = -(-tokens // tile) * -(-7168 // block)
            useful = programs <= 2 * units or programs == limits[-1]
            if (resident or phase == "dispatch") and useful and not (fp8 and phase == "dispatch" and tile > 2):
                found.append(Tiling(programs=programs, warps=warps, block=block, tile=tile))
    return found


def median_us(call, rank: int) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) * 1e3 / CALLS for a, b in itertools.pairwise(marks[1:]))
    slowest = torch.tensor([times[len(times) // 2]], device=f"cuda:{rank}")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def worker(rank: int, world: int, meet: str, args) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{meet}", rank=rank, world_size=world, device_id=device)
    ranks = RankContext(rank=rank, world_size=world, device=device, group=dist.group.WORLD)
    shape = ExpertShape(hidden=args.hidden, intermediate=128, num_experts=args.experts, top_k=8)
    quant = QuantConfig(scheme="fp8_block") if args.fp8 else QuantConfig()
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(args.experts, world), device="cuda", quant=quant)
    kind = type("Tuned", (NvlinkPrepareAndFinalize,), {"tilings": Tilings(launch_early=args.early)})
    pf = kind(ranks, spec, PrepareFinalizeOptions(max_tokens_per_rank=max(args.tokens)))
    results = []
    for tokens in args.tokens:
        generator = torch.Generator(device).manual_seed(rank)
        x = torch.randn((tokens, args.hidden), device=device, generator=generator).bfloat16()
        ids = torch.rand((tokens, args.experts), device=device, generator=generator).topk(8).indices.int()
        routing = Routing(ids_Mt=ids, weights_Mt=torch.rand((tokens, 8), device=device))
        flight, out = pf._flight(routing, (tokens,) * world, tokens), torch.empty_like(x)
        first = {"dispatch": pf.tilings.dispatch_many, "combine": pf.tilings.combine_many}

        for phase in ("dispatch", "combine"):
            timed = []
            for tiling in candidates(phase, tokens, args.fp8, args.narrow):

                def call(phase=phase, tiling=tiling, best=first["dispatch"], flight=flight, x=x, out=out):
                    pf._dispatch(flight, x, tiling if phase == "dispatch" else best, wait=True)
                    if phase == "combine":
                        pf._combine(flight, out, tiling)

                timed.append((median_us(call, rank), tiling))
            timed.sort(key=lambda item: item[0])
            first[phase] = timed[0][1]
            results += [{"tokens": tokens, "phase": phase, "us": us, **dataclasses.asdict(t)} for us, t in timed]
            if rank == 0:
                narrow = next((item for item in timed if item[1].programs <= 32), None)
                shown = [*timed[: args.show], *([narrow] if narrow and narrow not in timed[: args.show] else [])]
                for us, t in shown:
                    print(f"T {tokens:5} {phase:9} {us:8.2f} us  programs {t.programs:5} warps {t.warps:3}"
                          f" block {t.block:5} tile {t.tile}", flush=True)  # fmt: skip
        pf.heap.give_back(flight.slot)
    pf.check()
    pf.close()
    if rank == 0 and args.json:
        meta = {"hidden": args.hidden, "experts": args.experts, "fp8": args.fp8, "launch_early": args.early,
                "narrow": args.narrow,
                "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}  # fmt: skip
        reports.save(args.json, {"meta": meta, "results": results})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128, 1024, 4096])
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--early", action="store_true", help="programmatic dependent launch")
    parser.add_argument("--narrow", action="store_true", help="only tilings that take 32 multiprocessors")
    parser.add_argument("--show", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    world = torch.cuda.device_count()
    meet = f"/tmp/tune_nvlink_{time.monotonic_ns()}"
    mp.spawn(worker, (world, meet, args), world)


if __name__ == "__main__":
    main()
