"""Measures the time from a fault to the first good answer, with its parts: one fault at a time, each repeated, p50 and longest.

    python -m benchmarks.recovery --out benchmarks/results/recovery_cpu.json
    python -m benchmarks.recovery --device cuda --ranks 2 --redundant 8 --spares 0 --out benchmarks/results/recovery_h200x2.json
    python -m benchmarks.recovery --device cuda --ranks 2 --spares 0 --ranks-per-gpu 2 --all2all all_to_all \
        --faults idle experts stop --repeats 1 --out benchmarks/results/recovery_h200_shared.json

Faults: `idle`, `prepare` (dispatch), `experts`, `finalize` (combine): a rank gets SIGKILL while it waits, or kills itself
with SIGKILL as it enters that phase of a step. `stop`: SIGSTOP of a rank. `cold`: two ranks at once with one spare (or one rank
with `--spares 0`), so that a standby takes the place of one, or with `--standbys 0` a process has to start. `scale`: no fault,
but one rank more and one less again while a client asks without pause, with the waits of requests each time. The first good
answer is the first one to a request that was sent after the fault. It is compared with the reference. With copies of all experts
`rejoined` is the time until the lost rank is back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import reports
from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import EpserveError
from epserve.models.demo import reference_block, write_demo_checkpoint
from epserve.pool import members
from epserve.rank.actor import RankActor

from .sharing import add_option, cluster_section, sharing

LAYER = 1
PHASES = ("prepare", "experts", "finalize")
FAULTS = ("idle", *PHASES, "stop", "cold", "scale")
HANG_S = 300.0
CALM_S = 1.0  # between faults, once everything is as it was
TOLERANCE = {torch.float32: (1e-5, 0.0), torch.bfloat16: (1.5e-2, 0.05)}
"""Relative L2 error of a row, and the share of rows that may exceed it: near ties of the gate fall differently in bfloat16."""


class MortalRank(RankActor):
    """A rank that can be told to end itself, as `kill -9` does, when it enters a phase of its next step."""

    def die_in(self, phase: str, note: str) -> None:
        """note: a file for the moment of death, time.monotonic() seconds, which all processes of a machine share."""
        assert self._worker is not None
        clock, enter = self._worker.clock, self._worker.clock.enter

        def mortal(name: str) -> None:
            enter(name)
            if name == phase:
                Path(note).write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

        clock.enter = mortal  # type: ignore[method-assign]
        for path in self._worker.kernels.first.paths.values():
            if path.kernel is not None:
                path.kernel.on_phase = mortal


class Bench:
    def __init__(self, engine: Engine, path: Path, tokens: int, notes: Path):
        self.engine, self.notes = engine, notes
        dtype = engine.info.dtype
        self.x_MK = torch.randn((tokens, engine.info.hidden), generator=torch.Generator().manual_seed(1)).to(dtype)
        self.expected, self.tolerance = reference_block(path, LAYER)(self.x_MK), TOLERANCE[dtype]
        self.refused = 0

    async def ask(self) -> None:
        end = time.monotonic() + HANG_S
        while True:
            try:
                y = await self.engine.forward(Batch(layer=LAYER, hidden=self.x_MK, deadline=end))
            except EpserveError as error:
                if not error.retryable:
                    raise
                self.refused += 1
                await asyncio.sleep(0.01)
                continue
            limit, strays = self.tolerance
            errors = (y.double() - self.expected.double()).norm(dim=1) / self.expected.double().norm(dim=1)
            far = (errors > limit).sum().item()  # NaN is never small
            assert not errors.isnan().any() and far <= strays * len(errors), f"{far} rows are wrong: {errors.max():.2e}"
            return

    async def until(self, condition) -> float:
        end = time.monotonic() + HANG_S
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(f"not within {HANG_S:g} s: {self.engine.status()}")
            await asyncio.sleep(0.001)
        return time.monotonic()

    def whole(self) -> bool:
        status, engine = self.engine.status(), self.engine.config.engine
        ready = len(status.ranks), status.spares, self.engine._pool.standbys.ready
        return status.state == "serving" and ready == (engine.ranks, engine.spares, engine.standbys)

    async def resize(self) -> list[dict]:
        await self.until(self.whole)
        stop, asking = False, []

        async def client() -> None:
            while not stop:
                start = time.monotonic()
                await self.ask()
                asking.append(time.monotonic() - start)

        task, ranks, found = asyncio.ensure_future(client()), self.engine.config.engine.ranks, []
        for wanted in (ranks + 1, ranks):
            await asyncio.sleep(CALM_S)
            asking.clear()
            done = await self.engine.scale(wanted)
            await self.ask()
            found.append({
                "fault": "scale", "by": f"{done.before} -> {done.after}", "paused_s": round(done.paused_s, 4),
                "seconds_s": round(done.seconds, 4), "slowest_answer_s": round(max(asking, default=0.0), 4), "stages_s": {},
                "load": round(os.getloadavg()[0], 2),
            })  # fmt: skip
        stop = True
        await task
        return found

    async def fault(self, kind: str, number: int) -> dict:
        pool = self.engine._pool
        await self.until(self.whole)
        for _ in range(5):
            await self.ask()
        await asyncio.sleep(CALM_S)
        before, ranks = len(pool.recoveries), len(pool.members)
        victims = (
            [number % ranks] if kind != "cold" or not pool.spares.ready else [number % ranks, (number + 1) % ranks]
        )
        noticed = asyncio.ensure_future(self.until(lambda: self.engine.state() != "serving"))
        if kind in PHASES:
            note = self.notes / f"{kind}-{number}"
            (outcome,) = [await pool.members[victims[0]].call(MortalRank.die_in, kind, str(note), timeout=10)]
            assert outcome.failure is None, outcome.failure
            first = asyncio.ensure_future(self.ask())  # it takes the rank along, and is answered by the others
            await self.until(lambda: note.exists() and note.read_text())
            start = float(note.read_text())
        else:
            start = time.monotonic()
            for victim in victims:
                os.kill(pool.members[victim].facts.pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            first = asyncio.ensure_future(self.ask())
        await first
        answered = time.monotonic()
        await self.until(lambda: len(pool.recoveries) > before)
        done = pool.recoveries[before]
        result = {
            "noticed_s": (await noticed) - start, "answered_s": answered - start, "rebuild_s": done.seconds,
            "stages_s": {name: round(seconds, 4) for name, seconds in done.stages.items()},
        }  # fmt: skip
        whole = await self.until(self.whole)
        if done.by == "copies":
            result["rejoined_s"] = whole - start
        shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
        return {"fault": kind, "by": done.by, **shown, "load": round(os.getloadavg()[0], 2)}


async def run(args: argparse.Namespace, path: Path, notes: Path) -> dict:
    config = {
        "model": {"path": str(path)},
        "engine": {
            "ranks": args.ranks, "device": args.device, "all2all": args.all2all, "experts": args.experts,
            "spares": args.spares, "spare_weights": args.spare_weights, "redundant_experts": args.redundant,
            "standbys": args.standbys, "max_tokens_per_rank": args.max_tokens_per_rank,
        },
        "cluster": cluster_section(args),
        "scheduler": {"heartbeat_s": args.heartbeat, "step_timeout_s": 30},
    }  # fmt: skip
    engine = Engine(parse_config(config))
    await engine.start()
    each: list[dict] = []
    backends = engine.status().backends
    try:
        bench = Bench(engine, path, args.tokens, notes)
        await bench.until(bench.whole)
        memory = {
            "rank": _memory_mib(engine._pool.members), "spare": _memory_mib(engine._pool.spares.members),
            "standby": _memory_mib(engine._pool.standbys.members),
        }  # fmt: skip
        for kind in args.faults:
            for number in range(args.cold_repeats if kind == "cold" else args.repeats):
                new = await bench.resize() if kind == "scale" else [await bench.fault(kind, number)]
                each += new
                print(*map(json.dumps, new), sep="\n", flush=True)
    finally:
        await engine.close()
    return {
        "config": config["engine"] | config["scheduler"], "backends": backends,
        "model": {name: getattr(args, name) for name in ("hidden", "intermediate", "num_experts", "dtype")},
        "memory_mib": memory, "tokens": args.tokens, "refused": bench.refused, "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if args.device == "cuda" and torch.cuda.is_available() else "",
        "ranks_per_gpu": sharing(args),
        "summary": {kind: summary([one for one in each if one["fault"] == kind], args.heartbeat) for kind in args.faults},
        "each": each,
    }  # fmt: skip


def _memory_mib(processes: list) -> dict[str, int]:
    """Returns the host memory of the first process: resident, and unshared. It is empty if there is no process."""
    if not processes or not Path(f"/proc/{processes[0].facts.pid}").exists():
        return {}
    lines = Path(f"/proc/{processes[0].facts.pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) >> 10 for name, rest in (line.split(":", 1) for line in lines)}
    return {"resident": sizes["Rss"], "private": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def summary(each: list[dict], heartbeat_s: float) -> dict:
    """Returns p50 and longest of each time. For a stop it also has the time on top of the heartbeat."""
    found: dict = {"repeats": len(each), "by": sorted({one["by"] for one in each})}
    for name in ("noticed_s", "rebuild_s", "answered_s", "rejoined_s", "paused_s", "seconds_s", "slowest_answer_s"):
        if values := [one[name] for one in each if name in one]:
            found[name] = {"p50": round(statistics.median(values), 3), "max": round(max(values), 3)}
    if each and each[0]["fault"] == "stop":
        over = [one["answered_s"] - heartbeat_s for one in each]
        found["answered_after_heartbeat_s"] = {"p50": round(statistics.median(over), 3), "max": round(max(over), 3)}
    stages = {name for one in each for name in one["stages_s"]}
    found["stages_p50_s"] = {
        name: round(statistics.median(one["stages_s"].get(name, 0.0) for one in each), 4) for name in sorted(stages)
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold-repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--all2all", default="auto")
    parser.add_argument("--experts", default="auto")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--spare-weights", choices=("checkpoint", "host"), default="host")
    parser.add_argument("--redundant", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-tokens-per-rank", type=int, default=1024)
    parser.add_argument("--heartbeat", type=float, default=1.0)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    add_option(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    members.RankActor = MortalRank  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        path, notes = Path(folder) / "model", Path(folder) / "notes"
        notes.mkdir()
        write_demo_checkpoint(
            "deepseek_v3", path, hidden=args.hidden, intermediate=args.intermediate, num_experts=args.num_experts,
            dtype=getattr(torch, args.dtype),
        )  # fmt: skip
        result = asyncio.run(run(args, path, notes))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        reports.save(args.out, result)
    print(json.dumps(result["summary"], indent=1))
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
