"""The weighted sum of a token's local slots, in slot order: no atomics, so the bits do not depend on timing."""

import triton
import triton.language as tl

from .pieces import pdl_enter


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["ids", "weights"])
def weighted_sum(y, inv, ids, weights, out, S, K: tl.constexpr, TOPK: tl.constexpr, SPLIT: tl.constexpr,
                 IN_SLOTS: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Computes out[token] = sum over slots of weight * (sum over splits of y[split, row]). IN_SLOTS: the row is the slot itself.
    NOTE: the weight of a slot without an expert may be NaN, so it is not read."""
    pdl_enter(PDL)
    token = tl.program_id(0)
    c = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for t in tl.static_range(TOPK):
        slot = token.to(tl.int64) * TOPK + t
        if IN_SLOTS:
            row = tl.where(tl.load(ids + slot) >= 0, slot, -1)
        else:
            row = tl.load(inv + slot).to(tl.int64)
        wt = tl.load(weights + slot, mask=row >= 0, other=0.0)
        for sp in tl.static_range(SPLIT):
            at = y + (sp * S.to(tl.int64) + row) * K + c
            total += wt * tl.load(at, mask=(c < K) & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * K + c, total.to(out.dtype.element_ty), mask=c < K)
