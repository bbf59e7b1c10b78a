"""Two tables of tiles on the benchmark's own inputs: whole layers replayed in turn in one process, in all cells that differ.

    python -m benchmarks.two_tables shipped.json new.json --out experts/tuned/nvidia_h200.json --json result.json

A chip that is warm is up to a fifth slower than a cool one, and hosts differ, so that times of two runs say little about tiles.
Each result is first checked against the reference. `--out`: the first table with those cells of the second one that are faster
by more than `--gain`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from benchmarks import reports
from benchmarks.expert_inputs import SHAPES, TOLERANCE, Shape, make_inputs, make_weights, num_sets, relative_error
from benchmarks.experts import MS, Standard, environment, read_table
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import Problem
from epserve.modular_kernel import ExpertWeights, Prepared

ROUNDS = 30

Table = dict[str, dict[int, Tiles]]


def captured(kernel: Standard, shape: Shape, dtype: str, m: int) -> tuple[torch.cuda.CUDAGraph, list[Prepared], float]:
    """A graph over several sets of inputs, these inputs, which must outlive it, and the relative L2 error of the first."""
    inputs = [make_inputs(shape, m, "cuda", m * 100 + i) for i in range(num_sets(m))]
    prepared = [kernel.prepare(each) for each in inputs]
    error = relative_error(kernel.weights, inputs[0], kernel.run(prepared[0]), 256, dtype)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        for each in prepared:
            kernel.run(each)
        graph.capture_end()
    return graph, prepared, error


def in_turn(graphs: list[torch.cuda.CUDAGraph], sets: int) -> list[float]:
    """Median us of one batch, of each graph."""
    seen: list[list[float]] = [[] for _ in graphs]
    for turn in range(ROUNDS + 2):
        for i in range(len(graphs)) if turn % 2 else reversed(range(len(graphs))):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[i].replay()
            end.record()
            end.synchronize()
            if turn > 1:
                seen[i].append(start.elapsed_time(end) * 1e3 / sets)
    return [statistics.median(times) for times in seen]


def compare(name: str, dtype: str, m: int, weights: ExpertWeights, tables: list[Table]) -> dict | None:
    """Returns a cell's times, or None if both tables choose the same tiles."""
    shape = SHAPES[name]
    kernels = [Standard(shape, dtype, weights, table) for table in tables]
    first, second = (kernel.experts.tiles(m, shape.local_experts, shape.topk)[0] for kernel in kernels)
    if first == second:
        return None
    made = [captured(kernel, shape, dtype, m) for kernel in kernels]
    us, new_us = in_turn([graph for graph, _, _ in made], len(made[0][1]))
    errors = [error for _, _, error in made]
    return {"shape": name, "dtype": dtype, "M": m, "us": us, "new_us": new_us, "ratio": new_us / us, "errors": errors,
            "right": max(errors) < TOLERANCE[dtype], "tiles": first.to_json(), "new_tiles": second.to_json()}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs=2)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--gain", type=float, default=0.01, help="what a cell must win to be taken")
    parser.add_argument("--out", type=Path, help="the table to write")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tables = [read_table(path) for path in options.tables]
    merged = json.loads(options.tables[0].read_text())
    report: dict = {"commit": options.commit, **environment(), "cells": []}
    for name in options.shapes:
        for dtype in options.dtypes:
            weights = make_weights(SHAPES[name], dtype, "cuda")
            key = Problem.of(SHAPES[name].spec(dtype, "cuda"), SHAPES[name].local_experts).key
            for m in MS:
                cell = compare(name, dtype, m, weights, tables)
                if cell is None:
                    continue
                report["cells"].append(cell)
                taken = cell["right"] and cell["ratio"] < 1 - options.gain
                print(f"{name:10} {dtype:10} {m:5d} {cell['us']:8.1f} {cell['new_us']:8.1f} {cell['ratio']:6.3f}"
                      f" {'taken' if taken else 'left' if cell['right'] else 'WRONG'}", flush=True)  # fmt: skip
                if taken:
                    merged["cells"].setdefault(key, {})[str(m)] = cell["new_tiles"]
                torch.cuda.empty_cache()
            del weights
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(merged, indent=1) + "\n")
    if options.json:
        reports.save(options.json, report)
    return 0 if all(cell["right"] for cell in report["cells"]) else 1


if __name__ == "__main__":
    sys.exit(main())
