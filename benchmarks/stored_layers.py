"""One layer of a published model's shape and layout as a rank of the service computes it, beside the bare experts' kernels.

    python -m benchmarks.stored_layers --json benchmarks/results/stored_layers_h200.json
    python -m benchmarks.stored_layers --cpu --scale 16 --tokens 1 9

gpt-oss-120b (mxfp4 with biases), Kimi-K2 (int4 in groups of 32) and DeepSeek-V3 (fp8 in blocks of 128x128). The last two have
the experts of one rank of eight. A checkpoint of random codes is written in the published form and loaded by the service's own
path: plan, method class, `Worker`. "service" is the time of the experts' kernels within a step of that rank, "bare" the time
of the same kernels around nothing, both by the GPU's own clock and measured in turn. "step" is the time of all
kernels of the step: copies, placement, count of loads, experts. On a CPU the clock measures the whole step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.autograd import DeviceType

from benchmarks import cuda_regions, reports
from epserve import experts
from epserve.config import parse_config
from epserve.modular_kernel import (
    DispatchHandle,
    HandleBook,
    Prepared,
    RankContext,
    Routing,
    TopKWeightAndReduceNoOP,
    Workspaces,
)
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from tests.models.stored_layouts import BY_NAME

TURNS, REPEATS = 5, 10
LIMIT = 1.2e-2
"""Largest relative L2 difference between both results in bfloat16: a padded batch sums in another order."""


def write_gpt_oss(folder: Path, scale: int) -> None:
    from transformers import AutoConfig

    hidden, columns, num_experts = 2880 // scale // 32 * 32, 2880 // scale // 32 * 32, 128 // scale
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=hidden, intermediate_size=columns, num_local_experts=num_experts, num_experts_per_tok=4,
        num_hidden_layers=1, vocab_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    ).to_dict() | {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16", "torch_dtype": "bfloat16"}  # fmt: skip
    block, g = "model.layers.0.mlp", torch.Generator().manual_seed(0)
    tensors = {
        f"{block}.router.weight": torch.randn((num_experts, hidden), generator=g).bfloat16() / hidden**0.5,
        f"{block}.router.bias": torch.zeros(num_experts, dtype=torch.bfloat16),
    }
    for name, rows, inner in (("gate_up_proj", 2 * columns, hidden), ("down_proj", hidden, columns)):
        shape, key = (num_experts, rows, inner // 32), f"{block}.experts.{name}"
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=g)
        tensors[f"{key}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8, generator=g)
        tensors[f"{key}_bias"] = torch.randn((num_experts, rows), generator=g).bfloat16() * 0.1
    _write(folder, config, tensors)


def write_kimi_k2(folder: Path, scale: int) -> None:
    from transformers import AutoConfig

    hidden, columns, num_experts = 7168 // scale // 128 * 128, 2048 // scale // 128 * 128, 48 // min(scale, 6)
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=hidden, moe_intermediate_size=columns, intermediate_size=columns,
        n_routed_experts=num_experts, num_experts_per_tok=8, n_group=1, topk_group=1, first_k_dense_replace=0,
        n_shared_experts=1, num_hidden_layers=1, vocab_size=32, num_attention_heads=2, num_key_value_heads=2,
    ).to_dict()  # fmt: skip
    settings = BY_NAME["compressed int4"].settings
    config |= {"quantization_config": settings, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    block, g = "model.layers.0.mlp", torch.Generator().manual_seed(0)
    tensors = {
        f"{block}.gate.weight": torch.randn((num_experts, hidden), generator=g).bfloat16() / hidden**0.5,
        f"{block}.gate.e_score_correction_bias": torch.zeros(num_experts),
    }
    modules = [f"experts.{number}" for number in range(num_experts)] + ["shared_experts"]
    for module in modules:
        for name, rows, inner in (
            ("gate_proj", columns, hidden), ("up_proj", columns, hidden), ("down_proj", hidden, columns),
        ):  # fmt: skip
            key = f"{block}.{module}.{name}"
            tensors[f"{key}.weight_packed"] = torch.randint(
                -(2**31), 2**31 - 1, (rows, inner // 8), dtype=torch.int32, generator=g
            )
            tensors[f"{key}.weight_scale"] = torch.full((rows, inner // 32), 0.005, dtype=torch.bfloat16)
            tensors[f"{key}.weight_shape"] = torch.tensor([rows, inner])
    _write(folder, config, tensors)


def write_deepseek_v3(folder: Path, scale: int) -> None:
    sizes = argparse.Namespace(
        hidden=7168 // scale // 128 * 128, intermediate=2048 // scale // 128 * 128, experts=32 // min(scale, 4), top_k=8,
        cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    cuda_regions.write_checkpoint(folder, sizes, "fp8_block", 1)


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "gpt-oss-120b": write_gpt_oss, "kimi-k2_ep8": write_kimi_k2, "deepseek-v3_ep8": write_deepseek_v3,
}  # fmt: skip


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


class Bare:
    """The experts class of a rank over weights of its own, without a rank around it."""

    def __init__(self, worker: Worker, layer: int, tokens: int):
        info, device = worker.info, worker.ranks.device
        (group,) = worker.plan.groups
        self.experts = experts.REGISTRY.get(worker.plan.chosen.experts)(group.spec)
        read = worker.checkpoint.load_layer(layer, range(info.num_experts), device)
        self.weights = self.experts.prepare_weights(read.experts)
        self.experts.warm_up(self.weights, tokens)
        self.top_k, self.num_experts, self.spaces = info.top_k, info.num_experts, Workspaces(device)
        self.device = device

    def __call__(self, x_MK: torch.Tensor, ids_Mt: torch.Tensor, weights_Mt: torch.Tensor) -> torch.Tensor:
        routing = Routing(ids_Mt=ids_Mt, weights_Mt=weights_Mt)
        prepared = Prepared(x=x_MK, routing=routing, handle=DispatchHandle(HandleBook("bare"), None))
        shapes = self.experts.workspace_shapes(len(x_MK), self.top_k, self.num_experts)
        self.spaces.reserve(shapes)
        workspace = self.spaces.carve(shapes)
        rows = self.experts.apply(workspace.output, prepared, weights=self.weights, workspace=workspace)
        reduce = self.experts.finalize_weight_and_reduce_impl()
        if isinstance(reduce, TopKWeightAndReduceNoOP):
            return rows
        out_MK = torch.empty_like(x_MK)
        reduce.apply(rows, routing, out_MK)
        return out_MK


Kernels = list[tuple[str, float, float]]
"""Name, start and end of each kernel of `REPEATS` calls, in microseconds."""


def kernels(run: Callable[[], Any], device: torch.device) -> Kernels:
    """Returns the kernels of `REPEATS` calls, or on a CPU the calls."""
    if device.type == "cpu":
        found = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            found.append(("call", start * 1e6, time.perf_counter() * 1e6))
        return found
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    events = [each for each in seen.events() or () if each.device_type == DeviceType.CUDA]
    return [(each.name, each.time_range.start, each.time_range.end) for each in events]


def busy(found: Kernels) -> float:
    """Returns the microseconds of a call in which some of the kernels run.

    A kernel may start while the one before it ends (programmatic dependent launch) and wait for it: the sum of both would
    count that time twice.
    """
    total, until = 0.0, 0.0
    for _, start, end in sorted(found, key=lambda each: each[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / REPEATS


def cells(name: str, args: argparse.Namespace, device: torch.device, folder: Path) -> list[dict[str, Any]]:
    WRITERS[name](folder, args.scale)
    chosen = {"experts": "triton"} if device.type == "cuda" else {"experts": "loop"}
    engine = {"ranks": 1, "device": device.type, "max_tokens_per_rank": max(args.tokens), **chosen}
    worker = Worker(parse_config({"model": {"path": str(folder)}, "engine": engine}), RankContext(device=device))
    worker.load()
    worker.warm_up()
    (layer,) = worker.info.layers
    bare = Bare(worker, layer, max(args.tokens))
    g, found = torch.Generator().manual_seed(1), []
    for tokens in args.tokens:
        x = torch.randn((tokens, worker.info.hidden), generator=g).to(worker.info.dtype).to(device)
        scores = torch.rand((tokens, worker.info.num_experts), generator=g)
        ids = scores.topk(worker.info.top_k, 1).indices.int().to(device)
        shares = torch.rand(ids.shape, generator=g).to(device)
        plan = StepPlan(step=0, layer=layer, mode="routed", tokens_per_rank=(tokens,))
        step = lambda: worker.step(plan, x, ids, shares)  # noqa: B023, E731
        alone = lambda: bare(x, ids, shares)  # noqa: B023, E731
        with torch.inference_mode():
            one, other = step().float(), alone().float()
            difference = float((one - other).norm() / other.norm())
            if not difference <= LIMIT:
                raise SystemExit(
                    f"{name}, {tokens} tokens: both results differ by {difference:.1e}, at most {LIMIT:.0e}"
                )
            turns = [(kernels(alone, device), kernels(step, device)) for _ in range(TURNS)]
        names = {kernel for kernel, _, _ in turns[0][0]}
        bare_us = statistics.median(busy(first) for first, _ in turns)
        service_us = statistics.median(busy([each for each in second if each[0] in names]) for _, second in turns)
        found.append(
            {
                "model": name, "tokens": tokens, "served_as": worker.plan.groups[0].spec.quant.scheme,
                "bare_us": round(bare_us, 1), "service_us": round(service_us, 1),
                "step_us": round(statistics.median(busy(second) for _, second in turns), 1),
                "ratio": round(service_us / bare_us, 3), "difference": difference,
            }
        )  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
    worker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WRITERS), default=list(WRITERS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes")
    parser.add_argument("--cpu", action="store_true", help="the plumbing alone")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu else "cuda:0")
    found: list[dict[str, Any]] = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as place:
            found += cells(name, args, device, Path(place) / "model")
    gpu = "" if args.cpu else torch.cuda.get_device_name(device)
    if args.json:
        report = {
            "benchmark": "stored_layers",
            "commit": args.commit,
            "gpu": gpu,
            "torch": torch.__version__,
            "cells": found,
        }
        reports.save(args.json, report)


if __name__ == "__main__":
    main()
