"""What a call through a lane costs beyond the kernel, beside the other ways: `python -m benchmarks.lanes [--ranks N]`.

One service on CPU ranks of this machine, one client in a process of its own. The client sends the same batch over a lane, in
a region and in messages, in turn, since the machine's load changes. The kernel's time of each call is the sum of its step's
phases on the slowest rank, by that rank's own clock. What is left of the call's time is the way there and back. Then 1 and 64
lanes with one call under way each, driven by one thread, and the processor time of the lanes' thread and of the whole rank
while no bell rings.

The machine's load is written beside the figures: on two cores that other programs use, the tenth percentile says more than
the median.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import reports
from epserve.client import Client
from epserve.config import parse_config
from epserve.models.demo import write_demo_checkpoint
from epserve.service.run import running

RESULT = Path(__file__).parent / "results" / "lanes.json"
SIZES = {"hidden": 2048, "intermediate": 256, "num_experts": 16, "top_k": 2, "num_layers": 2, "seed": 1}
WAYS = ("lane", "region", "messages")
TOKENS = {1: 200, 16: 200, 1024: 15}  # tokens of a call: calls of each way
LANES = (1, 64)
LOAD_S, IDLE_S = 3.0, 5.0
WARM_UP = 5
PAUSE_S = 0.002  # between calls, as attention would take


def calls(address: str, layer: int, tokens: int, repeats: int, dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """Way and seconds of each call, and when it began, in the order of the calls."""
    torch.set_num_threads(1)
    x = torch.randn(tokens, SIZES["hidden"]).to(dtype)
    done = []
    with ExitStack() as held:
        client = held.enter_context(Client(address))
        lane = held.enter_context(client.open_lane(tokens))
        region = held.enter_context(client.register_region(4 * x.nbytes + (1 << 20)))
        inside = region.empty(x.shape, x.dtype)
        inside.copy_(x)
        lane.x()[:tokens] = x
        each = {
            "lane": lambda: lane.call(layer, tokens),
            "region": lambda: client.forward(layer, inside, region=region),
            "messages": lambda: client.forward(layer, x),
        }
        for _ in range(repeats + WARM_UP):
            for way in WAYS:
                time.sleep(PAUSE_S)
                start = time.monotonic()
                each[way]()
                done.append((way, time.monotonic() - start, start))
        lane.check()
        assert torch.equal(lane.y()[:tokens], client.forward(layer, x)), "other bits than over gRPC"
    return done


def rate(address: str, layer: int, lanes: int) -> float:
    """Calls of one token a second."""
    torch.set_num_threads(1)
    with ExitStack() as held:
        client = held.enter_context(Client(address))
        opened = [held.enter_context(client.open_lane(1)) for _ in range(lanes)]
        for lane in opened:
            lane.x().normal_()
            lane.start(layer, 1)
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < LOAD_S:
            for lane in opened:
                lane.finish()
                lane.start(layer, 1)
                count += 1
        for lane in opened:
            lane.finish()
            lane.check()
    return count / spent


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median_us": round(statistics.median(ordered) * 1e6), "p10_us": round(ordered[len(ordered) // 10] * 1e6)}


async def measure(config, layer: int, scale: float) -> dict:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        async with running(config) as (engine, server):
            records: list = []
            engine.on_step(records.append)
            dtype, result = engine.info.dtype, {}
            for tokens, wanted in TOKENS.items():
                records.clear()
                repeats = max(3, round(wanted * scale))
                question = (server.address, layer, tokens, repeats, dtype)
                done = await asyncio.to_thread(pool.apply, calls, question)
                await asyncio.sleep(1)  # lanes tell of their steps a little later
                steps = sorted(records, key=lambda each: each.started)
                kernels = [max(sum(phases.values()) for phases in record.phases) for record in steps]
                assert len(kernels) == len(done) + 1, (len(kernels), len(done))
                rows: dict = {}
                for way in WAYS:
                    mine = [
                        (whole, kernel) for (name, whole, _), kernel in zip(done, kernels, strict=False) if name == way
                    ]
                    mine = mine[WARM_UP:]
                    kernel = statistics.median(kernel for _, kernel in mine)
                    beyond = [whole - each for whole, each in mine]
                    rows[way] = summary([whole for whole, _ in mine]) | {
                        "kernel_us": round(kernel * 1e6),
                        **{f"beyond_{name}": value for name, value in summary(beyond).items()},
                        "of_kernel": round(statistics.median(whole / each for whole, each in mine), 3),
                    }
                there = [
                    step.parts[0].queued - began
                    for (way, _, began), step in zip(done, steps, strict=False)
                    if way == "lane"
                ]
                rows["lane"]["bell_to_step_us"] = round(statistics.median(there[WARM_UP:]) * 1e6)
                result[str(tokens)] = rows
                print(tokens, rows, flush=True)
            rates = {str(lanes): round(await asyncio.to_thread(pool.apply, rate, (server.address, layer, lanes)), 1)
                     for lanes in LANES}  # fmt: skip
            result["calls_per_s"] = rates
            await asyncio.sleep(1.5)  # the thread counts its time when it wakes
            rank = engine.status().ranks[0].pid
            before, rank_before, start = server.lanes_cpu_s, cpu_s(rank), time.monotonic()
            await asyncio.to_thread(pool.apply, hold, (server.address,))
            await asyncio.sleep(1.5)
            took = time.monotonic() - start
            result["idle_share_of_a_core"] = round((server.lanes_cpu_s - before) / took, 4)
            result["idle_share_of_rank"] = round((cpu_s(rank) - rank_before) / took, 4)
            print(rates, result["idle_share_of_a_core"], result["idle_share_of_rank"], flush=True)
            return result


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process, all of its threads."""
    spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


def hold(address: str) -> None:
    """One lane, without a call."""
    with Client(address) as client, client.open_lane(1):
        time.sleep(IDLE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--scale", type=float, default=1.0, help="repeats, over those of the kept result")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = write_demo_checkpoint("mixtral", Path(folder) / "model", **SIZES)
        engine = {"ranks": options.ranks, "device": "cpu"}
        config = parse_config(
            {
                "model": {"path": str(path or Path(folder) / "model"), "dtype": options.dtype},
                "engine": engine,
                "server": {"port": 0},
            },
            "benchmark",
        )
        result = asyncio.run(measure(config, 0, options.scale))
    report = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "load": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},
        "sizes": SIZES, "dtype": options.dtype, "ranks": options.ranks, **result,
    }  # fmt: skip
    if options.json is not None:
        reports.save(options.json, report)


if __name__ == "__main__":
    main()
