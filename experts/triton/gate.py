"""The gate by two Triton launches: what `epserve.rank.gate.route` runs on CUDA devices. Graph-safe, no host sync, no atomics.

A token's ids and weights are the same bits in a batch of any size. Among equal scores the lowest expert id comes first.

Legend: M tokens, K hidden size, E experts, t = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from epserve.experts.kernels import gate as kernels
from epserve.modular_kernel import GateSpec, GateWeights, Routing

from . import warmup as triton_warmup
from .compiles import COUNTER

MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 1024, 32, 64
"""A row of scores lies in registers, and the choice is unrolled."""
CHUNK = {2: 256, 4: 128}
"""Values of K in one accumulator, by bytes of a weight: 16 or 24 steps of a tensor core, which truncates sums instead of
rounding them. Float32 weights and their three pieces take more registers."""
OUTER = 4
"""Sums of chunks that are added last: programs for each tile of a thick batch."""
ROWS = 1
"""Tokens a program of the second launch."""
LOADS = 8192
"""Numbers that one warp of the second launch reads. More spill registers, and a row within one warp needs no barrier."""
SCORINGS = {
    "softmax": kernels.SOFTMAX.value,
    "sigmoid": kernels.SIGMOID.value,
    "softmax_of_topk": kernels.SOFTMAX_OF_TOPK.value,
}
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Holds bt tokens x be experts a program. whole: a program sums every chunk of one of the OUTER sums, else one chunk."""

    up_to: float
    """The largest M that it serves."""
    bt: int
    be: int = 64
    whole: bool = False
    warps: int = 4
    stages: int = 3


def tiles(num_experts: int, weight_dtype: torch.dtype, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Returns tiles from few tokens to many. A thin batch is split over K as far as possible, to spread weights over the chip.

    Tiles are smaller before compute capability 9.0: products of single warps hold both operands in registers there, and a
    multiprocessor may have no more than 99 KiB of shared memory."""
    narrow = Tile(up_to=float("inf"), bt=64, whole=True)
    if capability < (9, 0):
        return Tile(up_to=32, bt=16), Tile(up_to=256, bt=32), narrow
    wide = num_experts > 64 and weight_dtype != torch.float32
    thick = Tile(up_to=float("inf"), bt=128, be=128, whole=True, warps=8) if wide else narrow
    return Tile(up_to=32, bt=16), Tile(up_to=256, bt=64), thick


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def unavailable() -> str | None:
    return triton_warmup.unavailable()


def chooses(spec: GateSpec, num_experts: int) -> bool:
    """Returns whether `choose` can compute this gate."""
    return num_experts <= MAX_EXPERTS and spec.top_k <= MAX_TOP_K and spec.num_groups <= MAX_GROUPS


def multiplies(x_MK: torch.Tensor, weights: GateWeights, spec: GateSpec) -> bool:
    """Returns whether the kernel's products are exact: both operands of one 16-bit dtype, or bf16 x float32 (three pieces)."""
    w_EK = weights.weight_EK
    exact = x_MK.dtype == w_EK.dtype or (x_MK.dtype, w_EK.dtype) == (torch.bfloat16, torch.float32)
    lie = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x_MK, w_EK)) and x_MK.shape[1] % 16 == 0
    return x_MK.dtype in (torch.bfloat16, torch.float16) and exact and lie and (
        spec.logits_float32 or x_MK.dtype == w_EK.dtype)  # fmt: skip


def route(x_MK: torch.Tensor, weights: GateWeights, spec: GateSpec, *, ids_dtype: torch.dtype = torch.int32) -> Routing:
    """Routes rows if `multiplies` and `chooses` hold. Logits are float32, rounded to x's dtype unless the spec says float32."""
    M, K = x_MK.shape
    E = weights.weight_EK.shape[0]
    chunk = CHUNK[weights.weight_EK.element_size()]
    outer, inner = splits(K, chunk)
    tile = next(each for each in tiles(E, weights.weight_EK.dtype, _capability(x_MK.device)) if each.up_to >= M)
    num_parts = outer if tile.whole else outer * inner
    parts = torch.empty((num_parts, M, E), dtype=torch.float32, device=x_MK.device)
    if M:
        grid = (triton.cdiv(E, tile.be) * triton.cdiv(M, tile.bt), num_parts)
        _launch(kernels.gate_logits, grid, x_MK, weights.weight_EK, parts, M, E=E, K=K, CHUNK=chunk, INNER=inner,
                WHOLE=tile.whole, BE=tile.be, BT=tile.bt, num_warps=tile.warps, num_stages=tile.stages)  # fmt: skip
    dtype = torch.float32 if spec.logits_float32 else x_MK.dtype
    split = (outer, 1 if tile.whole else inner)
    bias, correction = weights.bias_E, weights.correction_bias_E
    return _choose(parts, bias, correction, spec, split=split, dtype=dtype, ids_dtype=ids_dtype)


def choose(
    logits_ME: torch.Tensor,
    correction_bias_E: torch.Tensor | None,
    spec: GateSpec,
    *,
    ids_dtype: torch.dtype = torch.int32,
) -> Routing:
    """Computes ids and weights from logits in any of `DTYPES`."""
    parts, dtype = logits_ME.contiguous()[None], logits_ME.dtype
    return _choose(parts, None, correction_bias_E, spec, split=(1, 1), dtype=dtype, ids_dtype=ids_dtype)


def warm_up(weights: GateWeights, spec: GateSpec, dtype: torch.dtype, *, ids_dtype: torch.dtype = torch.int32) -> None:
    """Compiles and loads the kernels for batches of any size, on the weights' device. A repeated call takes 20 ms."""
    E, K = weights.weight_EK.shape
    device = weights.weight_EK.device
    COUNTER.install()
    with COUNTER.warming():
        for tile in tiles(E, weights.weight_EK.dtype, _capability(device)):
            M = 512 if tile.whole else int(tile.up_to)
            x_MK = torch.zeros((M, K), dtype=dtype, device=device)
            if multiplies(x_MK, weights, spec):
                route(x_MK, weights, spec, ids_dtype=ids_dtype)
        logits = torch.zeros((1, E), dtype=torch.float32 if spec.logits_float32 else dtype, device=device)
        choose(
            logits, weights.correction_bias_E, spec, ids_dtype=ids_dtype
        )  # for rows that the first kernel cannot take
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def splits(hidden: int, chunk: int) -> tuple[int, int]:
    """Returns (outer, inner), the levels of the sum over K above one chunk, the same for batches of any size."""
    chunks = triton.cdiv(hidden, chunk)
    outer = min(OUTER, chunks)
    return outer, triton.cdiv(chunks, outer)


def _choose(
    parts: torch.Tensor, bias, correction, spec: GateSpec, *, split: tuple[int, int], dtype, ids_dtype: torch.dtype
) -> Routing:
    _, M, E = parts.shape
    ids_Mt = torch.empty((M, spec.top_k), dtype=ids_dtype, device=parts.device)
    weights_Mt = torch.empty((M, spec.top_k), dtype=torch.float32, device=parts.device)
    limited = spec.top_groups < spec.num_groups and spec.scoring != "softmax_of_topk"
    groups, top_groups = (spec.num_groups, spec.top_groups) if limited else (1, 1)
    if M:
        _launch(kernels.choose_experts, (triton.cdiv(M, ROWS),), parts, bias, correction, ids_Mt, weights_Mt, M, E=E,
                OUTER=split[0], INNER=split[1], LOGITS=DTYPES[dtype], SCORING=SCORINGS[spec.scoring], GROUPS=groups,
                TOP_GROUPS=top_groups, TOP2=spec.group_score == "top2_sum", TOPK=spec.top_k,
                RENORMALISE=spec.renormalise, EPSILON=float(spec.renormalise_epsilon),
                FACTOR=float(spec.routed_scaling_factor), ROUND=spec.round_weights, GP=triton.next_power_of_2(groups),
                SP=triton.next_power_of_2(E // groups), TP=triton.next_power_of_2(spec.top_k), ROWS=ROWS,
                num_warps=row_warps(E, split[0] * split[1]))  # fmt: skip
    return Routing(ids_Mt=ids_Mt, weights_Mt=weights_Mt)


def row_warps(num_experts: int, num_parts: int) -> int:
    return min(8, triton.next_power_of_2(triton.cdiv(ROWS * triton.next_power_of_2(num_experts) * num_parts, LOADS)))


def _launch(kernel, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    x = args[0]
    pdl = x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)
    extra = {"launch_pdl": True} if pdl else {}
    kernel[grid](*args, PDL=pdl, **constants, **extra)
