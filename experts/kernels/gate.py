"""The gate on the device: partial logits by tensor cores, then everything from logits to ids and weights in one launch.

Legend: M tokens, K hidden size, E experts. The sum over K has one order for every M: CHUNK values of K in one accumulator,
INNER chunks one after the other, then OUTER of those sums. `gate_logits` may stop between any two of these levels, and
`choose_experts` continues from there, so a token's logits are the same bits in a batch of any size.
"""

import triton
import triton.language as tl

from .pieces import EXACT, pdl_enter

SOFTMAX, SIGMOID, SOFTMAX_OF_TOPK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

NAN_KEY, LOWEST = tl.constexpr(0x7FFFFFFF), tl.constexpr(-0x80000000)
"""Keys of NaN, which torch.topk takes for the greatest, and of positions that hold no expert or an expert already chosen."""


@triton.jit
def _dot(w, x, acc):
    if EXACT:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w, tl.trans(x), acc)


@triton.jit
def _step(w, x, acc):
    """Returns acc + w (BE, BK) x (BT, BK)^T. A float32 weight is exactly the sum of three bfloat16, so products stay exact."""
    if w.dtype == tl.float32:
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = _dot(high, x, _dot(middle, x, _dot(low, x, acc)))
    else:
        acc = _dot(w, x, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def gate_logits(x, w, parts, M, E: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, INNER: tl.constexpr,
                WHOLE: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Computes parts (OUTER or OUTER * INNER, M, E) float32. WHOLE: a program sums INNER chunks, otherwise a single chunk.
    Experts take WGMMA's 64-row operand in every tile, so that the products are of one kind for any number of tokens."""
    BK: tl.constexpr = CHUNK // 2
    blocks: tl.constexpr = (E + BE - 1) // BE
    e = tl.program_id(0) % blocks * BE + tl.arange(0, BE)
    t = tl.program_id(0) // blocks * BT + tl.arange(0, BT)
    part, k = tl.program_id(1), tl.arange(0, BK)
    at_w = w + e.to(tl.int64)[:, None] * K
    at_x = x + t.to(tl.int64)[:, None] * K
    in_e, in_t = (e < E)[:, None], (t < M)[:, None]
    total = tl.zeros((BE, BT), tl.float32)
    if WHOLE:
        pdl_enter(PDL)
        acc = tl.zeros((BE, BT), tl.float32)
        for step in range(2 * INNER):
            at = (part * 2 * INNER + step) * BK + k[None, :]
            wt = tl.load(at_w + at, mask=in_e & (at < K), other=0)
            xt = tl.load(at_x + at, mask=in_t & (at < K), other=0)
            acc = _step(wt, xt, acc)
            if step % 2 == 1:
                total += acc
                acc = tl.zeros((BE, BT), tl.float32)
    else:
        first = part * CHUNK + k[None, :]
        second = first + BK
        w1 = tl.load(at_w + first, mask=in_e & (first < K), other=0)
        w2 = tl.load(at_w + second, mask=in_e & (second < K), other=0)
        pdl_enter(PDL)  # weights do not depend on the kernel before
        x1 = tl.load(at_x + first, mask=in_t & (first < K), other=0)
        x2 = tl.load(at_x + second, mask=in_t & (second < K), other=0)
        total = _step(w2, x2, _step(w1, x1, total))
    out = parts + (part.to(tl.int64) * M + t[None, :]) * E + e[:, None]
    tl.store(out, total, mask=(e < E)[:, None] & (t < M)[None, :])


@triton.jit
def _key(v):
    """Returns int32 keys in the order of float32: -0 equals 0, NaN is the greatest."""
    bits = tl.where(v == 0.0, 0.0, v).to(tl.int32, bitcast=True)
    return tl.where(v == v, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, at, AXIS: tl.constexpr):
    """Returns the index of the greatest key (the lowest index among equals) and the key. The axis stays, with size 1."""
    most = tl.max(key, AXIS, keep_dims=True)
    return tl.min(tl.where(key == most, at, 0x7FFFFFFF), AXIS, keep_dims=True), most


@triton.jit
def _limit(key, valid, ROWS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, GROUPS: tl.constexpr,
           TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):  # fmt: skip
    """Sets the key of -inf for experts outside the TOP_GROUPS best groups."""
    each = tl.reshape(tl.where(valid, key, LOWEST), (ROWS, GP, SP))
    inside = tl.arange(0, SP)[None, None, :]
    at, best = _best(each, inside, 2)
    score = _value(best)
    if TOP2:
        _, second = _best(tl.where(inside == at, LOWEST, each), inside, 2)
        score += _value(second)
    g = tl.arange(0, GP)[None, :]
    rank = tl.where(g < GROUPS, _key(tl.reshape(score, (ROWS, GP))), LOWEST)
    for _ in tl.static_range(TOP_GROUPS):
        at, best = _best(rank, g, 1)
        rank = tl.where(g == at, LOWEST, rank)
    chosen = tl.reshape(tl.broadcast_to((rank == LOWEST)[:, :, None], (ROWS, GP, SP)), (ROWS, GP * SP))
    minus = tl.full((ROWS, GP * SP), float("-inf"), tl.float32)
    return tl.where(chosen, key, _key(minus))


@triton.jit(do_not_specialize=["M"],
            do_not_specialize_on_alignment=["parts", "bias", "correction", "ids", "weights"])  # fmt: skip
def choose_experts(parts, bias, correction, ids, weights, M, E: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
                   LOGITS: tl.constexpr, SCORING: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
                   TOP2: tl.constexpr, TOPK: tl.constexpr, RENORMALISE: tl.constexpr, EPSILON: tl.constexpr,
                   FACTOR: tl.constexpr, ROUND: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, TP: tl.constexpr,
                   ROWS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Computes ids and weights (M, TOPK), ROWS tokens a program. Position p of a row is expert p % SP of group p // SP, so no
    size needs to be a power of two. GP >= GROUPS, SP >= E // GROUPS, TP >= TOPK. LOGITS: the dtype that holds the logits."""
    each: tl.constexpr = E // GROUPS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, GP * SP)
    e = p // SP * each + p % SP
    real = (p // SP < GROUPS) & (p % SP < each)
    inside = (row < M)[:, None] & real[None, :]
    offset = row.to(tl.int64)[:, None] * E + e[None, :]
    if bias is not None:
        add = tl.load(bias + e, mask=real, other=0).to(tl.float32)
    if correction is not None:
        moved = tl.load(correction + e, mask=real, other=0).to(tl.float32)
    pdl_enter(PDL)
    logits = tl.zeros((ROWS, GP * SP), tl.float32)
    for o in tl.static_range(OUTER):
        part = tl.zeros((ROWS, GP * SP), tl.float32)
        for i in tl.static_range(INNER):
            start = parts + M.to(tl.int64) * (E * (o * INNER + i))
            part += tl.load(start + offset, mask=inside, other=0).to(tl.float32)
        logits += part
    if bias is not None:
        logits += add[None, :]
    logits = logits.to(LOGITS).to(tl.float32)

    scores = logits
    if SCORING == SOFTMAX:
        known = tl.where(real[None, :], logits, float("-inf"))
        powers = tl.where(real[None, :], tl.exp(known - tl.max(known, 1, keep_dims=True)), 0.0)
        scores = tl.div_rn(powers, tl.broadcast_to(tl.sum(powers, 1, keep_dims=True), powers.shape))
    elif SCORING == SIGMOID:
        scores = tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp(-logits))
    held = _key(scores)  # keys all the way: a warp finds the greatest integer in one instruction
    key = held
    if correction is not None:
        key = _key(scores + moved[None, :])
    if TOP_GROUPS < GROUPS:
        key = _limit(key, real[None, :], ROWS, GP, SP, GROUPS, TOP_GROUPS, TOP2)
    key = tl.where(real[None, :], key, LOWEST)

    slot = tl.arange(0, TP)[None, :]
    chosen_ids = tl.zeros((ROWS, TP), tl.int32)
    shares = tl.full((ROWS, TP), float("-inf") if SCORING == SOFTMAX_OF_TOPK else 0.0, tl.float32)
    for i in tl.static_range(TOPK):
        at, most = _best(key, p[None, :], 1)
        here = p[None, :] == at
        if correction is not None or TOP_GROUPS < GROUPS:  # the choice does not depend on the score alone
            most = tl.max(tl.where(here, held, LOWEST), 1, keep_dims=True)
        chosen_ids = tl.where(slot == i, at // SP * each + at % SP, chosen_ids)
        shares = tl.where(slot == i, _value(most), shares)
        key = tl.where(here, LOWEST, key)

    if SCORING == SOFTMAX_OF_TOPK:
        powers = tl.where(slot < TOPK, tl.exp(shares - tl.max(shares, 1, keep_dims=True)), 0.0)
        shares = tl.div_rn(powers, tl.broadcast_to(tl.sum(powers, 1, keep_dims=True), powers.shape))
        shares = shares.to(LOGITS).to(tl.float32)  # torch goes on in the dtype of the logits
    if RENORMALISE:
        total = tl.sum(shares, 1, keep_dims=True)
        if SCORING == SOFTMAX_OF_TOPK:
            total = (total.to(LOGITS).to(tl.float32) + EPSILON).to(LOGITS).to(tl.float32)
        else:
            total += EPSILON
        shares = tl.div_rn(shares, tl.broadcast_to(total, shares.shape))
        if SCORING == SOFTMAX_OF_TOPK:
            shares = shares.to(LOGITS).to(tl.float32)
    if FACTOR != 1.0:
        shares *= FACTOR
        if SCORING == SOFTMAX_OF_TOPK:
            shares = shares.to(LOGITS).to(tl.float32)
    if ROUND:
        shares = shares.to(LOGITS).to(tl.float32)
    out = row.to(tl.int64)[:, None] * TOPK + slot
    kept = (row < M)[:, None] & (slot < TOPK)
    tl.store(ids + out, chosen_ids, mask=kept)
    tl.store(weights + out, shares, mask=kept)
