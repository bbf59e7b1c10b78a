"""The service with clients' tensors on the ranks' own GPUs (CUDA IPC) beside the kernel alone: one client process on each GPU.

    python -m benchmarks.cuda_regions --json benchmarks/results/cuda_regions.json
    python -m benchmarks.cuda_regions --cpu --hidden 64 --intermediate 32 --tokens 64 --seconds 1

A layer of DeepSeek-V3's sizes with `--experts` on each rank, in bf16 and with fp8 blocks. First the ranks alone, in processes of
their own: the same steps (gate, shared expert, dispatch, experts, combine), one behind the other, nothing around them. Then the
service with the same ranks. "throughput": tokens a second of all clients at once, `--depth` calls each in flight, medians of
tenths of the time, through regions on the GPUs and through regions of system memory (whose copies to and from the GPU are the
client's, and count). "latency": one client, `--small` tokens, one call at a time, and where the time goes: the means of its
parts. The ratio is of the service's median to the kernel's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing as mp
import platform
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks import reports
from epserve.cli.layer import synthetic
from epserve.client import Client
from epserve.client import cuda_region as client_cuda_region
from epserve.client.exchange import OutgoingRequest
from epserve.config import Config, parse_config
from epserve.engine.records import StepRecord
from epserve.modular_kernel import RankContext
from epserve.pool import members
from epserve.protocol.frames import begun
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from epserve.service.run import running
from tests.support.fake_device_memory import FakeGpuMemory, RankOnFakeGpu

LAYER = 1
WARM, REPEATS = 20, 200
WINDOWS = 10
LIMIT_S = 120.0
WAYS = ("cuda", "system")
SCHEMES = ("none", "fp8_block")
PHASES = ("copy in", "gate", "prepare", "experts", "finalize", "copy out")


def write_checkpoint(folder: Path, args, scheme: str, world: int) -> None:
    """Writes a model of two layers. One is an MoE layer, and only its tensors are there."""
    from transformers import AutoConfig

    sizes = synthetic.LayerSizes(
        hidden=args.hidden, intermediate=args.intermediate, num_experts=args.experts * world, top_k=args.top_k,
        shared=args.intermediate, scheme=scheme, dtype=torch.float32 if args.cpu else torch.bfloat16,
    )  # fmt: skip
    gate = sizes.gate
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=args.hidden, moe_intermediate_size=args.intermediate, intermediate_size=args.intermediate,
        n_routed_experts=sizes.num_experts, num_experts_per_tok=args.top_k, n_group=gate.num_groups,
        topk_group=gate.top_groups, first_k_dense_replace=1, n_shared_experts=1, num_hidden_layers=2, vocab_size=32,
        num_attention_heads=2, num_key_value_heads=2, routed_scaling_factor=gate.routed_scaling_factor,
    ).to_dict()  # fmt: skip
    config["dtype"] = config["torch_dtype"] = str(sizes.dtype).removeprefix("torch.")
    if scheme == "fp8_block":
        config["quantization_config"] = {
            "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3",
        }  # fmt: skip
    device = torch.device("cpu" if args.cpu else "cuda:0")
    block, tensors = f"model.layers.{LAYER}.mlp.", {}

    def put(
        name: str, gate_up: torch.Tensor, down: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        half = gate_up.shape[0] // 2
        for part, whole, scale in (
            ("gate_proj", gate_up[:half], scales[0][: len(scales[0]) // 2] if scales else None),
            ("up_proj", gate_up[half:], scales[0][len(scales[0]) // 2 :] if scales else None),
            ("down_proj", down, scales[1] if scales else None),
        ):
            tensors[f"{block}{name}.{part}.weight"] = whole.contiguous().cpu()
            if scale is not None:
                tensors[f"{block}{name}.{part}.weight_scale_inv"] = scale.contiguous().cpu()

    for number in range(sizes.num_experts):
        one = synthetic.expert_weights(sizes, [number], device)
        scales = (one.s13[0], one.s2[0]) if one.s13 is not None and one.s2 is not None else None
        put(f"experts.{number}", one.w13_eNK[0], one.w2_eKN[0], scales)
    shared = synthetic.expert_weights(sizes, [sizes.num_experts], device)
    scales = (shared.s13[0], shared.s2[0]) if shared.s13 is not None and shared.s2 is not None else None
    put("shared_experts", shared.w13_eNK[0], shared.w2_eKN[0], scales)
    weights = synthetic.gate_weights(sizes, device)
    assert weights.correction_bias_E is not None
    tensors[f"{block}gate.weight"] = weights.weight_EK.cpu()
    tensors[f"{block}gate.e_score_correction_bias"] = weights.correction_bias_E.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def config_of(folder: Path, args, world: int) -> Config:
    return parse_config(
        {
            "model": {"path": str(folder)},
            "engine": {
                "ranks": world, "device": "cpu" if args.cpu else "cuda", "max_tokens_per_rank": args.tokens, "standbys": 0,
                "cuda_graph_tokens": [] if args.eager else "auto",
            },
            "scheduler": {"max_step_tokens": args.tokens * world, "max_queued_tokens": 1 << 20},
            "server": {"port": 0, "max_buffered_bytes": 1 << 34},
        }
    )  # fmt: skip


# The ranks alone.


def bare_rank(rank: int, world: int, meeting: str, folder: Path, args, results) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
    group = None
    if not args.cpu:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group(
            "gloo" if args.cpu else "nccl", init_method=f"file://{meeting}", rank=rank, world_size=world,
            device_id=None if args.cpu else device, timeout=timedelta(seconds=LIMIT_S),
        )  # fmt: skip
        group = dist.group.WORLD
    ranks = RankContext(rank=rank, world_size=world, device=device, group=group, timeout_s=LIMIT_S)
    worker = Worker(config_of(folder, args, world), ranks)
    worker.load()
    worker.warm_up()

    def wait() -> None:
        if not args.cpu:
            torch.cuda.synchronize()

    found: dict[str, float] = {}
    # First all ranks are full. Then one client sends few tokens.
    for name, counts in (("full", (args.tokens,) * world), ("small", (args.small, *(0,) * (world - 1)))):
        x_MK = torch.randn((counts[rank], args.hidden), device=device).to(worker.info.dtype)
        plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=counts)
        for _ in range(WARM):
            worker.step(plan, x_MK, None, None)
        wait()
        marks = []
        for _ in range(args.repeats + 1):  # one behind the other, as a model's layers follow each other
            mark = time.perf_counter() if args.cpu else torch.cuda.Event(enable_timing=True)
            if not args.cpu:
                mark.record()
            marks.append(mark)
            worker.step(plan, x_MK, None, None)
        wait()
        spans = [b - a if args.cpu else a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        found[f"{name}_step_s"] = statistics.median(spans)
        alone = []
        for _ in range(args.repeats):  # each waited for
            start = time.perf_counter()
            worker.step(plan, x_MK, None, None)
            wait()
            alone.append(time.perf_counter() - start)
        found[f"{name}_waited_s"] = statistics.median(alone)
    results.put((rank, found, worker.plan.chosen.explain().splitlines()[0]))
    worker.close()
    if world > 1:
        dist.destroy_process_group()


def bare(folder: Path, args, world: int) -> dict[str, Any]:
    """Returns the times of the slowest rank."""
    context = mp.get_context("spawn")
    results = context.Queue()
    meeting = str(folder / f"meeting_{time.monotonic_ns()}")
    processes = [
        context.Process(target=bare_rank, args=(rank, world, meeting, folder, args, results), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=LIMIT_S) for _ in processes]
    for process in processes:
        process.join(LIMIT_S)
    times = {name: max(each[1][name] for each in found) for name in found[0][1]}
    return {**times, "backends": found[0][2]}


# The service's clients.


class Caller:
    """One client on one GPU, with inputs of its own for each call in flight."""

    def __init__(self, client: Client, region: Any, way: str, tokens: int, args, number: int, depth: int):
        self.client, self.region, self.way = client, region, way
        device = torch.device("cpu" if args.cpu else f"cuda:{number}")
        dtype = torch.float32 if args.cpu else torch.bfloat16
        generator = torch.Generator(device).manual_seed(number)
        self.sources = [
            torch.randn((tokens, args.hidden), device=device, generator=generator).to(dtype) for _ in range(depth)
        ]
        self.inputs = [region.empty(x.shape, x.dtype) for x in self.sources]
        for mine, x in zip(self.inputs, self.sources, strict=True):
            mine.copy_(x)

    def once(self, index: int = 0) -> Any:
        return self.submit(index).result(LIMIT_S)

    def request(self, index: int) -> OutgoingRequest:
        if self.way == "system":  # the rows come from the GPU, and `home` copies the result back there
            self.inputs[index].copy_(self.sources[index])
        return OutgoingRequest(LAYER, self.inputs[index], None, None, request_id="", region=self.region)

    def home(self, y: torch.Tensor) -> torch.Tensor:
        return y.to(self.sources[0].device) if self.way == "system" else y

    def submit(self, index: int) -> Any:
        if self.way == "system":
            self.inputs[index].copy_(self.sources[index])
        return self.client.forward_async(LAYER, self.inputs[index], region=self.region, timeout=LIMIT_S)

    def timed(self) -> dict[str, float]:
        """Makes one call over the doorbell. Returns its seconds and the timings that the service reports."""
        start = time.perf_counter()
        with self.request(0) as request:
            assert request.bell is not None
            frame = request.bell.call(request.frame(LIMIT_S), LIMIT_S, None)
            y = self.home(request.answer(frame))
        end = time.perf_counter()
        del y
        said = begun(frame).header.timings
        return {
            "total": end - start, "codec": said.codec_us / 1e6, "engine": said.engine_us / 1e6,
            "queue": said.queue_us / 1e6, "steps": said.steps_us / 1e6,
        }  # fmt: skip


def client_process(number: int, address: str, args, pipe) -> None:
    torch.set_num_threads(1)
    if args.cpu:
        client_cuda_region.GpuMemory = FakeGpuMemory  # type: ignore[assignment,misc]
    else:
        torch.cuda.set_device(number)
    item = 4 if args.cpu else 2
    room = (2 * args.depth + 2) * args.tokens * args.hidden * item + (1 << 20)
    with Client(address) as client:
        while True:
            asked, way, *more = pipe.recv()
            if asked == "end":
                return
            register = client.register_cuda_region if way == "cuda" else client.register_region
            where = {"device": number} if way == "cuda" else {}
            with register(room, **where) as region:
                if asked == "latency":
                    caller = Caller(client, region, way, args.small, args, number, 1)
                    for _ in range(WARM):
                        caller.timed()
                    pipe.send(("ready",))
                    pipe.recv()
                    pipe.send([caller.timed() for _ in range(args.repeats)])
                    continue
                caller = Caller(client, region, way, args.tokens, args, number, args.depth)
                for index in range(args.depth):
                    caller.once(index)
                pipe.send(("ready",))
                pipe.recv()
                pipe.send(("done", keep_busy(caller, args.depth, more[0])))


def keep_busy(caller: Caller, depth: int, seconds: float) -> int:
    """Keeps `depth` calls in flight for `seconds`. Returns the number of answered calls."""
    end, answered = time.monotonic() + seconds, 0
    calls = [caller.submit(index) for index in range(depth)]
    index = 0
    while calls:
        y = caller.home(calls.pop(0).result(LIMIT_S))
        del y  # its memory serves the next call
        answered += 1
        if time.monotonic() < end:
            calls.append(caller.submit(index % depth))
        index += 1
    return answered


class Bench:
    def __init__(self, engine, clients: list[Any], args):
        self.engine, self.clients, self.args = engine, clients, args
        self.steps: list[StepRecord] = []
        engine.on_step(self.steps.append)

    async def tell(self, clients: list[Any], *message: Any) -> list[Any]:
        for pipe in clients:
            pipe.send(message)
        return [await asyncio.to_thread(receive, pipe) for pipe in clients]

    async def throughput(self, way: str, clients: list[Any]) -> dict[str, Any]:
        """Tokens a second: of each tenth of the time in which all clients were at work."""
        await self.tell(clients, "throughput", way, self.args.seconds)
        self.steps.clear()
        begin = time.monotonic()
        await self.tell(clients, "go")
        first, last = begin + 0.1 * self.args.seconds, begin + self.args.seconds
        width = (last - first) / WINDOWS
        tokens = [0] * WINDOWS
        for step in self.steps:
            if first <= step.ended < last:
                tokens[min(int((step.ended - first) / width), WINDOWS - 1)] += step.tokens
        inside = [step for step in self.steps if first <= step.ended < last]
        rates = sorted(each / width for each in tokens)
        full = sum(min(step.tokens_per_rank) == self.args.tokens for step in inside)
        return {
            "tokens_per_s": statistics.median(rates), "least": rates[0], "most": rates[-1], "steps": len(inside),
            "steps_with_all_ranks_full": full,
        }  # fmt: skip

    async def latency(self, way: str) -> dict[str, Any]:
        await self.tell(self.clients[:1], "latency", way)
        self.steps.clear()
        ((calls),) = await self.tell(self.clients[:1], "go")
        mean = {name: statistics.fmean(call[name] for call in calls) for name in calls[0]}
        phases = {
            name: statistics.fmean(step.phases[0].get(name, 0.0) for step in self.steps) for name in ("check", *PHASES)
        }
        parts = {
            "client and its socket, both ways": mean["total"] - mean["codec"] - mean["engine"],
            "checks and the reply": mean["codec"],
            "queue": mean["queue"],
            "event loop, before and after the step": mean["engine"] - mean["queue"] - mean["steps"],
            "frame to the rank, its Python, and back": mean["steps"] - sum(phases.values()),
            **{f"rank: {name}": seconds for name, seconds in phases.items()},
        }
        totals = sorted(call["total"] for call in calls)
        return {
            "median_us": statistics.median(totals) * 1e6, "p99_us": totals[int(0.99 * len(totals))] * 1e6,
            "mean_us": mean["total"] * 1e6, "mean_parts_us": {name: 1e6 * part for name, part in parts.items()},
        }  # fmt: skip


def receive(pipe) -> Any:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"a client process said nothing for {LIMIT_S:g} s")
    return pipe.recv()


async def serve(folder: Path, args, world: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    async with running(config_of(folder, args, world)) as (engine, server):
        pipes, processes = [], []
        for number in range(world):
            ours, theirs = context.Pipe()
            address = f"127.0.0.1:{server.port}"
            process = context.Process(target=client_process, args=(number, address, args, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        try:
            bench, found = Bench(engine, pipes, args), {}
            for way in WAYS:
                found[way] = {"throughput": await bench.throughput(way, pipes), "latency": await bench.latency(way)}
            told = engine.status().backends.splitlines()
            found["backends"], found["graphs"] = told[0], [line for line in told if "graph" in line]
            for pipe in pipes:
                pipe.send(("end", ""))
            return found
        finally:
            for process in processes:
                await asyncio.to_thread(process.join, 10)
                process.kill()


def one_scheme(scheme: str, args, world: int) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cuda-regions-") as place:
        folder = Path(place) / scheme
        writing = mp.get_context("spawn").Process(target=write_checkpoint, args=(folder, args, scheme, world))
        writing.start()
        writing.join()
        if writing.exitcode:
            raise SystemExit(f"writing the checkpoint failed ({writing.exitcode})")
        kernel = bare(folder, args, world)
        service = asyncio.run(serve(folder, args, world))
    kernel["tokens_per_s"] = world * args.tokens / kernel["full_step_s"]
    ratios = {way: service[way]["throughput"]["tokens_per_s"] / kernel["tokens_per_s"] for way in WAYS}
    added = {way: service[way]["latency"]["median_us"] - 1e6 * kernel["small_waited_s"] for way in WAYS}
    result = {
        "scheme": scheme, "kernel": kernel, "service": service, "throughput_over_kernel": ratios,
        "added_latency_us": added, "seconds": time.monotonic() - start,
    }  # fmt: skip
    show(result, args)
    return result


def show(result: dict[str, Any], args) -> None:
    kernel, service = result["kernel"], result["service"]
    print(f"{result['scheme']}: {kernel['backends']}")
    for line in service["graphs"]:
        print(f"  {line.strip()}")
    print(f"  kernel alone: {kernel['tokens_per_s']:,.0f} tokens/s ({1e3 * kernel['full_step_s']:.2f} ms a step of"
          f" {args.tokens} tokens a rank); {args.small} tokens on one rank {1e6 * kernel['small_waited_s']:.0f} us")  # fmt: skip
    for way in WAYS:
        rate, wait = service[way]["throughput"], service[way]["latency"]
        print(f"  {way:6} {rate['tokens_per_s']:,.0f} tokens/s, {result['throughput_over_kernel'][way]:.3f} of the kernel's;"
              f" {args.small} tokens: {wait['median_us']:.0f} us, {result['added_latency_us'][way]:.0f} more")  # fmt: skip
        print("         " + ", ".join(f"{name} {us:.0f}" for name, us in wait["mean_parts_us"].items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=16, help="on each rank")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of each client, and so on each rank")
    parser.add_argument("--small", type=int, default=128, help="tokens of the latency's calls")
    parser.add_argument("--depth", type=int, default=3, help="calls of each client in flight")
    parser.add_argument("--eager", action="store_true", help="no step as a CUDA graph")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of throughput")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--ranks", type=int, default=0, help="0: as many as there are GPUs")
    parser.add_argument("--cpu", action="store_true", help="made-up GPUs: the plumbing alone")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.cpu:
        args.schemes = ["none"]
        members.RankActor = RankOnFakeGpu  # type: ignore[misc]
    world = args.ranks or (2 if args.cpu else torch.cuda.device_count())
    if not args.cpu and not 1 <= world <= torch.cuda.device_count():
        parser.error(f"{torch.cuda.device_count()} GPUs, {world} ranks: one GPU for each is needed")
    rows = [one_scheme(scheme, args, world) for scheme in args.schemes]
    if args.json:
        sizes = {
            name: getattr(args, name) for name in ("hidden", "intermediate", "experts", "top_k", "tokens", "small")
        }
        gpu = "" if args.cpu else torch.cuda.get_device_name()
        meta = {"ranks": world, "gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), **sizes}
        meta |= {"depth": args.depth, "eager": args.eager, "commit": args.commit, "date": time.strftime("%Y-%m-%d")}
        reports.save(args.json, {"meta": meta, "rows": rows})


if __name__ == "__main__":
    main()
