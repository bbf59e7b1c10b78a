"""Times the gate of a DeepSeek-V3 layer on one GPU: torch's operations against the two kernels, as replayed CUDA graphs.

    python -m benchmarks.gate --json benchmarks/results/gate_h200.json
    python -m benchmarks.gate --tiles                       # every size of tiles at every number of tokens as well
    python -m benchmarks.gate --cpu --tokens 1 16            # torch alone, small sizes: the plumbing

Figures are the median us of one call, with CALLS calls a graph, each on other hidden states:
    torch            as the gate was before it had kernels: the product of float32 copies, torch.topk
    kernels          weight held in bfloat16, as checkpoints store it
    kernels_float32  weight held in float32
    products, choice the two launches of `kernels` each by itself
Each cell is checked first: ids and weights of tokens without near ties against float64. floor_us: bytes of x and of the weight at
4.3 TB/s.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch

from benchmarks import reports
from epserve.cli.layer.synthetic import LayerSizes, gate_weights
from epserve.modular_kernel import GateSpec, GateWeights
from epserve.rank import gate
from epserve.rank.gate import fitted, route

CALLS, NEAR, TB_PER_S = 10, 1e-5, 4.3
TOLERANCE = 1e-6


def reference(
    x_MK: torch.Tensor, weights: GateWeights, spec: GateSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, weights in float64, and which tokens have no two candidates within NEAR of each other. Sigmoid and softmax gates."""
    logits = x_MK.double() @ weights.weight_EK.double().T
    if weights.bias_E is not None:
        logits = logits + weights.bias_E.double()
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(1)
    choice = scores if weights.correction_bias_E is None else scores + weights.correction_bias_E.double()
    clear = torch.ones(len(x_MK), dtype=torch.bool, device=x_MK.device)
    if spec.top_groups < spec.num_groups:
        grouped = choice.unflatten(1, (spec.num_groups, -1))
        best = grouped.topk(2 if spec.group_score == "top2_sum" else 1).values.sum(2)
        order = best.sort(dim=1, descending=True)
        clear &= order.values[:, spec.top_groups - 1] - order.values[:, spec.top_groups] > NEAR
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, order.indices[:, : spec.top_groups], False)
        choice = grouped.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
    order = choice.sort(dim=1, descending=True)
    clear &= (order.values[:, : spec.top_k + 1].diff(dim=1) < -NEAR).all(1)
    ids = order.indices[:, : spec.top_k]
    shares = scores.gather(1, ids)
    if spec.renormalise:
        shares = shares / (shares.sum(1, keepdim=True) + spec.renormalise_epsilon)
    return ids, shares * spec.routed_scaling_factor, clear


def check(call: Callable, x_MK: torch.Tensor, weights: GateWeights, spec: GateSpec) -> float:
    """The largest error of a weight where the choice is clear. Raises ValueError where ids differ or weights by too much."""
    ids, shares, clear = reference(x_MK, weights, spec)
    got = call(x_MK)
    wrong = int((got.ids_Mt.long() != ids)[clear].any(1).sum()) if got.ids_Mt.numel() else 0
    error = (got.weights_Mt.double() - shares)[clear].abs().max().item() if clear.any() else 0.0
    if wrong or not error < TOLERANCE * max(1.0, spec.routed_scaling_factor):
        raise ValueError(
            f"{wrong} of {int(clear.sum())} clear tokens with other ids, largest error of a weight {error:.2g}"
        )
    return error


def torch_as_before():
    """`route` without its kernels, with torch.topk."""

    def top(values, k, in_order):
        found = torch.topk(values, k, dim=-1, sorted=in_order)
        return found.values, found.indices

    return mock.patch.multiple(gate, _kernels=lambda *tensors: None, _top=top)


def time_us(call: Callable, inputs: Sequence[torch.Tensor]) -> float:
    """Returns the median us of one call. `inputs`: one for each call of a graph."""
    if inputs[0].device.type == "cpu":
        start = time.perf_counter()
        for x in inputs:
            call(x)
        return (time.perf_counter() - start) / len(inputs) * 1e6
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in inputs[:3]:
            call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        kept = [call(x) for x in inputs]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(53)]
    for each in marks:
        each.record()
        graph.replay()
    torch.cuda.synchronize()
    del kept
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks[2:])) * 1e3 / len(inputs)


def gate_call(weights: GateWeights, spec: GateSpec) -> Callable:
    return lambda x: route(x, weights, spec)


def cells(options, device: torch.device):
    for num_experts in options.experts:
        sizes = LayerSizes(hidden=options.hidden, num_experts=num_experts, top_k=options.top_k)
        made = gate_weights(sizes, device)
        wide = GateWeights(weight_EK=made.weight_EK.bfloat16().float(), correction_bias_E=made.correction_bias_E)
        narrow, spec = fitted(wide, sizes.gate, torch.bfloat16), sizes.gate
        for tokens in options.tokens:
            drawn = torch.Generator(device).manual_seed(tokens)
            inputs = [
                torch.randn((tokens, sizes.hidden), device=device, generator=drawn).bfloat16() for _ in range(CALLS)
            ]
            floor = (tokens * sizes.hidden * 2 + narrow.weight_EK.numel() * 2) / TB_PER_S / 1e6
            cell = {"experts": num_experts, "tokens": tokens, "hidden": sizes.hidden, "floor_us": floor, "us": {}}
            with torch_as_before():
                cell["us"]["torch"] = time_us(gate_call(wide, spec), inputs)
            cell["error"] = {}
            if device.type == "cuda":
                for name, weights in (("kernels", narrow), ("kernels_float32", wide)):
                    cell["error"][name] = check(gate_call(weights, spec), inputs[0], weights, spec)
                    cell["us"][name] = time_us(gate_call(weights, spec), inputs)
                cell["us"] |= halves(inputs, narrow, spec)
                cell["times_faster"] = cell["us"]["torch"] / cell["us"]["kernels"]
                if options.tiles:
                    cell["tiles"] = every_tile(inputs, narrow, spec) | every_row(inputs, narrow, spec)
            yield cell


def halves(inputs: Sequence[torch.Tensor], weights: GateWeights, spec: GateSpec) -> dict[str, float]:
    """Returns the us of either launch by itself. The other one is left out, so choice reads old values in memory."""
    from epserve.experts.triton import gate as triton_gate

    launch, us = triton_gate._launch, {}
    for name, kept in (("products", triton_gate.kernels.gate_logits), ("choice", triton_gate.kernels.choose_experts)):

        def only(kernel, *args, kept=kept, **constants):
            if kernel is kept:
                launch(kernel, *args, **constants)

        with mock.patch.object(triton_gate, "_launch", only):
            us[name] = time_us(gate_call(weights, spec), inputs)
    return us


def every_tile(inputs: Sequence[torch.Tensor], weights: GateWeights, spec: GateSpec) -> dict[str, float | str]:
    """Returns the us of the whole gate with each size of tiles, the quickest first, or a text if it does not fit the GPU."""
    from epserve.experts.triton import gate as triton_gate
    from epserve.experts.triton.gate import Tile

    found: dict[str, float | str] = {}
    for whole in (False, True):
        for bt, be, warps, stages in ((16, 64, 4, 4), (32, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2),
                                      (128, 64, 8, 3), (64, 128, 4, 2), (64, 128, 8, 3), (128, 128, 8, 2),
                                      (128, 128, 8, 3)):  # fmt: skip
            if bt > max(16, 2 * inputs[0].shape[0]) or be > max(64, weights.weight_EK.shape[0]):
                continue
            if not whole and (bt > 64 or stages == 2):
                continue  # no loop, so nothing is staged
            tile = Tile(up_to=float("inf"), bt=bt, be=be, whole=whole, warps=warps, stages=stages)
            name = f"{'whole' if whole else 'split'} {bt}x{be} warps {warps} stages {stages}"
            with mock.patch.object(triton_gate, "tiles", lambda *_, tile=tile: (tile,)):
                try:
                    found[name] = time_us(gate_call(weights, spec), inputs)
                except Exception as error:  # out of shared memory, which Triton says in several ways
                    found[name] = f"{type(error).__name__}: {error}"[:120]
    return dict(sorted(found.items(), key=lambda item: item[1] if isinstance(item[1], float) else float("inf")))


def every_row(inputs: Sequence[torch.Tensor], weights: GateWeights, spec: GateSpec) -> dict[str, float]:
    """us of the whole gate with other tokens and warps a program of the second launch."""
    from epserve.experts.triton import gate as triton_gate

    found = {}
    for rows, warps in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 4), (8, 8)):
        with mock.patch.multiple(triton_gate, ROWS=rows, row_warps=lambda *_, warps=warps: warps):
            found[f"choice: {rows} rows, warps {warps}"] = time_us(gate_call(weights, spec), inputs)
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 512, 4096])
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tiles", action="store_true", help="time every size of tiles too")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    if not options.cpu and not torch.cuda.is_available():
        print("no CUDA device (--cpu times torch alone)", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.cpu else "cuda")
    name = "cpu" if options.cpu else torch.cuda.get_device_name()
    report = {"device": name, "torch": torch.__version__, "calls_per_graph": CALLS, "cells": []}
    with torch.inference_mode():
        for cell in cells(options, device):
            report["cells"].append(cell)
            times = ", ".join(f"{key} {us:.1f}" for key, us in cell["us"].items())
            print(f"E {cell['experts']:4} M {cell['tokens']:5}: {times}, floor {cell['floor_us']:.1f} us", flush=True)
            for tile, us in list(cell.get("tiles", {}).items()):
                print(f"    {tile:34} {us if isinstance(us, str) else f'{us:.1f}'}")
    if options.json:
        reports.save(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
