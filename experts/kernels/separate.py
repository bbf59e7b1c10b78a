"""Device code around a library's grouped GEMMs: the layout of local slots expert by expert, and the non-linearity between."""

import triton
import triton.language as tl

from .pieces import BLOCK, ROW, TENSOR, activate, to_e4m3


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["ids"])
def place_rows(ids, counts, cursor, inv, owner, ends, S, ALIGN: tl.constexpr, E: tl.constexpr, BINS: tl.constexpr,
               B: tl.constexpr):  # fmt: skip
    """Sets inv[slot] = row of a local slot (else -1). An expert's rows begin at a multiple of ALIGN. It also sets
    owner[row] = expert, or ends[e] = one past expert e's last row, unless they are None. The order inside an expert depends on
    a race, but no row's value does."""
    i, bins = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, BINS)
    e = tl.load(ids + i, mask=i < S, other=-1)
    ok = e >= 0
    n = tl.load(counts + bins, mask=bins < BINS - 1, other=0)
    room = (n + ALIGN - 1) // ALIGN * ALIGN
    first = tl.cumsum(room, 0) - room
    at = tl.where(ok, e, 0)
    row = tl.gather(first, at, 0) + tl.atomic_add(cursor + at, 1, mask=ok, sem="relaxed")
    tl.store(inv + i, tl.where(ok, row, -1), mask=i < S)
    if owner is not None:
        tl.store(owner + row, e, mask=ok)
    if ends is not None and tl.program_id(0) == 0:
        tl.store(ends + bins, first + n, mask=bins < E)


@triton.jit(do_not_specialize=["S"])
def activate_rows(h, inv, out, scales, a, S, N: tl.constexpr, MODE: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
                  ALPHA: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """Computes out (rows, N) = act(gate) * up of h (rows, 2N), quantised by MODE (`pieces`), for the rows of local slots.
    A program takes 128 * B columns, or the whole row if the row has one scale."""
    g = tl.program_id(1) * B + tl.arange(0, B)
    column = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < N
    GROUPS: tl.constexpr = (N + 127) // 128
    for slot in range(tl.program_id(0), S, tl.num_programs(0)):
        row = tl.load(inv + slot).to(tl.int64)
        if row >= 0:
            at = h + row * (2 * N) + column
            gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(at + N, mask=mask, other=0.0).to(tl.float32)
            v = activate(gate, up, ACT, LIMIT, ALPHA)
            to = out + row * N + column
            if MODE == BLOCK:
                s = tl.maximum(tl.max(tl.abs(v), 1), 1e-10) / 448.0
                tl.store(scales + row * GROUPS + g, s, mask=g < GROUPS)
                tl.store(to, to_e4m3(v / s[:, None]), mask=mask)
            elif MODE == ROW:
                top = tl.max(tl.max(tl.where(mask, tl.abs(v), 0.0), 1), 0)
                s = tl.maximum(top, 1e-10) / 448.0
                tl.store(scales + row, s)
                tl.store(to, to_e4m3(v / s), mask=mask)
            elif MODE == TENSOR:
                tl.store(to, to_e4m3(v * (1.0 / tl.load(a))), mask=mask)
            else:
                tl.store(to, v.to(out.dtype.element_ty), mask=mask)
