"""Measures the effect of zeros behind the rows of bf16 products on a CPU: `python -m benchmarks.row_padding [--json FILE]`.

It times a rank's experts with and without the zeros that `experts/rows.py` puts behind rows whose inner size is no multiple of
32: slices of published models, one thread, the two ways in turn, medians of rounds. The ratio counts, the times are the
machine's. If both inner sizes are multiples of 32, there are no zeros and nothing to measure.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks import reports
from epserve import all2all, experts
from epserve.experts import rows
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    FusedMoEModularKernel,
    LayerSpec,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
)

LAYERS = {
    "DeepSeek-V2-Lite, 1408 in 8 slices": (2048, 176, 64, 6),
    "gpt-oss-20b, 2880 in 4 slices": (2880, 720, 32, 4),
    "hidden 1000": (1000, 512, 16, 2),
}
"""hidden, intermediate of a slice, experts, top-k."""
PAIRS = (("local", "grouped_mm"), ("local", "loop"), ("all_to_all_batched", "batched_mm"))
TOKENS = (1, 16, 256)
BATCHED_CAP = 16  # tokens. Blocks of batched_mm are for few


@contextmanager
def without_zeros() -> Iterator[None]:
    with mock.patch.object(rows, "TILE", 1):
        yield


def kernel_of(pair: tuple[str, str], sizes: tuple[int, int, int, int], tokens: int):
    hidden, intermediate, count, top_k = sizes
    shape = ExpertShape(hidden=hidden, intermediate=intermediate, num_experts=count, top_k=top_k)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(count, 1))
    manager = all2all.REGISTRY.get(pair[0])(RankContext())
    options = PrepareFinalizeOptions(max_tokens_per_rank=tokens)
    return FusedMoEModularKernel(manager.get_handle(spec, options), experts.REGISTRY.get(pair[1])(spec))


def measure(pair: tuple[str, str], sizes: tuple[int, int, int, int], tokens: int, rounds: int) -> dict:
    hidden, intermediate, count, top_k = sizes
    plain = ExpertWeights(
        w13_eNK=(torch.randn(count, 2 * intermediate, hidden) * hidden**-0.5).bfloat16(),
        w2_eKN=(torch.randn(count, hidden, intermediate) * intermediate**-0.5).bfloat16(),
    )
    kernel = kernel_of(pair, sizes, tokens)
    ready = kernel.fused_experts.prepare_weights(plain)
    with without_zeros():
        bare = kernel_of(pair, sizes, tokens)
        bare.warm_up(plain)
    kernel.warm_up(ready)

    def once(which: FusedMoEModularKernel, weights: ExpertWeights, x: torch.Tensor, routing: Routing) -> float:
        start = time.perf_counter()
        which.forward(x, routing, weights=weights)
        return time.perf_counter() - start

    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        x = torch.randn(tokens, hidden).bfloat16()
        ids = torch.rand(tokens, count).topk(top_k, 1).indices.int()
        routing = Routing(ids_Mt=ids, weights_Mt=torch.rand(tokens, top_k))
        times[0].append(once(kernel, ready, x, routing))
        with without_zeros():
            times[1].append(once(bare, plain, x, routing))
    with_ms, without_ms = (statistics.median(each) * 1e3 for each in times)
    return {"with_ms": with_ms, "without_ms": without_ms, "ratio": with_ms / without_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cells = []
    with torch.inference_mode():
        for layer, sizes in LAYERS.items():
            for pair in PAIRS:
                for tokens in TOKENS:
                    if pair[1] == "batched_mm" and tokens > BATCHED_CAP:
                        continue
                    cell = {"layer": layer, "experts": pair[1], "tokens": tokens}
                    cell |= measure(pair, sizes, tokens, options.rounds)
                    cells.append(cell)
                    print(f"{layer:36} {pair[1]:11} {tokens:4} tokens {cell['with_ms']:8.2f} ms with zeros,"
                          f" {cell['ratio']:.3f} times without", flush=True)  # fmt: skip
    if options.json:
        meta = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        reports.save(options.json, {"meta": meta, "cells": cells})


if __name__ == "__main__":
    main()
