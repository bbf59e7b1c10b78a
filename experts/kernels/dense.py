"""Device code of dense experts that every token visits: a plain GEMM, and activation-and-multiply.

The grid has a program for each tile of the output, so no program stays on its multiprocessor for long. The kernels of an
all-to-all beside it find room within one tile's time. (A persistent GEMM would hold all multiprocessors until it ends.)

Legend: M rows, N output columns, K inner size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pieces import activate


@triton.jit(do_not_specialize=["M"])
def product(x, w, out, M, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            GROUP: tl.constexpr):  # fmt: skip
    """Computes out (M, N) = x (M, K) w (N, K)^T, with x and w by TMA. Groups of GROUP row tiles share weights in the cache."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    m, n = first + within % size, within // size
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(x.load([m * BM, k]), w.load([n * BN, k]).T, total)
    row, column = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


@triton.jit
def gated(h, out, N: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Computes out (M, N) = act(gate) * up, rounded once. h (M, 2N) has gate then up."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(h + row * 2 * N + column, mask=column < N, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * N + N + column, mask=column < N, other=0.0).to(tl.float32)
    value = activate(gate, up, ACT, LIMIT, ALPHA)
    tl.store(out + row * N + column, value.to(out.dtype.element_ty), mask=column < N)
