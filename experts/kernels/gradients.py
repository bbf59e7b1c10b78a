"""Device code of the experts' gradients: one grouped GEMM, of rows sorted by expert, for all of their products.

Weights lie as the forward has them. A product with a transposed weight reads the same memory in the other order. Legend: S rows
sorted by expert, N output columns, K inner size, T tiles.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def grouped(x, w, out, tiles, T, N, K, WE, WROW, TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
            BK: tl.constexpr):  # fmt: skip
    """Computes out (S, N) = x (S, K) w_e^T, or x w_e with TRANSPOSED, where w_e is the weight of the row's expert.

    Args:
        tiles: int32 (3, T): expert, first row and number of rows of each tile. A tile without rows does nothing.
        WE, WROW: elements from one expert, and from one row of a weight, to the next.
        TRANSPOSED: a weight has K rows of N columns, else N rows of K columns.

    Tiles of one expert follow each other in the grid, and so share its weights in the cache.
    """
    tile, block = tl.program_id(0) % T, tl.program_id(0) // T
    rows = tl.load(tiles + 2 * T + tile)
    if rows > 0:
        expert, first = tl.load(tiles + tile), tl.load(tiles + T + tile)
        m, n, k = tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BK)
        row = (first + m).to(tl.int64)
        a_at = x + row[:, None] * K + k[None, :]
        b_at = w + expert.to(tl.int64) * WE
        if TRANSPOSED:
            b_at += k[:, None] * WROW + n[None, :]
            step = BK * WROW
        else:
            b_at += n[None, :] * WROW + k[:, None]
            step = BK
        ok_m, ok_n = m < rows, n < N
        total = tl.zeros([BM, BN], tl.float32)
        for kb in range(0, K, BK):
            ok_k = k < K - kb
            a = tl.load(a_at, mask=ok_m[:, None] & ok_k[None, :], other=0.0)
            b = tl.load(b_at, mask=ok_k[:, None] & ok_n[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            a_at += BK
            b_at += step
        tl.store(
            out + row[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=ok_m[:, None] & ok_n[None, :]
        )
