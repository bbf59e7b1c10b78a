"""torch's grouped GEMMs with small Triton kernels around them: the calibration peer, timed in the same run on the same inputs.

Its drift from the time that `peers/h200.csv` holds for it tells how far this machine is from the one behind that table. bf16,
and fp8 with one static scale a tensor. count -> permute (and quantise) -> GEMM -> SiLU * up (and quantise) -> GEMM ->
weighted sum.
"""

import torch
import triton
import triton.language as tl

from benchmarks.expert_inputs import Inputs
from epserve.modular_kernel import ExpertWeights


@triton.jit
def _count(ids, counts, n, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + offsets, mask=offsets < n, other=-1)
    expert = tl.where(expert < 0, EXPERTS, expert)  # pairs of other ranks fall into a bin that is not stored
    histogram = tl.histogram(expert.to(tl.int32), BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + bins, histogram, mask=(bins < EXPERTS) & (histogram > 0))


@triton.jit
def _permute(x, ids, counts, cursor, row_of_pair, ends, out, scale, K, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
             BINS: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    pair = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if pair == 0:
        ends_now = tl.cumsum(tl.load(counts + bins, mask=bins < EXPERTS, other=0), 0)
        tl.store(ends + bins, ends_now, mask=bins < EXPERTS)
    expert = tl.load(ids + pair)
    if expert < 0:
        tl.store(row_of_pair + pair, -1)
        return
    row = tl.sum(tl.load(counts + bins, mask=bins < expert, other=0), 0) + tl.atomic_add(cursor + expert, 1)
    tl.store(row_of_pair + pair, row)
    source = x + (pair // TOPK).to(tl.int64) * K
    target = out + row.to(tl.int64) * K
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + column, mask=column < K, other=0.0)
        if FP8:
            scaled = value.to(tl.float32) * (1.0 / scale)
            value = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)
        tl.store(target + column, value, mask=column < K)


@triton.jit
def _silu_mul(h, out, ends, scale, N, EXPERTS: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(ends + EXPERTS - 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    row = row.to(tl.int64)
    gate = tl.load(h + row * 2 * N + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * N + N + column, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if FP8:
        value = tl.minimum(tl.maximum(value * (1.0 / scale), -448.0), 448.0)
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_sum(y, row_of_pair, weights, out, K, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < K
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(row_of_pair + token * TOPK + k)
        if row >= 0:
            weight = tl.load(weights + token * TOPK + k)
            total += weight * tl.load(y + row.to(tl.int64) * K + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * K + column, total.to(tl.bfloat16), mask=mask)


class TorchGroupedMM:
    """torch._grouped_mm (bf16) or torch._scaled_grouped_mm (fp8, row-wise scales that hold one value a tensor)."""

    MAX_TOKENS = 16384

    def __init__(self, weights: ExpertWeights, topk: int):
        self.weights, self.topk, self.fp8 = weights, topk, weights.a1 is not None
        self.w13, self.w2 = weights.w13_eNK.transpose(1, 2), weights.w2_eKN.transpose(1, 2)
        self.a1 = self.a2 = 1.0
        self.scales13: tuple | None = None
        self.scales2: tuple | None = None
        if self.fp8:
            assert weights.a1 is not None and weights.a2 is not None and weights.s13 is not None
            assert weights.s2 is not None
            self.a1, self.a2 = weights.a1.item(), weights.a2.item()
            rows = self.MAX_TOKENS * topk
            spread13 = weights.s13[:, None].expand(-1, self.w13.shape[2]).contiguous()
            spread2 = weights.s2[:, None].expand(-1, self.w2.shape[2]).contiguous()
            self.scales13, self.scales2 = (weights.a1.repeat(rows), spread13), (weights.a2.repeat(rows), spread2)

    def _grouped(self, a, b, ends, scales):
        """a (rows, K) @ b[e] (K, N), expert e's rows ending at ends[e]."""
        if scales is None:
            return torch._grouped_mm(a, b, offs=ends)
        return torch._scaled_grouped_mm(a, b, scales[0][: a.shape[0]], scales[1], offs=ends, out_dtype=torch.bfloat16,
                                        use_fast_accum=True)  # fmt: skip

    def run(self, inputs: Inputs) -> torch.Tensor:
        x, ids, topk = inputs.x, inputs.ids_local, self.topk
        m, hidden = x.shape
        experts, intermediate = self.weights.num_experts, self.weights.w2_eKN.shape[2]
        pairs, bins = m * topk, triton.next_power_of_2(experts)
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        counts, cursor = torch.zeros((2, experts), dtype=torch.int32, device=x.device)
        row_of_pair = torch.empty(pairs, dtype=torch.int32, device=x.device)
        ends = torch.empty(experts, dtype=torch.int32, device=x.device)
        permuted = torch.empty((pairs, hidden), dtype=dtype, device=x.device)
        _count[(triton.cdiv(pairs, 1024),)](ids, counts, pairs, EXPERTS=experts, BINS=2 * bins, BLOCK=1024)
        _permute[(pairs,)](x, ids, counts, cursor, row_of_pair, ends, permuted, self.a1, hidden, TOPK=topk,
                           EXPERTS=experts, BINS=bins, FP8=self.fp8, BLOCK=1024, num_warps=4)  # fmt: skip
        h = self._grouped(permuted, self.w13, ends, self.scales13)
        activated = torch.empty((pairs, intermediate), dtype=dtype, device=x.device)
        block = 1024 if intermediate % 1024 == 0 else 512
        _silu_mul[(pairs, triton.cdiv(intermediate, block))](h, activated, ends, self.a2, intermediate, EXPERTS=experts,
                                                             FP8=self.fp8, BLOCK=block, num_warps=4)  # fmt: skip
        y = self._grouped(activated, self.w2, ends, self.scales2)
        out = torch.empty((m, hidden), dtype=torch.bfloat16, device=x.device)
        _weighted_sum[(m, triton.cdiv(hidden, 1024))](y, row_of_pair, inputs.weights, out, hidden, TOPK=topk,
                                                      BLOCK=1024, num_warps=4)  # fmt: skip
        return out
