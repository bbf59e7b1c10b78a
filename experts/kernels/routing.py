"""Counting sort of the local slots by expert, and the table of tiles (see `pieces`). Slots with id -1 get no row."""

import triton
import triton.language as tl

from .pieces import FIELDS, pdl_enter


@triton.jit(do_not_specialize=["S", "T", "BM"], do_not_specialize_on_alignment=["ids"])
def route_small(ids, order, inv, tiles, S, T, BM, SP: tl.constexpr, BINS: tl.constexpr, B: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Sorts in one launch, by comparison of every slot with every other: B slots a program, SP >= S."""
    pdl_enter(PDL)
    j, i, bins = tl.arange(0, SP), tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, BINS)
    ej = tl.load(ids + j, mask=j < S, other=-1)
    ei = tl.load(ids + i, mask=i < S, other=-1)
    ok = ei >= 0
    same = ej[None, :] == ei[:, None]
    rank = tl.sum((same & (j[None, :] < i[:, None])).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    pos = rank + tl.sum(((ej[None, :] < ei[:, None]) & (ej[None, :] >= 0)).to(tl.int32), 1)
    tl.store(order + pos, i, mask=ok)
    tl.store(inv + i, tl.where(ok, pos, -1), mask=i < S)
    per = tl.histogram(tl.where(ej >= 0, ej, BINS - 1), BINS)
    per = tl.where(bins < BINS - 1, (per + BM - 1) // BM, 0)
    low = tl.sum(tl.where(bins[None, :] < ei[:, None], per[None, :], 0), 1)
    tile, first = low + rank // BM, ok & (rank % BM == 0)
    tl.store(tiles + tile, ei, mask=first)
    tl.store(tiles + T + tile, pos, mask=first)
    tl.store(tiles + 2 * T + tile, tl.minimum(count - rank, BM), mask=first)
    tl.store(tiles + 3 * T + tile, low, mask=first)
    tl.store(tiles + 4 * T + tile, (count + BM - 1) // BM, mask=first)
    if tl.program_id(0) == 0:
        tl.store(tiles + FIELDS * T, tl.sum(per, 0))


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["ids"])
def count_slots(ids, counts, S, BINS: tl.constexpr, B: tl.constexpr):
    """Counts the slots of each expert. `counts` (BINS,) starts at 0."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.load(ids + i, mask=i < S, other=-1)
    bins = tl.arange(0, BINS)
    n = tl.histogram(tl.where(e >= 0, e, BINS - 1), BINS)
    tl.atomic_add(counts + bins, n, mask=(bins < BINS - 1) & (n > 0))


@triton.jit(do_not_specialize=["S", "T", "BM"], do_not_specialize_on_alignment=["ids"])
def place_slots(ids, counts, cursor, order, inv, tiles, S, T, BM, BINS: tl.constexpr, B: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Places the slots, in the second launch. The order of rows inside an expert depends on the race for `cursor`, but no row's
    value does."""
    pdl_enter(PDL)
    i, bins = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, BINS)
    e = tl.load(ids + i, mask=i < S, other=-1)
    ok = e >= 0
    n = tl.load(counts + bins, mask=bins < BINS - 1, other=0)
    per = (n + BM - 1) // BM
    at = tl.where(ok, e, 0)
    start, low = tl.gather(tl.cumsum(n, 0) - n, at, 0), tl.gather(tl.cumsum(per, 0) - per, at, 0)
    rank = tl.atomic_add(cursor + at, 1, mask=ok, sem="relaxed")
    tl.store(order + start + rank, i, mask=ok)
    tl.store(inv + i, tl.where(ok, start + rank, -1), mask=i < S)
    first, tile = ok & (rank % BM == 0), low + rank // BM
    tl.store(tiles + tile, e, mask=first)
    tl.store(tiles + T + tile, start + rank, mask=first)
    tl.store(tiles + 2 * T + tile, tl.minimum(tl.gather(n, at, 0) - rank, BM), mask=first)
    tl.store(tiles + 3 * T + tile, low, mask=first)
    tl.store(tiles + 4 * T + tile, tl.gather(per, at, 0), mask=first)
    if tl.program_id(0) == 0:
        tl.store(tiles + FIELDS * T, tl.sum(per, 0))


@triton.jit
def _tile_rows(n, active, t, tiles, T, capacity, BM, E: tl.constexpr, BINS: tl.constexpr):
    """Writes the table entries `t` for experts of `n` rows each, or no entry when not `active`."""
    per = tl.where(active, (n + BM - 1) // BM, 0)
    end = tl.cumsum(per, 0)
    e = tl.sum((t[:, None] >= end[None, :]).to(tl.int32), 1)
    at = tl.minimum(e, BINS - 1)
    low = tl.gather(end - per, at, 0)
    first = (t - low) * BM
    ok = t < tl.sum(per, 0)
    tl.store(tiles + t, e, mask=ok)
    tl.store(tiles + T + t, e * capacity + first, mask=ok)
    tl.store(tiles + 2 * T + t, tl.minimum(tl.gather(n, at, 0) - first, BM), mask=ok)
    tl.store(tiles + 3 * T + t, low, mask=ok)
    tl.store(tiles + 4 * T + t, tl.gather(per, at, 0), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(tiles + FIELDS * T, tl.sum(per, 0))


@triton.jit(do_not_specialize=["capacity", "T_thin", "T_thick", "BM_thin", "BM_thick", "limit"])
def plan_batched(counts, thin, thick, capacity, T_thin, T_thick, BM_thin, BM_thick, limit, E: tl.constexpr,
                 BINS: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Writes the tables of the batched format, B entries a program. Experts of at most `limit` rows on average fill `thin`,
    otherwise `thick`. The other table stays empty, so that its GEMMs find nothing to do. No host sync."""
    pdl_enter(PDL)
    bins, t = tl.arange(0, BINS), tl.program_id(0) * B + tl.arange(0, B)
    n = tl.minimum(tl.load(counts + bins, mask=bins < E, other=0), capacity)
    few = tl.sum(n, 0) <= limit * tl.sum((n > 0).to(tl.int32), 0)
    _tile_rows(n, few, t, thin, T_thin, capacity, BM_thin, E, BINS)
    _tile_rows(n, few == 0, t, thick, T_thick, capacity, BM_thick, E, BINS)
