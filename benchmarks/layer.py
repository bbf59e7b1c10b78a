"""Times a whole DeepSeek-V3 layer over each all-to-all backend, and over bare DeepEP with the best peer's experts, on one host.

    python -m benchmarks.layer --json layer.json                     # every GPU, E = 32 a GPU, bf16 and block fp8
    python -m benchmarks.layer --only nvlink deepep_ll --schemes fp8_block --tokens 128
    python -m benchmarks.layer --cpu                                  # gloo ranks, small sizes: the plumbing alone

Hidden 7,168, intermediate 2,048, 32 experts a rank, top-8, one shared expert in bf16. Times: see `benchmarks/ep_layer.py`.

Baseline: dispatch + the peer's experts + combine + the shared expert, one after the other, each timed by itself, without the
gaps between them. The bare calls run in the same processes, on the same buffer that ours used before. Low latency runs in a CUDA
graph. The peer's experts are, each stated in the JSON:
    stored     the fastest peer of `peers/h200.csv` for as many (token, local expert) pairs, extrapolated above 16,384
    rate       those operations at the highest rate that any peer has in any cell of that table, never measured here
    torch      torch's grouped GEMMs on the rows that arrived, timed in this run (bf16 only)
    cutlass, deepgemm   our backends of these names on those rows, timed in this run, if the packages are installed
    floor      operations or bytes at the chip's rate, which no experts can beat
ratio = ours / baseline. Peers' times are of another machine of the same kind. torch's, timed on both, tells the difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import reports
from benchmarks.all2all import Ranks, supervise, time_eager, time_graph
from benchmarks.all2all_candidates import BareHighThroughput, BareLowLatency, Case
from benchmarks.ep_layer import BACKENDS, BATCHED_CAP, measure, time_call
from benchmarks.expert_inputs import Inputs
from benchmarks.peer_times import best_peer, best_rate, floor_us
from benchmarks.torch_peer import TorchGroupedMM
from epserve import experts
from epserve.cli.layer.synthetic import TOLERANCE, LayerSizes, SyntheticLayer, gate_weights, reasons, shared_expert
from epserve.modular_kernel import (
    DispatchHandle,
    FusedMoEExpertsModular,
    HandleBook,
    Prepared,
    Routing,
    Workspaces,
)
from epserve.rank.gate import route

PARTS = "parts"
EXPERTS_PER_RANK = 32  # 64 over two ranks, DeepSeek-V3's 256 over eight
DTYPES = {"none": "bf16", "fp8_block": "fp8_block"}


def run(job: str, ranks: Ranks, options):
    """Cells of one job, `backend/scheme`: of ours and, where the backend is DeepEP's, of the bare calls too."""
    backend, scheme = job.split("/")
    sizes = layer_sizes(options, scheme)
    if backend == PARTS:
        yield from parts(ranks, sizes, options.tokens)
        return
    for layer, cell in measure(backend, ranks, sizes, options.tokens):
        yield cell
        if backend in ("deepep_ht", "deepep_ll"):
            yield from bare(backend, ranks, layer, cell["tokens"])


def layer_sizes(options, scheme: str) -> LayerSizes:
    return LayerSizes(
        hidden=options.hidden,
        intermediate=options.intermediate,
        num_experts=options.experts,
        top_k=options.top_k,
        shared=options.intermediate,
        scheme=scheme,
    )


def parts(ranks: Ranks, sizes: LayerSizes, tokens: list[int]):
    """The gate, and the shared expert with the sum, each by itself."""
    gate, shared = gate_weights(sizes, ranks.device), shared_expert(sizes, ranks.device)
    for num_tokens in tokens:
        x = torch.randn((num_tokens, sizes.hidden), device=ranks.device).to(sizes.dtype)
        out = torch.empty_like(x)

        def add_shared(x=x, out=out):
            return out.add_(shared(x))

        def choose(x=x):
            return route(x, gate, sizes.gate).weights_Mt

        graphed = ranks.device.type == "cuda"
        for name, call in (("gate", choose), ("shared", add_shared)):
            us, _ = time_call(call, ranks, graphed=graphed)
            yield {"backend": name, "scheme": sizes.scheme, "tokens": num_tokens, "us": us, "graph": graphed}


class OnOurBuffer:
    """A bare candidate whose library buffer is the one of our own backend."""

    def __init__(self, backend: str, layer: SyntheticLayer, fp8: bool):
        pf, ranks = layer.kernel.prepare_finalize, layer.ranks
        spec = layer.spec
        case = Case(
            rank=ranks.rank, world=ranks.world_size, device=ranks.device, hidden=spec.shape.hidden,
            experts=spec.shape.num_experts, topk=spec.shape.top_k, max_tokens=pf.options.max_tokens_per_rank,
            largest_hidden=spec.shape.hidden, largest_experts=spec.shape.num_experts,
        )  # fmt: skip
        self.case, self.fp8 = case, fp8
        owner: Any = pf if backend == "deepep_ht" else pf.shared  # type: ignore[attr-defined]
        self.buffer = owner.buffer
        self.cap = pf.options.max_tokens_per_rank


class HighThroughput(OnOurBuffer, BareHighThroughput):
    pass


class LowLatency(OnOurBuffer, BareLowLatency):
    def prepare(self):
        received, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.ids, self.cap, self.case.experts, use_fp8=self.fp8
        )
        return SimpleNamespace(x=received, counts=counts, handle=handle)


def bare(backend: str, ranks: Ranks, layer: SyntheticLayer, num_tokens: int):
    """Dispatch and combine of the library alone, and for bf16 rows torch's experts on what arrived."""
    fp8 = layer.sizes.scheme == "fp8_block"
    candidate = (HighThroughput if backend == "deepep_ht" else LowLatency)(backend, layer, fp8)
    x = layer.tokens(num_tokens)
    routing = layer.gate(x)
    candidate.load(x, routing.ids_Mt, routing.weights_Mt)
    state = candidate.prepare()
    y = candidate.identity(state)
    out = candidate.finalize(state, y)
    want = candidate.expected(x, routing.weights_Mt)
    error = max(ranks.gather(((out.float() - want).norm() / want.norm()).item()))
    if not error < (5e-2 if fp8 else 1e-2):
        raise ValueError(f"bare {backend}: wrong output, relative L2 error {error:.3g}")
    cell = {"backend": f"bare_{backend}", "scheme": layer.sizes.scheme, "tokens": num_tokens, "error": error}
    if backend == "deepep_ll":
        both, _ = time_graph(lambda: candidate.finalize(candidate.prepare(), y), ranks)
        dispatch, state = time_graph(candidate.prepare, ranks)
        combine, _ = time_graph(lambda: candidate.finalize(state, y), ranks)
    else:
        dispatch, combine = time_eager(candidate, y, ranks)
        both = dispatch + combine
    times = [max(each) for each in zip(*ranks.gather((dispatch, combine, both)), strict=True)]
    yield cell | {"us": times[2], "dispatch_us": times[0], "combine_us": times[1], "graph": backend == "deepep_ll"}
    if isinstance(candidate, HighThroughput):
        yield from peers_here(ranks, layer, candidate, num_tokens)


def peers_here(ranks: Ranks, layer: SyntheticLayer, candidate: HighThroughput, num_tokens: int):
    """Times experts of libraries on the rows that DeepEP delivered, each checked against our own experts' result on them.

    cutlass, deepgemm: the library's products with our kernels around them. torch: its grouped products with the small kernels of
    `torch_peer.py`. With those the whole chain is timed too, call after call.
    """
    state = candidate.prepare()
    x, scales = state.x if candidate.fp8 else (state.x, None)
    routing = Routing(ids_Mt=state.ids.int().contiguous(), weights_Mt=state.weights)
    prepared = Prepared(x=x, scales=scales, routing=routing, handle=DispatchHandle(HandleBook("peers"), None))
    pairs = ranks.gather(int((routing.ids_Mt >= 0).sum()))
    candidate.finalize(state, candidate.identity(state))
    if not min(pairs):
        return  # a rank without rows: nothing to compare
    want = apply(layer.kernel.fused_experts, prepared, layer)()
    runs: dict = {}
    for name in ("cutlass", "deepgemm"):
        if name in experts.REGISTRY.names() and not reasons("deepep_ht", name, layer.spec):
            runs[name] = apply(experts.REGISTRY.get(name)(layer.spec), prepared, layer)
    if not candidate.fp8:
        peer = TorchGroupedMM(layer.raw_weights, layer.sizes.top_k)
        runs["torch"] = lambda: peer.run(inputs_of(state))
    for name, call in runs.items():
        error = max(ranks.gather(((call().float() - want.float()).norm() / want.float().norm()).item()))
        if not error < 2 * TOLERANCE[layer.sizes.scheme]:
            raise ValueError(f"{name} and our experts differ, relative L2 error {error:.3g}")
        us = max(ranks.gather(time_graph(call, ranks)[0]))
        cell = {"backend": f"peer_{name}", "scheme": layer.sizes.scheme, "tokens": num_tokens, "us": us, "graph": True}
        cell |= {"pairs": max(pairs), "error": error}
        if name == "torch":
            cell["chain_us"], _ = time_call(lambda: chain(candidate, layer, peer), ranks, graphed=False)
        yield cell


def apply(fused: FusedMoEExpertsModular, prepared: Prepared, layer: SyntheticLayer):
    """A call of `fused` on one batch, with a workspace of its own."""
    assert prepared.routing is not None
    weights = fused.prepare_weights(layer.raw_weights)
    num_rows, top_k = prepared.routing.ids_Mt.shape
    shapes = fused.workspace_shapes(num_rows, top_k, weights.num_experts)
    workspace = Workspaces(prepared.x.device).carve(shapes)
    return lambda: fused.apply(workspace.output, prepared, weights=weights, workspace=workspace)


def inputs_of(state) -> Inputs:
    return Inputs(x=state.x, ids_local=state.ids.int(), weights=state.weights, pairs=0, active=0)


def chain(candidate: HighThroughput, layer: SyntheticLayer, peer: TorchGroupedMM) -> torch.Tensor:
    state = candidate.prepare()
    out = candidate.finalize(state, peer.run(inputs_of(state)))
    return out if layer.shared is None else out + layer.shared(candidate.x)


def compare(cells: list[dict], scheme: str, tokens: int) -> dict:
    """Compares ours with each baseline, in one row. Baselines without a measurement are left out."""
    at = {cell["backend"]: cell for cell in cells if (cell["scheme"], cell["tokens"]) == (scheme, tokens)}
    ours = {name: at[name]["us"] for name in BACKENDS if name in at}
    row: dict = {"scheme": scheme, "tokens": tokens, "ours_us": ours, "baselines": {}, "ratios": {}}
    row |= {f"{name}_us": at[name]["us"] for name in ("gate", "shared") if name in at}
    pairs = tokens * 8  # top-8, as many as every rank sends
    dtype = DTYPES[scheme]
    peers = {"stored": best_peer(dtype, pairs)}
    if rate := best_rate(dtype, pairs):
        peers["rate"] = rate
    peers["floor"] = {"peer": "none", "us": floor_us(dtype, pairs), "how": "the chip's rate"}
    for name in ("torch", "cutlass", "deepgemm"):
        if f"peer_{name}" in at:
            peers[name] = {"peer": name, "us": at[f"peer_{name}"]["us"], "how": "this run"}
    if "peer_torch" in at:
        row["torch_chain_us"] = at["peer_torch"]["chain_us"]
    for mode in ("deepep_ht", "deepep_ll"):
        if f"bare_{mode}" not in at or "shared" not in at:
            continue
        for name, peer in peers.items():
            us = at[f"bare_{mode}"]["us"] + peer["us"] + at["shared"]["us"]
            row["baselines"][f"bare_{mode} + {name}"] = {"us": us, "experts": peer}
    for name, us in ours.items():
        row["ratios"][name] = {base: us / value["us"] for base, value in row["baselines"].items()}
    over_deepep = [ours[name] for name in ("deepep_ht", "deepep_ll") if name in ours]
    if over_deepep and "nvlink" in ours:
        row["nvlink_over_better_deepep"] = ours["nvlink"] / min(over_deepep)
    return row


def print_rows(rows: list[dict]) -> None:
    for row in (row for row in rows if row["ours_us"]):
        ours = "  ".join(f"{name} {us:.1f}" for name, us in row["ours_us"].items())
        beside = "  ".join(f"{name} {row[f'{name}_us']:.1f}" for name in ("gate", "shared") if f"{name}_us" in row)
        print(f"\n{DTYPES[row['scheme']]}, {row['tokens']} tokens a rank, us: {ours} | {beside}")
        for name, base in row["baselines"].items():
            ratios = "  ".join(f"{mine} {each[name]:.3f}" for mine, each in row["ratios"].items())
            peer = base["experts"]
            print(f"  {name:20} {base['us']:8.1f} ({peer['peer']}, {peer['how']}): ours/this {ratios}")
        if "nvlink_over_better_deepep" in row:
            print(f"  nvlink / ours over the better DeepEP mode: {row['nvlink_over_better_deepep']:.3f} (goal 0.85)")
        mode = "deepep_ll" if row["tokens"] <= BATCHED_CAP else "deepep_ht"
        for base in (base for base in row["baselines"] if base.startswith(f"bare_{mode}") and "floor" not in base):
            best = min(row["ratios"], key=lambda name: row["ratios"][name][base])
            print(f"  best of ours / {base}: {row['ratios'][best][base]:.3f} ({best}; goal 0.90)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--schemes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--tokens", nargs="+", type=int, help="per rank")
    parser.add_argument("--world", type=int, help="ranks; default: every GPU, or 2 with --cpu")
    parser.add_argument("--cpu", action="store_true", help="gloo ranks, small sizes")
    parser.add_argument("--limit-s", type=float, default=120, help="the longest that a rank waits for another")
    parser.add_argument("--budget-s", type=float, default=500, help="what has not ended by then is left out")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--commit", default="", help="recorded in the result")
    options = parser.parse_args()
    options.world = options.world or (2 if options.cpu else torch.cuda.device_count())
    if options.world < 2 or (not options.cpu and options.world > torch.cuda.device_count()):
        parser.error(f"{options.world} ranks on {torch.cuda.device_count()} GPUs: 2 or more are needed, or --cpu")
    small = options.cpu
    options.hidden, options.intermediate, options.top_k = (256, 128, 3) if small else (7168, 2048, 8)
    options.experts = options.world * (8 if small else EXPERTS_PER_RANK)
    options.tokens = options.tokens or ([1, 16] if small else [1, 128, 4096])
    options.json_path, options.json = options.json, None
    jobs = [f"{name}/{scheme}" for scheme in options.schemes for name in (PARTS, *options.only)]
    begin = time.monotonic()
    cells, failures = supervise(jobs, options, run, stop=begin + options.budget_s)
    rows = [compare(cells, s, t) for s in options.schemes for t in options.tokens] if not small else []
    for cell in cells:
        print(json.dumps(cell))
    print_rows(rows)
    for name, error in failures.items():
        print(f"{name}: {error}")
    gpu = None if small else torch.cuda.get_device_name()
    meta = {"gpu": gpu, "world": options.world, "torch": torch.__version__, "commit": options.commit,
            "date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - begin)}  # fmt: skip
    if options.json_path:
        report = {"meta": meta, "rows": rows, "cells": cells, "failures": failures}
        reports.save(options.json_path, report)
    wrong = [error for error in failures.values() if not error.startswith("not available")]
    return 1 if wrong or not cells else 0


if __name__ == "__main__":
    sys.exit(main())
