"""Where the time of a request goes, and how throughput grows with clients: `python -m benchmarks.serving [--ranks N]`.

One service on this machine's ranks (CPU processes, or GPUs with --device cuda), one run, medians of many. For each batch size the
same batch is sent
  in the ranks     the kernel alone, as the ranks' own clocks saw it (slowest rank of each step), and its copy to the device
  to the engine    in this process: queueing, joining, splitting, the sockets to Ray's actors, the kernel
  over gRPC        from a client in another process: all of it, with the tensors in messages and in a shared-memory region
and the differences are reported, beside the time to copy the request's and the reply's bytes four times over in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from epserve.config import parse_config
from epserve.models.demo import write_demo_checkpoint
from epserve.runtime.engine import Batch
from epserve.service import running

TOKENS = (1, 64, 4096)
CLIENTS = (1, 8, 64)
CLIENT_TOKENS = 16  # each request of the throughput part
SIZES = {"hidden": 2048, "intermediate": 256, "num_experts": 16, "top_k": 2, "num_layers": 2, "seed": 1}
LARGE = {"hidden": 7168, "intermediate": 2048, "num_experts": 32, "top_k": 8, "num_layers": 1, "seed": 1}


def copy_ms(nbytes: int) -> float:
    """Median time of copying `nbytes` once in memory."""
    source = torch.ones(max(nbytes, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source), repeats=15)


def median_ms(call, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def ask(
    address: str, layer: int, num_tokens: int, hidden: int, repeats: int, dtype: torch.dtype
) -> tuple[float, float]:
    """In a process of its own: median ms of one call, with tensors in messages and in shared memory."""
    from epserve.client import Client

    torch.set_num_threads(1)
    x = torch.randn((num_tokens, hidden)).to(dtype)
    with Client(address) as client:
        inline = median_ms(lambda: client.forward(layer, x, timeout=120), repeats)
        with client.register_region(4 * x.nbytes + (1 << 20)) as region:
            shared = region.empty(tuple(x.shape), dtype)
            shared.copy_(x)

            def call() -> None:
                y = client.forward(layer, shared, region=region, timeout=120)
                del y  # its place in the region is free again

            return inline, median_ms(call, repeats)


def load(address: str, layer: int, clients: int, hidden: int, seconds: float) -> dict:
    """In a process of its own: `clients` clients that each keep one request under way for `seconds`."""
    return asyncio.run(_load(address, layer, clients, hidden, seconds))


async def _load(address: str, layer: int, clients: int, hidden: int, seconds: float) -> dict:
    from epserve.client import AsyncClient

    torch.set_num_threads(1)
    x, times = torch.randn((CLIENT_TOKENS, hidden)), []

    async def one() -> None:
        async with AsyncClient(address) as client:
            await client.forward(layer, x, timeout=120)
            end = time.perf_counter() + seconds
            while (start := time.perf_counter()) < end:
                await client.forward(layer, x, timeout=120)
                times.append((time.perf_counter() - start) * 1e3)

    await asyncio.gather(*(one() for _ in range(clients)))
    times.sort()
    p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
    rate = len(times) / seconds
    return {"clients": clients, "requests_per_s": rate, "tokens_per_s": rate * CLIENT_TOKENS,
            "p50_ms": statistics.median(times), "p99_ms": p99}  # fmt: skip


async def engine_ms(engine, layer: int, num_tokens: int, repeats: int) -> tuple[float, float]:
    """Median ms of a call to the engine, and of the ranks' own time within it."""
    hidden = torch.randn((num_tokens, engine.info.hidden)).to(engine.info.dtype)
    times: list[float] = []
    inside: list[float] = []
    engine.on_step(lambda record: inside.append(max(sum(phases.values()) for phases in record.phases) * 1e3))
    for number in range(repeats + 2):
        batch = Batch(layer=layer, hidden=hidden, ids=None, weights=None, deadline=time.monotonic() + 120,
                      request_id=f"bench-{number}")  # fmt: skip
        start = time.perf_counter()
        await engine.forward(batch)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:]), statistics.median(inside[2 : repeats + 2])


async def measure(options, path: Path) -> dict:
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": options.ranks, "device": options.device, "max_tokens_per_rank": 4096},
            "scheduler": {"join_wait_ms": options.join_wait_ms},
            "server": {"port": 0},
        }
    )
    result: dict = {"latency": [], "throughput": []}
    pool = multiprocessing.get_context("spawn").Pool(1)
    loop = asyncio.get_running_loop()
    async with running(config) as (engine, server):
        address, layer = f"127.0.0.1:{server.port}", engine.info.layers[0]

        async def elsewhere(function, *arguments):
            return await loop.run_in_executor(None, lambda: pool.apply(function, (address, layer, *arguments)))

        for num_tokens in options.tokens:
            repeats = options.repeats if num_tokens < 1000 else max(5, options.repeats // 4)
            in_engine, in_kernel = await engine_ms(engine, layer, num_tokens, repeats)
            over_grpc, in_region = await elsewhere(ask, num_tokens, engine.info.hidden, repeats, engine.info.dtype)
            nbytes = num_tokens * engine.info.hidden * engine.info.dtype.itemsize
            floor = 4 * 2 * copy_ms(nbytes)
            result["latency"].append({
                "tokens": num_tokens, "kernel_ms": in_kernel, "runtime_ms": in_engine - in_kernel,
                "grpc_ms": over_grpc - in_engine, "total_ms": over_grpc, "region_total_ms": in_region,
                "four_copies_ms": floor,
                "overhead_over_copies": (over_grpc - in_kernel) / floor,
                "region_overhead_over_copies": (in_region - in_kernel) / floor, "total_over_kernel": over_grpc / in_kernel,
                "region_total_over_kernel": in_region / in_kernel})  # fmt: skip
        result["backends"] = engine.status().backends
        for clients in options.clients:
            result["throughput"].append(await elsewhere(load, clients, engine.info.hidden, options.seconds))
    pool.close()
    first = result["throughput"][0]["requests_per_s"]
    for row in result["throughput"]:
        row["x_one_client"] = row["requests_per_s"] / first
    return result


def show(rows: list[dict]) -> None:
    print("  ".join(key.rjust(20) for key in rows[0]))
    for row in rows:
        print(
            "  ".join(f"{value:20.3f}" if isinstance(value, float) else str(value).rjust(20) for value in row.values())
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--large", action="store_true", help="a layer of DeepSeek-V3's width in bf16, for GPUs")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each throughput measurement")
    parser.add_argument("--join-wait-ms", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        sizes, dtype = (LARGE, torch.bfloat16) if options.large else (SIZES, torch.float32)
        write_demo_checkpoint("mixtral", path, dtype=dtype, **sizes)
        result = asyncio.run(measure(options, path))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result["host"] = {"machine": platform.platform(), "cpus": multiprocessing.cpu_count(), "ranks": options.ranks,
                      "torch": torch.__version__, "commit": commit.stdout.strip(), "sizes": sizes, "device": options.device,
                      "backends": result.pop("backends")}  # fmt: skip
    show(result["latency"])
    show(result["throughput"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
