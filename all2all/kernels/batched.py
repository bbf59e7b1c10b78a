"""Device code between rows with local ids and the batched format: blocks of T rows, one for each of this rank's experts.

Legend: M' rows, H hidden size, K top-k, e experts of this rank, T capacity of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def place(ids, places, counts, rows, K: tl.constexpr, BLOCK: tl.constexpr):
    """Places each expert's rows in their order, one program an expert. places[row, slot] is the index of the row in the block
    of the slot's expert. An expert that a row names twice has the row once."""
    expert = tl.program_id(0)
    k = tl.arange(0, triton.next_power_of_2(K))
    count = tl.zeros([], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        cell = row.to(tl.int64)[:, None] * K + k[None, :]
        real = (row < rows)[:, None] & (k < K)[None, :]
        hit = tl.load(ids + cell, mask=real, other=-1) == expert
        here = tl.max(hit.to(tl.int32), 1)
        at = count + tl.cumsum(here, 0) - here
        tl.store(places + cell, tl.broadcast_to(at[:, None], [BLOCK, triton.next_power_of_2(K)]), mask=real & hit)
        count += tl.sum(here, 0)
    tl.store(counts + expert, count)


@triton.jit
def spread(x, scales, ids, places, blocks, block_scales, H: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
           SCALED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copies row r to row places[r, slot] of every local slot's block. SCALED: copies its H/128 scales too."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = c * BLOCK + tl.arange(0, BLOCK)
    group = c * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
    slots = tl.arange(0, triton.next_power_of_2(K))
    local = tl.max(tl.load(ids + row * K + slots, mask=slots < K, other=-1), 0) >= 0
    value = tl.load(x + row * H + at, mask=(at < H) & local)
    scale = tl.zeros([BLOCK // 128], tl.float32)
    if SCALED:
        scale = tl.load(scales + row * (H // 128) + group, mask=(group < H // 128) & local)
    for k in tl.static_range(K):
        expert = tl.load(ids + row * K + k)
        if expert >= 0:
            there = expert.to(tl.int64) * T + tl.load(places + row * K + k)
            tl.store(blocks + there * H + at, value, mask=at < H)
            if SCALED:
                tl.store(block_scales + there * (H // 128) + group, scale, mask=group < H // 128)


@triton.jit
def weigh(y, ids, weights, places, out, H: tl.constexpr, K: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):
    """Sets out[r] to the weighted sum over r's local slots, in slot order and float32. Rows without a local slot keep their
    contents."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = c * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    found = 0
    for k in tl.static_range(K):
        expert = tl.load(ids + row * K + k)
        if expert >= 0:
            there = expert.to(tl.int64) * T + tl.load(places + row * K + k)
            total += tl.load(y + there * H + at, mask=at < H, other=0.0).to(tl.float32) * tl.load(weights + row * K + k)
            found = 1
    if found != 0:
        tl.store(out + row * H + at, total.to(out.dtype.element_ty), mask=at < H)
