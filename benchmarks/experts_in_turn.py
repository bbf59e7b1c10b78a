"""Our experts and the peers that are installed, in turn in one process: what differs by 3 % is not the heat of the chip.

    python -m benchmarks.experts_in_turn --json result.json
    python -m benchmarks.experts_in_turn --shapes mixtral8x7 --dtypes fp8_block --ms 4096 --pause 0.5 --rounds 8
    python -m benchmarks.experts_in_turn --peers deepgemm              our experts and one peer

Every contender of a cell is checked against float64 and captured as one CUDA graph over several inputs. Then they replay in
turn, in random order each round. **cool**: the median of one replay after a pause, in which the chip's clock recovers.
**warm**: the median of the last replays of `--warm` seconds without a pause. Contenders: our Triton experts, our backends
on a library's products (`cutlass`, `deepgemm`) where the library is installed, torch's grouped products with plain kernels
around them (`torch`), and for 4-bit weights our kernels that widen them tile by tile (`four_bits`). Exit status 1 when a cell
failed or was wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import reports
from benchmarks.expert_inputs import (
    GROUPS,
    SHAPES,
    TOLERANCE,
    Shape,
    floor_us,
    make_inputs,
    make_weights,
    num_sets,
    relative_error,
    scheme_of,
)
from benchmarks.experts import ALLOWED, FORMATS, LIBRARIES, MS, compile_cell, environment, stored_peers
from benchmarks.torch_peer import TorchGroupedMM
from epserve.errors import Incompatible
from epserve.modular_kernel import ExpertWeights

PEERS = (*LIBRARIES, "torch", "four_bits")
Graphs = dict[str, torch.cuda.CUDAGraph]


def contenders(shape: Shape, dtype: str, weights: ExpertWeights, peers: list[str]) -> dict[str, Callable]:
    """Name -> a function from inputs to a function that runs the layer on them."""
    found: dict[str, Callable] = {}
    for name in ("standard", *(peer for peer in peers if peer != "torch" and (peer != "four_bits" or dtype in GROUPS))):
        try:
            kernel = FORMATS["standard" if name == "four_bits" else name](shape, dtype, weights, None)
        except Incompatible:
            continue
        if scheme_of(dtype) not in kernel.experts.capability.quant_schemes:
            continue
        if name == "four_bits":  # also in thick batches
            kernel.experts.widened = lambda: None  # type: ignore[method-assign]

        def on(inputs, kernel=kernel):
            prepared = kernel.prepare(inputs)
            return lambda: kernel.run(prepared)

        found["triton" if name == "standard" else name] = on
    if "torch" in peers and dtype in ("bf16", "fp8_tensor"):
        peer = TorchGroupedMM(weights, shape.topk)
        found["torch"] = lambda inputs: lambda: peer.run(inputs)
    return found


def capture(runs: list[Callable]) -> torch.cuda.CUDAGraph:
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        for run in runs:
            run()
        graph.capture_end()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def in_turn(graphs: Graphs, sets: int, rounds: int, pause: float, warm_s: float) -> dict[str, dict[str, float]]:
    """us per batch: after pauses, and under load."""
    order, cool = random.Random(1), {name: [] for name in graphs}  # type: ignore[var-annotated]
    for _ in range(rounds):
        for name in order.sample(list(graphs), len(graphs)):
            time.sleep(pause)
            cool[name].append(replay_us(graphs[name]) / sets)
    warm: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(2):
        for name in order.sample(list(graphs), len(graphs)):
            times, until = [], time.monotonic() + warm_s / 2
            while len(times) < 4 or time.monotonic() < until:
                times.append(replay_us(graphs[name]) / sets)
            warm[name] += times[len(times) // 2 :]
    return {name: {"cool": statistics.median(cool[name]), "warm": statistics.median(warm[name])} for name in graphs}


def measure(name: str, dtype: str, m: int, weights: ExpertWeights, options: argparse.Namespace) -> dict:
    """Measures one cell. A contender that fails or is wrong is left out of the turns. A failure of ours ends the cell."""
    shape, sets = SHAPES[name], num_sets(m)
    batches = [make_inputs(shape, m, "cuda", m * 100 + i) for i in range(sets)]
    pairs, active = (sum(getattr(batch, each) for batch in batches) / sets for each in ("pairs", "active"))
    floor = floor_us(shape, dtype, m, pairs, active)
    cell: dict = {"shape": name, "dtype": dtype, "M": m, "floor_us": floor, "left_out": {}}
    graphs: Graphs = {}
    for who, on in contenders(shape, dtype, weights, options.peers).items():
        try:
            runs = [on(batch) for batch in batches]
            error = relative_error(weights, batches[0], runs[0](), 128, dtype)
            if not error < ALLOWED[dtype]:
                raise ValueError(f"relative error {error:.1e}")
            graphs[who] = capture(runs)
        except Exception as error:  # one contender must not end the cell
            cell["left_out"][who] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    cell["us"] = in_turn(graphs, sets, options.rounds, options.pause, options.warm)
    return cell


def report(cell: dict, stored: dict) -> str:
    """Returns one line, with ours / theirs behind each contender, cool and warm. Below 1 ours is faster."""
    ours, texts = cell["us"].get("triton"), []

    def against(cool: float, warm: float) -> str:
        return f" ({ours['cool'] / cool:.3f}, {ours['warm'] / warm:.3f})" if ours else ""

    for name, seen in cell["us"].items():
        ratio = "" if name == "triton" else against(seen["cool"], seen["warm"])
        texts.append(f"{name} {seen['cool']:.1f} / {seen['warm']:.1f}{ratio}")
    known = stored.get((cell["shape"], cell["dtype"], cell["M"]))
    if known:
        cell["best_peer"], best = known["best_peer"], float(known["best_us"])
        cell["best_us"] = best
        texts.append(f"stored {known['best_peer']} {best:.1f}{against(best, best)}")
    texts += [f"{name} LEFT OUT {why}" for name, why in cell["left_out"].items()]
    return f"{cell['shape']:10} {cell['dtype']:10} {cell['M']:5d}  " + "; ".join(texts)


def summary(cells: list[dict]) -> list[str]:
    """Geometric means of ours over the best contender of this run, and over the stored best peer."""
    lines = []
    for end in ("cool", "warm"):
        for what in ("the best of this run", "the stored best peer"):
            ratios = []
            for cell in cells:
                others = [seen[end] for name, seen in cell["us"].items() if name != "triton"]
                base = cell.get("best_us") if "stored" in what else min(others, default=None)
                if "triton" in cell["us"] and base:
                    ratios.append(cell["us"]["triton"][end] / base)
            if ratios:
                mean, worst = statistics.geometric_mean(ratios), max(ratios)
                lines.append(f"{end}: {mean:.3f} of {what} over {len(ratios)} cells, worst {worst:.3f}")
    return lines


def rounded(cell: dict) -> dict:
    us = {name: {end: round(value, 2) for end, value in seen.items()} for name, seen in cell["us"].items()}
    return {**cell, "us": us, "floor_us": round(cell["floor_us"], 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=ALLOWED, default=list(TOLERANCE))
    parser.add_argument("--ms", nargs="+", type=int, default=MS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each cool replay")
    parser.add_argument("--warm", type=float, default=0.5, help="seconds of load before each warm time")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="where they are installed")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    stored, cells = stored_peers("uniform", "standard"), []
    jobs = [("standard", s, d, m, None) for s in options.shapes for d in options.dtypes for m in options.ms]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        print(*filter(None, pool.map(compile_cell, jobs)), sep="\n", flush=True)
    head = {"commit": options.commit, "rounds": options.rounds, "pause_s": options.pause, **environment()}
    for name in options.shapes:
        for dtype in options.dtypes:
            weights = make_weights(SHAPES[name], dtype, "cuda")
            for m in options.ms:
                cell = measure(name, dtype, m, weights, options)
                print(report(cell, stored), flush=True)
                cells.append(rounded(cell))
                if options.json:
                    reports.save(options.json, {**head, "cells": cells})
            del weights
            torch.cuda.empty_cache()
    print(*summary(cells), sep="\n")
    return 0 if all("triton" in cell["us"] and math.isfinite(cell["us"]["triton"]["cool"]) for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
