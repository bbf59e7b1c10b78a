"""Shared parts of the GEMM kernels: programmatic launch, the choice of a program's tile, one matrix step, the non-linearity.

A tile is `BM` rows of one expert. `tiles` is a table of int32, `(FIELDS, T)` = expert, first row, number of rows, the expert's
first tile, its number of tiles. The number of all tiles follows the table. In direct mode (few slots) there is no table:
every program derives its tile from the ids, in registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EXACT = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether operands are widened first: only in the interpreter, which multiplies the raw bits of bf16."""

FLOAT, TENSOR, BLOCK, ROW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Scales of activations, in this order: no scale, one static number, one for 128 columns, one a row."""

DIRECT, GATHER, ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Sources of a tile's rows, in this order: slots found in the ids, slots in `order`, rows that already lie expert by expert."""

FIELDS = tl.constexpr(5)
"""Rows of the table of tiles. The number of tiles lies behind them."""

WHOLE, INT4, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Forms of weights, in this order: unpacked, 4-bit integers with offset 8, e2m1. See `four_bits`."""

SILU, GELU, GELU_TANH, RELU2, SWIGLUOAI = (tl.constexpr(i) for i in range(5))


@triton.jit
def pdl_enter(ON: tl.constexpr):
    """Waits for the kernel before and lets the kernel after start its own prologue (programmatic dependent launch)."""
    if ON:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def direct_state(ids, S, BM, SP: tl.constexpr, BINS: tl.constexpr):
    """Returns the ids of all slots, the tiles of each expert and their running sum. SP >= S, BINS > number of experts."""
    j, bins = tl.arange(0, SP), tl.arange(0, BINS)
    e = tl.load(ids + j, mask=j < S, other=-1)
    n = tl.histogram(tl.where(e >= 0, e, BINS - 1), BINS)
    per = tl.where(bins < BINS - 1, (n + BM - 1) // BM, 0)
    return e, per, tl.cumsum(per, 0) - per


@triton.jit
def direct_tile(t, ej, per, toff, BM: tl.constexpr, SP: tl.constexpr, BINS: tl.constexpr):
    """Returns tile t's expert, its slots and the mask of the real rows among BM."""
    j, bins, m = tl.arange(0, SP), tl.arange(0, BINS), tl.arange(0, BM)
    hit = (t >= toff) & (t < toff + per)
    e = tl.sum(tl.where(hit, bins, 0), 0)
    first = (t - tl.sum(tl.where(hit, toff, 0), 0)) * BM
    same = (ej == e).to(tl.int32)
    rank = tl.cumsum(same, 0) - same
    chosen = (same[None, :] > 0) & (rank[None, :] == first + m[:, None])
    return e, tl.sum(tl.where(chosen, j[None, :], 0), 1), tl.sum(chosen.to(tl.int32), 1) > 0


@triton.jit
def work_item(w, tiles, T, num_tiles, GM, NB: tl.constexpr, SPLIT: tl.constexpr, SOURCE: tl.constexpr):
    """Maps a work item to tile, column block and split. The tile runs fastest inside a group of tiles: weights stay in L2.

    GM > 0: groups of GM tiles, across experts. GM < 0: groups of even size, at most -GM, that end with the expert, so that no
    group reads the weights of two experts. In both cases q // NB is a tile of q's group.
    """
    q = w // SPLIT
    low, count, size = 0, num_tiles, GM
    if SOURCE != DIRECT:  # noqa: SIM102 (a constant: without a table nothing below is compiled)
        if GM < 0:
            low, count = tl.load(tiles + 3 * T + q // NB), tl.load(tiles + 4 * T + q // NB)
            groups = (count - GM - 1) // -GM
            size = (count + groups - 1) // groups
    first = low + (q // NB - low) // size * size
    size = tl.minimum(low + count - first, size)
    rest = q - first * NB
    return first + rest % size, rest // size, w % SPLIT


@triton.jit
def matrix_step(a, w, acc, SWAP: tl.constexpr):
    """Returns acc + a (BM, BK) x w (BN, BK)^T. SWAP: transposed, with the weights in WGMMA's 64-row operand."""
    if EXACT and w.dtype != tl.int8:
        a, w = a.to(tl.float32), w.to(tl.float32)
    if SWAP:
        acc = tl.dot(w, tl.trans(a), acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(a, tl.trans(w), acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def to_e4m3(v):
    return tl.minimum(tl.maximum(v, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def activate(g, u, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Returns act(gate) * up in float32. LIMIT 0 means no clamp."""
    if LIMIT > 0:
        g = tl.minimum(g, LIMIT)
        u = tl.minimum(tl.maximum(u, -LIMIT), LIMIT)
    if ACT == SILU:
        v = g * tl.sigmoid(g) * u
    elif ACT == GELU:
        v = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif ACT == GELU_TANH:  # 0.5 * (1 + tanh(z)) = sigmoid(2 z)
        v = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
    elif ACT == RELU2:
        r = tl.maximum(g, 0.0)
        v = r * r * u
    else:
        v = g * tl.sigmoid(ALPHA * g) * (u + 1.0)
    return v
