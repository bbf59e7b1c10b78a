"""The shipped tiles of thick cells against variants of them, in one process and in turn: is a variant right, is it faster?

    python -m benchmarks.compare_tiles --json OUT.json --table OUT_TABLE.json
    python -m benchmarks.compare_tiles --cells mixtral8x7:bf16:1024 qwen3_235b:fp8_block:16384

First every kind of variant runs its cases of `tests.triton_cases`, each in a process with a deadline; a kind that hangs or is
wrong is left out. Then the variants of each GEMM are timed in turn, several rounds, each after all others; last, the whole
layer with the shipped and with the best tiles, in turn, checked against the fp32 reference. `--table`: the shipped table with
those cells that were faster by more than `--gain`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from importlib import resources
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.expert_inputs import SHAPES, TOLERANCE, make_inputs, make_weights, relative_error
from benchmarks.experts import Standard, environment, stored_peers, time_graph
from benchmarks.tune_candidates import First
from benchmarks.tune_experts import Trial, compile_trial, time_us
from experts.triton_tiles import GemmTiles, Problem, Tiles, shipped

LOSING = [
    "mixtral8x7:fp8_block:256", "mixtral8x7:fp8_block:1024", "mixtral8x7:fp8_block:4096", "mixtral8x7:fp8_block:16384",
    "mixtral8x7:bf16:1024", "mixtral8x7:bf16:4096", "mixtral8x7:fp8_tensor:4096", "qwen3_235b:fp8_block:16384",
    "qwen3_235b:bf16:4096", "dsv3_ep8:bf16:16384",
]  # fmt: skip
KINDS = {
    "by_expert": "groups end with the expert",
    "width": "products of",
    "lag": "second half behind",
    "dynamic": "next item that nobody has",
    "split": "split sums",
}
"""Field of a configuration -> what its cases are called."""


def wrong_kinds(deadline: float) -> dict[str, str]:
    """Kinds of variants whose cases fail or hang on this GPU, and what was seen."""

    def run(kind: str) -> tuple[str, str | None]:
        command = [sys.executable, "-m", "tests.triton_cases", KINDS[kind], "-v"]
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


def variants(old: GemmTiles, dtype: str, *, gated: bool, without: set[str]) -> list[GemmTiles]:
    """`old` first. Groups that end with the expert, then the specialised kernel with each option, alone and together."""
    block, bk = dtype == "fp8_block", 64 if dtype == "bf16" else 128
    found = [old]

    def add(base: GemmTiles, **options) -> None:
        one = replace(base, **options)
        used = {k for k in KINDS if getattr(one, k) != getattr(GemmTiles(bn=128, bk=bk), k)}
        if one not in found and not used & without:
            found.append(one)

    for group in (4, 8, 16, 32):
        add(old, group=group, by_expert=True)
    base = GemmTiles(bn=128, bk=bk, specialised=True, group=old.group)
    best = 64 if block else 256
    add(base, dynamic=True)
    add(base, width=best)
    for lag in (1, 2):
        add(base, lag=lag)
    for group in (4, 8, 16):
        for width in (128, best):
            add(base, group=group, by_expert=True, width=width, dynamic=True)
    if not gated:
        for group in (8, 32):
            add(base, group=group, by_expert=True, width=best, dynamic=True, split=2)
    for width, lag in ((128, 1), (best, 2), (best, 4)):
        add(base, group=16, by_expert=True, width=width, dynamic=True, lag=lag)
    if not block:
        wide = {"wide": True} if gated else {}
        add(
            GemmTiles(bn=128 if gated else 256, bk=bk, warps=8, stages=4, flat=not gated, **wide),
            group=8,
            by_expert=True,
        )
    return found


def expands(c: GemmTiles, old: Tiles) -> bool:
    """Whether rows are expanded for a first GEMM; the variants that are not the shipped one keep what it does."""
    return c.specialised or (old.expand and not old.gate_up.specialised)


class Cell:
    """One (shape, dtype, tokens) and its variants."""

    def __init__(self, text: str, without: set[str]):
        self.name, self.dtype, m = text.split(":")
        self.m, self.shape = int(m), SHAPES[self.name]
        self.problem = Problem.of(self.shape.spec(self.dtype, "cuda"), self.shape.local_experts)
        self.old = shipped("NVIDIA H200")[self.problem.key][self.m]
        self.options: dict[str, list] = {
            "gate_up": [First(c, expands(c, self.old) if i else self.old.expand) for i, c in enumerate(
                variants(self.old.gate_up, self.dtype, gated=True, without=without))],
            "down": variants(self.old.down, self.dtype, gated=False, without=without),
        }  # fmt: skip

    def program(self, which: str, option) -> tuple:
        """What is compiled for a variant: groups do not change the program. Cells of one shape and dtype share programs."""
        c, expand = (option.tiles, option.expand) if isinstance(option, First) else (option, False)
        plain = replace(c, group=1, by_expert=False)
        return self.name, self.dtype, self.m, self.old.bm, which, First(plain, expand) if which == "gate_up" else plain

    def key(self, which: str, option) -> tuple:
        job = self.program(which, option)
        return job[:2] + job[3:]

    def programs(self) -> dict[tuple, tuple]:
        """`key` -> arguments of `compile_program`."""
        both = [(self.key(which, o), self.program(which, o)) for which in self.options for o in self.options[which]]
        return {key: job for key, job in both if job[3] == 128 or not getattr(job[5], "tiles", job[5]).specialised}


def compile_program(job) -> str | None:
    name, dtype, m, bm, which, option = job
    return compile_trial(SHAPES[name], dtype, m, bm, which, option, "cuda")


def time_variants(cell: Cell, usable: dict, weights, rounds: int) -> dict:
    """GEMM -> [(variant, median us)], in the order of `usable`; the first is the shipped one."""
    sets = 8 if cell.m <= 64 else 4 if cell.m <= 1024 else 2
    inputs = [make_inputs(cell.shape, cell.m, "cuda", cell.m * 100 + i) for i in range(sets)]
    out = torch.empty((cell.m, cell.shape.hidden), dtype=torch.bfloat16, device="cuda")
    trial = Trial(cell.shape, cell.dtype, weights, cell.m, cell.old.bm, inputs)
    seen: dict = {which: [[] for _ in usable[which]] for which in usable}
    for turn in range(rounds):
        for which, options in usable.items():
            order = list(range(len(options)))
            for i in order if turn % 2 == 0 else reversed(order):
                gate_up, down = (
                    (options[i], cell.old.down) if which == "gate_up" else (usable["gate_up"][0], options[i])
                )
                tiles, made = trial.buffers(gate_up, down)
                trial.first(
                    tiles, made
                )  # the second GEMM reads real rows: what they hold changes the power that it takes
                us = time_us(lambda t=tiles, b=made, w=which: trial.step(w, t, b, out), repeats=3) / sets
                seen[which][i].append(us)
    return {which: [(option, statistics.median(times)) for option, times in zip(usable[which], seen[which], strict=True)]
            for which in usable}  # fmt: skip


def time_layers(cell: Cell, weights, both: list[Tiles], rounds: int) -> list[dict]:
    """The whole layer with each of the tiles: checked, then timed in turn."""
    sets = 8 if cell.m <= 64 else 4 if cell.m <= 1024 else 2
    inputs = [make_inputs(cell.shape, cell.m, "cuda", cell.m * 100 + i) for i in range(sets)]
    kernels = [Standard(cell.shape, cell.dtype, weights, {cell.problem.key: {cell.m: tiles}}) for tiles in both]
    results: list[dict] = [{"us": [], "err": 0.0} for _ in both]
    for turn in range(rounds):
        for kernel, result in list(zip(kernels, results, strict=True))[:: 1 if turn % 2 == 0 else -1]:
            us, out = time_graph(kernel.run, [kernel.prepare(one) for one in inputs])
            result["us"].append(us)
            result["err"] = max(result["err"], relative_error(weights, inputs[-1], out, 256, cell.dtype))
    for result in results:
        result["us"] = statistics.median(result["us"])
        result["right"] = result["err"] < TOLERANCE[cell.dtype]
    return results


def short(option) -> str:
    c = option.tiles if isinstance(option, First) else option
    text = f"{'E' if c.by_expert else ''}g{c.group}"
    if c.specialised:
        return (
            f"ws {text} w{c.width}"
            + (f" lag{c.lag}" if c.lag else "")
            + (" dyn" if c.dynamic else "")
            + (f" k/{c.split}" if c.split > 1 else "")
        )
    return f"tri {c.bn}x{c.bk} {text} w{c.warps}s{c.stages}" + "".join(
        f" {flag}" for flag in ("wide", "flat", "swap") if getattr(c, flag))  # fmt: skip


def best_of(cell: Cell, timed: dict, gain: float) -> Tiles:
    """The fastest of each GEMM, or the shipped one where none is faster by more than `gain`."""
    won = {}
    for which, seen in timed.items():
        option, us = min(seen, key=lambda pair: pair[1])
        won[which] = option if us < seen[0][1] * (1 - gain) else seen[0][0]
    first = won["gate_up"]
    return Tiles(bm=cell.old.bm, expand=first.expand, gate_up=first.tiles, down=won["down"])


def report_cell(cell: Cell, timed: dict, layers: list[dict], peer: float | None) -> dict:
    for which, seen in timed.items():
        base = seen[0][1]
        print(f"  {which:8} {base:8.1f} us: " + "; ".join(f"{short(o)} {us / base:.3f}" for o, us in seen))
    old, new = layers
    against = "".join(f" {layer['us'] / peer:.3f}" for layer in layers) if peer else ""
    print(f"  layer {old['us']:.1f} -> {new['us']:.1f} us ({new['us'] / old['us']:.3f}), times best peer{against},"
          f" errors {old['err']:.1e} {new['err']:.1e}{'' if new['right'] else '  WRONG'}", flush=True)  # fmt: skip
    return {
        "shape": cell.name, "dtype": cell.dtype, "M": cell.m, "old": layers[0], "new": layers[1], "best_us": peer,
        "variants": {which: [[short(o), round(us, 2)] for o, us in seen] for which, seen in timed.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=LOSING, help="SHAPE:DTYPE:TOKENS")
    parser.add_argument("--rounds", type=int, default=3)
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
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        jobs = {key: job for cell in cells for key, job in cell.programs().items()}
        errors = dict(zip(jobs, pool.map(compile_program, jobs.values()), strict=True))
    for key, error in [pair for pair in errors.items() if pair[1]][:6]:
        print("no compile:", *key[:2], key[3], short(key[4]), error)
    good = {key for key, error in errors.items() if error is None}
    print(f"compiled {len(good)} in {time.monotonic() - begin:.0f} s", flush=True)
    peers = stored_peers("uniform", "standard")
    table = json.loads((resources.files("experts") / "tuned" / "nvidia_h200.json").read_text())
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
            usable = {which: [o for o in cell.options[which] if cell.key(which, o) in good] for which in cell.options}
            timed = time_variants(cell, usable, weights, options.rounds)
            new = best_of(cell, timed, options.gain)
            layers = time_layers(cell, weights, [cell.old, new], options.rounds)
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
                path.write_text(json.dumps(value, indent=1))
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if wrong or any(not cell["new"]["right"] for cell in report["cells"]) else 0


if __name__ == "__main__":
    sys.exit(main())
