"""How long the Triton experts take to be ready with an empty cache on disk, how many variants that is, and that nothing
compiles afterwards.

TRITON_CACHE_DIR=$(mktemp -d) python -m benchmarks.ready_time --shape dsv3_ep8 --dtype fp8_block
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from benchmarks import reports
from benchmarks.expert_inputs import SHAPES, make_inputs, make_weights
from benchmarks.experts import Standard, environment
from epserve.experts.triton.compiles import COUNTER


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="dsv3_ep8")
    parser.add_argument("--dtype", default="fp8_block")
    parser.add_argument("--max-rows", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    kernel = Standard(shape, options.dtype, make_weights(shape, options.dtype, "cuda"), None)
    torch.cuda.synchronize()
    begin = time.monotonic()
    kernel.experts.warm_up(kernel.weights, options.max_rows)
    ready_s = time.monotonic() - begin
    COUNTER.ready()
    source = random.Random(1)
    sizes = [1, 2, 15, 16, 17, 31, 4096] + [source.randint(1, min(4096, options.max_rows)) for _ in range(193)]
    times = []
    for tokens in sizes:
        prepared = kernel.prepare(make_inputs(shape, tokens, "cuda", tokens))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        kernel.run(prepared)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    times.sort()
    report = {"shape": options.shape, "dtype": options.dtype, **environment(), "ready_s": round(ready_s, 1),
              "variants": COUNTER.num_warm, "late_compiles": COUNTER.num_late,
              "p50_ms": round(statistics.median(times), 3), "p99_ms": round(times[int(len(times) * 0.99)], 3)}  # fmt: skip
    print(json.dumps(report))
    if options.json:
        reports.save(options.json, report)


if __name__ == "__main__":
    main()
