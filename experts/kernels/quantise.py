"""Quantisation of rows to e4m3 or int8, with the scales of `pieces`: static, of 128 columns, or of a row. Also a plain copy."""

import triton
import triton.language as tl

from .pieces import BLOCK, FIELDS, FLOAT, ROW, TENSOR, pdl_enter, to_e4m3


@triton.jit
def _narrow(v, TO: tl.constexpr):
    """Rounds to TO, saturating. int8 rounds half away from zero."""
    if tl.int8 == TO:
        v = tl.minimum(tl.maximum(v, -127.0), 127.0)
        out = (v + tl.where(v >= 0, 0.5, -0.5)).to(tl.int8)
    elif tl.float8e4nv == TO:
        out = to_e4m3(v)
    else:
        out = v.to(TO)
    return out


@triton.jit(do_not_specialize_on_alignment=["ids"])
def quantise_tokens(x, given, ids, inv, xq, xs, a1, K: tl.constexpr, TOPK: tl.constexpr, TP: tl.constexpr,
                    MODE: tl.constexpr, EXPAND: tl.constexpr, GIVEN: tl.constexpr, B: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """Quantises token rows, 128 * B columns a program. EXPAND: one copy for each local slot, at row `inv[slot]`, so that rows
    lie expert by expert. Otherwise it writes one row a token. GIVEN: x is quantised already, with its scales. Tokens without
    a local slot are neither read nor written."""
    pdl_enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TP)
    local = tl.max(tl.load(ids + token * TOPK + t, mask=t < TOPK, other=-1), 0)
    TO: tl.constexpr = xq.dtype.element_ty
    KG: tl.constexpr = (K + 127) // 128
    if local >= 0:
        g = tl.program_id(1) * B + tl.arange(0, B)
        column = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        mask = column < K
        q = tl.load(x + token * K + column, mask=mask, other=0.0)
        s = tl.zeros((B,), tl.float32)
        if GIVEN:
            s = tl.load(given + token * KG + g, mask=g < KG, other=0.0)
        elif MODE != FLOAT:
            v = q.to(tl.float32)
            if MODE == BLOCK:
                s = tl.maximum(tl.max(tl.abs(v), 1), 1e-10) / 448.0
            elif MODE == TENSOR:
                s += tl.load(a1)
            else:
                s += tl.maximum(tl.max(tl.max(tl.abs(v), 1), 0), 1e-10) / (127.0 if tl.int8 == TO else 448.0)
            q = _narrow(v / s[:, None], TO)
        for slot in tl.static_range(TOPK if EXPAND else 1):
            row = tl.load(inv + token * TOPK + slot).to(tl.int64) if EXPAND else token
            if row >= 0:
                tl.store(xq + row * K + column, q, mask=mask)
                if MODE == BLOCK:
                    tl.store(xs + row * KG + g, s, mask=g < KG)
                elif MODE == ROW:
                    tl.store(xs + row + g * 0, s, mask=g == 0)


@triton.jit(do_not_specialize=["S", "T", "BM"], do_not_specialize_on_alignment=["ids"])
def quantise_rows(x, ids, tiles, xq, xs, a, S, T, BM, K: tl.constexpr, IN_SLOTS: tl.constexpr, MODE: tl.constexpr,
                  B: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Quantises whole rows, 128 * B >= K columns, that lie expert by expert (see `tiles`) or by slot (IN_SLOTS: id >= 0)."""
    pdl_enter(PDL)
    TO: tl.constexpr = xq.dtype.element_ty
    KG: tl.constexpr = (K + 127) // 128
    g = tl.arange(0, B)
    column = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    items = S if IN_SLOTS else tl.load(tiles + FIELDS * T) * BM
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if IN_SLOTS:
            row, real = item, tl.load(ids + item) >= 0
        else:
            tile, m = item // BM, item % BM
            row, real = tl.load(tiles + T + tile) + m, m < tl.load(tiles + 2 * T + tile)
        if real:
            at = tl.full((), 0, tl.int64) + row
            v = tl.load(x + at * K + column, mask=column < K, other=0.0).to(tl.float32)
            if MODE == BLOCK:
                s = tl.maximum(tl.max(tl.abs(v), 1), 1e-10) / 448.0
                tl.store(xs + at * KG + g, s, mask=g < KG)
                v = v / s[:, None]
            elif MODE == TENSOR:
                v = v * (1.0 / tl.load(a))
            else:
                s = tl.maximum(tl.max(tl.max(tl.abs(v), 1), 0), 1e-10) / (127.0 if tl.int8 == TO else 448.0)
                tl.store(xs + at, s)
                v = v / s
            tl.store(xq + at * K + column, _narrow(v, TO), mask=column < K)
