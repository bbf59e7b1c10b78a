"""Times candidate tiles of both GEMMs on the GPU, cell by cell, and writes the best ones as a table for `experts/tuned/`.

    python -m benchmarks.tune_experts --budget 400 --out experts/tuned/nvidia_h200.json
    python -m benchmarks.tune_experts --shapes dsv3_ep8 --dtypes fp8_block --ms 1 4      a part; what --out holds is kept
    python -m benchmarks.tune_experts --no-time                                          only fill Triton's cache on disk

All candidates are compiled in a process pool first. The time that is left is shared evenly among the cells that are left; a
cell that runs out keeps the best so far. The first GEMM also pays for the quantisation or the copy of rows before it, the
second for the weighted sum after it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import tune_candidates
from benchmarks.expert_inputs import SHAPES, TOLERANCE, Shape, make_inputs, make_weights
from benchmarks.experts import MS, environment, stub_weights
from benchmarks.tune_candidates import First, candidates, token_tiles
from epserve.modular_kernel import ExpertWeights
from experts.triton_experts import TritonExperts
from experts.triton_launch import BLOCK, DIRECT, DIRECT_SLOTS, FLOAT, GATHER, ROWS, regions
from experts.triton_tiles import GemmTiles, Problem, Tiles


class Trial:
    """One token tile of one cell: routed inputs, and a launch of each GEMM with any candidate."""

    def __init__(self, shape: Shape, dtype: str, weights: ExpertWeights, m: int, bm: int, inputs: list):
        self.shape, self.weights, self.m, self.bm, self.inputs = shape, weights, m, bm, inputs
        device = weights.w13_eNK.device.type
        self.experts = TritonExperts(shape.spec(dtype, device))
        self.experts.table = {}
        self.run = self.experts.launcher()
        self.direct = m * shape.topk <= DIRECT_SLOTS and bm <= 32

    def buffers(self, first: First, second: GemmTiles):
        """Fresh scratch, one for each set of inputs, already routed."""
        tiles = Tiles(bm=self.bm, gate_up=first.tiles, down=second, expand=first.expand)
        e, t = self.shape.local_experts, self.shape.topk
        r13, r2 = regions(None)
        self.experts._carve(r13, r2, self.m, t, e, tiles)
        device = self.weights.w13_eNK.device
        made = []
        for one in self.inputs:
            carvers = regions(None)
            for carver, size in zip(carvers, (r13.most, r2.most), strict=True):
                carver.region = torch.empty(size, dtype=torch.uint8, device=device)
            b, _ = self.experts._carve(*carvers, self.m, t, e, tiles)
            if not self.direct:
                self.run.sort(b, one.ids_local, bm=self.bm, num_experts=e)
            made.append(b)
        return tiles, made

    def first(self, tiles: Tiles, made: list) -> None:
        mode = self.run.numerics.mode
        expand = tiles.expand and not self.direct
        fly = tiles.gate_up.fly
        for b, one in zip(made, self.inputs, strict=True):
            x, xs = one.x, None
            if expand or (mode != FLOAT and not fly):
                self.run.quantise_tokens(b, x, None, one.ids_local, self.weights, expand=expand)
                x, xs = b.xq, b.xs
            source = DIRECT if self.direct else ROWS if expand else GATHER
            self.run.gate_up(b, x, xs, self.weights, tiles, source=source, ids=one.ids_local, fly=fly)

    def second(self, tiles: Tiles, made: list, out: torch.Tensor) -> None:
        source = DIRECT if self.direct else ROWS if self.bm >= 64 else GATHER
        for b, one in zip(made, self.inputs, strict=True):
            self.run.down(b, self.weights, tiles, b.y, source=source, ids=one.ids_local)
            self.run.reduce(b, one.ids_local, one.weights, out, split=tiles.down.split, in_slots=self.direct)

    def step(self, which: str, tiles: Tiles, made: list, out: torch.Tensor) -> None:
        if which == "gate_up":
            self.first(tiles, made)
        else:
            self.second(tiles, made, out)


def capture(launch) -> torch.cuda.CUDAGraph:
    """A graph of launch(), which has run once and has been replayed once."""
    launch()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        launch()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_us(launch, repeats: int = 5) -> float:
    """Median us of one graph replay of launch(), which runs over all input sets."""
    graph, times = capture(launch), []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def tune_cell(shape: Shape, dtype: str, weights, m: int, deadline: float, log: list) -> tuple[float, Tiles] | None:
    """Every candidate once, then the best few again, in turn: the clock falls while the chip is warm, so order matters."""
    sets = 8 if m <= 64 else 4 if m <= 1024 else 2
    inputs = [make_inputs(shape, m, "cuda", m * 100 + i) for i in range(sets)]
    out = torch.empty((m, shape.hidden), dtype=torch.bfloat16, device="cuda")
    best, begin, sizes = None, time.monotonic(), token_tiles(dtype, shape, m)
    for turn, bm in enumerate(sizes):
        trial = Trial(shape, dtype, weights, m, bm, inputs)
        firsts, seconds = candidates(dtype, shape, m, bm)
        found = {}
        for which, options in (("gate_up", firsts), ("down", seconds)):

            def measure(option, which=which, trial=trial, firsts=firsts, seconds=seconds, bm=bm) -> float | None:
                try:
                    first, second = (option, seconds[0]) if which == "gate_up" else (firsts[0], option)
                    tiles, made = trial.buffers(first, second)
                    us = time_us(lambda: trial.step(which, tiles, made, out)) / sets
                except Exception as error:  # a candidate that fails is dropped
                    log.append([str(error).splitlines()[0][:150], shape.hidden, dtype, m, bm, which, repr(option)])
                    trial.run.counter.zero_()
                    return None
                log.append([round(us, 2), shape.hidden, dtype, m, bm, which, repr(option)])
                return us

            share = (turn + (0.6 if which == "gate_up" else 1.0)) / len(sizes)
            seen: dict = {}
            for option in options:
                if time.monotonic() > begin + (deadline - begin) * share and seen:
                    break
                us = measure(option)
                if us is not None:
                    seen[option] = [us]
            for option in 2 * sorted(seen, key=lambda option: min(seen[option]))[:4]:  # type: ignore[type-var]
                us = measure(option)
                if us is not None:
                    seen[option].append(us)
            again = {option: statistics.mean(times[1:]) for option, times in seen.items() if len(times) > 2}
            if again:
                winner = min(again, key=lambda option: again[option])
                found[which] = (again[winner], winner)
        if len(found) == 2:
            total = found["gate_up"][0] + found["down"][0]
            if best is None or total < best[0]:
                first = found["gate_up"][1]
                best = (total, Tiles(bm=bm, gate_up=first.tiles, expand=first.expand, down=found["down"][1]))
    return best


def compile_job(job) -> str | None:
    """In a worker: one GEMM of one candidate. The error's text, or None."""
    name, dtype, m, bm, which, option, device = job
    return compile_trial(SHAPES[name], dtype, m, bm, which, option, device)


def compile_trial(shape: Shape, dtype: str, m: int, bm: int, which: str, option, device: str) -> str | None:
    """One GEMM of one candidate, with weights of a few elements. The error's text, or None."""
    try:
        torch.set_num_threads(1)
        trial = Trial(shape, dtype, stub_weights(shape, dtype, device), m, bm, [])
        trial.run.launch = trial.run.compile_only
        compile_one(trial, dtype, which, option)
    except Exception as error:  # dropped, and reported
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def compile_one(trial: Trial, dtype: str, which: str, option):
    firsts, seconds = candidates(dtype, trial.shape, trial.m, trial.bm)
    first, second = (option, seconds[0]) if which == "gate_up" else (firsts[0], option)
    tiles = Tiles(bm=trial.bm, gate_up=first.tiles, down=second, expand=first.expand)
    device, mode = trial.weights.w13_eNK.device, trial.run.numerics.mode
    b, _ = trial.experts._carve(*regions(None), trial.m, trial.shape.topk, trial.shape.local_experts, tiles)
    stored = trial.run.stored
    rows = torch.empty((4, trial.shape.hidden), dtype=stored, device=device)
    i32, f32 = torch.empty(64, dtype=torch.int32, device=device), torch.empty(64, device=device)
    ids = torch.empty((4, trial.shape.topk), dtype=torch.int32, device=device)
    b.h = b.hq = torch.empty((4, trial.shape.intermediate), dtype=stored, device=device)
    b.hs = f32 if mode == BLOCK else None
    b.part = f32 if tiles.gate_up.split > 1 else None
    b.y = torch.empty(64, dtype=torch.float32 if second.split > 1 else torch.bfloat16, device=device)
    if not trial.direct:
        b.order = b.inv = b.tiles = i32
    if which == "gate_up":
        fly = first.tiles.fly
        x = torch.empty((4, trial.shape.hidden), dtype=torch.bfloat16, device=device) if fly else rows
        expand = first.expand and not trial.direct
        xs = f32 if mode == BLOCK and not fly else None
        source = DIRECT if trial.direct else ROWS if expand else GATHER
        return trial.run.gate_up(b, x, xs, trial.weights, tiles, source=source, ids=ids, fly=fly)
    source = DIRECT if trial.direct else ROWS if trial.bm >= 64 else GATHER
    return trial.run.down(b, trial.weights, tiles, b.y, source=source, ids=ids)


def jobs_of(cells: list, device: str) -> list:
    """Compile jobs without duplicates: grid and grouping do not change the program."""
    seen, jobs = set(), []
    for name, dtype, m in cells:
        shape = SHAPES[name]
        slots = m * shape.topk
        direct = (32 if slots <= 32 else DIRECT_SLOTS) if slots <= DIRECT_SLOTS else 0
        for bm in token_tiles(dtype, shape, m):
            firsts, seconds = candidates(dtype, shape, m, bm)
            for which, options in (("gate_up", firsts), ("down", seconds)):
                for option in options:
                    tiles = option.tiles if isinstance(option, First) else option
                    plain = replace(tiles, group=1, by_expert=False, full_grid=False)
                    key = (name, dtype, bm, direct, which, plain, getattr(option, "expand", False))
                    if key not in seen:
                        seen.add(key)
                        jobs.append((name, dtype, m, bm, which, option, device))
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=400, help="seconds, compiling included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, help="every measurement, as JSON")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--ms", nargs="+", type=int, default=MS)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without the warp-specialised kernels")
    options = parser.parse_args()
    begin = time.monotonic()
    tune_candidates.SPECIALISED = not options.plain
    cells = [(s, d, m) for s in options.shapes for d in options.dtypes for m in options.ms]
    jobs = jobs_of(cells, "cuda")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        errors = list(pool.map(compile_job, jobs, chunksize=2))
    failed = [(job, error) for job, error in zip(jobs, errors, strict=True) if error]
    print(f"compiled {len(jobs) - len(failed)} of {len(jobs)} in {time.monotonic() - begin:.0f} s", flush=True)
    for job, error in failed[:8]:
        print("no compile:", *job, error)
    if options.no_time:
        return
    table = json.loads(options.out.read_text()) if options.out.exists() else {"cells": {}}
    table.update(environment())
    log: list = []
    left = len(cells)
    for name in options.shapes:
        for dtype in options.dtypes:
            shape = SHAPES[name]
            weights = make_weights(shape, dtype, "cuda")
            problem = Problem.of(shape.spec(dtype, "cuda"), shape.local_experts)
            for m in options.ms:
                now = time.monotonic()
                deadline = now + max(0.0, begin + options.budget - now) / left
                left -= 1
                best = tune_cell(shape, dtype, weights, m, deadline, log)
                if best:
                    table["cells"].setdefault(problem.key, {})[str(m)] = best[1].to_json()
                print(name, dtype, m, best and (round(best[0], 1), json.dumps(best[1].to_json())),
                      f"[{time.monotonic() - begin:.0f} s]", flush=True)  # fmt: skip
            options.out.write_text(json.dumps(table, indent=1))
            if options.log:
                options.log.write_text(json.dumps(log))
            del weights
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
