"""Measures the cost of `combine_order: slot`: `python -m benchmarks.combine_order [--ranks N] [--json FILE]`.

It runs whole forward passes of one layer on CPU ranks over gloo, the same tokens in turn with `rank` and with `slot`, and takes
medians of rounds: the ratios count, the times depend on the machine. `loop` runs with either. `grouped_mm` adds a rank's slots
itself and runs with `rank` only, so a service that takes the fastest experts pays the difference too. `rows` is the number of
rows that come home to a rank.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import reports
from epserve import all2all, experts
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
from tests.support.ranks import run_ranks

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 512, 16, 4
TOKENS = (1, 16, 256)
"""The tokens of each rank."""
WAYS = (("loop", "rank"), ("loop", "slot"), ("grouped_mm", "rank"))


def measure(ranks: RankContext, dtype_name: str, rounds: int) -> list[dict]:
    torch.set_num_threads(1)
    torch.manual_seed(ranks.rank)
    dtype = getattr(torch, dtype_name)
    shape = ExpertShape(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, top_k=TOP_K, dtype=dtype)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(EXPERTS, ranks.world_size))
    mine = spec.layout.counts[ranks.rank]
    weights = ExpertWeights(
        w13_eNK=(torch.randn(mine, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5).to(dtype),
        w2_eKN=(torch.randn(mine, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5).to(dtype),
    )
    manager = all2all.REGISTRY.get("all_to_all")(ranks)
    kernels = {}
    for name, order in WAYS:
        options = PrepareFinalizeOptions(max_tokens_per_rank=max(TOKENS), combine_order=order)
        kernels[name, order] = FusedMoEModularKernel(
            manager.get_handle(spec, options), experts.REGISTRY.get(name)(spec)
        )
        kernels[name, order].warm_up(weights)
    cells = []
    for tokens in TOKENS:
        times: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            x = torch.randn(tokens, HIDDEN).to(dtype)
            ids = torch.rand(tokens, EXPERTS).topk(TOP_K, 1).indices.int()
            routing = Routing(ids_Mt=ids, weights_Mt=torch.rand(tokens, TOP_K))
            for way, kernel in kernels.items():
                dist.barrier(ranks.group)
                start = time.perf_counter()
                kernel.forward(x, routing, weights=weights, tokens_per_rank=[tokens] * ranks.world_size)
                times[way].append(time.perf_counter() - start)
        ms = {f"{name}, {order}": statistics.median(each) * 1e3 for (name, order), each in times.items()}
        visited = ranks.world_size * (1 - _none_of(EXPERTS - EXPERTS // ranks.world_size))
        cells.append({"dtype": dtype_name, "tokens": tokens, "ms": ms, "rows": {"rank": visited, "slot": TOP_K}})
    manager.destroy()
    return cells


def _none_of(others: int) -> float:
    """How likely it is that a token chooses all its experts among `others`, even routing assumed."""
    chance = 1.0
    for slot in range(TOP_K):
        chance *= (others - slot) / (EXPERTS - slot)
    return max(chance, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cells = []
    for dtype in ("float32", "bfloat16"):
        cells += run_ranks(measure, options.ranks, dtype, options.rounds)[0]
    for cell in cells:
        ms = cell["ms"]
        base = ms["loop, rank"]
        print(f"{cell['dtype']:9} {cell['tokens']:4} tokens a rank: loop by rank {base:8.2f} ms, by slot"
              f" {ms['loop, slot'] / base:.3f} times that, grouped_mm by rank {ms['grouped_mm, rank'] / base:.3f}")  # fmt: skip
    if options.json:
        meta = {
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "ranks": options.ranks,
        }
        reports.save(options.json, {"meta": meta, "cells": cells})


if __name__ == "__main__":
    main()
