"""Causes faults at random moments under load, and compares every answer with the reference.

    python -m benchmarks.chaos --faults 500 --dense --heartbeat 1 --limit 2400 --out benchmarks/results/chaos_500.json

Kinds: kill (SIGKILL of a rank), pair (two at once), stop (SIGSTOP for good), slow (SIGSTOP for less than a heartbeat),
raise (a step that raises on one rank), memory (a rank has no byte left: RLIMIT_AS), spare (SIGKILL of the spare),
move (experts move), all on CPU ranks of this machine. `benchmarks.chaos_hosts` cuts the network. A fault waits for the recovery
from the one before it and for all ranks. `--dense` does not wait for the spare, and so makes faults in quick succession.
It fails when an answer is wrong, a request is lost, something hangs, or the memory of all processes together grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import ray
import torch

from benchmarks import reports
from epserve.cluster import node
from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import EpserveError
from epserve.models.demo import reference_block, write_demo_checkpoint
from epserve.pool import members
from epserve.rank.actor import RankActor

LAYER = 1
WEIGHTS = {"kill": 6, "pair": 1, "stop": 2, "slow": 3, "raise": 4, "memory": 2, "spare": 1, "move": 3}
GROWTH = 1.15  # of all processes' memory between the first and the last fifth of the run
PHASES = ("any", "idle", "prepare", "experts", "finalize")
TRIES = 40  # pings to catch a rank in the wanted phase
HANG_S = 300.0  # not healed by then: the run ends
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class HungryRank(RankActor):
    """A rank that can be told to run out of memory."""

    def starve(self) -> None:
        """No more address space than now, and what its allocators keep in reserve is used up."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        self._hoard: list[bytearray] = []
        for size in (1 << 20, 1 << 16, 1 << 12, 1 << 10):
            with contextlib.suppress(MemoryError):
                while True:
                    self._hoard.append(bytearray(size))


class Load:
    """Clients that ask without pause."""

    def __init__(self, engine: Engine, path: Path, clients: int):
        self.engine, self.reference = engine, reference_block(path, LAYER)
        self.answers = self.wrong = 0
        self.errors: Counter[str] = Counter()
        self.latencies: list[float] = []
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(clients)]

    async def _ask(self, number: int) -> None:
        batches = [
            torch.randn((count, 64), generator=torch.Generator().manual_seed(count)) for count in (1 + number, 30, 90)
        ]
        wanted = [self.reference(x) for x in batches]
        while not self._stop:
            for x, expected in zip(batches, wanted, strict=True):
                start = time.monotonic()
                try:
                    y = await self.engine.forward(Batch(layer=LAYER, hidden=x, deadline=start + HANG_S))
                except EpserveError as error:
                    self.errors[f"{type(error).__name__}: {error}"] += 1
                    continue
                self.answers += 1
                self.wrong += not torch.allclose(y, expected, **TOLERANCE)
                self.latencies.append(time.monotonic() - start)

    async def stop(self) -> None:
        self._stop = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), HANG_S)


class Chaos:
    def __init__(self, engine: Engine, load: Load, seed: int, heartbeat_s: float, dense: bool):
        self.engine, self.load, self.heartbeat_s, self.dense = engine, load, heartbeat_s, dense
        self.chance = random.Random(seed)

    async def fault(self, kind: str) -> dict:
        """Causes a fault and waits for the full recovery. Returns a record of the fault."""
        pool, before = self.engine._pool, len(self.engine._pool.recoveries)
        await asyncio.sleep(self.chance.uniform(0.05, 0.6))
        victims = self.chance.sample(range(len(pool.members)), 2)
        phase = await self._catch(pool.members[victims[0]], self.chance.choice(PHASES))
        start = time.monotonic()
        expects = await getattr(self, "_" + kind)(pool, victims)
        if expects:
            await self._until(lambda: len(pool.recoveries) > before, kind)
        answers = self.load.answers
        await self._until(lambda: self.load.answers > answers, kind)
        first_answer = time.monotonic() - start
        await self._until(self._whole, kind)
        done = pool.recoveries[before:]
        return {
            "kind": kind, "phase": phase, "first_answer_s": round(first_answer, 3), "by": [each.by for each in done],
            "rebuild_s": [round(each.seconds, 3) for each in done], "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip

    def _whole(self) -> bool:
        status, engine = self.engine.status(), self.engine.config.engine
        spares = self.dense or status.spares == engine.spares
        return status.state == "serving" and len(status.ranks) == engine.ranks and spares

    async def _until(self, condition, kind: str) -> None:
        end = time.monotonic() + HANG_S
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(f"{kind}: not healed within {HANG_S:g} s: {self.engine.status()}")
            await asyncio.sleep(0.005)

    async def _catch(self, member, wanted: str) -> str:
        for _ in range(TRIES):
            if not await member.ping(5.0) or wanted in ("any", member.pulse.phase):
                break
        return member.pulse.phase

    async def _kill(self, pool, victims) -> bool:
        os.kill(pool.members[victims[0]].facts.pid, signal.SIGKILL)
        return True

    async def _pair(self, pool, victims) -> bool:
        for victim in victims:
            os.kill(pool.members[victim].facts.pid, signal.SIGKILL)
        return True

    async def _stop(self, pool, victims) -> bool:
        os.kill(pool.members[victims[0]].facts.pid, signal.SIGSTOP)
        return True

    async def _slow(self, pool, victims) -> bool:
        pid = pool.members[victims[0]].facts.pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(0.1, 0.4) * self.heartbeat_s)
        os.kill(pid, signal.SIGCONT)
        return False

    async def _raise(self, pool, victims) -> bool:
        link = pool.members[victims[0]].link
        submit = link.submit

        def spoil(header, tensors, out):
            if "layer" in header and tensors[0].shape[0]:
                link.submit = submit
                tensors = [tensors[0][:-1].contiguous()]
            return submit(header, tensors, out)

        link.submit = spoil
        return True

    async def _spare(self, pool, victims) -> bool:
        for spare in pool.spares.members:
            ray.kill(spare.actor)
        await self._until(lambda: not pool.spares.ready, "spare")
        return False

    async def _memory(self, pool, victims) -> bool:
        await pool.members[victims[0]].call(HungryRank.starve, timeout=HANG_S)
        return True

    async def _move(self, pool, victims) -> bool:
        loads = {layer: [self.chance.random() ** 3 for _ in range(8)] for layer in self.engine.layers}
        try:
            await pool.changes.rebalance(loads=loads)
        except EpserveError as error:
            self.load.errors[f"rebalance: {error}"] += 1
        return False


async def run(args: argparse.Namespace, path: Path) -> dict:
    config = {
        "model": {"path": str(path)},
        "engine": {
            "ranks": args.ranks, "device": "cpu", "experts": "grouped_mm", "spares": args.spares,
            "spare_weights": "host", "redundant_experts": args.redundant,
        },
        "scheduler": {"heartbeat_s": args.heartbeat, "step_timeout_s": 30},
    }  # fmt: skip
    engine = Engine(parse_config(config))
    await engine.start()
    load = Load(engine, path, args.clients)
    while engine.status().spares < args.spares:
        await asyncio.sleep(0.1)
    chaos = Chaos(engine, load, args.seed, args.heartbeat, args.dense)
    kinds = chaos.chance.choices(args.kinds, [WEIGHTS[kind] for kind in args.kinds], k=args.faults)
    faults: list[dict] = []
    start, memory = time.monotonic(), []
    try:
        for kind in kinds:
            if time.monotonic() - start > args.limit:
                break
            faults.append(await chaos.fault(kind))
            memory.append(_resident_mib())
            faults[-1]["resident_mib"] = memory[-1]
            print(json.dumps(faults[-1]), flush=True)
        await load.stop()
    finally:
        recoveries, replayed = len(engine.status().ranks), engine.status().replayed_requests
        await engine.close()
    first = {kind: [each["first_answer_s"] for each in faults if each["kind"] == kind] for kind in WEIGHTS}
    return {
        "config": config["engine"] | config["scheduler"], "seed": args.seed, "cpus": os.cpu_count(),
        "faults": len(faults), "kinds": dict(Counter(each["kind"] for each in faults)),
        "answers": load.answers, "wrong": load.wrong, "errors": dict(load.errors), "replayed_requests": replayed,
        "ranks_at_the_end": recoveries, "seconds": round(time.monotonic() - start, 1),
        "load_average": {
            "mean": round(statistics.mean(each["load"] for each in faults), 1),
            "max": max(each["load"] for each in faults),
        },
        "first_answer_s": {
            kind: {"p50": round(statistics.median(each), 3), "max": max(each)} for kind, each in first.items() if each
        },
        "slowest_request_s": round(max(load.latencies), 2),
        "resident_mib": {
            who: {"first": sizes[0], "last": sizes[-1], "peak": max(sizes)}
            for who in memory[0] if (sizes := [each[who] for each in memory])
        },
        "all_processes_mib": _fifths(memory),
        "each": faults,
    }  # fmt: skip


def _resident_mib() -> dict[str, int]:
    """Returns the memory of this process (engine and clients), of Ray's processes, and of the ranks, spares and helpers.

    Shared pages count in each.
    """
    sizes = {"engine": 0, "ray": 0, "actors": 0}
    for pid in {os.getpid(), *node.descendants({os.getpid()})}:
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            who = "engine" if pid == os.getpid() else "actors" if title.startswith(b"ray::") else "ray"
            sizes[who] += pages * resource.getpagesize()
    return {who: size >> 20 for who, size in sizes.items()}


def _fifths(memory: list[dict[str, int]]) -> dict[str, float]:
    """Returns the medians of the first and the last fifth of all processes' memory. `growth` is their ratio.

    Ranks come and go, so that a single reading says little.
    """
    totals = [sum(each.values()) for each in memory]
    part = max(len(totals) // 5, 1)
    first, last = statistics.median(totals[:part]), statistics.median(totals[-part:])
    return {"first_fifth": first, "last_fifth": last, "growth": round(last / first, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which no further fault is made")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--redundant", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--dense", action="store_true", help="no waiting for a new spare between faults")
    parser.add_argument("--kinds", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--heartbeat", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    members.RankActor = HungryRank  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_demo_checkpoint("deepseek_v3", path, dtype=torch.float32)
        result = asyncio.run(run(args, path))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        reports.save(args.out, result)
    print(json.dumps({key: value for key, value in result.items() if key != "each"}, indent=1))
    grown = len(result["each"]) >= 50 and result["all_processes_mib"]["growth"] > GROWTH
    return 1 if result["wrong"] or result["errors"] or grown else 0


if __name__ == "__main__":
    sys.exit(main())
