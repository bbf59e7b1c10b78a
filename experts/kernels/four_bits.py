"""Conversion of 4-bit weights to the dtype of the products, 8 weights of one 32-bit word at a time.

A thread's operand of a tensor core has two pairs, 8 apart, from each 16 neighbours in K, and a word has 8 neighbours. With
SWAP the weights are that operand, and K is multiplied in another order, `order_of_k`. The sums are the same, and no weight
changes its thread.

bf16 is made two values at a time, by bits, so one instruction works on both. Float scales enter as two bf16, high and low, so
that a product is rounded about once, as in float32 arithmetic.
"""

import triton
import triton.language as tl

from .pieces import EXACT, FP4, INT4

PART, REST = tl.constexpr(2.0**64), tl.constexpr(2.0**62)
"""e2m1's bits, put where bf16 has its own, mean 2^-126 of the value. Scales bring 2^64 of that back, sums in float32 the rest
(`finish`): bf16 has no room for 2^126 times a scale above 2. Scales above 2^63 are taken for 2^63."""

# `prmt` brings a byte of l into both bytes of p's low half, the same byte of h into its high half.
BEGIN = "{ .reg .b32 l, h, p, t, z, o, c;\n"
INTEGERS = (  # 128 + code as bf16, minus 136
    BEGIN + "mov.b32 o, 0x3F803F80; mov.b32 c, 0xC308C308; shr.u32 h, $1, 4; prmt.b32 p, $1, h, #;\n"
    "lop3.b32 p, p, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 p, p, o, c;\n"
)  # fmt: skip
FLOATS = (
    BEGIN + "shl.b32 l, $1, 4; prmt.b32 p, l, $1, #;\n"
    "shr.u32 t, p, 6; and.b32 t, t, 0x01C001C0; lop3.b32 p, p, 0x80008000, t, 0xEA;\n"
)  # fmt: skip
ONCE = "mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, p, $2, z; }"
TWICE = "mov.b32 z, 0x80008000; fma.rn.bf16x2 t, p, $3, z; fma.rn.bf16x2 $0, p, $2, t; }"
BYTES = ("0x4400", "0x5511", "0x6622", "0x7733")
ASM_INT4 = tl.constexpr(tuple((INTEGERS + TWICE).replace("#", byte) for byte in BYTES))
ASM_FP4 = tl.constexpr(tuple((FLOATS + TWICE).replace("#", byte) for byte in BYTES))
ASM_MXFP4 = tl.constexpr(tuple((FLOATS + ONCE).replace("#", byte) for byte in BYTES))
"""Assembly that turns a word and its scale into the two values of a byte, as the halves of 32 bits. One text for each byte."""


@triton.jit
def order_of_k(BK: tl.constexpr, SWAP: tl.constexpr):
    """Returns the column, within a step's BK columns, of the k-th multiplied value. Pairs stay together, the unit of a copy."""
    k = tl.arange(0, BK)
    if SWAP:
        k = k // 32 * 32 + k // 2 % 4 * 8 + k // 8 % 4 * 2 + k % 2
        k = tl.max_contiguous(tl.multiple_of(k, 2), 2)
    return k


@triton.jit
def finish(acc, PACKED: tl.constexpr, TO: tl.constexpr):
    """Multiplies sums by the rest of the scale: see REST."""
    FAST: tl.constexpr = not EXACT and tl.bfloat16 == TO
    if PACKED == FP4 and FAST:
        acc *= REST
    return acc


@triton.jit
def _plain(word, s, J: tl.constexpr, PACKED: tl.constexpr, TO: tl.constexpr):
    """Returns value J of each word, in float32."""
    code = (word >> (4 * J)) & 0xF
    if PACKED == INT4:
        value = (code - 8).to(tl.float32)
    else:
        m = (code & 7).to(tl.float32)
        value = tl.where(m < 4, 0.5 * m, tl.where(m < 6, m - 2.0, 2.0 * m - 8.0))
        value = tl.where(code > 7, -value, value)
    return (value * s).to(TO)


@triton.jit
def _scales(ws, at, inside, kb, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Loads scales (BN, BK // GROUP). Floats keep their dtype, and bytes become int32."""
    NG: tl.constexpr = BK // GROUP
    g = tl.arange(0, NG)
    if ws.dtype.element_ty == tl.uint8 and NG == 4 and K % BK == 0:  # one 32-bit word, which can be fetched ahead
        words = ws.to(tl.pointer_type(tl.int32), bitcast=True)
        four = tl.load(words + at * (K // BK) + kb, mask=inside, other=0)
        # Not `>> 8 * arange`: with an index in it the layout of the products does not reach back to the loads.
        low, high = tl.join(four & 0xFF, (four >> 8) & 0xFF), tl.join((four >> 16) & 0xFF, (four >> 24) & 0xFF)
        s = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BN, NG))
    else:
        g += kb * NG
        mask = inside[:, None] & (g < K // GROUP)[None, :]
        s = tl.load(ws + at[:, None] * (K // GROUP) + g[None, :], mask=mask, other=0)
        if ws.dtype.element_ty == tl.uint8:
            s = s.to(tl.int32)
    return s


@triton.jit
def _twice(v):
    """Returns one value as two equal bf16 in 32 bits."""
    bits = v.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def _pair(word, high, low, ASM: tl.constexpr):
    """Returns the two values of a byte of each word, side by side on a new axis."""
    if low is None:
        both = tl.inline_asm_elementwise(ASM, "=r,r,r", [word, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        both = tl.inline_asm_elementwise(ASM, "=r,r,r,r", [word, high, low], dtype=tl.int32, is_pure=True, pack=1)
    even, odd = both.to(tl.int16), (both >> 16).to(tl.int16)
    return tl.join(even.to(tl.bfloat16, bitcast=True), odd.to(tl.bfloat16, bitcast=True))


@triton.jit
def _per_word(s, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    return tl.reshape(tl.broadcast_to(s[:, :, None], (BN, BK // GROUP, GROUP // 8)), (BN, BK // 8))


@triton.jit
def unpack(w, ws, row, inside, kb, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
           GROUP: tl.constexpr, TO: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    """Returns BN rows x BK columns of weights, in `order_of_k`, in TO. A byte has two codes, the even one low. GROUP codes, a
    multiple of 8, share one scale (a float, or as uint8 an exponent with bias 127). The sums need `finish`."""
    at = row.to(tl.int64)
    j = kb * (BK // 8) + tl.arange(0, BK // 8)
    words = w.to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.load(words + at[:, None] * (K // 8) + j[None, :], mask=inside[:, None] & (j < K // 8)[None, :], other=0)
    s = _scales(ws, at, inside, kb, K, BN, BK, GROUP)
    FAST: tl.constexpr = not EXACT and tl.bfloat16 == TO  # the interpreter has no assembler, fp16 no range for scales
    if FAST:
        low = None
        FLOATS: tl.constexpr = ASM_INT4 if PACKED == INT4 else ASM_FP4
        ASM: tl.constexpr = ASM_MXFP4 if ws.dtype.element_ty == tl.uint8 else FLOATS
        if ws.dtype.element_ty == tl.uint8:
            field = tl.minimum(s + 64, 254)
            high = _per_word((field << 7) | (field << 23), BN, BK, GROUP)
        else:
            wide = s.to(tl.float32)
            if PACKED == FP4:
                wide *= PART
            rest = wide - wide.to(tl.bfloat16).to(tl.float32)
            high, low = _per_word(_twice(wide), BN, BK, GROUP), _per_word(_twice(rest), BN, BK, GROUP)
        A0: tl.constexpr = ASM[0]  # Triton 3.6 takes no element of a tuple as a constant argument
        A1: tl.constexpr = ASM[1]
        A2: tl.constexpr = ASM[2]
        A3: tl.constexpr = ASM[3]
        b0, b1 = _pair(word, high, low, A0), _pair(word, high, low, A1)
        b2, b3 = _pair(word, high, low, A2), _pair(word, high, low, A3)
    else:
        if ws.dtype.element_ty == tl.uint8:
            wide = (s << 23).to(tl.float32, bitcast=True)
        else:
            wide = s.to(tl.float32)
        f = _per_word(wide, BN, BK, GROUP)
        b0 = tl.join(_plain(word, f, 0, PACKED, TO), _plain(word, f, 1, PACKED, TO))
        b1 = tl.join(_plain(word, f, 2, PACKED, TO), _plain(word, f, 3, PACKED, TO))
        b2 = tl.join(_plain(word, f, 4, PACKED, TO), _plain(word, f, 5, PACKED, TO))
        b3 = tl.join(_plain(word, f, 6, PACKED, TO), _plain(word, f, 7, PACKED, TO))
    left, right = tl.join(b0, b1), tl.join(b2, b3)
    # row, 32 columns, word, value of a byte, low bit of the byte, its high bit
    eight = tl.reshape(tl.join(left, right), (BN, BK // 32, 4, 2, 2, 2))
    if SWAP:
        eight = tl.permute(eight, (0, 1, 5, 4, 2, 3))
    else:
        eight = tl.permute(eight, (0, 1, 2, 5, 4, 3))
    return tl.reshape(eight, (BN, BK))
