"""Calls 8 lanes without pause while processes are killed and stalled: `python -m benchmarks.lanes_soak [--calls 1000000]`.

One service on a CPU rank of this machine, with a spare. Two processes have four lanes each. Every call has a layer, a size from 1
to 64 rows and rows of its own choice, and every result is compared with what the service said over gRPC at the start. Meanwhile
another client with a lane is killed and started again, one more writes random words into its lane, and now and then the rank is
killed, or stopped until the service notices. A call counts once its result is there: none may be lost, and none wrong. A step
that is shared rounds otherwise than one that is not, so results are compared within a tolerance. Before the others start, one
client compares bit by bit. Memory is that of front end and rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import platform
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import reports
from epserve.client import Client
from epserve.config import parse_config
from epserve.models.demo import write_demo_checkpoint
from epserve.protocol import lane_words as lw
from epserve.service.run import running

RESULT = Path(__file__).parent / "results" / "lanes_soak.json"
SIZES = {"hidden": 64, "intermediate": 64, "num_experts": 8, "top_k": 2, "num_layers": 2, "seed": 1}
PROCESSES, LANES = 2, 4
MOST_TOKENS, INPUTS = 64, 48
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
CALL_S = 240.0
CLIENT_LIVES_S, FAULT_EVERY_S, STALL_S = 8.0, 60.0, 0.2


def inputs(layers: tuple[int, ...]) -> list[tuple[int, torch.Tensor]]:
    """The calls that all clients choose from: layer and rows."""
    chosen, generator = random.Random(1), torch.Generator().manual_seed(1)
    return [
        (chosen.choice(layers), torch.randn(chosen.randint(1, MOST_TOKENS), SIZES["hidden"], generator=generator))
        for _ in range(INPUTS)
    ]


def work(address: str, number: int, done: Any, wrong: Any, stop: Any) -> None:
    """Four lanes with a call under way each."""
    torch.set_num_threads(1)
    chosen = random.Random(number)
    with ExitStack() as held:
        client = held.enter_context(Client(address))
        lanes = [held.enter_context(client.open_lane(MOST_TOKENS, call_timeout=CALL_S)) for _ in range(LANES)]
        asked = inputs(tuple(lanes[0].layers))
        expected = [client.forward(layer, x) for layer, x in asked]
        under_way = []
        for lane in lanes:
            under_way.append(chosen.randrange(INPUTS))
            begin(lane, asked[under_way[-1]])
        since = time.monotonic()
        while not stop.is_set():
            for index, lane in enumerate(lanes):
                y = lane.finish()
                lane.check()  # raises for a call that was lost
                if not torch.allclose(y, expected[under_way[index]], **TOLERANCE):
                    wrong[number] += 1
                done[number] += 1
                under_way[index] = chosen.randrange(INPUTS)
                begin(lane, asked[under_way[index]])
            if time.monotonic() - since > FAULT_EVERY_S / 4:  # a client that stalls
                time.sleep(STALL_S)
                since = time.monotonic()
        for lane in lanes:
            lane.finish()
            lane.check()


def same_bits(address: str) -> None:
    """Compares lane and gRPC while no other client is there."""
    torch.set_num_threads(1)
    with Client(address) as client, client.open_lane(MOST_TOKENS) as lane:
        for layer, x in inputs(tuple(lane.layers)):
            assert torch.equal(lane.forward(layer, x), client.forward(layer, x)), "other bits than over gRPC"


def begin(lane: Any, call: tuple[int, torch.Tensor]) -> None:
    layer, x = call
    lane.x()[: len(x)] = x
    lane.start(layer, len(x))


def victim(address: str) -> None:
    """Calls until it is killed."""
    with Client(address) as client, client.open_lane(MOST_TOKENS, slots=4, call_timeout=CALL_S) as lane:
        while True:
            for slot in range(4):
                lane.start(lane.layers[0], MOST_TOKENS, slot=slot)
            for slot in range(4):
                lane.finish(slot=slot)


def vandal(address: str, seed: int) -> None:
    """Writes random words, and some that look right, until it is killed."""
    chosen = random.Random(seed)
    with Client(address) as client, client.open_lane(4, slots=2) as lane:
        while True:
            lane._words.store(8 * chosen.randrange(lw.ROWS_AT // 8), chosen.getrandbits(32), chosen.getrandbits(32))
            header = lw.header(mode=chosen.randrange(4), layer=chosen.randrange(3), tokens=chosen.randrange(6))
            lane._words.store(lw.bell_at(0), chosen.randrange(4), header)
            with contextlib.suppress(OSError):
                os.eventfd_write(lane._bell, 1)
            time.sleep(0.005)


def resident(pid: int) -> int:
    """Bytes of a process's own memory, without shared pages."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Dirty:",)):
                return int(line.split()[1]) << 10
    return 0


async def soak(config: Any, calls: int, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    done, wrong, stop = context.Array("q", PROCESSES), context.Array("q", PROCESSES), context.Event()
    counts: Counter[str] = Counter()
    memory: list[tuple[float, int, int]] = []
    async with running(config) as (engine, server):

        def started(function: Any, *arguments: Any) -> Any:
            process = context.Process(target=function, args=(server.address, *arguments), daemon=True)
            process.start()
            return process

        alone = started(same_bits)
        await asyncio.to_thread(alone.join, CALL_S)
        if alone.exitcode != 0:
            raise RuntimeError("a lane's results have other bits than those over gRPC")
        workers = [started(work, number, done, wrong, stop) for number in range(PROCESSES)]
        others = [started(victim), started(vandal, 0)]
        start = last_fault = last_victim = time.monotonic()
        while sum(done) < calls and time.monotonic() - start < seconds:
            await asyncio.sleep(1)
            now = time.monotonic()
            if dead := [worker for worker in workers if not worker.is_alive()]:
                raise RuntimeError(f"{len(dead)} clients have ended with an error")
            if now - last_victim > CLIENT_LIVES_S:
                last_victim = now
                for process in others:
                    process.kill()
                    process.join()
                counts["clients killed"] += len(others)
                others = [started(victim), started(vandal, counts["clients killed"])]
            rank = engine.status().ranks[0].pid
            memory.append((round(now - start, 1), resident(os.getpid()), resident(rank)))
            if now - last_fault > FAULT_EVERY_S and engine.status().spares and engine.state() == "serving":
                last_fault = now
                kind = signal.SIGSTOP if counts["ranks killed"] > counts["ranks stopped"] else signal.SIGKILL
                counts["ranks stopped" if kind == signal.SIGSTOP else "ranks killed"] += 1
                os.kill(rank, kind)
            if len(memory) % 30 == 0:
                print(round(now - start), list(done), list(wrong), dict(counts), server.lanes, flush=True)
        stop.set()
        ended = time.monotonic() - start
        for worker in workers:
            await asyncio.to_thread(worker.join, CALL_S)
        codes = [worker.exitcode for worker in workers]
        for process in others:
            process.kill()
        shown = server.lanes
        third = max(1, len(memory) // 3)
        return {
            "calls": sum(done), "wrong": sum(wrong), "clients_exit_codes": codes, "seconds": round(ended), **counts,
            "recoveries": engine.status().recoveries,
            "lanes": {name: getattr(shown, name) for name in ("calls", "joined", "refused", "waited")},
            "front_end_MiB": [mean(each for _, each, _ in part) for part in (memory[third : 2 * third], memory[2 * third :])],
            "memory": memory[:: max(1, len(memory) // 60)],
        }  # fmt: skip


def mean(values: Any) -> float:
    found = list(values)
    return round(sum(found) / max(len(found), 1) / (1 << 20), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = write_demo_checkpoint("mixtral", Path(folder) / "model", **SIZES)
        config = parse_config(
            {
                "model": {"path": str(path or Path(folder) / "model"), "dtype": "float32"},
                "engine": {"ranks": 1, "device": "cpu", "cpu_threads": 1, "spares": 1, "spare_weights": "host"},
                "scheduler": {"heartbeat_s": 4},
                "server": {"port": 0},
            },
            "benchmark",
        )
        result = asyncio.run(soak(config, options.calls, options.seconds))
    machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
    loads = {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)}
    report = {"machine": machine, "load": loads, "sizes": SIZES, **result}
    print(reports.text(report))
    if options.json is not None:
        reports.save(options.json, report)


if __name__ == "__main__":
    main()
