"""Measures the experts on one GPU: time, distance to the floor, distance to the best known peer of each cell.

    python -m benchmarks.experts --json result.json                         72 cells: 3 shapes x 3 dtypes x 8 token counts
    python -m benchmarks.experts --shapes dsv3_ep8 --dtypes fp8_block --ms 1 64 4096 --skew zipf
    python -m benchmarks.experts --format batched                            the batched format on the same rows
    python -m benchmarks.experts --dtypes bf16 int4 mxfp4 nvfp4              4-bit weights: no peer; x_bf16 compares with our bf16
    python -m benchmarks.experts --experts cutlass --dtypes bf16 fp8_tensor  another backend in the Triton experts' place

Each cell is checked against a float64 reference, then timed as one CUDA graph over several different inputs: the median of 7 to
60 replays, whose output, filled with NaN before, is checked again. Peers' times (`peers/h200.csv`: best of vLLM, SGLang,
DeepGEMM, triton_kernels, torch, hpc-ops) were measured in the same way with the same inputs. `benchmarks.experts_in_turn` runs
installed peers beside ours. The exit status is 1 when a cell failed or was wrong.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from benchmarks import reports
from benchmarks.expert_inputs import (
    GROUPS,
    MORE_TOLERANCE,
    SHAPES,
    TOLERANCE,
    Inputs,
    Shape,
    floor_us,
    make_inputs,
    make_weights,
    num_sets,
    relative_error,
)
from benchmarks.torch_peer import TorchGroupedMM
from epserve.errors import Incompatible
from epserve.experts import REGISTRY
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.triton.batched import BatchedTritonExperts
from epserve.experts.triton.compiles import COUNTER
from epserve.experts.triton.experts import TritonExperts
from epserve.modular_kernel import DispatchHandle, ExpertWeights, HandleBook, Prepared, Routing, Workspaces

HERE = Path(__file__).resolve().parent
MS = [1, 4, 16, 64, 256, 1024, 4096, 16384]
BOOK = HandleBook("benchmark")
ALLOWED = TOLERANCE | MORE_TOLERANCE
LIBRARIES = ("cutlass", "deepgemm")
"""Experts backends in Standard format beside our own."""


class Standard:
    """TritonExperts behind run(inputs) -> (M, K)."""

    def __init__(self, shape: Shape, dtype: str, weights: ExpertWeights, table: dict[str, dict[int, Tiles]] | None):
        self.weights, self.topk = weights, shape.topk
        self.experts = TritonExperts(shape.spec(dtype, "cuda"))
        self.experts.table = table
        self.spaces = Workspaces("cuda")

    def prepare(self, inputs: Inputs) -> Prepared:
        routing = Routing(ids_Mt=inputs.ids_local, weights_Mt=inputs.weights)
        prepared = Prepared(x=inputs.x, routing=routing, handle=DispatchHandle(BOOK, None))
        self.spaces.reserve(self.shapes(prepared))
        return prepared

    def shapes(self, prepared: Prepared):
        return self.experts.workspace_shapes(prepared.x.shape[0], self.topk, self.weights.num_experts)

    def run(self, prepared: Prepared) -> torch.Tensor:
        workspace = self.spaces.carve(self.shapes(prepared))
        return self.experts.apply(workspace.output, prepared, weights=self.weights, workspace=workspace)

    def finish(self, inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
        return out


class Batched(Standard):
    """BatchedTritonExperts on the same rows, with room for four times the mean. The weighted sum is not in the time."""

    def __init__(self, shape: Shape, dtype: str, weights: ExpertWeights, table: dict[str, dict[int, Tiles]] | None):
        super().__init__(shape, dtype, weights, table)
        self.experts = BatchedTritonExperts(shape.spec(dtype, "cuda"))
        self.experts.table = table

    def prepare(self, inputs: Inputs) -> Prepared:
        flat = inputs.ids_local.flatten().long()
        e = self.weights.num_experts
        counts = torch.bincount(flat[flat >= 0], minlength=e)
        capacity = max(16, 4 * (-(-int(counts.sum()) // e)), int(counts.max()))
        x = torch.full((e, capacity, inputs.x.shape[1]), math.nan, dtype=inputs.x.dtype, device=inputs.x.device)
        for expert in range(e):
            token = (inputs.ids_local == expert).nonzero()[:, 0]
            x[expert, : len(token)] = inputs.x[token]
        prepared = Prepared(x=x, expert_num_tokens=counts.int(), handle=DispatchHandle(BOOK, None))
        self.spaces.reserve(self.shapes(prepared))
        return prepared

    def shapes(self, prepared: Prepared):
        return self.experts.workspace_shapes(0, self.topk, *prepared.x.shape[:2])

    def finish(self, inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
        summed = torch.zeros_like(inputs.x, dtype=torch.float32)
        for expert in range(out.shape[0]):
            token, slot = (inputs.ids_local == expert).nonzero(as_tuple=True)
            summed.index_add_(0, token, out[expert, : len(token)].float() * inputs.weights[token, slot][:, None])
        return summed


class Library(Standard):
    """A backend that multiplies with a library's kernels."""

    name = ""

    def __init__(self, shape: Shape, dtype: str, weights: ExpertWeights, table: dict[str, dict[int, Tiles]] | None):
        super().__init__(shape, dtype, weights, table)
        backend = REGISTRY.get(self.name)
        if missing := backend.unavailable():
            raise Incompatible(f"{self.name}: {missing}")
        self.experts = backend(shape.spec(dtype, "cuda"))


FORMATS = {"standard": Standard, "batched": Batched} | {
    name: type(name, (Library,), {"name": name}) for name in LIBRARIES
}


def stub_weights(shape: Shape, dtype: str, device: str) -> ExpertWeights:
    """A few elements of the right dtypes: enough where nothing runs."""
    stored = torch.uint8 if dtype in GROUPS else torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
    scaled = torch.uint8 if dtype == "mxfp4" else torch.float32
    scale = None if dtype == "bf16" else torch.empty(64, dtype=scaled, device=device)
    static = torch.empty(1, device=device) if dtype == "fp8_tensor" else None
    stub = torch.empty((shape.local_experts, 1, 64), dtype=stored, device=device)
    return ExpertWeights(w13_eNK=stub, w2_eKN=stub, s13=scale, s2=scale, a1=static, a2=static)


def compile_cell(job: tuple[str, str, str, int, dict | None]) -> str | None:
    """In a worker: what one cell launches, with weights of a few elements, into Triton's cache on disk. An error's text."""
    layout, name, dtype, m, table = job
    try:
        torch.set_num_threads(1)
        shape = SHAPES[name]
        kernel = FORMATS[layout](shape, dtype, stub_weights(shape, dtype, "cuda"), table)
        launcher = kernel.experts.launcher()
        launcher.launch = launcher.compile_only
        kernel.run(kernel.prepare(make_inputs(shape, m, "cuda", m * 100)))
    except Exception as error:  # the cell itself will show it again
        return f"{name} {dtype} {m}: {type(error).__name__}: {error}"[:300]
    return None


def time_graph(run: Callable, batches: list[Prepared]) -> tuple[float, torch.Tensor]:
    """Median us per batch, and the last batch's output, filled with NaN before the last replay."""
    for batch in batches:
        run(batch)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        outs = [run(batch) for batch in batches]
        graph.capture_end()

    def replay_ms(repeats: int) -> list[float]:
        spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in spans:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in spans]

    times = replay_ms(int(min(60, max(7, 60 / replay_ms(3)[-1]))))
    outs[-1].fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    return statistics.median(times) * 1e3 / len(batches), outs[-1]


def measure(kernel: Standard, shape: Shape, dtype: str, m: int, skew: str) -> dict:
    """Check one cell and time it. A failure is part of the result: it must not end the run."""
    result: dict = dict.fromkeys(("us", "floor_us", "err", "error"))
    try:
        sets = num_sets(m)
        batches = [make_inputs(shape, m, "cuda", m * 100 + i, skew) for i in range(sets)]
        pairs, active = (sum(getattr(batch, name) for batch in batches) / sets for name in ("pairs", "active"))
        result["floor_us"] = floor_us(shape, dtype, m, pairs, active)
        prepared = [kernel.prepare(batch) for batch in batches]
        out = kernel.finish(batches[0], kernel.run(prepared[0]))
        result["err"] = relative_error(kernel.weights, batches[0], out, 256, dtype)
        if result["err"] < ALLOWED[dtype]:
            result["us"], out = time_graph(kernel.run, prepared)
            result["err"] = relative_error(kernel.weights, batches[-1], kernel.finish(batches[-1], out), 64, dtype)
        if not result["err"] < ALLOWED[dtype]:
            result["error"] = f"wrong output, allowed error {ALLOWED[dtype]}"
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return result


def calibrate(peer: TorchGroupedMM | None, shape: Shape, m: int, skew: str) -> float | None:
    """torch's grouped GEMMs on the same inputs, in us."""
    if peer is None:
        return None
    sets = num_sets(m)
    return time_graph(peer.run, [make_inputs(shape, m, "cuda", m * 100 + i, skew) for i in range(sets)])[0]


def compare(name: str, dtype: str, m: int, result: dict, gmm_us: float | None, stored: dict) -> dict:
    """One cell of the report: the measured time beside the stored ones."""
    cell = {"shape": name, "dtype": dtype, "M": m, **result}
    known = stored.get((name, dtype, m), {})
    if known and result["floor_us"] and not math.isclose(result["floor_us"], float(known["floor_us"]), rel_tol=1e-3):
        cell["error"] = "the inputs are not those of the stored run"
    cell["best_peer"], cell["best_us"] = known.get("best_peer"), float(known.get("best_us", 0)) or None
    cell["gmm_us"], known_gmm = gmm_us, known.get("torch_gmm")
    cell["gmm_drift"] = gmm_us / float(known_gmm) if gmm_us and known_gmm else None
    for ratio, base in (("x_floor", "floor_us"), ("x_best", "best_us")):
        cell[ratio] = cell["us"] / cell[base] if cell["us"] and cell[base] and not cell["error"] else None
    return cell


def beside_bf16(cells: list[dict]) -> None:
    """Each cell's time against our bf16 at the same place, where this run has it."""
    wide = {(cell["shape"], cell["M"]): cell["us"] for cell in cells if cell["dtype"] == "bf16" and not cell["error"]}
    for cell in cells:
        known = wide.get((cell["shape"], cell["M"]))
        comparable = cell["us"] and known and not cell["error"] and cell["dtype"] != "bf16"
        cell["x_bf16"] = cell["us"] / known if comparable else None


RATIOS = ("x_floor", "x_best", "gmm_drift", "x_bf16")


def print_cell(cell: dict) -> None:
    ratios = " ".join(f"{cell[name] or math.nan:6.3f}" for name in RATIOS)
    line = f"{cell['shape']:10} {cell['dtype']:10} {cell['M']:5d} {cell['us'] or math.nan:8.1f} {ratios}"
    print(f"{line} {cell['err'] or math.nan:.1e}" + (f"  FAILED {cell['error']}" if cell["error"] else ""), flush=True)


def summarise(cells: list[dict], ratio: str) -> str:
    have = [cell for cell in cells if cell[ratio]]
    if not have:
        return f"{ratio}: in no cell"
    worst = max(have, key=lambda cell: cell[ratio])
    mean = statistics.geometric_mean([cell[ratio] for cell in have])
    place = f"worst {worst[ratio]:.3f} at {worst['shape']} {worst['dtype']} M={worst['M']}"
    return f"{ratio}: geometric mean {mean:.3f} over {len(have)} of {len(cells)} cells, {place}"


def stored_peers(skew: str, layout: str) -> dict:
    if skew != "uniform" or layout != "standard":
        return {}
    with open(HERE / "peers" / "h200.csv", newline="") as file:
        return {(row["shape"], row["dtype"], int(row["M"])): row for row in csv.DictReader(file)}


def read_table(path: Path) -> dict[str, dict[int, Tiles]]:
    """Tuned tiles by problem and bucket."""
    cells = json.loads(path.read_text())["cells"]
    return {key: {int(b): Tiles.from_json(cell) for b, cell in rows.items()} for key, rows in cells.items()}


def environment() -> dict:
    driver = torch.cuda.get_device_properties(0)
    return {"gpu": driver.name, "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=ALLOWED, default=list(TOLERANCE))
    parser.add_argument("--ms", nargs="+", type=int, default=MS)
    parser.add_argument("--skew", choices=["uniform", "hot", "zipf"], default="uniform")
    parser.add_argument("--format", choices=("standard", "batched"), default="standard")
    parser.add_argument("--experts", choices=("triton", *LIBRARIES), default="triton")
    parser.add_argument("--calibrate", nargs="*", type=int, default=[], help="token counts at which torch is timed too")
    parser.add_argument("--table", type=Path, help="a tuned table instead of the shipped one")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    table = read_table(options.table) if options.table else None
    layout = options.format if options.experts == "triton" else options.experts
    stored = stored_peers(options.skew, options.format)
    report = {"format": options.format, "experts": options.experts, "skew": options.skew, "commit": options.commit,
              **environment(), "cells": []}  # fmt: skip
    begin = time.monotonic()
    jobs = [(layout, s, d, m, table) for s in options.shapes for d in options.dtypes for m in options.ms]
    if layout not in LIBRARIES:  # those compile little of ours, and have no compile_only
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            for problem in filter(None, pool.map(compile_cell, jobs)):
                print(problem)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    COUNTER.install()
    for name in options.shapes:
        for dtype in options.dtypes:
            shape = SHAPES[name]
            kernel = FORMATS[layout](shape, dtype, make_weights(shape, dtype, "cuda"), table)
            peer = TorchGroupedMM(kernel.weights, shape.topk) if dtype in ("bf16", "fp8_tensor") else None
            for m in options.ms:
                result = measure(kernel, shape, dtype, m, options.skew)
                gmm_us = calibrate(peer if m in options.calibrate else None, shape, m, options.skew)
                report["cells"].append(compare(name, dtype, m, result, gmm_us, stored))
                beside_bf16(report["cells"])
                print_cell(report["cells"][-1])
            if options.json:
                reports.save(options.json, report)
            del kernel, peer
            torch.cuda.empty_cache()
    print(*(summarise(report["cells"], ratio) for ratio in RATIOS), sep="\n")
    failed = sum(cell["error"] is not None for cell in report["cells"])
    print(f"{failed} of {len(report['cells'])} cells failed, {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
