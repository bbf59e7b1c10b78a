"""Experts on a CPU: `python -m benchmarks.experts_cpu [--threads N] [--json FILE]`.

One layer. Each row of the table: epserve's backends on bf16 weights as each wants them, the library's bare call in bf16,
epserve's backends on quantised weights where this processor has them, and the floor of this machine for bf16, measured in the
same run: the bytes of the experts that the batch visits, at the speed at which all of them can be read, or its products, at the
speed of one large product, whichever takes longer. Ways take turns, ids are drawn anew each time, and the median counts. Other
work on the machine changes the times more than the ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import reports
from epserve.all2all.local import LocalAll2AllManager
from epserve.cli.layer.synthetic import LayerSizes, expert_weights
from epserve.errors import ConfigError
from epserve.experts.cpu import formats
from epserve.experts.cpu import library as cpu_library
from epserve.experts.cpu.fused import VllmCpuExperts
from epserve.experts.cpu.packed import VllmCpuMxfp4Experts, VllmCpuPackedExperts
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
    why_not,
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
    codes = weights.derived[formats.NAME][0].codes if formats.NAME in weights.derived else weights.w13_eNK
    whole = codes.view(-1).view(torch.int64)
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
    if formats.NAME in weights.derived:
        first, second = (each.codes for each in weights.derived[formats.NAME])
        torch.ops._C.fused_experts_cpu(
            out, prepared.x, first, second, routing.weights_Mt, routing.ids_Mt, 0, *[None] * 10, True
        )
        return
    isa = cpu_library.library().isa(torch.bfloat16)
    packed = (weights.w13_eNK, weights.w2_eKN)
    torch.ops._C.cpu_fused_moe(
        out, prepared.x, *packed, None, None, routing.weights_Mt, routing.ids_Mt, False, "silu", isa
    )


def quantised(spec: LayerSpec) -> dict[str, tuple[FusedMoEExpertsModular, ExpertWeights]]:
    """Returns experts and packed weights of every scheme that this processor and the layer's sizes allow."""
    found: dict[str, tuple[FusedMoEExpertsModular, ExpertWeights]] = {}
    shape = spec.shape
    for scheme in ("int8_channel", "fp8_block", "int4", "mxfp4"):
        chosen = VllmCpuMxfp4Experts if scheme == "mxfp4" else VllmCpuPackedExperts
        try:
            sizes = LayerSizes(
                hidden=shape.hidden, intermediate=shape.intermediate, num_experts=shape.num_experts, top_k=shape.top_k, shared=0,
                scheme=scheme,
            )  # fmt: skip
        except ConfigError:  # blocks or groups that do not divide
            continue
        asked = replace(spec, quant=sizes.quant)
        record = LocalAll2AllManager.prepare_finalize.capability
        if chosen.unavailable() or why_not(record, chosen.capability, asked):
            continue
        experts = chosen(asked)
        plain = expert_weights(sizes, range(shape.num_experts), torch.device("cpu"))
        found[scheme] = experts, experts.prepare_weights(plain)
    return found


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
    for scheme, (experts, weights) in quantised(spec).items():
        ways[scheme] = lambda batch, experts=experts, weights=weights: run_experts(experts, batch, weights)
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
