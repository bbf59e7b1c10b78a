"""Inputs for the Triton experts and the float64 truth, for the interpreter (CPU) and for a GPU alike.

python -m tests.support.triton_cases [-v] [WORD ...]   every case on this machine's GPU, or those with a WORD in their reason or
                                            scheme; one line each with -v or a WORD; exit status 1 when one is wrong
"""

from __future__ import annotations

import dataclasses
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from epserve.experts.activation import activate
from epserve.experts.tiles.sizes import GemmTiles, Tiles
from epserve.experts.tiles.table import Problem
from epserve.experts.triton.batched import BatchedTritonExperts
from epserve.experts.triton.experts import TritonExperts
from epserve.modular_kernel import (
    Activation,
    DispatchHandle,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    HandleBook,
    LayerSpec,
    Prepared,
    QuantConfig,
    Routing,
    TopKWeightAndReduceNaiveBatched,
    Workspaces,
)
from epserve.modular_kernel.measured.buckets import BUCKETS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {
    "none": 6e-3,
    "int8_channel": 2.5e-2,
    "int4": 6e-3,
    "mxfp4": 6e-3,
    "nvfp4": 6e-3,
}  # relative L2 error; every e4m3 scheme: 6e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    why: str
    tokens: int
    scheme: str = "none"
    dynamic: bool = False
    dtype: torch.dtype = BF16
    local: int = 8
    total: int = 16
    hidden: int = 256
    intermediate: int = 256
    top_k: int = 2
    routing: str = "uniform"
    """uniform; hot: half of the slots go to expert 0; remote: no slot is local; twice: both slots name one expert."""
    activation: Activation = Activation()
    bias: bool = False
    quantised_input: bool = False
    tiles: Tiles | None = None

    def __str__(self) -> str:
        return self.why.replace(" ", "-")

    @property
    def spec(self) -> LayerSpec:
        shape = ExpertShape(hidden=self.hidden, intermediate=self.intermediate, num_experts=self.total,
                            top_k=self.top_k, dtype=self.dtype)  # fmt: skip
        return LayerSpec(shape=shape, layout=ExpertLayout.even(self.total, max(1, self.total // self.local)),
                         quant=QuantConfig(scheme=self.scheme, dynamic=self.dynamic), activation=self.activation,
                         bias=self.bias, device="cpu")  # fmt: skip


def gemm(**options) -> GemmTiles:
    return GemmTiles(**{"bn": 128, "bk": 128, **options})


def thick(bm=64, *, expand=False, wide=False, group=(2, 3), **options) -> Tiles:
    first, second = (gemm(**{"warps": 4, "stages": 3, "bk": 64, "group": size, **options}) for size in group)
    return Tiles(bm=bm, expand=expand, gate_up=dataclasses.replace(first, wide=wide), down=second)


def thin(bm=16, *, split=1, split2=1, fly=False, expand=False) -> Tiles:
    return Tiles(
        bm=bm,
        expand=expand,
        gate_up=gemm(swap=True, split=split, fly=fly, stages=3),
        down=gemm(swap=True, split=split2),
    )


CASES = [
    Case(why="no rows", tokens=0),
    Case(why="one token, direct", tokens=1),
    Case(why="direct, split-K in both GEMMs", tokens=5, hidden=512, tiles=thin(split=3, split2=2)),
    Case(why="direct limit exactly", tokens=64),
    Case(why="first size that is sorted", tokens=65),
    Case(why="sorted, split-K", tokens=70, hidden=512, tiles=thin(split=3, split2=2)),
    Case(why="sorted by two launches", tokens=130, top_k=8, local=2, total=8, tiles=thick(64)),
    Case(why="all slots remote", tokens=9, routing="remote"),
    Case(why="all slots remote, sorted", tokens=90, routing="remote"),
    Case(why="the same expert twice in a row", tokens=7, routing="twice"),
    Case(why="one expert has half of the slots", tokens=100, local=4, total=4, routing="hot", tiles=thick(64)),
    Case(why="an expert fills more thin tiles than its share", tokens=70, total=8, routing="hot", tiles=thin(32)),
    Case(why="rows expanded, loads by TMA", tokens=70, local=2, total=2, tiles=thick(64, expand=True)),
    Case(why="gate and up in one accumulator", tokens=70, local=2, total=2, tiles=thick(64, expand=True, wide=True)),
    Case(why="gathered, one accumulator", tokens=70, local=2, total=2, tiles=thick(64, wide=True)),
    Case(why="loops fused", tokens=70, local=2, total=2, tiles=thick(64, expand=True, wide=True, flat=True)),
    Case(why="token tile 128", tokens=90, local=2, total=2, tiles=thick(128, wide=True, expand=True, warps=8)),
    Case(why="groups end with the expert", tokens=100, local=2, total=2, tiles=thick(64, by_expert=True, group=(1, 2))),
    Case(why="groups end with the expert, sorted by two launches", tokens=600, local=3, total=6, routing="hot", hidden=128,
         intermediate=128, tiles=thick(64, by_expert=True, expand=True, wide=True, group=(4, 3))),
    Case(why="swapped thick tiles", tokens=70, local=2, total=2, tiles=thick(64, swap=True)),
    Case(why="float16", tokens=33, dtype=torch.float16),
    Case(why="sizes that no tile divides",
         tokens=70, local=2, total=2, hidden=336, intermediate=208, tiles=thick(64, wide=True, expand=True)),
    Case(why="odd sizes, gathered", tokens=70, local=2, total=2, hidden=336, intermediate=208, tiles=thick(64)),
    Case(why="odd sizes, direct, split", tokens=20, hidden=336, intermediate=208, tiles=thin(split=2, split2=2)),
    Case(why="three experts, top-3 of 3", tokens=31, local=3, total=3, top_k=3),
    Case(why="gpt-oss: clamped swiglu and biases", tokens=21, bias=True,
         activation=Activation(kind="swigluoai", limit=7.0)),
    Case(why="biases with split-K", tokens=21, bias=True, tiles=thin(split=2, split2=2)),
    Case(why="biases, thick", tokens=70, local=2, total=2, bias=True, tiles=thick(64, wide=True)),
    Case(why="gelu", tokens=5, activation=Activation(kind="gelu")),
    Case(why="gelu tanh", tokens=5, activation=Activation(kind="gelu_tanh")),
    Case(why="relu squared", tokens=5, activation=Activation(kind="relu2")),
    Case(why="fp8 static tensor scale", tokens=5, scheme="fp8_tensor"),
    Case(why="fp8 static, quantised on the fly", tokens=5, scheme="fp8_tensor", tiles=thin(fly=True, split=2)),
    Case(why="fp8 static, thick and wide",
         tokens=70, local=2, total=2, scheme="fp8_tensor", tiles=thick(64, wide=True, expand=True)),
    Case(why="fp8 dynamic, direct", tokens=5, scheme="fp8_tensor", dynamic=True),
    Case(why="fp8 dynamic, sorted", tokens=70, local=2, total=2, scheme="fp8_tensor", dynamic=True, tiles=thick(64, expand=True)),
    Case(why="fp8 channel, direct", tokens=5, scheme="fp8_channel"),
    Case(why="fp8 channel, sorted", tokens=70, local=2, total=2, scheme="fp8_channel", tiles=thick(64)),
    Case(why="fp8 channel, odd sizes", tokens=70, local=2, total=2, scheme="fp8_channel", hidden=336, intermediate=208,
         tiles=thick(64, wide=True, expand=True)),
    Case(why="fp8 blocks, direct", tokens=5, scheme="fp8_block"),
    Case(why="fp8 blocks on the fly, split", tokens=5, hidden=512, scheme="fp8_block", tiles=thin(fly=True, split=2)),
    Case(why="fp8 blocks, sorted", tokens=70, local=2, total=2, scheme="fp8_block", tiles=thick(64, bk=128)),
    Case(why="fp8 blocks, expanded", tokens=70, local=2, total=2, scheme="fp8_block", tiles=thick(64, bk=128, expand=True)),
    Case(why="fp8 blocks arrive quantised, direct", tokens=9, scheme="fp8_block", quantised_input=True,
         tiles=thin(fly=True)),
    Case(why="fp8 blocks arrive quantised, sorted", tokens=70, local=2, total=2, scheme="fp8_block", quantised_input=True,
         tiles=thick(64, bk=128, expand=True)),
    Case(why="int8 channel, direct", tokens=5, scheme="int8_channel"),
    Case(why="int8 channel, split", tokens=5, hidden=512, scheme="int8_channel", tiles=thin(split=2)),
    Case(why="int8 channel, sorted", tokens=70, local=2, total=2, scheme="int8_channel", tiles=thick(64)),
    Case(why="int4 weights, direct", tokens=5, scheme="int4"),
    Case(why="int4 weights, sorted", tokens=70, local=2, total=2, scheme="int4"),
    Case(why="mxfp4 weights, split", tokens=5, hidden=512, scheme="mxfp4", tiles=thin(split=2, split2=2)),
    Case(why="gpt-oss: mxfp4, biases, clamped swiglu, sizes that no tile divides", tokens=70, local=2, total=2, hidden=288,
         intermediate=160, scheme="mxfp4", bias=True, activation=Activation(kind="swigluoai", limit=7.0)),
    Case(why="nvfp4 weights, direct", tokens=5, scheme="nvfp4"),
]  # fmt: skip


def special(*, bm=128, bk=64, split=1, **options) -> Tiles:
    part = gemm(bk=bk, specialised=True, stages=4 if bm == 128 else 3, **options)
    return Tiles(bm=bm, expand=True, gate_up=part, down=dataclasses.replace(part, split=split))


BLOCKS = {"scheme": "fp8_block", "hidden": 512, "intermediate": 384}
SPECIALISED = [
    Case(why="specialised, 2-byte floats", tokens=700, hidden=512, intermediate=384, tiles=special()),
    Case(why="specialised, float16, few rows", tokens=90, hidden=512, dtype=torch.float16, tiles=special()),
    Case(why="specialised, inner size no multiple of its step",
         tokens=300, hidden=768, intermediate=128 * 7, tiles=special(bk=64)),
    Case(why="specialised, static fp8", tokens=700, hidden=512, intermediate=384, scheme="fp8_tensor", tiles=special(bk=128)),
    Case(why="specialised, blocks", tokens=700, **BLOCKS, tiles=special(bk=128)),
    Case(why="specialised, blocks, hot", tokens=900, hidden=1024, intermediate=512, routing="hot", scheme="fp8_block",
         tiles=special(bk=128, group=4)),
    Case(why="specialised, blocks, few rows", tokens=200, **BLOCKS, tiles=special(bk=128)),
    Case(why="specialised, blocks arrive quantised", tokens=700, **BLOCKS, quantised_input=True, tiles=special(bk=128)),
    Case(why="specialised, all remote", tokens=200, hidden=512, routing="remote", scheme="fp8_block",
         tiles=special(bk=128)),
    Case(why="specialised, groups end with the expert", tokens=700, hidden=512, intermediate=384,
         tiles=special(group=2, by_expert=True)),
    Case(why="specialised, groups end with the expert, blocks, hot", tokens=900, hidden=1024, intermediate=512, routing="hot",
         scheme="fp8_block", tiles=special(bk=128, group=4, by_expert=True)),
    Case(why="specialised, more items than programs", tokens=3000, hidden=512, intermediate=1024, routing="hot",
         local=8, total=8, tiles=special(group=8, by_expert=True)),
    Case(why="specialised, narrow products", tokens=700, **BLOCKS, tiles=special(bk=128, narrow=True)),
    Case(why="specialised, narrow products, few rows", tokens=200, **BLOCKS, tiles=special(bk=128, narrow=True)),
    Case(why="specialised, narrow products, everything else", tokens=3000, hidden=1024, intermediate=512, routing="hot",
         local=8, total=8, scheme="fp8_block", tiles=special(bk=128, group=8, by_expert=True, lag=2, narrow=True)),
    Case(why="specialised, second part behind, blocks", tokens=900, hidden=1024, intermediate=512, routing="hot",
         scheme="fp8_block", tiles=special(bk=128, lag=1)),
    Case(why="specialised, second part behind, even, blocks", tokens=900, hidden=1024, intermediate=512, scheme="fp8_block",
         tiles=special(bk=128, lag=2)),
    Case(why="specialised, second part behind, narrow products", tokens=900, hidden=1024, intermediate=512, routing="hot",
         scheme="fp8_block", tiles=special(bk=128, lag=3, narrow=True)),
    Case(why="specialised, second part behind, floats", tokens=900, hidden=1024, intermediate=512, routing="hot",
         tiles=special(lag=3)),
    Case(why="specialised, split sums", tokens=700, hidden=512, intermediate=384, tiles=special(split=2)),
    Case(why="specialised, split sums, blocks, steps behind the last column", tokens=700, hidden=512, intermediate=1280,
         scheme="fp8_block", tiles=special(bk=128, split=4, group=4, by_expert=True)),
    Case(why="specialised, split sums, narrow products", tokens=900, hidden=512, intermediate=1280, scheme="fp8_block",
         routing="hot", tiles=special(bk=128, split=3, narrow=True)),
    Case(why="specialised, 192 rows", tokens=700, hidden=512, intermediate=384, tiles=special(bm=192)),
    Case(why="specialised, 192 rows, few of them", tokens=90, hidden=512, intermediate=384, tiles=special(bm=192)),
    Case(why="specialised, 192 rows, everything else", tokens=3000, hidden=1024, intermediate=512, routing="hot", local=8,
         total=8, scheme="fp8_tensor", tiles=special(bm=192, bk=128, group=8, by_expert=True, lag=2, split=2)),
]  # fmt: skip
"""The interpreter cannot run these: they need a GPU of compute capability 9.0."""

FOUR_BITS = [
    Case(why=f"{scheme} weights, {what}", scheme=scheme, hidden=hidden, intermediate=intermediate, local=2, total=2,
         tokens=tokens, dtype=dtype)
    for scheme, hidden, intermediate in (("int4", 1024, 768), ("mxfp4", 1440, 736), ("nvfp4", 1040, 528))
    for what, tokens, dtype in (("one token", 1, BF16), ("thin, float16", 16, torch.float16), ("sorted in one launch", 90, BF16),
                                ("thick", 600, BF16))
]  # fmt: skip
"""Sizes that the interpreter would take minutes for."""
WIDENED = [
    *(Case(why="thick, weights widened once", tokens=900, hidden=512, intermediate=384, scheme=scheme, local=4, total=4)
      for scheme in ("int4", "mxfp4", "nvfp4")),
    Case(why="thick, weights widened once, hot, on two ranks", tokens=1800, hidden=768, intermediate=512, scheme="int4",
         local=4, total=8, routing="hot"),
    Case(why="thick, weights widened once, gpt-oss", tokens=900, hidden=288, intermediate=160, scheme="mxfp4", bias=True,
         local=4, total=4, activation=Activation(kind="swigluoai", limit=7.0)),
]  # fmt: skip
ALL = CASES + SPECIALISED + FOUR_BITS + WIDENED


def make_weights(case: Case, device: str, seed: int = 1) -> tuple[ExpertWeights, tuple[torch.Tensor, torch.Tensor]]:
    """The stored weights, and what they mean: float64 w13 and w2."""
    g = torch.Generator().manual_seed(seed)
    e, K, N = case.local, case.hidden, case.intermediate
    true = [torch.randn(shape, generator=g) / shape[-1] ** 0.5 for shape in ((e, 2 * N, K), (e, K, N))]
    stored, scales = zip(*(_store(w, case) for w in true), strict=True)
    meaning = tuple(_widen(q, s, case) for q, s in zip(stored, scales, strict=True))
    bias = [
        torch.randn(shape, generator=g).to(case.dtype).to(device) if case.bias else None
        for shape in ((e, 2 * N), (e, K))
    ]
    static = case.scheme == "fp8_tensor" and not case.dynamic
    a1, a2 = (torch.tensor([top / 448.0], device=device) if static else None for top in (6.0, 16.0))
    s13, s2 = (None if s is None else s.to(device) for s in scales)
    weights = ExpertWeights(w13_eNK=stored[0].to(device), w2_eKN=stored[1].to(device), activation=case.activation,
                            b13=bias[0], b2=bias[1], s13=s13, s2=s2, a1=a1, a2=a2)  # fmt: skip
    return weights, meaning


def _store(w: torch.Tensor, case: Case):
    """(stored, scale) as `QuantConfig` has it."""
    match case.scheme:
        case "none":
            return w.to(case.dtype), None
        case "int4" | "mxfp4" | "nvfp4":
            return _store_packed(w, case)
        case "fp8_tensor":
            s = w.abs().amax((1, 2)) / 448.0
            return (w / s[:, None, None]).to(FP8), s
        case "fp8_channel":
            s = w.abs().amax(2) / 448.0
            return (w / s[:, :, None]).to(FP8), s
        case "int8_channel":
            s = w.abs().amax(2) / 127.0
            return (w / s[:, :, None]).round().to(torch.int8), s
    blocks = w.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    s = blocks.abs().amax((2, 4)) / 448.0
    return (blocks / s[:, :, None, :, None]).reshape(w.shape).to(FP8), s


GROUPS = {"int4": 128, "mxfp4": 32, "nvfp4": 16}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def _store_packed(w: torch.Tensor, case: Case):
    groups = w.unflatten(2, (-1, GROUPS[case.scheme]))
    top = groups.abs().amax(3)
    if case.scheme == "int4":
        scale = stored = top / 7
        codes = (groups / scale[..., None]).round().clamp(-8, 7) + 8
    else:
        exponent = torch.log2(top / 6).ceil()
        scale, stored = (
            (torch.exp2(exponent), (exponent + 127).to(torch.uint8)) if case.scheme == "mxfp4" else (top / 6,) * 2
        )
        codes = ((groups / scale[..., None])[..., None] - E2M1).abs().argmin(-1)
    codes = codes.flatten(2).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), stored


def _widen_packed(q: torch.Tensor, s: torch.Tensor, case: Case) -> torch.Tensor:
    codes = torch.stack((q & 0xF, q >> 4), -1).flatten(2).long()
    value = codes.double() - 8 if case.scheme == "int4" else E2M1.double()[codes]
    scale = torch.exp2(s.double() - 127) if case.scheme == "mxfp4" else s.double()
    return value * scale.repeat_interleave(GROUPS[case.scheme], 2)


def _widen(q: torch.Tensor, s: torch.Tensor | None, case: Case) -> torch.Tensor:
    if case.scheme in GROUPS:
        return _widen_packed(q, s, case)
    w = q.double()
    if s is None:
        return w
    if case.scheme == "fp8_block":
        return w * s.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return w * (s[:, None, None] if s.ndim == 1 else s[:, :, None]).double()


def make_routing(case: Case, device: str, seed: int = 2) -> Routing:
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand((case.tokens, case.total), generator=g)
    if case.routing == "hot":
        scores[:, 0] = 2.0
    ids = scores.topk(case.top_k, 1).indices
    if case.routing == "twice":
        ids[:, 1] = ids[:, 0]
    if case.routing == "remote":
        ids[:] = -1
    ids = torch.where(ids < case.local, ids, -1).int()
    weights = torch.rand((case.tokens, case.top_k), generator=g) + 0.1
    weights[ids < 0] = float("nan")  # ignored, says the contract
    return Routing(ids_Mt=ids.to(device), weights_Mt=weights.to(device))


def make_input(case: Case, device: str, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.randn((case.tokens, case.hidden), generator=torch.Generator().manual_seed(seed))
    x[:, : min(64, case.hidden)] *= 0.01
    if not case.quantised_input:
        return x.to(case.dtype).to(device), None
    blocks = x.unflatten(1, (-1, 128))
    scales = blocks.abs().amax(2) / 448.0
    return (blocks / scales[:, :, None]).flatten(1).to(FP8).to(device), scales.to(device)


def truth(case: Case, meaning, weights: ExpertWeights, x, scales, routing: Routing) -> torch.Tensor:
    """Float64, one slot after the other."""
    wide = x.cpu().double()
    if scales is not None:
        wide = wide * scales.cpu().double().repeat_interleave(128, 1)
    out = torch.zeros((case.tokens, case.hidden), dtype=torch.float64)
    ids, topk_weights = routing.ids_Mt.cpu(), routing.weights_Mt.cpu()
    for expert in range(case.local):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        h = wide[token] @ meaning[0][expert].T
        if case.bias:
            h = h + weights.b13[expert].cpu().double()
        y = activate(h, case.activation) @ meaning[1][expert].T
        if case.bias:
            y = y + weights.b2[expert].cpu().double()
        out.index_add_(0, token, y * topk_weights[token, slot].double()[:, None])
    return out


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    got = out.cpu().double()
    assert bool(torch.isfinite(got).all()), "values that are not finite"
    return ((got - want).norm() / want.norm().clamp(min=1e-20)).item()


def tolerance(case: Case) -> float:
    return TOLERANCE.get(case.scheme, 6e-2) if case.dtype != torch.float16 else 2e-3


def standard(case: Case, device: str) -> TritonExperts:
    experts = TritonExperts(dataclasses.replace(case.spec, device=device))
    if case.tiles is not None:
        experts.table = {Problem.of(case.spec, case.local).key: dict.fromkeys(BUCKETS, case.tiles)}
    return experts


def _roll(rows: torch.Tensor, shift: int) -> torch.Tensor:
    return rows.view(torch.uint8).roll(shift, 0).view(rows.dtype)


def run_standard(case: Case, device: str, *, poison: bool = True, experts: TritonExperts | None = None, shift: int = 0):
    """One `apply` on poisoned scratch; `shift` permutes the tokens, which must not change any token's bits."""
    experts = experts or standard(case, device)
    weights, meaning = make_weights(case, device)
    x, scales = make_input(case, device)
    routing = make_routing(case, device)
    prepared = Prepared(x=_roll(x, shift), scales=scales if scales is None else _roll(scales, shift),
                        routing=Routing(ids_Mt=_roll(routing.ids_Mt, shift), weights_Mt=_roll(routing.weights_Mt, shift)),
                        handle=DispatchHandle(HandleBook("test"), None))  # fmt: skip
    shapes = experts.workspace_shapes(case.tokens, case.top_k, case.local)
    spaces = Workspaces(device)
    spaces.reserve(shapes)
    if poison:
        spaces.poison()
    workspace = spaces.carve(shapes)
    out = experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)
    return _roll(out, -shift), truth(case, meaning, weights, x, scales, routing)


def run_batched(case: Case, device: str, *, capacity: int, fill: float = float("nan"), spare: int | None = None):
    """The same tokens in the batched format; rows past the count hold `fill`. spare: scales lie column by column, as DeepEP
    leaves them, with so many columns more than the rows have."""
    experts = BatchedTritonExperts(dataclasses.replace(case.spec, device=device))
    if case.tiles is not None:
        experts.table = {Problem.of(case.spec, case.local).key: dict.fromkeys(BUCKETS, case.tiles)}
    weights, meaning = make_weights(case, device)
    x, scales = make_input(case, device)
    routing = make_routing(case, device)
    rows, row_scales, counts = _to_batched(case, x, scales, routing, capacity, fill)
    if row_scales is not None and spare is not None:
        groups = row_scales.shape[2]
        columns = torch.full((case.local, groups + spare, capacity), fill, device=device).transpose(1, 2)
        row_scales = columns[..., :groups].copy_(row_scales)
    prepared = Prepared(
        x=rows, scales=row_scales, expert_num_tokens=counts, handle=DispatchHandle(HandleBook("test"), None)
    )
    shapes = experts.workspace_shapes(0, case.top_k, case.local, capacity)
    spaces = Workspaces(device)
    spaces.reserve(shapes)
    spaces.poison()
    workspace = spaces.carve(shapes)
    y = experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)
    out = torch.empty((case.tokens, case.hidden), dtype=case.dtype, device=device)
    TopKWeightAndReduceNaiveBatched().apply(y, routing, out)
    return out, truth(case, meaning, weights, x, scales, routing)


def _to_batched(case: Case, x, scales, routing: Routing, capacity: int, fill: float):
    device = x.device
    rows = torch.full((case.local, capacity, case.hidden), fill).to(x.dtype).to(device)
    row_scales = None if scales is None else torch.full((case.local, capacity, scales.shape[1]), fill, device=device)
    counts = []
    for expert in range(case.local):
        token = (routing.ids_Mt.cpu() == expert).nonzero()[:, 0].to(device)
        counts.append(len(token))
        rows.view(torch.uint8)[expert, : len(token)] = x.view(torch.uint8)[token]
        if row_scales is not None:
            row_scales[expert, : len(token)] = scales[token]
    return rows, row_scales, torch.tensor(counts, dtype=torch.int32, device=device)


def check(job: tuple[int, bool]) -> tuple[bool, str]:
    """One case on the GPU: is it right, and what was seen."""
    case, batched = ALL[job[0]], job[1]
    name = f"{'batched ' if batched else 'standard'} {case.why}"
    try:
        out, want = run_batched(case, "cuda", capacity=case.tokens + 5) if batched else run_standard(case, "cuda")
        error = relative_error(out, want) if case.tokens else 0.0
        if batched:
            same = not case.quantised_input or all(
                torch.equal(out, run_batched(case, "cuda", capacity=case.tokens + 5, spare=spare)[0])
                for spare in (0, 3)
            )
        else:
            same = torch.equal(out, run_standard(case, "cuda", shift=case.tokens // 2)[0])
        return error < tolerance(case) and same, f"{name}: error {error:.1e}, same bits {same}"
    except Exception as problem:  # every case is to be seen
        return False, f"{name}: {type(problem).__name__}: {problem}".replace("\n", " ")[:300]


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "-v"]
    chosen = [
        i for i, case in enumerate(ALL) if not words or any(word in f"{case.why}, {case.scheme}" for word in words)
    ]
    jobs = [(i, batched) for i in chosen for batched in (False, True) if ALL[i].tokens or not batched]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        results = list(pool.map(check, jobs))
    for ok, text in results:
        if not ok or words or "-v" in sys.argv:
            print("ok " if ok else "BAD", text)
    bad = sum(not ok for ok, _ in results)
    print(f"{bad} wrong of {len(jobs)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
