"""What only a GPU can show of tuned tiles: they are found within the budget, and another start reads them, compiles them at
warm-up, at most 60 variants, and computes the same with them without a late compile.

    python -m tests.gpus.tiles_gpu --budget 60 [SHAPE:DTYPE ...]      about twice the budget for each; exit status 1: one is wrong
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.expert_inputs import SHAPES, TOLERANCE, make_inputs, make_weights, relative_error
from benchmarks.experts import BOOK, Standard
from epserve.experts.triton import warmup as triton_warmup
from epserve.experts.triton.compiles import COUNTER
from epserve.experts.triton.experts import TritonExperts
from epserve.modular_kernel import DispatchHandle, Prepared, Routing, Tuning, Workspaces

MOST_ROWS = 4096
LONGER = 8.0
"""Seconds over a budget: a round of compiling, the last comparison, making batches."""


def tune(name: str, dtype: str, folder: Path, budget: float, *, thorough: bool) -> None:
    shape = SHAPES[name]
    weights = make_weights(shape, dtype, "cuda")
    experts = TritonExperts(shape.spec(dtype, "cuda"))
    experts.use(Tuning(folder=folder, budget_s=budget, thorough=thorough))
    begin = time.monotonic()
    experts.tune(weights, MOST_ROWS)
    spent = time.monotonic() - begin
    experts.workspace_shapes(MOST_ROWS, shape.topk, shape.local_experts)
    for line in experts.explain():
        print("   ", line)
    assert spent < budget + LONGER, f"{spent:.1f} s of {budget}"
    assert experts.tuned.table and list(folder.glob("*.json")), "nothing was found or kept"
    times = experts.tuned.times
    best = min(each.us / each.before_us for each in times.values())
    print(
        f"ok tuned in {spent:.1f} s of {budget}, {len(times)} sizes, {COUNTER.num_tried} variants tried, best {best:.3f}"
    )


def serve(name: str, dtype: str, folder: Path) -> None:
    """In a process of its own: what is compiled is counted."""
    shape = SHAPES[name]
    weights = make_weights(shape, dtype, "cuda")
    experts = TritonExperts(shape.spec(dtype, "cuda"))
    experts.use(Tuning(folder=folder))
    spaces = Workspaces("cuda")
    spaces.reserve(experts.workspace_shapes(MOST_ROWS, shape.topk, shape.local_experts))
    spaces.lock()
    assert experts.tuned.table and not experts.tuned.notes, experts.tuned.notes
    begin = time.monotonic()
    triton_warmup.warm_up(experts, weights, MOST_ROWS, spaces)
    COUNTER.ready()
    assert COUNTER.num_warm <= 60, f"{COUNTER.num_warm} variants"
    print(f"ok {COUNTER.num_warm} variants warm in {time.monotonic() - begin:.1f} s")
    worst = 0.0
    for rows in [1, 4, 16, 64, MOST_ROWS, *random.Random(1).sample(range(1, MOST_ROWS), 20)]:
        one = make_inputs(shape, rows, "cuda", rows)
        routing = Routing(ids_Mt=one.ids_local, weights_Mt=one.weights)
        prepared = Prepared(x=one.x, routing=routing, handle=DispatchHandle(BOOK, None))
        workspace = spaces.carve(experts.workspace_shapes(rows, shape.topk, shape.local_experts))
        out = experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)
        worst = max(worst, relative_error(weights, one, out, 64, dtype))
    assert worst < TOLERANCE[dtype], f"relative L2 error {worst:.1e}"
    assert COUNTER.num_late == 0, COUNTER.late
    print(f"ok right, error {worst:.1e}, no late compile")
    whole = Standard(shape, dtype, weights, None)  # what is shipped, on the last inputs
    apart = float((whole.run(whole.prepare(one)).float() - out.float()).norm() / out.float().norm())
    print(f"   {apart:.1e} from the shipped tiles' result")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cells", nargs="*", default=["qwen3_235b:bf16", "dsv3_ep8:fp8_block"], metavar="SHAPE:DTYPE")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tuning for each")
    parser.add_argument("--serve", type=Path, help="only: read this folder and serve with it")
    options = parser.parse_args()
    bad = 0
    for text in options.cells:
        name, dtype = text.split(":")
        if options.serve is not None:
            serve(name, dtype, options.serve)
            continue
        print(text, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                tune(name, dtype, Path(folder) / "start", min(5.0, options.budget), thorough=False)
                tune(name, dtype, Path(folder) / "tuned", options.budget, thorough=True)
                (file,) = (Path(folder) / "tuned").glob("*.json")
                print("   ", json.dumps(json.loads(file.read_text())["times"]), flush=True)
                torch.cuda.empty_cache()
                command = [sys.executable, "-m", "tests.gpus.tiles_gpu", text, "--serve", str(file.parent)]
                subprocess.run(command, check=True, timeout=300)
            except Exception as problem:  # every cell is to be seen
                bad += 1
                print(f"BAD {text}: {type(problem).__name__}: {problem}".replace("\n", " ")[:400], flush=True)
    print(f"{bad} wrong of {len(options.cells)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
