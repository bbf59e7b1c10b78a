"""Device code of the NVLink all-to-all: stores into (dispatch) and loads from (combine) the memory of peers.

Legend: M tokens of this rank, H hidden size, K top-k, W ranks, phase 0 dispatch, 1 combine.

`table` holds one row of W addresses (`TAB` apart) for each part of a slot. `flags` are this rank's own, one int32 for each
source and phase, `FLAG` apart, and they only grow:
- dispatch: every program of the source adds its share after its stores. The shares of one step sum up to `SHARES` for any
  number of programs, so step n is complete at n * SHARES.
- combine: the flag is the source's last step whose partial sums may be read.
Each write is a release at system scope, and an acquire at the waiting rank pairs with it. The device counts steps in `ctl`:
dispatch counts, and the combine that follows it has the same number. Steps are compared by their difference, so they may
wrap, and a replayed graph needs no reset.

In dispatch only the last program waits, after its own stores, for all ranks including its own. In combine program 0 signals
before it waits, and then every program waits. So no program waits for a later program of its own grid.

A wait that outlasts its limit records the late rank (`failed`, and the host's `status`) and returns. Every later kernel of
this heap does nothing: the context survives, the host raises, and the group can be rebuilt.

Under Triton's interpreter (TRITON_INTERPRET=1) the same code runs on CPU ranks over shared files.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005, Triton grows a tuple only by +
from __future__ import annotations

import os
import time

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch, fixed when its modules are imported
NATIVE = tl.constexpr(not INTERPRETED)
FLAG = tl.constexpr(32)  # int32 between two flags: a flag a cache line of 128 bytes
TAB = tl.constexpr(64)  # addresses in a row of the table: the most ranks

# Rows of the table.
ROWS = tl.constexpr(0)
SCALES = tl.constexpr(1)
WEIGHTS = tl.constexpr(2)
Y = tl.constexpr(3)
FLAGS_DISPATCH = tl.constexpr(4)
FLAGS_COMBINE = tl.constexpr(5)
STATUS = tl.constexpr(6)
IDS = tl.constexpr(7)  # two rows: the spaced layout, then the dense layout

# Words of ctl.
STEP = tl.constexpr(0)  # dispatches that have been received
HIGH = tl.constexpr(1)  # rows of the spaced layout that may hold ids at the peers

FEW_RANKS = tl.constexpr(4)  # up to here the addresses of the ranks are kept in registers
SHARES = tl.constexpr(4096)  # a step's increment of a dispatch flag, and the most programs


@triton.jit
def _peer(table, part: tl.constexpr, rank, dtype: tl.constexpr):
    return tl.multiple_of(tl.load(table + part * TAB + rank).to(tl.pointer_type(dtype)), 16)


if INTERPRETED:

    def _host_clock() -> int:
        time.sleep(0.0005)  # between two reads of the flags, because the late rank may need this core
        return time.monotonic_ns()

    @triton.jit
    def _now():
        return _host_clock()

else:

    @triton.jit
    def _now():
        return globaltimer()


@triton.jit
def _seen(flags):
    if NATIVE:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l,~{memory}", [flags], tl.int32, is_pure=False, pack=1
        )
    else:
        seen = tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def _flags_of_peers(table, part: tl.constexpr, W: tl.constexpr):
    r = tl.arange(0, triton.next_power_of_2(W))
    return tl.load(table + part * TAB + r, mask=r < W, other=0).to(tl.pointer_type(tl.int32)), r < W


@triton.jit
def _ahead(flags, target, W: tl.constexpr):
    """Returns how far the slowest rank's flag is beyond the target. The result is negative when the flag is behind.

    It takes at most 32 flags at a time, so the reduction stays within a warp. A barrier is impossible, because warps leave
    the loop one by one.
    """
    r = tl.arange(0, 32 if W > 32 else triton.next_power_of_2(W))
    ahead = tl.min(_seen(flags + tl.minimum(r, W - 1) * FLAG) - target, 0)
    if W > 32:
        ahead = tl.minimum(ahead, tl.min(_seen(flags + tl.minimum(r + 32, W - 1) * FLAG) - target, 0))
    return ahead


@triton.jit
def _agree(ok):
    """Returns 1 if `ok` holds in every thread of the program, else 0 in all of them. Threads read a scalar at different times."""
    return tl.min(tl.zeros([1024], tl.int32) + ok.to(tl.int32), 0)


@triton.jit
def _wait(table, flags, failed, target, step, limit_ns, phase: tl.constexpr, W: tl.constexpr):
    """Waits until every rank's flag has reached the target. Returns 1 then, and 0 if this heap has failed, now or before."""
    intact = tl.load(failed) == 0
    start = _now()
    ahead = _ahead(flags, target, W)
    waiting = (ahead < 0) & intact
    while waiting:
        ahead = _ahead(flags, target, W)
        waiting = (ahead < 0) & (_now() - start < limit_ns)
    ready = _agree((ahead >= 0) & intact)
    if ready == 0:
        late = W
        for r in range(W):
            if tl.atomic_add(flags + (W - 1 - r) * FLAG, 0, sem="relaxed", scope="gpu") - target < 0:
                late = W - 1 - r
        code = ((phase * 128 + late + 1).to(tl.int64) << 32) | (step.to(tl.int64) & 0xFFFFFFFF)
        if tl.atomic_cas(failed, tl.full([], 0, tl.int64), code, sem="relaxed", scope="gpu") == 0:
            tl.store(tl.load(table + STATUS * TAB).to(tl.pointer_type(tl.int64)), code)
    return ready


@triton.jit
def _received(table, flags, ctl, failed, tokens, dense, limit_ns, W: tl.constexpr):
    """Waits for every rank's rows and counts the step. This rank's programs have read the words written here by then."""
    step = tl.load(ctl + STEP) + 1
    if _wait(table, flags, failed, step * SHARES, step, limit_ns, 0, W) != 0:
        tl.store(ctl + STEP, step)
        if dense == 0:
            tl.store(ctl + HIGH, tokens)


@triton.jit
def _send_tile(rows, scales, records_ids, records_weights, first, end, row, value, scale, ids, weights, at, group,
               live, records, H: tl.constexpr, K: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """Stores one tile of rows, and with its first columns the routing record, to the rank that holds experts first .. end-1."""
    here = (ids >= first) & (ids < end)
    wanted = tl.max(here.to(tl.int32), 1) > 0
    if FP8:
        tl.store(rows + row[:, None, None] * H + at[None], value, mask=wanted[:, None, None] & (at < H)[None])
        tl.store(scales + row[:, None] * (H // 128) + group[None, :], scale,
                 mask=wanted[:, None] & (group < H // 128)[None, :])  # fmt: skip
    else:
        tl.store(rows + row[:, None] * H + at[None, :], value, mask=wanted[:, None] & (at < H)[None, :])
    if records:
        k = tl.arange(0, triton.next_power_of_2(K))
        cell, real = row[:, None] * K + k[None, :], live[:, None] & (k < K)[None, :]
        tl.store(records_ids + cell, tl.where(here, ids - first, -1), mask=real)
        tl.store(records_weights + cell, weights, mask=real & wanted[:, None])


@triton.jit(do_not_specialize=["tokens", "first_row", "limit_ns", "dense"])
def dispatch(x, ids, weights, table, flags, ctl, failed, offsets, tokens, first_row: tl.int64, limit_ns: tl.int64, dense,
             H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
             FP8: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Stores row t of x to row `first_row + t` of every rank that holds one of its experts, and its record to every rank.

    A record holds the weights, and the ids as slots of the reading rank (-1: no expert of that rank). In the spaced layout
    (dense = 0) an earlier, longer dispatch may have filled rows behind the last token. Those rows get ids of -1.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    alive = _agree(tl.load(failed) == 0)
    high = tl.where(dense != 0, 0, tl.load(ctl + HIGH))
    chunks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    KIND: tl.constexpr = tl.float8e4nv if FP8 else x.dtype.element_ty
    k = tl.arange(0, triton.next_power_of_2(K))
    units = tl.cdiv(tokens, TILE) * chunks * alive
    row_at, scale_at, id_at, weight_at, bounds = (), (), (), (), (tl.load(offsets),)
    if W <= FEW_RANKS:  # constants are loaded once, and not once a tile by every thread
        for r in tl.static_range(W):
            row_at = row_at + (_peer(table, ROWS, r, KIND),)
            scale_at = scale_at + (_peer(table, SCALES, r, tl.float32),)
            id_at = id_at + (_peer(table + dense * TAB, IDS, r, tl.int32),)
            weight_at = weight_at + (_peer(table, WEIGHTS, r, tl.float32),)
            bounds = bounds + (tl.load(offsets + r + 1),)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        t = (unit // chunks) * TILE + tl.arange(0, TILE)
        c = unit % chunks
        live = t < tokens
        t = t.to(tl.int64)
        real = live[:, None] & (k < K)[None, :]
        e = tl.load(ids + t[:, None] * K + k[None, :], mask=real, other=-1)
        w = tl.load(weights + t[:, None] * K + k[None, :], mask=real & (c == 0), other=0.0)
        if FP8:
            group = c * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
            at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
            value = tl.load(x + t[:, None, None] * H + at[None], mask=live[:, None, None] & (at < H)[None], other=0.0)
            value = value.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(value), 2), 1e-10) / 448.0
            value = tl.minimum(tl.maximum(value / scale[:, :, None], -448.0), 448.0).to(tl.float8e4nv)
        else:
            group = k
            at = c * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + t[:, None] * H + at[None, :], mask=live[:, None] & (at < H)[None, :])
            scale = w
        row = first_row + t
        if W <= FEW_RANKS:
            for r in tl.static_range(W):
                _send_tile(row_at[r], scale_at[r], id_at[r], weight_at[r], bounds[r], bounds[r + 1], row, value, scale,
                           e, w, at, group, live, c == 0, H, K, FP8)  # fmt: skip
        else:
            for peer in range(W):
                _send_tile(_peer(table, ROWS, peer, KIND), _peer(table, SCALES, peer, tl.float32),
                           _peer(table + dense * TAB, IDS, peer, tl.int32), _peer(table, WEIGHTS, peer, tl.float32),
                           tl.load(offsets + peer), tl.load(offsets + peer + 1), row, value, scale,
                           e, w, at, group, live, c == 0, H, K, FP8)  # fmt: skip
    stale = tl.maximum(high - tokens, 0) * K * alive
    span: tl.constexpr = 1024
    for unit in range(tl.program_id(0), tl.cdiv(stale, span), tl.num_programs(0)):
        cell = unit * span + tl.arange(0, span)
        for peer in range(W):
            their_ids = _peer(table, IDS, peer, tl.int32)
            tl.store(their_ids + (first_row + tokens) * K + cell, tl.zeros_like(cell) - 1, mask=cell < stale)
    tl.debug_barrier()  # all of this program's stores come before its share
    if alive != 0:
        share = tl.where(tl.program_id(0) == 0, SHARES + 1 - tl.num_programs(0), 1)
        theirs, real = _flags_of_peers(table, FLAGS_DISPATCH, W)
        tl.atomic_add(
            theirs, tl.zeros([triton.next_power_of_2(W)], tl.int32) + share, mask=real, sem="release", scope="sys"
        )
    if WAIT & (tl.program_id(0) == tl.num_programs(0) - 1):
        _received(table, flags, ctl, failed, tokens, dense, limit_ns, W)


@triton.jit(do_not_specialize=["tokens", "limit_ns", "dense"])
def dispatch_wait(table, flags, ctl, failed, tokens, limit_ns: tl.int64, dense, W: tl.constexpr):
    """Waits for the rows of all ranks after a `dispatch` that did not wait. The grid has one program."""
    _received(table, flags, ctl, failed, tokens, dense, limit_ns, W)


@triton.jit
def _add_rank(total, y, first, end, row, at, ids, H: tl.constexpr):
    wanted = tl.max(((ids >= first) & (ids < end)).to(tl.int32), 1) > 0
    there = y + row[:, None] * H + at[None, :]
    return total + tl.load(there, mask=wanted[:, None] & (at < H)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "first_row", "limit_ns"])
def combine(out, ids, table, flags, ctl, failed, offsets, tokens, first_row: tl.int64, limit_ns: tl.int64,
            H: tl.constexpr, K: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """Sets out[t] to the sum, in rank order and float32, of row `first_row + t` of y at every rank that received t."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    step = tl.load(ctl + STEP)
    if (tl.program_id(0) == 0) & (tl.load(failed) == 0):
        theirs, real = _flags_of_peers(table, FLAGS_COMBINE, W)
        tl.atomic_xchg(
            theirs, tl.zeros([triton.next_power_of_2(W)], tl.int32) + step, mask=real, sem="release", scope="sys"
        )
    ready = _wait(table, flags, failed, step, step, limit_ns, 1, W)
    chunks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    k = tl.arange(0, triton.next_power_of_2(K))
    units = tl.cdiv(tokens, TILE) * chunks * ready
    y_at, bounds = (), (tl.load(offsets),)
    if W <= FEW_RANKS:
        for r in tl.static_range(W):
            y_at = y_at + (_peer(table, Y, r, out.dtype.element_ty),)
            bounds = bounds + (tl.load(offsets + r + 1),)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        t = (unit // chunks) * TILE + tl.arange(0, TILE)
        live = t < tokens
        t = t.to(tl.int64)
        at = (unit % chunks) * BLOCK + tl.arange(0, BLOCK)
        e = tl.load(ids + t[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=-1)
        total = tl.zeros([TILE, BLOCK], tl.float32)
        row = first_row + t
        if W <= FEW_RANKS:
            for r in tl.static_range(W):
                total = _add_rank(total, y_at[r], bounds[r], bounds[r + 1], row, at, e, H)
        else:
            for peer in range(W):
                total = _add_rank(total, _peer(table, Y, peer, out.dtype.element_ty), tl.load(offsets + peer),
                                  tl.load(offsets + peer + 1), row, at, e, H)  # fmt: skip
        tl.store(
            out + t[:, None] * H + at[None, :], total.to(out.dtype.element_ty), mask=live[:, None] & (at < H)[None, :]
        )
