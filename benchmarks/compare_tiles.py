"""Compares the shipped tiles of thick cells with variants of them, in one process and in turn: is a variant right and faster?

    python -m benchmarks.compare_tiles --json OUT.json --table OUT_TABLE.json
    python -m benchmarks.compare_tiles --cells mixtral8x7:bf16:1024 qwen3_235b:fp8_block:16384

First every kind of variant runs its cases of `tests.support.triton_cases`, each in a process with a deadline. A variant that
hangs or is wrong is left out. Then the variants of each GEMM are captured and replayed, all of them once a round. Last, the
whole layer runs with the shipped and with the best tiles in the same way, checked against the reference. `--table`: the shipped
table with those cells that were faster by more than `--gain`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch

from benchmarks import reports
from benchmarks.expert_inputs import SHAPES, TOLERANCE, make_inputs, make_weights, num_sets, relative_error
from benchmarks.experts import BOOK, Standard, environment, stored_peers
from epserve.experts.tiles.candidates import First, Options, joined
from epserve.experts.tiles.sizes import GemmTiles, Tiles
from epserve.experts.tiles.table import Problem, shipped
from epserve.experts.triton.experts import TritonExperts
from epserve.experts.triton.tile_trial import Trial, capture
from epserve.modular_kernel import DispatchHandle, Prepared, Routing

THICK = [
    f"{shape}:{dtype}:{m}"
    for shape, sizes in {
        "mixtral8x7": (1024, 4096, 16384), "qwen3_235b": (1024, 4096, 16384), "dsv3_ep8": (4096, 16384)
    }.items()
    for dtype in TOLERANCE for m in sizes
] + ["mixtral8x7:fp8_block:256", "mixtral8x7:bf16:256"]  # fmt: skip
KINDS = {
    "by_expert": "groups end with the expert",
    "narrow": "narrow products",
    "lag": "second part behind",
    "split": "split sums",
    "192": "192 rows",
    "": "more items than programs",
}
"""Field of a configuration -> what its cases are called."""


def wrong_kinds(deadline: float) -> dict[str, str]:
    """Returns the kinds of variants whose cases fail or hang on this GPU, with the failure."""

    def run(kind: str) -> tuple[str, str | None]:
        command = [sys.executable, "-m", "tests.support.triton_cases", KINDS[kind], "-v"]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            text, _ = child.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its workers, too: a kernel that hangs would keep the GPU
            return kind, f"not done after {deadline:.0f} s"
        lines = [line for line in text.splitlines() if not line.startswith("ok")]
        return kind, None if child.returncode == 0 else " | ".join(lines)[-800:]

    with ThreadPoolExecutor(len(KINDS)) as pool:
        return {kind: seen for kind, seen in pool.map(run, KINDS) if seen is not None}


def variants(old: Tiles, dtype: str, bm: int, *, gated: bool, without: set[str]) -> list[GemmTiles]:
    """Returns the shipped configuration if it has this `bm`, then groups that end with the expert, and the specialised kernel
    with its options if it can run."""
    block, bk = dtype == "fp8_block", 64 if dtype == "bf16" else 128
    shipped_one = old.gate_up if gated else old.down
    found = [shipped_one] if bm == old.bm else []

    def add(base: GemmTiles, **options) -> None:
        one = replace(base, **options)
        used = {k for k in KINDS if k.isalpha() and getattr(one, k) != getattr(GemmTiles(bn=128, bk=bk), k)}
        if one not in found and not used & without:
            found.append(one)

    if bm == old.bm and not shipped_one.specialised:
        for group in (4, 8, 16):
            add(shipped_one, group=group, by_expert=True)
    if bm < 128 or (bm == 192 and "192" in without) or "" in without:
        return found
    base = GemmTiles(bn=128, bk=bk, specialised=True, group=8, stages=4 if bm == 128 else 3)
    kinds = [{"narrow": narrow} for narrow in (True, False)] if block else [{}]
    for kind in kinds:
        add(base, **kind)
        for group in (16, 8, 4):
            for lag in (0, 1, 2) if group > 4 else (0, 2):
                add(base, group=group, by_expert=True, lag=lag, **kind)
        if not gated:
            add(base, group=16, by_expert=True, split=2, **kind)
    return found


def expands(c: GemmTiles, old: Tiles) -> bool:
    """Returns whether rows are expanded for a first GEMM. All variants do the same there as the shipped one."""
    return c.specialised or (old.expand and not old.gate_up.specialised)


class Cell:
    """One (shape, dtype, tokens) and its variants: (bm, GEMM) -> configurations."""

    def __init__(self, text: str, without: set[str]):
        self.name, self.dtype, m = text.split(":")
        self.m, self.shape = int(m), SHAPES[self.name]
        self.problem = Problem.of(self.shape.spec(self.dtype, "cuda"), self.shape.local_experts)
        self.old = shipped("NVIDIA H200")[self.problem.key][self.m]
        self.sets = num_sets(self.m)
        self.options: dict[tuple[int, str], list] = {}
        for bm in {self.old.bm: 0, **({} if self.dtype == "fp8_block" else {192: 0})}:
            first, second = (variants(self.old, self.dtype, bm, gated=g, without=without) for g in (True, False))
            if first and second:
                self.options[bm, "gate_up"] = [
                    First(c, self.old.expand if c == self.old.gate_up else expands(c, self.old)) for c in first
                ]
                self.options[bm, "down"] = second

    def inputs(self) -> list:
        return [make_inputs(self.shape, self.m, "cuda", self.m * 100 + i) for i in range(self.sets)]


def replay_in_turn(graphs: list[torch.cuda.CUDAGraph], seconds: float) -> list[float]:
    """Median us of each graph: all of them once a round, in random order, so that the heat of the chip is the same for all."""
    order, spent, times = random.Random(1), 0.0, [[] for _ in graphs]  # type: ignore[var-annotated]
    while len(times[0]) < 4 or (spent < seconds and len(times[0]) < 30):
        for i in order.sample(range(len(graphs)), len(graphs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[i].replay()
            end.record()
            end.synchronize()
            times[i].append(start.elapsed_time(end) * 1e3)
            spent += times[i][-1] / 1e6
    return [statistics.median(each) for each in times]


class Bench:
    """All variants of one `bm` on the same scratch: routed once, compiled and captured."""

    def __init__(self, cell: Cell, weights, bm: int, inputs: list):
        spec = cell.shape.spec(cell.dtype, "cuda")
        batches = [
            Prepared(
                x=one.x,
                routing=Routing(ids_Mt=one.ids_local, weights_Mt=one.weights),
                handle=DispatchHandle(BOOK, None),
            )
            for one in inputs
        ]
        self.trial, self.bm = Trial(lambda: TritonExperts(spec), weights, batches), bm

    def usable(self, firsts: list[First], seconds: list[GemmTiles]) -> Options:
        """Those that compile and run once."""
        options = Options(bm=self.bm, first=tuple(firsts), second=tuple(seconds))
        self.trial.compile(options, time.monotonic() + 600)
        kept: dict[str, list] = {"gate_up": [], "down": []}
        for which, partner in (("gate_up", seconds[0]), ("down", firsts[0])):
            for option in options.of(which):
                try:
                    self.trial.launchable(which, self.bm, option, partner)()
                    torch.cuda.synchronize()
                    kept[which].append(option)
                except Exception as error:
                    print("  left out:", self.bm, which, short(option), str(error).splitlines()[0][:150])
        return Options(bm=self.bm, first=tuple(kept["gate_up"]), second=tuple(kept["down"]))

    def graphs(self, options: Options) -> dict:
        """(GEMM, number of the variant) -> graph. The second GEMM reads real rows: they change the power that it takes."""
        every = [(("gate_up", i), joined(self.bm, o, options.second[0])) for i, o in enumerate(options.first)]
        every += [(("down", i), joined(self.bm, options.first[0], o)) for i, o in enumerate(options.second)]
        for _, tiles in every:  # scratch grows to the largest before its addresses are captured
            self.trial.buffers(tiles)
        captured: dict = {}
        for key, tiles in every:
            made, direct = self.trial.buffers(tiles)
            if key[0] == "down":
                self.trial.step("gate_up", tiles, made, direct)
            captured[key] = capture(lambda t=tiles, m=made, w=key[0], d=direct: self.trial.step(w, t, m, d))
        return captured


def time_variants(cell: Cell, weights) -> dict:
    """(bm, GEMM) -> [(variant, us of one batch)], the shipped one first where it has this bm."""
    inputs, graphs, usable = cell.inputs(), {}, {}
    benches = {bm: Bench(cell, weights, bm, inputs) for bm in {bm for bm, _ in cell.options}}
    for bm, bench in benches.items():
        options = bench.usable(cell.options[bm, "gate_up"], cell.options[bm, "down"])
        if options.first and options.second:
            usable |= {(bm, which): options.of(which) for which in ("gate_up", "down")}
            graphs |= {(bm, *key): graph for key, graph in bench.graphs(options).items()}
    times = replay_in_turn(list(graphs.values()), 1.5)
    seen: dict = {key: [] for key in usable}
    for (bm, which, i), us in zip(graphs, times, strict=True):
        seen[bm, which].append((usable[bm, which][i], us / cell.sets))
    return seen


def time_layers(cell: Cell, weights, both: list[Tiles]) -> list[dict]:
    """Times the whole layer with each of the tiles, in turn. Its output, filled with NaN before, is checked."""
    inputs = cell.inputs()
    results, graphs, outs = [], [], []
    for tiles in both:
        kernel = Standard(cell.shape, cell.dtype, weights, {cell.problem.key: {cell.m: tiles}})
        prepared = [kernel.prepare(one) for one in inputs]
        mine: list = []
        graphs.append(capture(lambda k=kernel, p=prepared, m=mine: m.append([k.run(one) for one in p])))
        outs.append(mine[-1][-1])
    times = replay_in_turn(graphs, 1.0)
    for graph, out, us in zip(graphs, outs, times, strict=True):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        error = relative_error(weights, inputs[-1], out, 256, cell.dtype)
        results.append({"us": us / cell.sets, "err": error, "right": error < TOLERANCE[cell.dtype]})
    return results


def short(option) -> str:
    c = option.tiles if isinstance(option, First) else option
    text = f"{'E' if c.by_expert else ''}g{c.group}"
    if c.specialised:
        options = {"narrow": c.narrow, f"lag{c.lag}": c.lag, f"k/{c.split}": c.split > 1}
    else:
        text = f"tri {c.bn}x{c.bk} {text} w{c.warps}s{c.stages}"
        options = {flag: getattr(c, flag) for flag in ("wide", "flat", "swap")}
    return " ".join([text, *(name for name, on in options.items() if on)])


def best_of(cell: Cell, timed: dict, gain: float) -> Tiles:
    """Returns the fastest of each GEMM at the best `bm`, or the shipped one unless the variant wins by more than `gain`."""

    def fastest(bm: int, which: str):
        options = timed[bm, which]
        option, us = min(options, key=lambda pair: pair[1])
        keep = bm == cell.old.bm and us > options[0][1] * (1 - gain)
        return options[0] if keep else (option, us)

    pairs = {bm: [fastest(bm, which) for which in ("gate_up", "down")] for bm in {bm for bm, _ in timed}}
    bm = min(pairs, key=lambda bm: sum(us for _, us in pairs[bm]))
    first, second = (option for option, _ in pairs[bm])
    return Tiles(bm=bm, expand=first.expand, gate_up=first.tiles, down=second)


def report_cell(cell: Cell, timed: dict, layers: list[dict], peer: float | None) -> dict:
    for (bm, which), seen in timed.items():
        base = timed[cell.old.bm, which][0][1]
        print(f"  {bm} {which:8} {base:8.1f} us: " + "; ".join(f"{short(o)} {us / base:.3f}" for o, us in seen))
    old, new = layers
    against = "".join(f" {layer['us'] / peer:.3f}" for layer in layers) if peer else ""
    print(f"  layer {old['us']:.1f} -> {new['us']:.1f} us ({new['us'] / old['us']:.3f}), times best peer{against},"
          f" errors {old['err']:.1e} {new['err']:.1e}{'' if new['right'] else '  WRONG'}", flush=True)  # fmt: skip
    return {
        "shape": cell.name, "dtype": cell.dtype, "M": cell.m, "old": old, "new": new, "best_us": peer,
        "variants": {f"{bm} {which}": [[short(o), round(us, 2)] for o, us in seen] for (bm, which), seen in timed.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=THICK, help="SHAPE:DTYPE:TOKENS")
    parser.add_argument("--gain", type=float, default=0.005, help="what a variant must win to be taken")
    parser.add_argument("--check-seconds", type=float, default=70, help="deadline for the cases of one kind")
    parser.add_argument("--budget", type=float, default=220, help="seconds; cells that no longer fit are left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()
    wrong = wrong_kinds(options.check_seconds)
    for kind, seen in wrong.items():
        print(f"left out: {kind}: {seen}", flush=True)
    print(f"checked in {time.monotonic() - begin:.0f} s", flush=True)
    cells = [Cell(text, set(wrong)) for text in options.cells]
    peers = stored_peers("uniform", "standard")
    table = json.loads((resources.files("epserve.experts") / "tuned" / "nvidia_h200.json").read_text())
    report: dict = {**environment(), "wrong": wrong, "cells": []}
    held, weights = None, None
    for cell in cells:
        if time.monotonic() - begin > options.budget:
            print("no time left for", cell.name, cell.dtype, cell.m)
            continue
        if held != (cell.name, cell.dtype):
            weights = None
            torch.cuda.empty_cache()
            held, weights = (cell.name, cell.dtype), make_weights(cell.shape, cell.dtype, "cuda")
        start = time.monotonic()
        print(cell.name, cell.dtype, cell.m, flush=True)
        try:
            timed = time_variants(cell, weights)
            new = best_of(cell, timed, options.gain)
            layers = time_layers(cell, weights, [cell.old, new])
        except Exception as error:  # one cell must not end the run
            print("  FAILED", str(error).splitlines()[0][:200])
            continue
        known = peers.get((cell.name, cell.dtype, cell.m), {})
        report["cells"].append(report_cell(cell, timed, layers, float(known.get("best_us", 0)) or None))
        report["cells"][-1]["tiles"] = new.to_json()
        print(f"  {time.monotonic() - start:.1f} s, {json.dumps(new.to_json())}", flush=True)
        if layers[1]["right"] and layers[1]["us"] < layers[0]["us"] * (1 - options.gain):
            table["cells"][cell.problem.key][str(cell.m)] = new.to_json()
        for path, value in ((options.json, report), (options.table, table)):
            if path:
                reports.save(path, value)
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong or any(not cell["new"]["right"] for cell in report["cells"]) else 0


if __name__ == "__main__":
    sys.exit(main())
