"""4-bit weights written out in the dtype of the products."""

import triton
import triton.language as tl

from .four_bits import finish, unpack


@triton.jit
def widen(w, ws, out, ROWS, K: tl.constexpr, PACKED: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr):  # fmt: skip
    """Computes out (ROWS, K) = the weights w (ROWS, K / 2) times their scales ws, BN rows by BK columns a program."""
    row, column = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK + tl.arange(0, BK)
    TO: tl.constexpr = out.dtype.element_ty
    values = unpack(w, ws, row, row < ROWS, tl.program_id(1), K, BN, BK, PACKED, GROUP, TO, False)
    values = finish(values.to(tl.float32), PACKED, TO).to(TO)
    at = out + row.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(at, values, mask=(row < ROWS)[:, None] & (column < K)[None, :])
