"""Measures the cost of moving experts for the steps that go on, and the cost of counting and versioning without moves.

    python -m benchmarks.rebalance --out benchmarks/results/rebalance_cpu.json
    python -m benchmarks.rebalance --device cuda --ranks 2 --hidden 4096 --intermediate 1536 --num-experts 32 --tokens 512 \
        --out benchmarks/results/rebalance_h200x2.json

Clients ask without pause. The seconds of steps while nothing moves are set against those of steps that run while experts move
from rank to rank (`--moves` times, to placements for random loads). Every answer is compared with the first one. The processor
time of ranks and front end (with its clients) for a step splits a longer step into work and waiting. The cost of counting is
measured on one rank in this process: the same steps with and without it, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import reports
from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.engine.records import StepRecord
from epserve.models.demo import write_demo_checkpoint
from epserve.modular_kernel import RankContext
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker

from .sharing import add_option, cluster_section, sharing

LAYER = 1
WARM = 10
BLOCKS, STEPS = 40, 10
CALM_S = 1.0


class Clock:
    """Processor seconds of the ranks and of this process, in spans of which each belongs to a sort."""

    def __init__(self, pids: list[int]):
        # The clock of any process: ~pid in the upper bits and CPUCLOCK_SCHED below (Linux, posix-timers.h).
        self._clocks = [(~pid << 3) | 2 for pid in pids] + [time.CLOCK_PROCESS_CPUTIME_ID]
        self.seconds: dict[str, list[float]] = {}
        self._last = self._now()

    def end_of(self, sort: str) -> None:
        now = self._now()
        spent, self._last = [each - before for each, before in zip(now, self._last, strict=True)], now
        self.seconds[sort] = [a + b for a, b in zip(self.seconds.get(sort, [0.0] * len(now)), spent, strict=True)]

    def _now(self) -> list[float]:
        return [time.clock_gettime(each) for each in self._clocks]

    def per_step(self, sort: str, steps: int) -> dict[str, float]:
        *ranks, here = self.seconds.get(sort, [0.0, 0.0])
        return {
            "rank_ms": round(sum(ranks) / len(ranks) / max(steps, 1) * 1e3, 3),
            "front_end_ms": round(here / max(steps, 1) * 1e3, 3),
        }


class Load:
    """Clients that ask without pause, and the seconds of their steps, apart for those that overlap a move."""

    def __init__(self, engine: Engine, clients: int, tokens: int):
        self.engine = engine
        self.steps: list[StepRecord] = []
        engine.on_step(self.steps.append)
        self.wrong = self.answers = 0
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._ask(number, tokens)) for number in range(clients)]

    async def _ask(self, number: int, tokens: int) -> None:
        hidden, dtype = self.engine.info.hidden, self.engine.info.dtype
        x = torch.randn((tokens, hidden), generator=torch.Generator().manual_seed(number)).to(dtype)
        first = None
        while not self._stop:
            y = await self.engine.forward(Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + 120))
            first = y.clone() if first is None else first
            self.answers += 1
            self.wrong += not torch.allclose(y, first, rtol=2e-2, atol=2e-2)

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)


async def moves(args: argparse.Namespace, path: Path) -> dict:
    engine = Engine(
        parse_config(
            {
                "model": {"path": str(path)},
                "engine": {
                    "ranks": args.ranks,
                    "device": args.device,
                    "redundant_experts": args.redundant,
                    "standbys": 0,
                },
                "cluster": cluster_section(args),
            }
        )
    )
    await engine.start()
    try:
        chance, done, spans = random.Random(args.seed), [], []
        load = Load(engine, args.clients, args.tokens)
        while len(load.steps) < WARM:
            await asyncio.sleep(0.01)
        load.steps.clear()
        clock = Clock([rank.pid for rank in engine.status().ranks])
        for _ in range(args.moves):
            await asyncio.sleep(CALM_S)
            start = time.monotonic()
            loads = {layer: [chance.random() ** 3 for _ in range(args.num_experts)] for layer in engine.layers}
            clock.end_of("calm")
            done.append(await engine._pool.changes.rebalance(loads=loads))
            clock.end_of("moves")
            spans.append((start, time.monotonic()))
        await load.stop()
    finally:
        await engine.close()
    bytes_each = sum(each.numel() * each.element_size() for each in _one_expert(engine, path))
    during = [s for s in load.steps if any(s.started < end and s.ended > start for start, end in spans)]
    apart = [s for s in load.steps if s not in during]
    calm, busy = _times(apart), _times(during)
    ended = [s for s in load.steps if any(start <= s.ended < end for start, end in spans)]
    came_from: dict[str, int] = {}
    for each in done:
        for where, count in each.came_from.items():
            came_from[where] = came_from.get(where, 0) + count
    seconds = sum(each.seconds for each in done)
    return {
        "moves": len(done), "slots_moved": sum(each.moved for each in done), "came_from": came_from,
        "bytes_of_an_expert": bytes_each, "seconds_of_a_move": round(seconds / max(len(done), 1), 3),
        "answers": load.answers, "wrong": load.wrong,
        "step_calm_ms": calm, "step_during_moves_ms": busy,
        "cpu_a_step_calm": clock.per_step("calm", len(load.steps) - len(ended)),
        "cpu_a_step_during_moves": clock.per_step("moves", len(ended)),
        "cpu_of_a_move_s": round(sum(clock.seconds["moves"]) / max(len(done), 1), 4),
        "ratio": {name: round(busy[name] / calm[name], 3) for name in ("p50", "p90", "mean") if busy and calm},
    }  # fmt: skip


def _one_expert(engine: Engine, path: Path) -> list[torch.Tensor]:
    from epserve.models import open_checkpoint

    return list(open_checkpoint(path).load_layer(LAYER, [0]).experts.tensors().values())


def _times(steps: list[StepRecord]) -> dict:
    if len(steps) < 10:
        return {}
    times = sorted(step.seconds * 1e3 for step in steps)
    return {
        "steps": len(times), "p50": round(statistics.median(times), 3), "p90": round(times[int(len(times) * 0.9)], 3),
        "mean": round(statistics.mean(times), 3), "max": round(times[-1], 3),
    }  # fmt: skip


def counting(args: argparse.Namespace, path: Path, tokens: int) -> dict:
    """Medians of blocks of steps, with and without counting in turn, and the median of their ratios."""
    config = parse_config(
        {"model": {"path": str(path)}, "engine": {"device": args.device, "max_tokens_per_rank": tokens}}
    )
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    worker = Worker(config, RankContext(device=device))
    worker.load()
    worker.warm_up()
    x = torch.randn(tokens, worker.info.hidden).to(device, worker.info.dtype)
    plan = StepPlan(step=1, layer=LAYER, mode="block", tokens_per_rank=(tokens,))
    add = worker.load_counter.add

    def block(count: bool) -> float:
        worker.load_counter.add = add if count else lambda layer, ids: None  # type: ignore[method-assign]
        _wait(device)
        start = time.perf_counter()
        for _ in range(STEPS):
            worker.step(plan, x, None, None)
        _wait(device)
        return (time.perf_counter() - start) / STEPS

    block(True), block(False)
    pairs = [
        (block(True), block(False)) if number % 2 else (block(False), block(True))[::-1] for number in range(BLOCKS)
    ]
    with_, without = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    worker.close()
    return {
        "tokens": tokens, "step_ms": round(with_ * 1e3, 4), "step_without_ms": round(without * 1e3, 4),
        "cost_percent": round((ratio - 1) * 100, 2),
    }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--redundant", type=int, default=0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--num-experts", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--count-tokens", type=int, nargs="*", default=[16, 256, 1024])
    parser.add_argument("--seed", type=int, default=0)
    add_option(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_demo_checkpoint(
            "deepseek_v3", path, hidden=args.hidden, intermediate=args.intermediate, num_experts=args.num_experts,
            dtype=getattr(torch, dtype),
        )  # fmt: skip
        result = {
            "device": args.device, "gpu": torch.cuda.get_device_name(0) if args.device == "cuda" else "",
            "cpus": os.cpu_count(), "load_average_before": round(load_before, 2),
            "model": {"hidden": args.hidden, "intermediate": args.intermediate, "num_experts": args.num_experts, "dtype": dtype},
            "ranks": args.ranks, "ranks_per_gpu": sharing(args),
            "redundant": args.redundant, "clients": args.clients, "tokens": args.tokens,
            "counting": [counting(args, path, tokens) for tokens in args.count_tokens],
            "moving": asyncio.run(moves(args, path)),
        }  # fmt: skip
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        reports.save(args.out, result)
    print(json.dumps(result, indent=1))
    return 1 if result["moving"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
