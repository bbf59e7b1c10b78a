"""Device code that readies rows and ids for a communication library: one pass over each, instead of a dozen torch calls."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def widen(ids, weights, shifts, wide, shares, tokens, K: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """int32 ids -> int64, moved by `shifts[id]`; an expert that a token names again becomes -1, its weight is added up."""
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, triton.next_power_of_2(K))
    cell = t.to(tl.int64)[:, None] * K + k[None, :]
    real = (t < tokens)[:, None] & (k < K)[None, :]
    e = tl.load(ids + cell, mask=real, other=-1)
    w = tl.load(weights + cell, mask=real & (e >= 0), other=0.0)
    first, share = e >= 0, tl.zeros_like(w)
    for j in tl.static_range(K):
        other = tl.sum(tl.where((k == j)[None, :], e, 0), 1)
        weight = tl.sum(tl.where((k == j)[None, :], w, 0.0), 1)
        same = e == other[:, None]
        first = first & ((k <= j)[None, :] | ~same)
        share += tl.where(same, weight[:, None], 0.0)
    if SHIFT:
        e += tl.load(shifts + tl.maximum(e, 0), mask=real & (e >= 0), other=0)
    tl.store(wide + cell, tl.where(first, e, -1).to(tl.int64), mask=real)
    tl.store(shares + cell, tl.where(first, share, 0.0), mask=real)


@triton.jit(do_not_specialize=["rows"])
def quantise(x, out, scales, rows, H: tl.constexpr, BLOCK: tl.constexpr):
    """`(rows, H)` -> e4m3 and a float32 scale for each 1x128 block."""
    groups: tl.constexpr = BLOCK // 128
    chunks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    for unit in range(tl.program_id(0), rows * chunks, tl.num_programs(0)):
        row, g = (unit // chunks).to(tl.int64), (unit % chunks) * groups + tl.arange(0, groups)
        at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        value = tl.load(x + row * H + at, mask=at < H, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-10) / 448.0
        value = tl.minimum(tl.maximum(value / scale[:, None], -448.0), 448.0)
        tl.store(out + row * H + at, value.to(tl.float8e4nv), mask=at < H)
        tl.store(scales + row * (H // 128) + g, scale, mask=g < H // 128)
