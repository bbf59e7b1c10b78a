"""Experts on a CPU: `python -m benchmarks.experts_cpu [--threads N] [--json FILE]`.

One layer in bf16. Each row of the table: epserve's backends on the weights as each wants them, the library's bare call, and the
floor of this machine, measured in the same run: the bytes of the experts that the batch visits, at the speed at which all of
them can be read, or its products, at the speed of one large product, whichever takes longer. Ways take turns, ids are drawn
anew each time, and the median counts. Other work on the machine changes the times more than the ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import reports
from epserve.experts.cpu import library as cpu_library
from epserve.experts.cpu.fused import VllmCpuExperts
from epserve.experts.grouped_mm import GroupedMMExperts
from epserve.modular_kernel import (
    DispatchHandle,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    FusedMoEExpertsModular,
    HandleBook,
    LayerSpec,
    Prepared,
    Routing,
    Workspaces,
)

LAYERS = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "gpt-oss-20b": (2880, 2880, 32, 4)}
"""hidden, intermediate, experts, top-k. A rank holds `--share` of the experts, and every slot is local."""
TOKENS = (1, 4, 16, 64, 256, 1024)


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def read_speed(weights: ExpertWeights) -> float:
    """Bytes a second of a pass over all experts."""
    whole = weights.w13_eNK.view(-1).view(torch.int64)
    return whole.nbytes / min(timed(whole.sum) for _ in range(5))


def product_speed(size: int = 2048) -> float:
    """FLOP a second of one large product in bf16."""
    x = torch.randn(size, size).bfloat16()
    return 2 * size**3 / min(timed(lambda: x @ x) for _ in range(5))


def draw(spec: LayerSpec, num_tokens: int) -> Prepared:
    shape = spec.shape
    ids = torch.rand((num_tokens, shape.num_experts)).topk(shape.top_k, 1).indices.int()
    x = torch.randn(num_tokens, shape.hidden).bfloat16()
    routing = Routing(ids_Mt=ids.contiguous(), weights_Mt=torch.full(ids.shape, 1 / shape.top_k))
    return Prepared(x=x, routing=routing, handle=DispatchHandle(HandleBook("benchmark"), None))


def run_experts(experts: FusedMoEExpertsModular, prepared: Prepared, weights: ExpertWeights) -> None:
    rows, top_k = prepared.x.shape[0], experts.spec.shape.top_k
    space = Workspaces(torch.device("cpu")).carve(experts.workspace_shapes(rows, top_k, weights.num_experts))
    experts.apply(space.output, prepared, weights=weights, workspace=space)


def bare(prepared: Prepared, weights: ExpertWeights) -> None:
    """The library alone: whole rows with all their slots, its own sum."""
    assert prepared.routing is not None
    routing, out = prepared.routing, torch.empty_like(prepared.x)
    isa = cpu_library.library().isa(torch.bfloat16)
    packed = (weights.w13_eNK, weights.w2_eKN)
    torch.ops._C.cpu_fused_moe(
        out, prepared.x, *packed, None, None, routing.weights_Mt, routing.ids_Mt, False, "silu", isa
    )


def measure(layer: str, share: float, rounds: int) -> list[dict]:
    hidden, intermediate, num_experts, top_k = LAYERS[layer]
    num_experts = max(int(num_experts * share), top_k)
    shape = ExpertShape(hidden=hidden, intermediate=intermediate, num_experts=num_experts, top_k=top_k)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(num_experts, 1))
    w13_eNK, w2_eKN = (
        torch.empty(num_experts, *size).bfloat16() for size in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    for each in (*w13_eNK, *w2_eKN):
        each.normal_(std=0.05)
    plain = ExpertWeights(w13_eNK=w13_eNK, w2_eKN=w2_eKN)
    fused, grouped = VllmCpuExperts(spec), GroupedMMExperts(spec)
    packed = fused.prepare_weights(plain)
    bytes_s, flop_s = read_speed(packed), product_speed()
    one_expert = 3 * hidden * intermediate
    ways: dict[str, Callable[[Prepared], None]] = {
        "grouped_mm": lambda batch: run_experts(grouped, batch, plain),
        "grouped_mm, packed": lambda batch: run_experts(grouped, batch, packed),
        "vllm_cpu": lambda batch: run_experts(fused, batch, packed),
        "bare call": lambda batch: bare(batch, packed),
    }
    cells = []
    for tokens in TOKENS:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        floors = []
        for number in range(1 + (rounds if tokens < 256 else max(rounds // 5, 3))):
            batch = draw(spec, tokens)
            for name, way in ways.items():
                took = timed(lambda way=way, batch=batch: way(batch))
                if number:
                    seconds[name].append(took)
            assert batch.routing is not None
            visited = len(batch.routing.ids_Mt.unique())
            floors.append(max(visited * one_expert * 2 / bytes_s, 2 * one_expert * tokens * top_k / flop_s))
        floor = statistics.mean(floors)
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        cell = {"layer": layer, "experts": num_experts, "tokens": tokens, "floor_ms": floor * 1e3,
                "ms": {name: value * 1e3 for name, value in medians.items()},
                "least_ms": {name: min(each) * 1e3 for name, each in seconds.items()},
                "read_gb_s": bytes_s / 1e9, "product_gflop_s": flop_s / 1e9}  # fmt: skip
        cells.append(cell)
        shown = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in medians.items())
        print(f"{layer} M={tokens:4}: floor {floor * 1e3:.2f} ms; {shown}; vllm_cpu is"
              f" {medians['grouped_mm'] / medians['vllm_cpu']:.2f} times as fast as grouped_mm,"
              f" {medians['vllm_cpu'] / floor:.2f} x the floor, {medians['vllm_cpu'] / medians['bare call']:.2f} x the bare call",
              flush=True)  # fmt: skip
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.25, help="part of the layer's experts that the rank holds")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--layers", nargs="+", choices=tuple(LAYERS), default=tuple(LAYERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := cpu_library.why_not():
        parser.error(reason)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        cells = [cell for layer in options.layers for cell in measure(layer, options.share, options.rounds)]
    if options.json:
        found = cpu_library.library()
        meta = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": options.threads,
                "load": os.getloadavg(), "torch": torch.__version__, "library": found.version, "file": found.file,
                "isa": found.isa(torch.bfloat16)}  # fmt: skip
        reports.save(options.json, {"meta": meta, "cells": cells})


if __name__ == "__main__":
    main()
