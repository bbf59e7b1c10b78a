"""Time of a backward step of the experts against that of a forward one, on one rank: `python -m benchmarks.gradients`.

The kernel alone is timed: rows of random tokens, experts chosen at random, no transport. Forward and backward take turns, and the
median of each counts. A GPU times events of the device. A CPU times the process's own seconds, which other work beside it changes
least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import reports
from epserve.all2all.local import LocalAll2AllManager
from epserve.experts import REGISTRY
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
from epserve.rank.backward.kernel import RankGradients

TOKENS = (1, 64, 512, 4096)


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Milliseconds."""
    if device.type != "cuda":
        start = time.process_time()
        run()
        return (time.process_time() - start) * 1e3
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    run()
    marks[1].record()
    marks[1].synchronize()
    return marks[0].elapsed_time(marks[1])


def layer(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[LayerSpec, ExpertWeights]:
    shape = ExpertShape(
        hidden=args.hidden, intermediate=args.intermediate, num_experts=args.experts, top_k=args.top_k, dtype=dtype
    )
    generator = torch.Generator(device=device).manual_seed(1)

    def draw(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator, device=device) / sizes[-1] ** 0.5).to(dtype)

    E, N, K = args.experts, args.intermediate, args.hidden
    weights = ExpertWeights(w13_eNK=draw(E, 2 * N, K), w2_eKN=draw(E, K, N))
    return LayerSpec(shape=shape, layout=ExpertLayout.even(E, 1), device=device.type), weights


def measure(args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    spec, weights = layer(args, device, dtype)
    ranks, options = RankContext(device=device), PrepareFinalizeOptions(max_tokens_per_rank=max(tokens, 1))
    experts = REGISTRY.get(args.backend)(spec)
    kernel = FusedMoEModularKernel(LocalAll2AllManager(ranks).get_handle(spec, options), experts)
    weights = experts.prepare_weights(weights)
    kernel.warm_up(weights)
    backward = RankGradients(ranks, spec, options)
    x, g = (torch.randn((tokens, args.hidden), device=device).to(dtype) for _ in range(2))
    ids = torch.rand((tokens, args.experts), device=device).topk(args.top_k, dim=1).indices.int()
    routing = Routing(ids_Mt=ids, weights_Mt=torch.rand(ids.shape, device=device))

    def forth() -> object:
        with torch.inference_mode():
            return kernel.forward(x, routing, weights=weights, tokens_per_rank=(tokens,))

    def back() -> object:
        with torch.no_grad():
            return backward.backward(
                x, g, routing, weights=weights, tokens_per_rank=(tokens,), on_phase=lambda phase: None
            )

    for run in (forth, back) * 2:
        run()
    pairs = [(timed(device, forth), timed(device, back)) for _ in range(args.repeats)]
    forward_ms, backward_ms = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {
        "tokens": tokens, "forward_ms": round(forward_ms, 3), "backward_ms": round(backward_ms, 3),
        "ratio": round(backward_ms / forward_ms, 3),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--backend", default="", help="experts of the forward (default: triton on a GPU, else grouped_mm)"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="of a CPU (default: torch's own number)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.backend = args.backend or ("triton" if args.device == "cuda" else "grouped_mm")
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    for tokens in args.tokens:
        rows.append(measure(args, tokens))
        print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        names = "device", "dtype", "backend", "hidden", "intermediate", "experts", "top_k", "repeats"
        where = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads"
        reports.save(args.json, {"where": where, **{name: getattr(args, name) for name in names}, "cells": rows})


if __name__ == "__main__":
    main()
