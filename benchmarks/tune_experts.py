"""Tunes the tiles of the Triton experts on the GPU, as `epserve tune` does, for the shapes of the benchmarks.

It compares every cell with the tiles that served before, and writes a table for `experts/tuned/`.

    python -m benchmarks.tune_experts --budget 400 --out experts/tuned/nvidia_h200.json --json result.json
    python -m benchmarks.tune_experts --shapes dsv3_ep8 --dtypes fp8_block --ms 1 4 --out t.json    a part; --out keeps its others

The budget, with compiling, is shared evenly among the cells that are left. A cell that runs out keeps the best so far, and a
cell that gained less than 1 % keeps its old tiles. --json has whole layers with the new tiles and with the former ones (`us`,
`before_us`, in turn), for each cell.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import torch

from benchmarks import reports
from benchmarks.expert_inputs import MORE_TOLERANCE, SHAPES, TOLERANCE, make_weights
from benchmarks.experts import MS, environment
from epserve.experts.tiles.table import Problem
from epserve.experts.triton.experts import TritonExperts
from epserve.experts.triton.tile_tuning import merged
from epserve.modular_kernel import Tuning
from epserve.modular_kernel.measured.buckets import BUCKETS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=400, help="seconds, compiling included, making weights apart")
    parser.add_argument(
        "--out", type=Path, required=True, help="table to write; cells that it has and nothing beats stay"
    )
    parser.add_argument("--json", type=Path, help="times of every cell")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=[*TOLERANCE, *MORE_TOLERANCE], default=list(TOLERANCE))
    parser.add_argument("--ms", nargs="+", type=int, choices=BUCKETS, default=MS)
    parser.add_argument("--plain", action="store_true", help="without the warp-specialised kernels")
    parser.add_argument("--log", action="store_true", help="say why a candidate was dropped")
    options = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if options.log else logging.INFO, format="%(message)s", stream=sys.stdout)
    if options.log:
        logging.getLogger("epserve.experts").setLevel(logging.DEBUG)
    table = json.loads(options.out.read_text()) if options.out.exists() else {"cells": {}}
    table.update(environment())
    report: dict = {**environment(), "cells": []}
    pairs = [(shape, dtype) for shape in options.shapes for dtype in options.dtypes]
    spent = 0.0
    for done, (name, dtype) in enumerate(pairs):
        shape = SHAPES[name]
        weights = make_weights(shape, dtype, "cuda")
        experts = TritonExperts(shape.spec(dtype, "cuda"))
        experts.use(Tuning(budget_s=(options.budget - spent) / (len(pairs) - done), thorough=True))
        experts.searched |= set(BUCKETS) - set(options.ms)
        launcher = experts.launcher()
        if options.plain:
            launcher.specialises = False
        begin = time.monotonic()
        experts.tune(weights, max(options.ms))
        spent += time.monotonic() - begin
        key = Problem.of(experts.spec, shape.local_experts).key
        cells = {bucket: tiles.to_json() for bucket, tiles in experts.tuned.table.get(key, {}).items()}
        table["cells"] = merged(table["cells"], {key: {str(bucket): cell for bucket, cell in cells.items()}})
        for bucket, cell in cells.items():
            times = experts.tuned.times[key, bucket]
            print(f"{name} {dtype} {bucket}: {times.before_us:.1f} -> {times.us:.1f} us"
                  f" ({times.us / times.before_us:.3f}) {json.dumps(cell)}")  # fmt: skip
            report["cells"].append({"shape": name, "dtype": dtype, "M": bucket, "us": round(times.us, 2),
                                    "before_us": round(times.before_us, 2), "tiles": cell})  # fmt: skip
        for note in experts.tuned.notes:
            print(note)
        print(f"{name} {dtype}: {spent:.0f} s of {options.budget:.0f}", flush=True)
        options.out.write_text(json.dumps(table, indent=1))
        if options.json:
            reports.save(options.json, report)
        del weights, experts, launcher
        torch.cuda.empty_cache()
    missing = len(pairs) * len(options.ms) - len(report["cells"])
    if missing:
        print(f"{missing} cells were not timed: raise --budget")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
