"""The two grouped GEMMs. A persistent grid walks work items = tiles x column blocks (x splits). TMA loads the weights.

In the first GEMM `w` is a descriptor of `(E, 2, N, K)` with block (1, 2, BN, BK), so one transfer brings gate and up rows. In
the second it is a descriptor of `(E*K, N)` with block (BN, BK). Scale offsets are 32-bit: they pass 2^31 only with 128 times
as many elements. Out-of-range columns read as zero, and out-of-range rows are masked where results are stored. PACKED: `w` is
a pointer to 4-bit weights, widened on the way. STRIDED: scales of rows have a library's strides. See `pieces` for the modes.
"""

import triton
import triton.language as tl

from .four_bits import finish, order_of_k, unpack
from .pieces import (
    BLOCK,
    DIRECT,
    FIELDS,
    GATHER,
    ROW,
    ROWS,
    TENSOR,
    activate,
    direct_state,
    direct_tile,
    matrix_step,
    pdl_enter,
    to_e4m3,
    work_item,
)


@triton.jit
def _across(v, SWAP: tl.constexpr):
    """Returns a vector over rows of the token tile as a row or a column of the accumulator."""
    return v[None, :] if SWAP else v[:, None]


@triton.jit
def _along(v, SWAP: tl.constexpr):
    """Returns a vector over output columns as a column or a row of the accumulator."""
    return v[:, None] if SWAP else v[None, :]


@triton.jit
def _halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Splits (BM, 2*BN) into gate and up, each (BM, BN). One thread holds both halves of a column pair."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))


@triton.jit(do_not_specialize=["S", "T", "GM", "XE", "XM", "XK"], do_not_specialize_on_alignment=["ids", "xs"])
def gate_up(x, xd, xs, w, ws, a1, a2, b13, ids, order, tiles, h, hs, part, counter, S, T, GM, XE, XM, XK,
            STRIDED: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TOPK: tl.constexpr, MODE: tl.constexpr,
            CHANNEL: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, SOURCE: tl.constexpr,
            FLY: tl.constexpr, SWAP: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, SP: tl.constexpr,
            BINS: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """Computes h[row, n] = act(x w_gate^T) * (x w_up^T).

    Args:
        FLY: x is not quantised yet, and this kernel quantises it tile by tile.
        WIDE: gate and up share one accumulator of 2*BN columns.
        SPLIT: above 1, each split leaves its partial sums in `part`, and the last split to finish adds them, in order.
        xs: scales of blocks of x, (rows, K/128) row by row. STRIDED: the scale of expert e, `row` and block k lies at
            e*XE + row*XM + k*XK.

    If activations are quantised by row, h stays in the dtype of the model, because its rows are whole only after this kernel.
    """
    pdl_enter(PDL)
    NB: tl.constexpr = (N + BN - 1) // BN
    NK: tl.constexpr = (K + BK - 1) // BK
    KG: tl.constexpr = (K + 127) // 128
    NG: tl.constexpr = (N + 127) // 128
    PER: tl.constexpr = (NK + SPLIT - 1) // SPLIT
    ACC: tl.constexpr = tl.int32 if w.dtype == tl.int8 else tl.float32
    if SOURCE == DIRECT:
        ej, per, toff = direct_state(ids, S, BM, SP, BINS)
        num_tiles = tl.sum(per, 0)
    else:
        num_tiles = tl.load(tiles + FIELDS * T)
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), order_of_k(BK, SWAP and PACKED != 0)
    shape: tl.constexpr = [BN, BM] if SWAP else [BM, BN]
    for item in tl.range(tl.program_id(0), num_tiles * NB * SPLIT, tl.num_programs(0), flatten=FLAT):
        tile, nb, sp = work_item(item, tiles, T, num_tiles, GM, NB, SPLIT, SOURCE)
        if SOURCE == DIRECT:
            e, slot, ok = direct_tile(tile, ej, per, toff, BM, SP, BINS)
            row = slot
            token = slot // TOPK
        else:
            e, row0 = tl.load(tiles + tile), tl.load(tiles + T + tile)
            row, ok = row0 + m, m < tl.load(tiles + 2 * T + tile)
            token = row
            if SOURCE == GATHER:
                token = tl.load(order + row, mask=ok, other=0) // TOPK
        a_at = x + token.to(tl.int64)[:, None] * K + k[None, :]
        g, u = tl.zeros(shape, ACC), tl.zeros(shape, ACC)
        if WIDE:
            gu = tl.zeros([BM, 2 * BN], ACC)
        k0 = sp * PER
        k1 = tl.minimum(k0 + PER, NK)
        if MODE == BLOCK:
            sg_at = ws + (e * (2 * NG) + nb * BN // 128) * KG
            su_at = sg_at + NG * KG
            sg, su = tl.load(sg_at + k0), tl.load(su_at + k0)
            if not FLY:
                step = XK if STRIDED else 1
                xs_at = (xs + e * XE + token * XM) if STRIDED else (xs + token * KG)
                sa = tl.load(xs_at + k0 * step, mask=ok, other=0.0)
        for kb in range(k0, k1):
            if PACKED:
                gate_row, inside = e * (2 * N) + nb * BN + n, nb * BN + n < N
                wg = unpack(w, ws, gate_row, inside, kb, K, BN, BK, PACKED, GROUP, x.dtype.element_ty, SWAP)
                wu = unpack(w, ws, gate_row + N, inside, kb, K, BN, BK, PACKED, GROUP, x.dtype.element_ty, SWAP)
            elif WIDE:
                wgu = tl.reshape(w.load([e, 0, nb * BN, kb * BK]), (2 * BN, BK))
            else:
                wg = tl.reshape(w.load([e, 0, nb * BN, kb * BK]), (BN, BK))
                wu = tl.reshape(w.load([e, 1, nb * BN, kb * BK]), (BN, BK))
            if SOURCE == ROWS and not (PACKED and SWAP):
                a = xd.load([row0, kb * BK])
            elif K % BK == 0:
                a = tl.load(a_at + kb * BK, mask=ok[:, None], other=0.0)
            else:
                a = tl.load(a_at + kb * BK, mask=ok[:, None] & (k < K - kb * BK)[None, :], other=0.0)
            if MODE == BLOCK:
                nx = tl.minimum(kb + 1, NK - 1)  # the next block's scales, ahead of their use
                sg2, su2 = tl.load(sg_at + nx), tl.load(su_at + nx)
                if FLY:
                    af = a.to(tl.float32)
                    sa = tl.maximum(tl.max(tl.abs(af), 1), 1e-10) / 448.0
                    a = to_e4m3(af / sa[:, None])
                    sa2 = sa
                else:
                    sa2 = tl.load(xs_at + nx * step, mask=ok, other=0.0)
                sax = _across(sa, SWAP)
                zero = tl.zeros(shape, tl.float32)
                g += matrix_step(a, wg, zero, SWAP) * (sax * sg)
                u += matrix_step(a, wu, zero, SWAP) * (sax * su)
                sg, su, sa = sg2, su2, sa2
            else:
                if FLY:
                    a = to_e4m3(a.to(tl.float32) * (1.0 / tl.load(a1)))
                if WIDE:
                    gu = matrix_step(a, wgu, gu, SWAP)
                else:
                    g = matrix_step(a, wg, g, SWAP)
                    u = matrix_step(a, wu, u, SWAP)
        if WIDE:
            g, u = _halves(gu, BM, BN)
        if tl.int32 == ACC:
            g, u = g.to(tl.float32), u.to(tl.float32)
        g, u = finish(g, PACKED, x.dtype.element_ty), finish(u, PACKED, x.dtype.element_ty)
        last = True
        column = nb * BN + n
        inside = column < N
        if SPLIT > 1:
            okx = _across(ok, SWAP)
            mn = (n[:, None] + m[None, :] * BN) if SWAP else (m[:, None] * BN + n[None, :])
            base = part + (tile * NB + nb).to(tl.int64) * (SPLIT * 2 * BM * BN) + mn
            tl.store(base + sp * (2 * BM * BN), g, mask=okx)
            tl.store(base + sp * (2 * BM * BN) + BM * BN, u, mask=okx)
            tl.debug_barrier()
            done = tl.atomic_add(counter + tile * NB + nb, 1, sem="acq_rel")
            last = done == SPLIT - 1
            if last:
                g, u = tl.zeros(shape, tl.float32), tl.zeros(shape, tl.float32)
                for s in range(SPLIT):
                    g += tl.load(base + s * (2 * BM * BN), mask=okx, other=0.0, cache_modifier=".cg")
                    u += tl.load(base + s * (2 * BM * BN) + BM * BN, mask=okx, other=0.0, cache_modifier=".cg")
                tl.store(counter + tile * NB + nb, 0)  # ready for the next launch
        if MODE == TENSOR:
            scale = tl.load(a1) * tl.load(ws + e)
            g, u = g * scale, u * scale
        elif MODE == ROW:
            sax = _across(tl.load(xs + token, mask=ok, other=0.0), SWAP)
            if CHANNEL:
                at = ws + e.to(tl.int64) * (2 * N) + column
                g *= sax * _along(tl.load(at, mask=inside, other=0.0), SWAP)
                u *= sax * _along(tl.load(at + N, mask=inside, other=0.0), SWAP)
            else:
                g, u = g * (sax * tl.load(ws + e)), u * (sax * tl.load(ws + e))
        if BIAS:
            at = b13 + e.to(tl.int64) * (2 * N) + column
            g += _along(tl.load(at, mask=inside, other=0.0).to(tl.float32), SWAP)
            u += _along(tl.load(at + N, mask=inside, other=0.0).to(tl.float32), SWAP)
        v = activate(g, u, ACT, LIMIT, ALPHA)
        if SWAP:
            v = tl.trans(v)
        h_at = h + row.to(tl.int64)[:, None] * N + column[None, :]
        mask = ok[:, None] & last
        if N % BN != 0:
            mask &= inside[None, :]
        if MODE == BLOCK:
            s = tl.maximum(tl.max(tl.abs(v), 1), 1e-10) / 448.0
            tl.store(hs + row * NG + nb, s, mask=ok & last)
            tl.store(h_at, to_e4m3(v / s[:, None]), mask=mask)
        elif MODE == TENSOR:
            tl.store(h_at, to_e4m3(v * (1.0 / tl.load(a2))), mask=mask)
        else:
            tl.store(h_at, v.to(h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["S", "T", "GM"], do_not_specialize_on_alignment=["ids"])
def down(h, hd, hs, w, ws, a2, b2, ids, tiles, y, S, T, GM,
         K: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr, CHANNEL: tl.constexpr, PACKED: tl.constexpr,
         GROUP: tl.constexpr, SOURCE: tl.constexpr, SWAP: tl.constexpr,
         FLAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         SPLIT: tl.constexpr, SP: tl.constexpr, BINS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Computes y[split, row, k] = h[row] w2^T, not weighted. SOURCE: DIRECT, else rows. ROWS loads them by TMA through `hd`."""
    pdl_enter(PDL)
    NB: tl.constexpr = (K + BN - 1) // BN
    NK: tl.constexpr = (N + BK - 1) // BK
    NG: tl.constexpr = (N + 127) // 128
    KG: tl.constexpr = (K + 127) // 128
    PER: tl.constexpr = (NK + SPLIT - 1) // SPLIT
    ACC: tl.constexpr = tl.int32 if w.dtype == tl.int8 else tl.float32
    if SOURCE == DIRECT:
        ej, per, toff = direct_state(ids, S, BM, SP, BINS)
        num_tiles = tl.sum(per, 0)
    else:
        num_tiles = tl.load(tiles + FIELDS * T)
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), order_of_k(BK, SWAP and PACKED != 0)
    shape: tl.constexpr = [BN, BM] if SWAP else [BM, BN]
    for item in tl.range(tl.program_id(0), num_tiles * NB * SPLIT, tl.num_programs(0), flatten=FLAT):
        tile, nb, sp = work_item(item, tiles, T, num_tiles, GM, NB, SPLIT, SOURCE)
        if SOURCE == DIRECT:
            e, row, ok = direct_tile(tile, ej, per, toff, BM, SP, BINS)
        else:
            e, row0 = tl.load(tiles + tile), tl.load(tiles + T + tile)
            row, ok = row0 + m, m < tl.load(tiles + 2 * T + tile)
        h_at = h + row.to(tl.int64)[:, None] * N + k[None, :]
        k0 = sp * PER
        k1 = tl.minimum(k0 + PER, NK)
        acc = tl.zeros(shape, ACC)
        if MODE == BLOCK:
            sw_at = ws + (e * KG + nb * BN // 128) * NG
            hs_at = hs + row * NG
            sw, sa = tl.load(sw_at + k0), tl.load(hs_at + k0, mask=ok, other=0.0)
        for kb in range(k0, k1):
            if PACKED:
                row_w = e * K + nb * BN + n
                b = unpack(w, ws, row_w, nb * BN + n < K, kb, N, BN, BK, PACKED, GROUP, h.dtype.element_ty, SWAP)
            else:
                b = w.load([e * K + nb * BN, kb * BK])
            if SOURCE == ROWS and not (PACKED and SWAP):
                a = hd.load([row0, kb * BK])
            elif N % BK == 0:
                a = tl.load(h_at + kb * BK, mask=ok[:, None], other=0.0)
            else:
                a = tl.load(h_at + kb * BK, mask=ok[:, None] & (k < N - kb * BK)[None, :], other=0.0)
            if MODE == BLOCK:
                nx = tl.minimum(kb + 1, NK - 1)
                sw2, sa2 = tl.load(sw_at + nx), tl.load(hs_at + nx, mask=ok, other=0.0)
                acc += matrix_step(a, b, tl.zeros(shape, tl.float32), SWAP) * (_across(sa, SWAP) * sw)
                sw, sa = sw2, sa2
            else:
                acc = matrix_step(a, b, acc, SWAP)
        column = nb * BN + n
        inside = column < K
        if tl.int32 == ACC:
            acc = acc.to(tl.float32)
        acc = finish(acc, PACKED, h.dtype.element_ty)
        if MODE == TENSOR:
            acc *= tl.load(a2) * tl.load(ws + e)
        elif MODE == ROW:
            sax = _across(tl.load(hs + row, mask=ok, other=0.0), SWAP)
            if CHANNEL:
                acc *= sax * _along(tl.load(ws + e.to(tl.int64) * K + column, mask=inside, other=0.0), SWAP)
            else:
                acc *= sax * tl.load(ws + e)
        if BIAS:
            bias = tl.load(b2 + e.to(tl.int64) * K + column, mask=inside & (sp == 0), other=0.0)
            acc += _along(bias.to(tl.float32), SWAP)
        if SWAP:
            acc = tl.trans(acc)
        y_at = y + (sp * S.to(tl.int64) + row)[:, None] * K + column[None, :]
        mask = ok[:, None]
        if K % BN != 0:
            mask &= inside[None, :]
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=mask)
