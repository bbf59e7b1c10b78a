"""Device code that readies rows and ids for a communication library: one launch, instead of a dozen torch calls."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _name_once(ids, weights, shifts, named, shares, t, tokens, K: tl.constexpr, SHIFT: tl.constexpr):
    """Moves int64 ids by `shifts[id]`. A repeated expert of a token becomes -1, and its weight is added up.

    Ids are below 2**31, so registers hold 32 bits of them: comparisons and the histogram of `_lay_out` take half the registers.
    """
    k = tl.arange(0, triton.next_power_of_2(K))
    cell = t.to(tl.int64)[:, None] * K + k[None, :]
    real = (t < tokens)[:, None] & (k < K)[None, :]
    e = tl.load(ids + cell, mask=real, other=-1).to(tl.int32)
    w = tl.load(weights + cell, mask=real & (e >= 0), other=0.0)
    first, share = e >= 0, tl.zeros_like(w)
    for j in tl.static_range(K):
        other = tl.sum(tl.where((k == j)[None, :], e, 0), 1)
        weight = tl.sum(tl.where((k == j)[None, :], w, 0.0), 1)
        same = e == other[:, None]
        first = first & ((k <= j)[None, :] | ~same)
        share += tl.where(same, weight[:, None], 0.0)
    if SHIFT:
        e += tl.load(shifts + tl.maximum(e, 0), mask=real & (e >= 0), other=0).to(tl.int32)
    e = tl.where(first, e, -1)
    tl.store(named + cell, e.to(tl.int64), mask=real)
    tl.store(shares + cell, tl.where(first, share, 0.0), mask=real)
    return e


@triton.jit
def _lay_out(e, in_rank, counts, partial, arrived, tile, tiles, t, tokens, RANKS: tl.constexpr, EACH: tl.constexpr):
    """Computes the ranks that each token goes to, and the number of tokens of each rank and each expert. Every tile leaves its
    own sums in `partial`. The tile that finishes last adds all of them, so no buffer has to be zero beforehand."""
    E: tl.constexpr = RANKS * EACH
    BINS: tl.constexpr = triton.next_power_of_2(E + 1)
    ALL: tl.constexpr = triton.next_power_of_2(RANKS + E)
    ours = partial + tile * (RANKS + E)
    for rank in tl.static_range(RANKS):
        here = tl.max(((e >= rank * EACH) & (e < (rank + 1) * EACH)).to(tl.int32), 1)
        tl.store(in_rank + t.to(tl.int64) * RANKS + rank, here != 0, mask=t < tokens)
        tl.store(ours + rank, tl.sum(here, 0))
    bins = tl.arange(0, BINS)
    flat = tl.reshape(tl.where(e >= 0, e, BINS - 1), [e.shape[0] * e.shape[1]])
    tl.store(ours + RANKS + bins, tl.histogram(flat, BINS), mask=bins < E)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tiles - 1:
        j, some = tl.arange(0, ALL), tl.arange(0, 16)
        total = tl.zeros([ALL], tl.int32)
        for start in range(0, tiles, 16):
            at = start + some
            mask = (at < tiles)[:, None] & (j < RANKS + E)[None, :]
            part = partial + at[:, None] * (RANKS + E) + j[None, :]
            total += tl.sum(tl.load(part, mask=mask, other=0, cache_modifier=".cg"), 0)
        tl.store(counts + j, total, mask=j < RANKS + E)
        tl.store(arrived, 0)  # ready for the next launch


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["ids", "weights", "named", "shares", "in_rank", "counts", "partial"],
)
def ready(x, out, scales, ids, weights, shifts, named, shares, in_rank, counts, partial, arrived, tokens,
          H: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, EACH: tl.constexpr, SHIFT: tl.constexpr,
          FP8: tl.constexpr, LAYOUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Readies ids, weights and rows. The first programs take TILE tokens each and write their ids and weights (see `_name_once`)
    and, with LAYOUT, their destinations. With FP8 the other programs quantise x `(tokens, H)` to e4m3 `out` and a float32
    scale for each 1x128 block.

    Args:
        in_rank: bool (tokens, RANKS).
        counts: int32 (RANKS + RANKS * EACH): tokens to each rank, then to each expert.
        partial: as many int32 as `counts` for each tile.
        arrived: an int32 that is 0 between launches.
        EACH: experts of a rank.
    """
    tiles = tl.maximum((tokens + TILE - 1) // TILE, 1)  # at least one tile: it writes the zero counts of an empty batch
    program = tl.program_id(0)
    if program < tiles:
        t = program * TILE + tl.arange(0, TILE)
        e = _name_once(ids, weights, shifts, named, shares, t, tokens, K, SHIFT)
        if LAYOUT:
            _lay_out(e, in_rank, counts, partial, arrived, program, tiles, t, tokens, RANKS, EACH)
    if FP8:
        groups: tl.constexpr = BLOCK // 128
        chunks: tl.constexpr = (H + BLOCK - 1) // BLOCK
        first = tl.where(program < tiles, tokens * chunks, program - tiles)
        for unit in range(first, tokens * chunks, tl.maximum(tl.num_programs(0) - tiles, 1)):
            row, g = tl.full((), 0, tl.int64) + unit // chunks, (unit % chunks) * groups + tl.arange(0, groups)
            at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
            value = tl.load(x + row * H + at, mask=at < H, other=0.0).to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-10) / 448.0
            value = tl.minimum(tl.maximum(value / scale[:, None], -448.0), 448.0)
            tl.store(out + row * H + at, value.to(tl.float8e4nv), mask=at < H)
            tl.store(scales + row * (H // 128) + g, scale, mask=g < H // 128)
