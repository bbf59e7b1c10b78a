"""Grouped GEMMs for compute capability 9.0, warp-specialised by hand (Gluon): thick batches, rows that lie expert by expert.

One warp loads by TMA; two warpgroups, 64 rows each, multiply. With block scales (BLOCK) each product is scaled and added
outside the tensor core: Triton keeps all warps in step, so that the tensor cores idle meanwhile; here one warpgroup adds
while the other one multiplies.

A work item is 128 rows of one expert by two blocks of 128 output columns: gate and up in the first GEMM, neighbours in the
second. The modes are those of `pieces`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

FLOAT, TENSOR, BLOCK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
HALF_ROWS = gl.constexpr(64)
SIDE = gl.constexpr(128)

barrier_of_warps = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _here(v):
    """v, computed at this point: LLVM would else move the sums behind the second product, whose result needs their registers.
    The wait for a barrier that follows keeps ptxas from the same."""
    return gl.inline_asm_elementwise("// $0", "=f,0", [v], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _item(w, num_tiles, GM, NB: gl.constexpr):
    """Work item -> tile, column block: see `pieces.work_item`."""
    first = w // (GM * NB) * GM
    size = gl.minimum(num_tiles - first, GM)
    rest = w % (GM * NB)
    return first + rest % size, rest // size


@gluon.jit
def _load(xd, wd, tiles, a, b, full, empty, T, GM, ROWS: gl.constexpr, SECOND: gl.constexpr, STEP: gl.constexpr,
          NB: gl.constexpr, NK: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The producer. ROWS weight rows an expert, STEP of them a column block, the second block SECOND rows further.
    The second half of the rows is left out where the tile has none there."""
    BYTES: gl.constexpr = wd.block_type.nbytes
    num_tiles = gl.load(tiles + 3 * T)
    step = 0
    for item in range(gl.program_id(0), num_tiles * NB, gl.num_programs(0)):
        tile, nb = _item(item, num_tiles, GM, NB)
        e, row0 = gl.load(tiles + tile), gl.load(tiles + T + tile)
        w_row = e * ROWS + nb * STEP
        both = gl.load(tiles + 2 * T + tile) > HALF_ROWS
        for kb in range(NK):
            s = step % STAGES
            mbarrier.wait(empty.index(s), (step // STAGES + 1) & 1)
            bar = full.index(2 * s)
            mbarrier.expect(bar, 2 * BYTES, pred=both)
            mbarrier.expect(bar, BYTES + BYTES // 2, pred=both == 0)
            rows = a.index(s)
            tma.async_copy_global_to_shared(xd, [row0, kb * BK], bar, rows.slice(0, HALF_ROWS))
            tma.async_copy_global_to_shared(
                xd, [row0 + HALF_ROWS, kb * BK], bar, rows.slice(HALF_ROWS, HALF_ROWS), pred=both
            )
            tma.async_copy_global_to_shared(wd, [w_row, kb * BK], bar, b.index(2 * s))
            bar = full.index(2 * s + 1)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(wd, [w_row + SECOND, kb * BK], bar, b.index(2 * s + 1))
            step += 1


@gluon.jit
def _store_half(q, out, row0, count, column, OUT: gl.constexpr, HALF: gl.constexpr):
    """64 x 128 results to `out` (rows, OUT), 16 bytes a thread; rows past `count` are another expert's."""
    PER: gl.constexpr = 16 if q.dtype.primitive_bitwidth == 8 else 8
    stored: gl.constexpr = gl.BlockedLayout([1, PER], [PER // 4, 128 // PER], [4, 1], [1, 0])
    q = gl.convert_layout(q, stored)
    m = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, stored))
    n = column + gl.arange(0, SIDE, layout=gl.SliceLayout(0, stored))
    at = gl.expand_dims((row0 + m).to(gl.int64) * OUT, 1) + gl.expand_dims(n, 0)
    gl.store(out + at, q, mask=gl.expand_dims(m < count, 1))


@gluon.jit
def _to_e4m3(v):
    return gl.minimum(gl.maximum(v, -448.0), 448.0).to(gl.float8e4nv)


@gluon.jit
def _finish(acc0, acc1, out, outs, scale, a2, row0, count, nb, OUT: gl.constexpr, MODE: gl.constexpr,
            GATED: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """GATED: silu(acc0) * acc1, quantised as MODE says; else both blocks as they are."""
    if MODE == TENSOR:
        acc0, acc1 = acc0 * scale, acc1 * scale
    if GATED:
        v = acc0 / (1.0 + gl.exp(-acc0)) * acc1
        if MODE == BLOCK:
            s = gl.maximum(gl.max(gl.abs(v), 1), 1e-10) / 448.0
            m = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, v.type.layout))
            gl.store(outs + (row0 + m) * (OUT // SIDE) + nb, s, mask=m < count)
            q = _to_e4m3(v / gl.expand_dims(s, 1))
        elif MODE == TENSOR:
            q = _to_e4m3(v * (1.0 / gl.load(a2)))
        else:
            q = v.to(out.dtype.element_ty)
        _store_half(q, out, row0, count, nb * SIDE, OUT, HALF)
    else:
        _store_half(acc0.to(out.dtype.element_ty), out, row0, count, nb * 2 * SIDE, OUT, HALF)
        _store_half(acc1.to(out.dtype.element_ty), out, row0, count, nb * 2 * SIDE + SIDE, OUT, HALF)


@gluon.jit
def _sum_blocks(rows, xs, ws, a, b, full, empty, step, row0, count, block, layout: gl.constexpr, NEXT: gl.constexpr,
                NK: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """One work item with block scales: every product of 128 inner columns is scaled, then added in float32."""
    real = rows < count
    sa_at, s0_at = xs + (row0 + rows) * NK, ws + block * NK
    s1_at = s0_at + NEXT * NK
    zero = gl.zeros((HALF_ROWS, SIDE), gl.float32, layout)
    acc0, acc1 = zero, zero
    sa, s0, s1 = gl.load(sa_at, mask=real, other=0.0), gl.load(s0_at), gl.load(s1_at)
    for kb in range(NK):
        s = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(2 * s), phase)
        x = a.index(s).slice(HALF * HALF_ROWS, HALF_ROWS)
        product = warpgroup_mma(x, b.index(2 * s).permute((1, 0)), zero, use_acc=False, is_async=True)
        nx = gl.minimum(kb + 1, NK - 1)  # the next block's scales, ahead of their use
        sa2, s02, s12 = gl.load(sa_at + nx, mask=real, other=0.0), gl.load(s0_at + nx), gl.load(s1_at + nx)
        p = warpgroup_mma_wait(0, deps=[product])
        acc0 = _here(acc0 + p * gl.expand_dims(sa * s0, 1))
        mbarrier.wait(full.index(2 * s + 1), phase)
        product = warpgroup_mma(x, b.index(2 * s + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(0, deps=[product])
        barrier_of_warps()
        mbarrier.arrive(empty.index(s), count=1)
        acc1 += p * gl.expand_dims(sa * s1, 1)
        sa, s0, s1 = sa2, s02, s12
        step += 1
    return acc0, acc1, step


@gluon.jit
def _sum_plain(a, b, full, empty, step, layout: gl.constexpr, NK: gl.constexpr, STAGES: gl.constexpr,
               HALF: gl.constexpr):  # fmt: skip
    """One work item, summed in the tensor core; a stage is given back while the next one is being multiplied."""
    acc0 = gl.zeros((HALF_ROWS, SIDE), gl.float32, layout)
    acc1 = gl.zeros((HALF_ROWS, SIDE), gl.float32, layout)
    for kb in range(NK):
        s = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(2 * s), phase)
        x = a.index(s).slice(HALF * HALF_ROWS, HALF_ROWS)
        acc0 = warpgroup_mma(x, b.index(2 * s).permute((1, 0)), acc0, is_async=True)
        mbarrier.wait(full.index(2 * s + 1), phase)
        acc1 = warpgroup_mma(x, b.index(2 * s + 1).permute((1, 0)), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        barrier_of_warps()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=kb > 0)
        step += 1
    acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    barrier_of_warps()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc0, acc1, step


@gluon.jit
def _skip(full, empty, step, NK: gl.constexpr, STAGES: gl.constexpr):
    """The second half of a tile that has no rows there: give the stages back as they come, so that phases stay in step."""
    for _kb in range(NK):
        s = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(2 * s), phase)
        mbarrier.wait(full.index(2 * s + 1), phase)
        barrier_of_warps()  # a warp that fell two phases behind would wait for ever
        mbarrier.arrive(empty.index(s), count=1)
        step += 1
    return step


@gluon.jit
def _multiply(xs, ws, a1, a2, tiles, out, outs, a, b, full, empty, T, GM, OUT: gl.constexpr, NEXT: gl.constexpr,
              BLOCKS: gl.constexpr, STEP: gl.constexpr, NB: gl.constexpr, NK: gl.constexpr, STAGES: gl.constexpr,
              MODE: gl.constexpr, GATED: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """A consumer: 64 of the 128 rows. BLOCKS of 128 weight rows an expert, STEP of them a work item, the second NEXT further."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 256 // a.dtype.primitive_bitwidth])
    num_tiles = gl.load(tiles + 3 * T)
    m = HALF * HALF_ROWS + gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    step = 0
    scale = 1.0
    for item in range(gl.program_id(0), num_tiles * NB, gl.num_programs(0)):
        tile, nb = _item(item, num_tiles, GM, NB)
        e, row0, count = gl.load(tiles + tile), gl.load(tiles + T + tile), gl.load(tiles + 2 * T + tile)
        if HALF == 1 and count <= HALF_ROWS:
            step = _skip(full, empty, step, NK, STAGES)
        else:
            block = e * BLOCKS + nb * STEP
            if MODE == BLOCK:
                acc0, acc1, step = _sum_blocks(m, xs, ws, a, b, full, empty, step, row0, count, block, layout, NEXT, NK,
                                               STAGES, HALF)  # fmt: skip
            else:
                acc0, acc1, step = _sum_plain(a, b, full, empty, step, layout, NK, STAGES, HALF)
            if MODE == TENSOR:
                scale = gl.load(a1) * gl.load(ws + e)
            _finish(acc0, acc1, out, outs, scale, a2, row0, count, nb, OUT, MODE, GATED, HALF)


@gluon.jit(do_not_specialize=["T", "GM"])
def grouped(xd, xs, wd, ws, a1, a2, tiles, out, outs, T, GM, INNER: gl.constexpr, OUT: gl.constexpr,
            MODE: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """GATED: out (rows, OUT) = silu(x w_gate^T) * (x w_up^T), quantised; else out (rows, OUT) = x w^T. OUT % 256 == 0, or 128
    GATED.

    xd: descriptor of (rows, INNER), rows expert by expert, block (64, BK); wd: of the weights as (E * rows of one expert,
    INNER), block (128, BK). BLOCK: xs (rows, INNER/128), ws the weights' block scales, outs (rows, OUT/128). TENSOR: a1 the
    scale of x, a2 that of out, ws (E,).
    """
    BK: gl.constexpr = xd.block_type.shape[1]
    ROWS: gl.constexpr = 2 * OUT if GATED else OUT
    SECOND: gl.constexpr = OUT if GATED else SIDE
    STEP: gl.constexpr = SIDE if GATED else 2 * SIDE
    NB: gl.constexpr = OUT // STEP
    NK: gl.constexpr = (INNER + BK - 1) // BK
    a = gl.allocate_shared_memory(xd.dtype, [STAGES, SIDE, BK], xd.layout)
    b = gl.allocate_shared_memory(wd.dtype, [2 * STAGES, SIDE, BK], wd.layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(2 * s), count=1)
        mbarrier.init(full.index(2 * s + 1), count=1)
        mbarrier.init(empty.index(s), count=2)
    gl.warp_specialize(
        [
            (_multiply, (xs, ws, a1, a2, tiles, out, outs, a, b, full, empty, T, GM, OUT, SECOND // SIDE, ROWS // SIDE,
                         STEP // SIDE, NB, NK, STAGES, MODE, GATED, 0)),
            (_multiply, (xs, ws, a1, a2, tiles, out, outs, a, b, full, empty, T, GM, OUT, SECOND // SIDE, ROWS // SIDE,
                         STEP // SIDE, NB, NK, STAGES, MODE, GATED, 1)),
            (_load, (xd, wd, tiles, a, b, full, empty, T, GM, ROWS, SECOND, STEP, NB, NK, BK, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
