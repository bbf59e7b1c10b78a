"""What only a GPU can show of the experts: rows beyond 2^31 elements, a GPU that other processes use too, CUDA graphs that are
replayed with other inputs, products of libraries, and which backend is measured as the fastest.

python -m tests.gpus.triton_gpu [WORD ...]       all of them, or those with a WORD in their name; exit status 1 when one is wrong
"""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.expert_inputs import MORE_TOLERANCE, TOLERANCE, Inputs, Shape, make_inputs, make_weights, relative_error
from epserve.all2all.local import LocalAll2AllManager
from epserve.experts import REGISTRY
from epserve.experts.tiles.sizes import GemmTiles, Tiles
from epserve.experts.tiles.table import Problem
from epserve.experts.triton.batched import BatchedTritonExperts
from epserve.experts.triton.experts import TritonExperts
from epserve.modular_kernel import (
    Activation,
    DispatchHandle,
    ExpertLayout,
    FusedMoEModularKernel,
    HandleBook,
    Prepared,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
    Workspaces,
    why_not,
)
from epserve.modular_kernel.measured.buckets import BUCKETS
from epserve.modular_kernel.measured.selection import MeasuredExperts, Measuring
from tests.support.triton_cases import Case, make_routing, run_standard, special, thick, thin, tolerance
from tests.support.triton_cases import make_weights as make_case_weights
from tests.support.triton_cases import relative_error as case_error

ROWS, WIDTH = 524_289, 4096
"""(rows, columns) of activations, of the intermediate and of the result: 2^31 + 4,096 elements each."""
LARGE = Shape(local_experts=2, global_experts=2, hidden=WIDTH, intermediate=WIDTH, topk=1)
THICK = GemmTiles(bn=128, bk=64, group=8, warps=8, stages=3)
THICK_BLOCK = GemmTiles(bn=128, bk=128, group=8, warps=8, stages=3)
SPECIALISED = {bk: GemmTiles(bn=128, bk=bk, group=8, specialised=True) for bk in (64, 128)}
BOOK = HandleBook("test")

LARGE_CASES: dict[str, tuple[str, Tiles | None]] = {
    "rows gathered, bf16": ("bf16", Tiles(bm=128, gate_up=THICK, down=THICK)),
    "rows expanded, bf16": ("bf16", Tiles(bm=128, expand=True, gate_up=THICK, down=THICK)),
    "specialised, bf16": ("bf16", Tiles(bm=128, expand=True, gate_up=SPECIALISED[64], down=SPECIALISED[64])),
    "static fp8, rows quantised first": ("fp8_tensor", Tiles(bm=128, gate_up=THICK_BLOCK, down=THICK_BLOCK)),
    "fp8, a scale a row": ("fp8_channel", Tiles(bm=128, gate_up=THICK_BLOCK, down=THICK_BLOCK)),
    "fp8 blocks, gathered": ("fp8_block", Tiles(bm=128, gate_up=THICK_BLOCK, down=THICK_BLOCK)),
    "fp8 blocks, specialised": ("fp8_block", Tiles(bm=128, expand=True, gate_up=SPECIALISED[128], down=SPECIALISED[128])),
    "4-bit weights": ("mxfp4", None),
}  # fmt: skip
"""Name -> dtype and tiles (None: the rule's own)."""


def layer_of(name: str, rows: int):
    """A case's weights and inputs, and its experts on poisoned scratch as a function."""
    dtype, tiles = LARGE_CASES[name]
    weights, inputs = make_weights(LARGE, dtype, "cuda"), make_inputs(LARGE, rows, "cuda", 7)
    experts = TritonExperts(LARGE.spec(dtype, "cuda"))
    if tiles is not None:
        experts.table = {Problem.of(experts.spec, LARGE.local_experts).key: dict.fromkeys(BUCKETS, tiles)}
    routing = Routing(ids_Mt=inputs.ids_local, weights_Mt=inputs.weights)
    prepared = Prepared(x=inputs.x, routing=routing, handle=DispatchHandle(BOOK, None))
    spaces, shapes = Workspaces("cuda"), experts.workspace_shapes(rows, 1, LARGE.local_experts)
    spaces.reserve(shapes)

    def run() -> torch.Tensor:
        spaces.poison()
        workspace = spaces.carve(shapes)
        return experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)

    return weights, inputs, run


def large_standard(name: str) -> str:
    """Rows past 2^31 elements in x, h, y and the result; 256 rows, the last one among them, against float64."""
    torch.cuda.reset_peak_memory_stats()
    weights, inputs, run = layer_of(name, ROWS)
    return _judge_rows(weights, inputs, run(), LARGE_CASES[name][0])


def large_batched() -> str:
    """`(2, T, K)` with the second expert's rows past 2^31 elements; only the rows around its end are counted in."""
    capacity, counts = ROWS // 2 + 129, [70, ROWS // 2 + 65]
    torch.cuda.reset_peak_memory_stats()
    weights = make_weights(LARGE, "bf16", "cuda")
    x = torch.empty((2, capacity, WIDTH), dtype=torch.bfloat16, device="cuda").normal_()
    experts = BatchedTritonExperts(LARGE.spec("bf16", "cuda"))
    held = torch.tensor(counts, dtype=torch.int32, device="cuda")
    prepared = Prepared(x=x, expert_num_tokens=held, handle=DispatchHandle(BOOK, None))
    spaces, shapes = Workspaces("cuda"), experts.workspace_shapes(0, 1, 2, capacity)
    spaces.reserve(shapes)
    spaces.poison()
    workspace = spaces.carve(shapes)
    out = experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)
    rows = [(0, 0), (0, 69), (1, 0), (1, counts[1] - 66), (1, counts[1] - 1)]
    sample = Inputs(
        x=torch.stack([x[at] for at in rows]),
        ids_local=torch.tensor([[expert] for expert, _ in rows], dtype=torch.int32, device="cuda"),
        weights=torch.ones((len(rows), 1), device="cuda"), pairs=len(rows), active=2,
    )  # fmt: skip
    return _judge_rows(weights, sample, torch.stack([out[at] for at in rows]), "bf16")


def _judge_rows(weights, inputs: Inputs, out: torch.Tensor, dtype: str) -> str:
    error = relative_error(weights, inputs, out, 256, dtype)
    most = torch.cuda.max_memory_allocated() / 2**30
    assert error < (TOLERANCE | MORE_TOLERANCE)[dtype], f"relative L2 error {error:.1e}"
    assert most < 60, f"{most:.0f} GiB"
    return f"error {error:.1e}, {most:.1f} GiB"


HOG = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


def beside_another_process(name: str) -> str:
    """The GPU turns between two processes in the middle of kernels: what comes out is bit for bit what comes out alone."""
    _, _, run = layer_of(name, ROWS // 4)
    want = run().clone()
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE)
    try:
        assert hog.stdout is not None and hog.stdout.readline() == b"busy\n"
        wrong = sum(not torch.equal(run(), want) for _ in range(20))
        assert hog.poll() is None, "the other process ended"
    finally:
        hog.kill()
        hog.wait()
    assert not wrong, f"{wrong} of 20 runs differ"
    return "20 runs bit-equal"


GRAPH_CASES = [
    Case(why="direct", tokens=8, hidden=512),
    Case(why="direct, split-K in both GEMMs", tokens=5, hidden=512, tiles=thin(split=3, split2=2)),
    Case(why="sorted in one launch", tokens=70, hidden=512),
    Case(why="sorted in two launches", tokens=700, hidden=512, tiles=thick(128, wide=True, expand=True, warps=8)),
    Case(why="specialised", tokens=700, hidden=512, intermediate=384, tiles=special()),
    Case(why="biases", tokens=70, hidden=512, bias=True),
    Case(why="static fp8", tokens=70, hidden=512, scheme="fp8_tensor"),
    Case(why="fp8 channel", tokens=700, hidden=512, scheme="fp8_channel"),
    Case(why="fp8 blocks, thin", tokens=8, hidden=512, scheme="fp8_block"),
    Case(why="fp8 blocks, thick", tokens=700, hidden=512, scheme="fp8_block"),
    Case(why="int8 channel", tokens=70, hidden=512, scheme="int8_channel"),
    Case(why="int4", tokens=70, hidden=512, scheme="int4"),
    Case(why="mxfp4", tokens=8, hidden=512, scheme="mxfp4"),
    Case(why="nvfp4", tokens=700, hidden=512, scheme="nvfp4"),
]


BATCHES = (("one token", 1, "uniform"), ("thick", 900, "uniform"), ("hot", 300, "hot"), ("remote", 9, "remote"))
ROWWISE = (("none", False), ("fp8_tensor", False), ("fp8_tensor", True), ("fp8_channel", False))
LIBRARY_CASES = {
    "cutlass": [
        *(Case(why=f"{scheme}{' dynamic' * dynamic}, {what}", scheme=scheme, dynamic=dynamic, hidden=512, intermediate=384,
               tokens=tokens, routing=routing)
          for scheme, dynamic in ROWWISE for what, tokens, routing in BATCHES),
        Case(why="odd sizes, fp8", tokens=70, hidden=336, intermediate=208, scheme="fp8_channel"),
        Case(why="odd sizes, bf16", tokens=70, hidden=336, intermediate=208),
        Case(why="clamped swiglu", tokens=70, hidden=512, activation=Activation(kind="swigluoai", limit=7.0)),
    ],
    "deepgemm": [
        Case(why=f"{what}{', quantised before' * ready}", scheme="fp8_block", hidden=512, intermediate=384,
             tokens=tokens, routing=routing, quantised_input=ready)
        for what, tokens, routing in BATCHES for ready in (False, True)
    ],
}  # fmt: skip


def library(name: str, case: Case) -> str:
    """Against float64, and the same bits for tokens in another order."""
    backend = REGISTRY.get(name)
    if missing := backend.unavailable():
        return f"not run: {missing}"
    experts = backend(dataclasses.replace(case.spec, device="cuda"))
    out, want = run_standard(case, "cuda", experts=experts)
    error = case_error(out, want)
    assert error < tolerance(case), f"relative L2 error {error:.1e}"
    assert torch.equal(out, run_standard(case, "cuda", experts=experts, shift=case.tokens // 2)[0]), (
        "bits depend on order"
    )
    return f"error {error:.1e}"


def measured(scheme: str) -> str:
    """All backends of Standard format that this machine has, timed against each other: one rank of eight, DeepSeek's sizes."""
    shape = Shape(local_experts=32, global_experts=256, hidden=7168, intermediate=2048, topk=8)
    spec, weights = shape.spec(scheme, "cuda"), make_weights(shape, scheme, "cuda")
    record, found = LocalAll2AllManager.prepare_finalize.capability, {}
    for name in ("triton", "cutlass", "deepgemm"):
        backend = REGISTRY.get(name)
        one = dataclasses.replace(spec, layout=ExpertLayout.even(256, 1))
        if not backend.unavailable() and not why_not(record, backend.capability, one):
            found[name] = backend(spec)
    experts = MeasuredExperts(spec, found, measuring=Measuring(budget_s=10))
    begin = time.monotonic()
    experts.warm_up(experts.prepare_weights(weights), 16384)
    for line in experts.explain():
        print("   ", line)
    assert not experts.left_out, experts.left_out
    assert len(found) == 1 or max(experts.times) == 16384
    return f"{', '.join(found)} in {time.monotonic() - begin:.1f} s"


def graph_standard(case: Case, name: str = "triton") -> str:
    """The whole modular kernel on one rank: captured once, replayed with other rows, ids and weights; bit-equal to eager."""
    spec = dataclasses.replace(case.spec, device="cuda", cuda_graph=True)
    one_rank = dataclasses.replace(spec, layout=type(spec.layout)(counts=(case.total,)))
    whole = dataclasses.replace(case, local=case.total)
    manager = LocalAll2AllManager(RankContext(device=torch.device("cuda", 0)))
    options = PrepareFinalizeOptions(max_tokens_per_rank=case.tokens)
    backend = REGISTRY.get(name)
    if missing := backend.unavailable():
        return f"not run: {missing}"
    experts = backend(one_rank)
    if isinstance(experts, TritonExperts) and case.tiles is not None:
        experts.table = {Problem.of(one_rank, case.total).key: dict.fromkeys(BUCKETS, case.tiles)}
    kernel = FusedMoEModularKernel(manager.get_handle(one_rank, options), experts)
    weights, _ = make_case_weights(whole, "cuda")
    batches = [_batch(whole, seed) for seed in range(3)]
    kernel.warm_up(weights)
    x, routing = _batch(whole, 9)
    x, ids, shares = x.clone(), routing.ids_Mt.clone(), routing.weights_Mt.clone()

    def run(rows, routed):
        return kernel.forward(rows, routed, weights=weights)

    graph, out = _capture(lambda: run(x, Routing(ids_Mt=ids, weights_Mt=shares)))
    for rows, routed in batches:
        want = run(rows, routed).clone()
        for target, source in ((x, rows), (ids, routed.ids_Mt), (shares, routed.weights_Mt)):
            target.copy_(source)
        _replay_equals(graph, out, want, kernel.workspaces)
    manager.destroy()
    return f"{len(batches)} replays bit-equal to eager"


def graph_batched(case: Case) -> str:
    """The same for the batched experts: the counts change from replay to replay, from thin to thick and back."""
    capacity = case.tokens
    spec = dataclasses.replace(case.spec, device="cuda", cuda_graph=True)
    experts = BatchedTritonExperts(spec)
    weights, _ = make_case_weights(case, "cuda")
    spaces, shapes = Workspaces("cuda"), experts.workspace_shapes(0, case.top_k, case.local, capacity)
    spaces.reserve(shapes)
    x = torch.randn((case.local, capacity, case.hidden), device="cuda").to(case.dtype)
    counts = torch.full((case.local,), capacity, dtype=torch.int32, device="cuda")

    def run():
        prepared = Prepared(x=x, expert_num_tokens=counts, handle=DispatchHandle(BOOK, None))
        workspace = spaces.carve(shapes)
        return experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)

    graph, out = _capture(run)
    draws = torch.Generator().manual_seed(5)
    for most in (1, capacity, max(1, capacity // 20)):
        x.copy_(torch.randn(x.shape, generator=draws))
        held = torch.randint(0, most + 1, (case.local,), generator=draws, dtype=torch.int32)
        held[0] = most
        counts.copy_(held)
        real = torch.arange(capacity)[None, :] < held[:, None]
        want = run()[real].clone()
        _replay_equals(graph, out, want, spaces, real.cuda())
    return "3 replays bit-equal to eager"


def _batch(case: Case, seed: int) -> tuple[torch.Tensor, Routing]:
    x = torch.randn((case.tokens, case.hidden), generator=torch.Generator().manual_seed(100 + seed))
    return x.to(case.dtype).cuda(), make_routing(case, "cuda", 200 + seed)


def _capture(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        out = run()
    return graph, out


def _replay_equals(graph, out, want, spaces: Workspaces, real: torch.Tensor | None = None) -> None:
    """On poisoned scratch; the result is NaN before."""
    out.fill_(float("nan"))
    spaces.poison()
    graph.replay()
    torch.cuda.synchronize()
    got = out if real is None else out[real]
    assert bool(torch.isfinite(want).all()), "eager: values that are not finite"
    assert torch.equal(got, want), f"{int((got != want).sum())} of {want.numel()} elements differ from eager"


CHECKS: dict[str, Callable[[], str]] = {
    **{f"large: {name}": lambda name=name: large_standard(name) for name in LARGE_CASES},
    **{f"beside: {name}": lambda name=name: beside_another_process(name) for name, (_, t) in LARGE_CASES.items() if t},
    "large: batched, bf16": large_batched,
    **{f"graph: {case.why}": lambda case=case: graph_standard(case) for case in GRAPH_CASES},
    **{f"graph: batched, {case.why}": lambda case=case: graph_batched(case) for case in GRAPH_CASES
       if case.tiles is None and not case.bias},
    **{f"{name}: {case.why}": lambda name=name, case=case: library(name, case)
       for name, cases in LIBRARY_CASES.items() for case in cases},
    **{f"{name} graph: {case.why}": lambda name=name, case=case: graph_standard(case, name)
       for name, cases in LIBRARY_CASES.items() for case in cases if case.tokens == 900 and not case.quantised_input},
    **{f"measured: {scheme}": lambda scheme=scheme: measured(scheme)
       for scheme in ("bf16", "fp8_tensor", "fp8_channel", "fp8_block")},
}  # fmt: skip


def main() -> int:
    words, bad = sys.argv[1:], 0
    chosen = [name for name in CHECKS if not words or any(word in name for word in words)]
    for name in chosen:
        begin = time.monotonic()
        try:
            seen = CHECKS[name]()
            text = f"{'-- ' if seen.startswith('not run') else 'ok '} {name}: {seen}"
        except Exception as problem:  # every check is to be seen
            bad += 1
            text = f"BAD {name}: {type(problem).__name__}: {problem}".replace("\n", " ")[:300]
        print(f"{text} ({time.monotonic() - begin:.1f} s)", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{bad} wrong of {len(chosen)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
