"""Measures the parts of a request's time, and throughput by the number of clients: `python -m benchmarks.serving [--ranks N]`.

One service runs on this machine's ranks (CPU processes, or GPUs with --device cuda), and figures are medians of one run. For each
batch size the same batch is sent
  to the engine    in this process: queueing, joining, splitting, the way to Ray's actors and back, the kernel
  in messages      from a client in another process: over one stream, with the tensors in it
  in a region      the same with the tensors in shared memory
The kernel's own part of each call comes from the ranks' own clocks (the slowest rank of that step). Beside it stands the time
that the same bytes take in both directions over a raw TCP socket.

Throughput: N clients with a connection each keep one request of 16 tokens under way, in a gRPC call each (messages), on one
long-lived stream (stream) or through shared memory (region). Then requests of 64 clients come at random times (Poisson), at
70 % of the peak that was just seen, and a latency counts from the time when its request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import reports
from benchmarks.data_paths import echo_ms
from epserve.config import parse_config
from epserve.engine.engine import Batch
from epserve.models.demo import write_demo_checkpoint
from epserve.service.run import running

TOKENS = (1, 16, 64, 1024, 4096)
CLIENTS = (1, 8, 64)
CLIENT_TOKENS = 16  # each request of the throughput part
PACE = 0.7  # of the peak, for the latency under load
WARM_UP = 2  # calls that are not counted
SIZES = {"hidden": 2048, "intermediate": 256, "num_experts": 16, "top_k": 2, "num_layers": 2, "seed": 1}
LARGE = {"hidden": 7168, "intermediate": 2048, "num_experts": 32, "top_k": 8, "num_layers": 1, "seed": 1}


def copy_ms(nbytes: int) -> float:
    """Median time of copying `nbytes` once in memory."""
    source = torch.ones(max(nbytes, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    return statistics.median(times_ms(lambda: target.copy_(source), repeats=15))


def times_ms(call, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats + WARM_UP):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times[WARM_UP:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What another process sends, and how often."""

    address: str
    layer: int
    hidden: int
    dtype: torch.dtype
    tokens: int
    repeats: int
    way: str = "messages"


def ask(question: Question) -> list[float]:
    """In a process of its own: ms of each call."""
    from epserve.client import Client

    torch.set_num_threads(1)
    x = torch.randn((question.tokens, question.hidden)).to(question.dtype)
    with Client(question.address) as client, client.register_region(4 * x.nbytes + (1 << 20)) as region:
        inside = region.empty(tuple(x.shape), x.dtype)
        inside.copy_(x)

        def messages() -> None:
            client.forward(question.layer, x, timeout=120)

        def in_region() -> None:
            client.forward(question.layer, inside, region=region, timeout=120)

        return times_ms(messages if question.way == "messages" else in_region, question.repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """requests_per_s: 0 for clients that send the next one when they have the answer."""

    address: str
    layer: int
    hidden: int
    dtype: torch.dtype
    clients: int
    seconds: float
    way: str = "messages"
    requests_per_s: float = 0.0


def load(wanted: Load) -> dict:
    """In a process of its own."""
    return asyncio.run(_load(wanted))


async def _load(wanted: Load) -> dict:
    from epserve.client import AsyncClient

    torch.set_num_threads(1)
    x = torch.randn((CLIENT_TOKENS, wanted.hidden)).to(wanted.dtype)
    times: list[float] = []
    async with AsyncExitStack() as held:
        calls = []
        for _ in range(wanted.clients):
            client = await held.enter_async_context(AsyncClient(wanted.address))
            if wanted.way == "stream":
                stream = await held.enter_async_context(client.stream())
                calls.append(partial(stream.forward, wanted.layer, x, timeout=120))
                continue
            if wanted.way == "messages":
                calls.append(partial(client.forward, wanted.layer, x, timeout=120))
                continue
            region = await held.enter_async_context(client.register_region(64 * x.nbytes))
            inside = region.empty(tuple(x.shape), x.dtype)
            inside.copy_(x)
            calls.append(partial(client.forward, wanted.layer, inside, region=region, timeout=120))
        await asyncio.gather(*(call() for call in calls))
        start = time.perf_counter()
        end = start + wanted.seconds

        async def one(call, due: float) -> None:
            await call()
            times.append((time.perf_counter() - due) * 1e3)

        async def again_and_again(call) -> None:
            while (now := time.perf_counter()) < end:
                await one(call, now)

        if wanted.requests_per_s:
            draw, running, due = random.Random(1), set(), start
            while (due := due + draw.expovariate(wanted.requests_per_s)) < end:
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                running.add(asyncio.create_task(one(draw.choice(calls), due)))
            await asyncio.gather(*running)
        else:
            await asyncio.gather(*map(again_and_again, calls))
    times.sort()
    p50, p99 = statistics.median(times), times[min(len(times) - 1, int(len(times) * 0.99))]
    rate = len(times) / wanted.seconds
    return {"clients": wanted.clients, "way": wanted.way, "requests_per_s": rate, "tokens_per_s": rate * CLIENT_TOKENS,
            "p50_ms": p50, "p99_ms": p99, "p99_over_p50": p99 / p50}  # fmt: skip


async def engine_ms(engine, layer: int, num_tokens: int, repeats: int) -> list[float]:
    """Returns the milliseconds of each call to the engine in this process."""
    hidden = torch.randn((num_tokens, engine.info.hidden)).to(engine.info.dtype)
    times: list[float] = []
    for number in range(repeats + WARM_UP):
        batch = Batch(layer=layer, hidden=hidden, ids=None, weights=None, deadline=time.monotonic() + 120,
                      request_id=f"bench-{number}")  # fmt: skip
        start = time.perf_counter()
        await engine.forward(batch)
        times.append((time.perf_counter() - start) * 1e3)
    return times[WARM_UP:]


class Measurement:
    """Measures one running service. `pool` has the client's process."""

    def __init__(self, options, engine, server, pool):
        self._options, self._engine, self._pool = options, engine, pool
        self._where = {"address": f"127.0.0.1:{server.port}", "layer": engine.info.layers[0]}
        self._what = {"hidden": engine.info.hidden, "dtype": engine.info.dtype}
        self._kernel_ms: list[float] = []
        engine.on_step(lambda record: self._kernel_ms.append(max(sum(each.values()) for each in record.phases) * 1e3))

    async def elsewhere(self, function, question):
        return await asyncio.to_thread(self._pool.apply, function, (question,))

    async def latency(self, num_tokens: int) -> dict:
        repeats = self._options.repeats if num_tokens < 1000 else max(5, self._options.repeats // 4)
        nbytes = num_tokens * self._what["hidden"] * self._what["dtype"].itemsize
        row = {"tokens": num_tokens, "echo_ms": echo_ms(nbytes, 15), "copy_ms": copy_ms(nbytes)}
        ways = {"engine": engine_ms(self._engine, self._where["layer"], num_tokens, repeats)}
        for way in ("messages", "region"):
            question = Question(**self._where, **self._what, tokens=num_tokens, repeats=repeats, way=way)
            ways[way] = self.elsewhere(ask, question)
        for way, asking in ways.items():
            self._kernel_ms.clear()
            whole = await asking
            kernel = self._kernel_ms[-len(whole) :]  # one step for each call, as there are no other clients
            beyond = [each - inside for each, inside in zip(whole, kernel, strict=True)]
            row |= {f"{way}_ms": statistics.median(whole), f"{way}_kernel_ms": statistics.median(kernel),
                    f"{way}_beyond_ms": statistics.median(beyond),
                    f"{way}_over_kernel": statistics.median(
                        each / inside for each, inside in zip(whole, kernel, strict=True))}  # fmt: skip
        row["messages_beyond_over_echo"] = row["messages_beyond_ms"] / row["echo_ms"]
        return row

    async def throughput(self, way: str) -> list[dict]:
        common = {**self._where, **self._what, "seconds": self._options.seconds, "way": way}
        rows = [await self.elsewhere(load, Load(**common, clients=clients)) for clients in self._options.clients]
        peak = max(row["requests_per_s"] for row in rows)
        paced = Load(**common, clients=max(self._options.clients), requests_per_s=PACE * peak)
        rows.append(await self.elsewhere(load, paced) | {"pace": PACE})
        for row in rows:
            row["x_one_client"] = row["requests_per_s"] / rows[0]["requests_per_s"]
        return rows


async def measure(options, path: Path) -> dict:
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": options.ranks, "device": options.device, "max_tokens_per_rank": 4096},
            "cluster": {"data_path": options.data_path},
            "scheduler": {"join_wait_ms": options.join_wait_ms},
            "server": {"port": 0},
        }
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        async with running(config) as (engine, server):
            measurement = Measurement(options, engine, server, pool)
            latency = [await measurement.latency(num_tokens) for num_tokens in options.tokens]
            throughput = [row for way in options.ways for row in await measurement.throughput(way)]
            result = {"latency": latency, "throughput": throughput, "backends": engine.status().backends}
            kernel = {row["tokens"]: row["engine_kernel_ms"] for row in latency}
            if {CLIENT_TOKENS, 64 * CLIENT_TOKENS} <= kernel.keys():
                # How many times faster the kernel alone is when 64 requests share a step: more is not to be had.
                result["joining_x_kernel"] = 64 * kernel[CLIENT_TOKENS] / kernel[64 * CLIENT_TOKENS]
            return result


def show(rows: list[dict]) -> None:
    for row in rows:
        parts = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(parts))
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
    parser.add_argument("--ways", nargs="*", choices=("messages", "stream", "region"), default=("messages", "stream", "region"),
                        help="of the throughput part")  # fmt: skip
    parser.add_argument("--data-path", choices=("auto", "shared_memory", "sockets"), default="auto")
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
                      "torch": torch.__version__, "load": os.getloadavg(), "data_path": options.data_path,
                      "commit": commit.stdout.strip(), "sizes": sizes, "device": options.device,
                      "backends": result.pop("backends")}  # fmt: skip
    show(result["latency"])
    show(result["throughput"])
    print("64 requests in one step against one by one, the kernel alone:", result.get("joining_x_kernel"))
    if options.json:
        reports.save(options.json, result)


if __name__ == "__main__":
    main()
