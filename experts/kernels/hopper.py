"""Grouped GEMMs for compute capability 9.0, warp-specialised by hand (Gluon): thick batches, rows that lie expert by expert.

One warp loads by TMA, and two or three warpgroups, 64 rows each, multiply. With block scales (BLOCK) each product is scaled
and added outside the tensor core. Triton keeps all warps in step, so the tensor cores would idle during the sum. Here one
warpgroup adds while another one multiplies.

A work item is BM rows of one expert by two blocks of 128 output columns: gate and up in the first GEMM, neighbours in the
second. A program takes the next free item, because tiles differ in cost: parts of 64 rows that a tile does not fill are
neither loaded nor multiplied. The modes are those of `pieces`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FLOAT, TENSOR, BLOCK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
ROWS = gl.constexpr(64)
"""Rows of one warpgroup."""
SIDE = gl.constexpr(128)
FIELDS = gl.constexpr(5)  # as in `pieces`

barrier_of_warps = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _here(v):
    """Returns v, computed at this point. LLVM would otherwise move the sums behind the next product, whose result needs their
    registers. A following wait for a barrier, complete or not, keeps ptxas from the same move, since ptxas moves nothing over
    a branch."""
    return gl.inline_asm_elementwise("// $0", "=f,0", [v], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _item(w, tiles, T, num_tiles, GM, NB: gl.constexpr, SPLIT: gl.constexpr):
    """Maps a work item to tile, column block and split: see `pieces.work_item`."""
    q = w // SPLIT
    low, count, size = 0, num_tiles, GM
    if GM < 0:
        low, count = gl.load(tiles + 3 * T + q // NB), gl.load(tiles + 4 * T + q // NB)
        groups = (count - GM - 1) // -GM
        size = (count + groups - 1) // groups
    first = low + (q // NB - low) // size * size
    size = gl.minimum(low + count - first, size)
    rest = q - first * NB
    return first + rest % size, rest // size, w % SPLIT


@gluon.jit
def _post(queue, posted, taken, num, item):
    """Hands item number `num` of this program over to the consumers. The producer calls it."""
    slot = num % 2
    mbarrier.wait(taken.index(slot), (num // 2 + 1) & 1)
    queue.index(slot).store(gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + item)
    barrier_of_warps()
    mbarrier.arrive(posted.index(slot), count=1)


@gluon.jit
def _take(queue, posted, taken, num):
    """Returns item number `num` of this program. The consumers call it."""
    slot = num % 2
    mbarrier.wait(posted.index(slot), (num // 2) & 1)
    item = gl.max(queue.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    barrier_of_warps()
    mbarrier.arrive(taken.index(slot), count=1)
    return item


@gluon.jit
def _load(xd, wd, tiles, counter, a0, a1, a2, b, full, empty, queue, posted, taken, T, GM, PARTS: gl.constexpr,
          WEIGHT_ROWS: gl.constexpr, SECOND: gl.constexpr, STEP: gl.constexpr, NB: gl.constexpr, NK: gl.constexpr,
          BK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Runs the producer, NK steps an item. An expert has WEIGHT_ROWS weight rows and a column block STEP of them. The second
    block lies SECOND rows further. `counter` (2 numbers) hands out items. It is 0 again when all programs have ended."""
    BYTES: gl.constexpr = wd.block_type.nbytes
    num_items = gl.load(tiles + FIELDS * T) * (NB * SPLIT)
    step = 0
    num = 0
    item = gl.program_id(0)
    while item < num_items:
        _post(queue, posted, taken, num, item)
        tile, nb, sp = _item(item, tiles, T, num_items // (NB * SPLIT), GM, NB, SPLIT)
        e, row0 = gl.load(tiles + tile), gl.load(tiles + T + tile)
        w_row = e * WEIGHT_ROWS + nb * STEP
        parts = (gl.load(tiles + 2 * T + tile) + ROWS - 1) // ROWS
        for kb in range(NK):
            s = step % STAGES
            mbarrier.wait(empty.index(s), (step // STAGES + 1) & 1)
            bar, weights, column = full.index(s), b.index(s), (sp * NK + kb) * BK
            for n in gl.static_range(1, PARTS + 1):
                mbarrier.expect(bar, 2 * BYTES + n * (BYTES // 2), pred=parts == n)
            tma.async_copy_global_to_shared(xd, [row0, column], bar, a0.index(s))
            tma.async_copy_global_to_shared(xd, [row0 + ROWS, column], bar, a1.index(s), pred=parts > 1)
            if PARTS == 3:
                tma.async_copy_global_to_shared(xd, [row0 + 2 * ROWS, column], bar, a2.index(s), pred=parts > 2)
            tma.async_copy_global_to_shared(wd, [w_row, column], bar, weights.slice(0, SIDE))
            tma.async_copy_global_to_shared(wd, [w_row + SECOND, column], bar, weights.slice(SIDE, SIDE))
            if kb == NK // 2:  # early: the answer takes about a microsecond
                item = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            step += 1
        num += 1
    _post(queue, posted, taken, num, item)
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _store(q, out, row0, count, column, OUT: gl.constexpr, PART: gl.constexpr):
    """Stores 64 x 128 results to `out` (rows, OUT), 16 bytes a thread. Rows past `count` belong to another expert. 4-byte
    results are stored as they lie in the accumulator, 32 bytes in a row: shared memory has no room to bring them together."""
    PER: gl.constexpr = 128 // q.dtype.primitive_bitwidth
    rows: gl.constexpr = gl.BlockedLayout([1, PER], [PER // 4, 128 // PER], [4, 1], [1, 0])
    stored: gl.constexpr = q.type.layout if PER == 4 else rows
    q = gl.convert_layout(q, stored)
    m = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, stored))
    n = column + gl.arange(0, SIDE, layout=gl.SliceLayout(0, stored))
    at = gl.expand_dims((row0 + m).to(gl.int64) * OUT, 1) + gl.expand_dims(n, 0)
    gl.store(out + at, q, mask=gl.expand_dims(m < count, 1))


@gluon.jit
def _silu(v):
    """Returns v / (1 + exp(-v)) by the special function unit, within 2 ulp. A division with its range checks would take most
    of the epilogue's time."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }",
        "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _to_e4m3(v):
    return gl.minimum(gl.maximum(v, -448.0), 448.0).to(gl.float8e4nv)


@gluon.jit
def _finish(acc0, acc1, out, outs, scale, a2, row0, count, nb, OUT: gl.constexpr, MODE: gl.constexpr,
            GATED: gl.constexpr, PART: gl.constexpr):  # fmt: skip
    """Stores the result of an item. GATED: silu(acc0) * acc1, quantised by MODE. Otherwise both blocks without a change."""
    if MODE == TENSOR:
        acc0, acc1 = acc0 * scale, acc1 * scale
    if GATED:
        v = _silu(acc0) * acc1
        if MODE == BLOCK:
            top = gl.maximum(gl.max(gl.abs(v), 1), 1e-10)
            m = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, v.type.layout))
            gl.store(outs + (row0 + m) * (OUT // SIDE) + nb, top / 448.0, mask=m < count)
            q = _to_e4m3(v * gl.expand_dims(448.0 / top, 1))
        elif MODE == TENSOR:
            q = _to_e4m3(v * (1.0 / gl.load(a2)))
        else:
            q = v.to(out.dtype.element_ty)
        _store(q, out, row0, count, nb * SIDE, OUT, PART)
    else:
        _store(acc0.to(out.dtype.element_ty), out, row0, count, nb * 2 * SIDE, OUT, PART)
        _store(acc1.to(out.dtype.element_ty), out, row0, count, nb * 2 * SIDE + SIDE, OUT, PART)


@gluon.jit
def _sum_blocks(rows, xs, XM, XK, ws, a, b, full, empty, ours, step, row0, count, block, k0, layout: gl.constexpr,
                NEXT: gl.constexpr, NK: gl.constexpr, ALL: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
                LAST: gl.constexpr):  # fmt: skip
    """Sums one work item with block scales: every product of 128 inner columns is scaled, then added in float32. It takes the
    steps k0 to k0 + NK of ALL. The scale of a row and a step lies at xs + row * XM + step * XK."""
    real = rows < count
    sa_at, s0_at = xs + (row0 + rows) * XM + k0 * XK, ws + block * ALL + k0
    s1_at = s0_at + NEXT * ALL
    zero = gl.zeros((ROWS, SIDE), gl.float32, layout)
    acc0, acc1 = zero, zero
    sa, s0, s1 = gl.load(sa_at, mask=real, other=0.0), gl.load(s0_at), gl.load(s1_at)
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    for kb in range(NK):
        s = step % STAGES
        x, w = a.index(s), b.index(s)
        product = warpgroup_mma(x, w.slice(0, SIDE).permute((1, 0)), zero, use_acc=False, is_async=True)
        # Beside the first product the stage before is given back, and the next block's scales are loaded ahead of their use.
        barrier_of_warps()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=kb > 0)
        nx = gl.minimum(kb + 1, ALL - 1 - k0)
        sa2, s02, s12 = gl.load(sa_at + nx * XK, mask=real, other=0.0), gl.load(s0_at + nx), gl.load(s1_at + nx)
        p = warpgroup_mma_wait(0, deps=[product])
        if LAG % 2 == 1 and not LAST:
            mbarrier.arrive(ours, count=1, pred=kb == LAG // 2)
        acc0 = _here(acc0 + p * gl.expand_dims(sa * s0, 1))
        product = warpgroup_mma(x, w.slice(SIDE, SIDE).permute((1, 0)), zero, use_acc=False, is_async=True)
        step += 1
        # The wait for the next stage runs beside the second product.
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=kb + 1 < NK)
        p = warpgroup_mma_wait(0, deps=[product])
        if LAG > 0 and LAG % 2 == 0 and not LAST:
            mbarrier.arrive(ours, count=1, pred=kb == LAG // 2 - 1)
        acc1 += p * gl.expand_dims(sa * s1, 1)
        sa, s0, s1 = sa2, s02, s12
    barrier_of_warps()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc0, acc1, step


@gluon.jit
def _quarter(acc, product, sa, sw, bar, phase):
    """Returns acc + product * scales, computed while one later product runs, and the product, whose registers are then free."""
    p = warpgroup_mma_wait(1, deps=[product])
    acc = _here(acc + p * gl.expand_dims(sa * sw, 1))
    mbarrier.wait(bar, phase)  # complete: see `_here`
    return acc, p


@gluon.jit
def _sum_quarters(rows, xs, XM, XK, ws, a, b, full, empty, ours, step, row0, count, block, k0, layout: gl.constexpr,
                  NEXT: gl.constexpr, NK: gl.constexpr, ALL: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
                  LAST: gl.constexpr):  # fmt: skip
    """Sums like `_sum_blocks`, in blocks of 64 columns: while one product is scaled and added, the next one runs. Rows go
    through registers, because shared memory would limit products of 64 columns that read both operands from it."""
    QUARTER: gl.constexpr = SIDE // 2
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    real = rows < count
    sa_at, s0_at = xs + (row0 + rows) * XM + k0 * XK, ws + block * ALL + k0
    s1_at = s0_at + NEXT * ALL
    zero = gl.zeros((ROWS, QUARTER), gl.float32, layout)
    acc0, acc1, acc2, acc3 = zero, zero, zero, zero
    sa = gl.load(sa_at, mask=real, other=0.0)
    for kb in range(NK):
        s = step % STAGES
        here, nx = gl.minimum(kb, ALL - 1 - k0), gl.minimum(kb + 1, ALL - 1 - k0)
        s0, s1 = gl.load(s0_at + here), gl.load(s1_at + here)
        phase, bar = (step // STAGES) & 1, full.index(s)
        mbarrier.wait(bar, phase)
        x, w = a.index(s).load(operand), b.index(s)
        p0 = warpgroup_mma(x, w.slice(0, QUARTER).permute((1, 0)), zero, use_acc=False, is_async=True)
        p1 = warpgroup_mma(x, w.slice(QUARTER, QUARTER).permute((1, 0)), zero, use_acc=False, is_async=True)
        sa2 = gl.load(sa_at + nx * XK, mask=real, other=0.0)  # the next block's scales, ahead of their use
        acc0, free0 = _quarter(acc0, p0, sa, s0, bar, phase)
        p2 = warpgroup_mma(x, w.slice(2 * QUARTER, QUARTER).permute((1, 0)), free0, use_acc=False, is_async=True)
        acc1, free1 = _quarter(acc1, p1, sa, s0, bar, phase)
        p3 = warpgroup_mma(x, w.slice(3 * QUARTER, QUARTER).permute((1, 0)), free1, use_acc=False, is_async=True)
        acc2, _free = _quarter(acc2, p2, sa, s1, bar, phase)
        p = warpgroup_mma_wait(0, deps=[p3])
        if LAG > 0 and not LAST:
            mbarrier.arrive(ours, count=1, pred=kb == (LAG - 1) // 2)
        barrier_of_warps()
        mbarrier.arrive(empty.index(s), count=1)
        acc3 += p * gl.expand_dims(sa * s1, 1)
        sa = sa2
        step += 1
    return acc0, acc1, acc2, acc3, step


@gluon.jit
def _give_back(empty, ours, step, kb, STAGES: gl.constexpr, LAG: gl.constexpr, LAST: gl.constexpr):
    """Gives back the stage of the step before `step`, while `step` is being multiplied."""
    if LAG > 0 and not LAST:
        mbarrier.arrive(ours, count=1, pred=kb == (LAG + 1) // 2)
    barrier_of_warps()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=kb > 0)


@gluon.jit
def _sum_wide(a, b, full, empty, ours, step, layout: gl.constexpr, NK: gl.constexpr, STAGES: gl.constexpr,
              LAG: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """Sums one work item in the tensor core. One product serves both column blocks, so it reads the rows once."""
    acc = gl.zeros((ROWS, 2 * SIDE), gl.float32, layout)
    for kb in range(NK):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        acc = warpgroup_mma(a.index(s), b.index(s).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        _give_back(empty, ours, step, kb, STAGES, LAG, LAST)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    _give_back(empty, ours, step, NK, STAGES, LAG, LAST)
    acc0, acc1 = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, SIDE)), (0, 2, 1)))
    return acc0, acc1, step


@gluon.jit
def _sum_halves(a, b, full, empty, ours, step, layout: gl.constexpr, NK: gl.constexpr, STAGES: gl.constexpr,
                LAG: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """Sums like `_sum_wide`, in two products. With three consumers ptxas has too few registers for one of 256 columns."""
    acc0 = gl.zeros((ROWS, SIDE), gl.float32, layout)
    acc1 = gl.zeros((ROWS, SIDE), gl.float32, layout)
    for kb in range(NK):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        x, w = a.index(s), b.index(s)
        acc0 = warpgroup_mma(x, w.slice(0, SIDE).permute((1, 0)), acc0, is_async=True)
        acc1 = warpgroup_mma(x, w.slice(SIDE, SIDE).permute((1, 0)), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        _give_back(empty, ours, step, kb, STAGES, LAG, LAST)
        step += 1
    acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    _give_back(empty, ours, step, NK, STAGES, LAG, LAST)
    return acc0, acc1, step


@gluon.jit
def _skip(full, empty, step, NK: gl.constexpr, STAGES: gl.constexpr):
    """Skips a part of a tile that has no rows. It gives the stages back as they come, so that phases stay in step."""
    for _kb in range(NK):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        barrier_of_warps()  # a warp that fell two phases behind would wait for ever
        mbarrier.arrive(empty.index(s), count=1)
        step += 1
    return step


@gluon.jit
def _beside(left, right):
    """Joins two blocks of 64 columns into one of 128."""
    both = gl.join(left, right)  # (64, 64, 2)
    return gl.reshape(gl.permute(both, (0, 2, 1)), (ROWS, SIDE))


@gluon.jit
def _multiply(xs, XE, XM, XK, ws, a1, a2, tiles, out, outs, a, b, full, empty, queue, posted, taken, turn, S, T, GM,
              OUT: gl.constexpr, NEXT: gl.constexpr, BLOCKS: gl.constexpr, STEP: gl.constexpr, NB: gl.constexpr,
              NK: gl.constexpr, ALL: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr, GATED: gl.constexpr,
              WIDTH: gl.constexpr, LAG: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr,
              PART: gl.constexpr):  # fmt: skip
    """Runs a consumer, which takes 64 of the rows. An expert has BLOCKS blocks of 128 weight rows and a work item STEP of them.
    The second block lies NEXT further. LAG: products of the item that the consumer before finishes before this one starts."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // a.dtype.primitive_bitwidth])
    LAST: gl.constexpr = PART == PARTS - 1
    num_items = gl.load(tiles + FIELDS * T) * (NB * SPLIT)
    m = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    ours = turn.index(PART % 2)
    step = 0
    num = 0
    scale = 1.0
    item = _take(queue, posted, taken, num)
    while item < num_items:
        tile, nb, sp = _item(item, tiles, T, num_items // (NB * SPLIT), GM, NB, SPLIT)
        e, row0, count = gl.load(tiles + tile), gl.load(tiles + T + tile), gl.load(tiles + 2 * T + tile)
        if LAG > 0 and PART > 0:
            mbarrier.wait(turn.index(PART - 1), num & 1)
        if PART > 0 and count <= PART * ROWS:
            if LAG > 0 and not LAST:
                mbarrier.arrive(ours, count=1)
            step = _skip(full, empty, step, NK, STAGES)
        else:
            block, k0 = e * BLOCKS + nb * STEP, sp * NK
            if MODE != BLOCK and WIDTH == SIDE:
                acc0, acc1, step = _sum_halves(a, b, full, empty, ours, step, layout, NK, STAGES, LAG, LAST)
            elif MODE != BLOCK:
                acc0, acc1, step = _sum_wide(a, b, full, empty, ours, step, layout, NK, STAGES, LAG, LAST)
            elif WIDTH == SIDE:
                acc0, acc1, step = _sum_blocks(m, xs + e * XE, XM, XK, ws, a, b, full, empty, ours, step, row0, count, block,
                                               k0, layout, NEXT, NK, ALL, STAGES, LAG, LAST)  # fmt: skip
            else:
                q0, q1, q2, q3, step = _sum_quarters(m, xs + e * XE, XM, XK, ws, a, b, full, empty, ours, step, row0, count,
                                                     block, k0, layout, NEXT, NK, ALL, STAGES, LAG, LAST)  # fmt: skip
                acc0, acc1 = _beside(q0, q1), _beside(q2, q3)
            if MODE == TENSOR:
                scale = gl.load(a1) * gl.load(ws + e)
            at = out + sp * S.to(gl.int64) * OUT
            _finish(acc0, acc1, at, outs, scale, a2, row0, count, nb, OUT, MODE, GATED, PART)
        num += 1
        item = _take(queue, posted, taken, num)


@gluon.jit(do_not_specialize=["S", "T", "GM", "XE", "XM", "XK"])
def grouped(xd, xs, wd, ws, a1, a2, tiles, counter, out, outs, S, T, GM, XE, XM, XK, STRIDED: gl.constexpr,
            INNER: gl.constexpr, OUT: gl.constexpr, MODE: gl.constexpr, GATED: gl.constexpr, BM: gl.constexpr,
            STAGES: gl.constexpr, WIDTH: gl.constexpr, LAG: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Computes one grouped GEMM. GATED: out (rows, OUT) = silu(x w_gate^T) * (x w_up^T), quantised. Otherwise
    out (rows, OUT) = x w^T. OUT % 256 == 0, or OUT % 128 == 0 with GATED.

    Args:
        xd: descriptor of (rows, INNER), rows expert by expert, block (64, BK).
        wd: descriptor of the weights as (E * rows of one expert, INNER), block (128, BK).
        xs, ws, outs: with BLOCK, xs (rows, INNER/128), the weights' block scales, outs (rows, OUT/128).
        a1, a2: with TENSOR, the scales of x and of out. ws is then (E,).
        BM: 128, or 192 without BLOCK.
        WIDTH: columns of one product: 64 or 128 with BLOCK, else 256, or 128 with BM 192.
        SPLIT: above 1, without GATED, out is (SPLIT, S, OUT), one sum for each part of the inner columns.
        STRIDED: xs has expert e's scale of `row` and block k at e*XE + row*XM + k*XK.
    """
    BK: gl.constexpr = xd.block_type.shape[1]
    WEIGHT_ROWS: gl.constexpr = 2 * OUT if GATED else OUT
    SECOND: gl.constexpr = OUT if GATED else SIDE
    STEP: gl.constexpr = SIDE if GATED else 2 * SIDE
    NB: gl.constexpr = OUT // STEP
    ALL: gl.constexpr = (INNER + BK - 1) // BK
    NK: gl.constexpr = (ALL + SPLIT - 1) // SPLIT  # TMA fills steps behind the last column with zeros
    WAIT: gl.constexpr = LAG if NK >= STAGES else 0  # the first may be a whole item ahead otherwise
    PARTS: gl.constexpr = BM // ROWS
    r0 = gl.allocate_shared_memory(xd.dtype, [STAGES, ROWS, BK], xd.layout)
    r1 = gl.allocate_shared_memory(xd.dtype, [STAGES, ROWS, BK], xd.layout)
    r2 = gl.allocate_shared_memory(xd.dtype, [STAGES, ROWS, BK], xd.layout) if PARTS == 3 else r1
    b = gl.allocate_shared_memory(wd.dtype, [STAGES, 2 * SIDE, BK], wd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queue = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    posted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Allocated only where it is used: the compiler puts results into the memory of a barrier without a wait. When the GPU turns
    # to another process in between, it restores the barrier over these results.
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()) if WAIT > 0 else posted
    for s in gl.static_range(2):
        if WAIT > 0:
            mbarrier.init(turn.index(s), count=1)
        mbarrier.init(posted.index(s), count=1)
        mbarrier.init(taken.index(s), count=PARTS)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=PARTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if PARTS == 2:
        gl.warp_specialize([
            (_multiply, (xs, XE if STRIDED else 0, XM if STRIDED else ALL, XK if STRIDED else 1, ws, a1, a2, tiles, out, outs,
                         r0, b, full, empty, queue, posted, taken, turn, S, T, GM, OUT, SECOND // SIDE,
                         WEIGHT_ROWS // SIDE, STEP // SIDE, NB, NK, ALL, STAGES, MODE, GATED, WIDTH, WAIT, SPLIT, PARTS, 0)),
            (_multiply, (xs, XE if STRIDED else 0, XM if STRIDED else ALL, XK if STRIDED else 1, ws, a1, a2, tiles, out, outs,
                         r1, b, full, empty, queue, posted, taken, turn, S, T, GM, OUT, SECOND // SIDE,
                         WEIGHT_ROWS // SIDE, STEP // SIDE, NB, NK, ALL, STAGES, MODE, GATED, WIDTH, WAIT, SPLIT, PARTS, 1)),
            (_load, (xd, wd, tiles, counter, r0, r1, r2, b, full, empty, queue, posted, taken, T, GM, PARTS, WEIGHT_ROWS,
                     SECOND, STEP, NB, NK, BK, STAGES, SPLIT)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (xs, XE if STRIDED else 0, XM if STRIDED else ALL, XK if STRIDED else 1, ws, a1, a2, tiles, out, outs,
                         r0, b, full, empty, queue, posted, taken, turn, S, T, GM, OUT, SECOND // SIDE,
                         WEIGHT_ROWS // SIDE, STEP // SIDE, NB, NK, ALL, STAGES, MODE, GATED, WIDTH, WAIT, SPLIT, PARTS, 0)),
            (_multiply, (xs, XE if STRIDED else 0, XM if STRIDED else ALL, XK if STRIDED else 1, ws, a1, a2, tiles, out, outs,
                         r1, b, full, empty, queue, posted, taken, turn, S, T, GM, OUT, SECOND // SIDE,
                         WEIGHT_ROWS // SIDE, STEP // SIDE, NB, NK, ALL, STAGES, MODE, GATED, WIDTH, WAIT, SPLIT, PARTS, 1)),
            (_multiply, (xs, XE if STRIDED else 0, XM if STRIDED else ALL, XK if STRIDED else 1, ws, a1, a2, tiles, out, outs,
                         r2, b, full, empty, queue, posted, taken, turn, S, T, GM, OUT, SECOND // SIDE,
                         WEIGHT_ROWS // SIDE, STEP // SIDE, NB, NK, ALL, STAGES, MODE, GATED, WIDTH, WAIT, SPLIT, PARTS, 2)),
            (_load, (xd, wd, tiles, counter, r0, r1, r2, b, full, empty, queue, posted, taken, T, GM, PARTS, WEIGHT_ROWS,
                     SECOND, STEP, NB, NK, BK, STAGES, SPLIT)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
