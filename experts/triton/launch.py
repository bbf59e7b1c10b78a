"""Buffers and launches that the Standard and the batched Triton experts share. Which tiles to use is decided elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from epserve.errors import Incompatible
from epserve.experts.kernels import gemm, hopper, pieces, quantise, reduce, routing
from epserve.experts.tiles.memory import Gpu, programs_at_once
from epserve.experts.tiles.sizes import GemmTiles, Tiles
from epserve.modular_kernel import ExpertWeights, LayerSpec, Workspace

FLOAT, TENSOR, BLOCK, ROW = (mode.value for mode in (pieces.FLOAT, pieces.TENSOR, pieces.BLOCK, pieces.ROW))
DIRECT, GATHER, ROWS = (source.value for source in (pieces.DIRECT, pieces.GATHER, pieces.ROWS))
TABLE = pieces.FIELDS.value
"""Numbers that the table of tiles holds for each tile."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "swigluoai": 4}
DIRECT_SLOTS = 128
"""Slots up to which the tiles come from the ids themselves, without a routing kernel."""
SMALL_SORT = 1024
"""Slots up to which one launch sorts by comparison. Above it, a histogram and a placement sort them."""
ALIGN = 256
ROW_BY_ROW = (0, 0, 0)
"""Stands for strides that the kernels do not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Describes how a quantisation scheme runs: see `kernels/pieces.py`."""

    mode: int
    stored: torch.dtype | None = None
    """Dtype of weights and quantised activations. None: the model's own dtype."""
    channel: bool = False
    """Weight scales are one an output channel instead of one an expert."""
    packed: int = 0
    """Form of 4-bit weights (`pieces.INT4`, `pieces.FP4`), with one scale for `group` of them."""
    group: int = 1

    @classmethod
    def of(cls, spec: LayerSpec) -> Numerics:
        e4m3 = torch.float8_e4m3fn
        match spec.quant.scheme:
            case "none":
                return cls(mode=FLOAT)
            case "fp8_tensor":
                return cls(mode=ROW if spec.quant.dynamic else TENSOR, stored=e4m3)
            case "fp8_channel":
                return cls(mode=ROW, stored=e4m3, channel=True)
            case "fp8_block":
                return cls(mode=BLOCK, stored=e4m3)
            case "int8_channel":
                return cls(mode=ROW, stored=torch.int8, channel=True)
            case "int4":
                return cls(mode=FLOAT, packed=pieces.INT4.value, group=spec.quant.group)
            case "mxfp4":
                return cls(mode=FLOAT, packed=pieces.FP4.value, group=32)
            case "nvfp4":
                return cls(mode=FLOAT, packed=pieces.FP4.value, group=16)
        raise Incompatible(f"the Triton experts have no quantisation {spec.quant.scheme}")


class Carver:
    """Hands out aligned pieces of one byte region. Without a region it only adds their sizes up."""

    def __init__(self, region: torch.Tensor | None = None):
        self.region, self.used, self.most = region, 0, 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        size = math.prod(shape) * dtype.itemsize
        start, self.used = self.used, self.used + -(-size // ALIGN) * ALIGN
        self.most = max(self.most, self.used)
        return None if self.region is None else self.region[start : start + size].view(dtype).view(shape)


@dataclass(slots=True, kw_only=True)
class Buffers:
    """Holds the scratch of one `apply`. `num_rows` = rows of h and y: local slots are among them."""

    num_rows: int
    max_tiles: int
    xq: torch.Tensor | None
    xs: torch.Tensor | None
    h: torch.Tensor | None
    hs: torch.Tensor | None
    hq: torch.Tensor | None
    """Rows that the second GEMM reads. It is `h` itself unless rows are quantised after the first GEMM."""
    part: torch.Tensor | None
    y: torch.Tensor | None
    order: torch.Tensor | None = None
    inv: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    counts: torch.Tensor | None = None


class Launcher:
    """Launches kernels of one layer shape on one device. Keeps no batch state but counters that are 0 between launches."""

    def __init__(self, spec: LayerSpec, device: torch.device):
        self.spec, self.device, self.numerics = spec, device, Numerics.of(spec)
        self.K, self.N, self.top_k = spec.shape.hidden, spec.shape.intermediate, spec.shape.top_k
        self.dtype = spec.shape.dtype
        group = self.numerics.group
        if self.K % group or self.N % group:
            text = (
                f"{spec.quant.scheme}: hidden {self.K} and intermediate {self.N} must be multiples of the group {group}"
            )
            raise Incompatible(text)
        self.stored = self.numerics.stored or self.dtype
        cuda = device.type == "cuda"
        self.gpu = Gpu.of(device)
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 4
        self.pdl = cuda and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
        self.counter = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        act = spec.activation
        self.specialises = cuda and self.gpu.capability == (9, 0) and self._plain_enough()
        self.act = {"ACT": ACTIVATIONS[act.kind], "LIMIT": float(act.limit or 0.0), "ALPHA": float(act.alpha)}
        self.launch: Callable = self._run

    def _run(self, kernel, programs: int | tuple[int, int], *args, **constants) -> None:
        grid = programs if isinstance(programs, tuple) else (programs,)
        extra = {"launch_pdl": True} if self.pdl and "PDL" in kernel.arg_names else {}
        kernel[grid](*args, **constants, **extra)

    def compile_only(self, kernel, programs, *args, **constants) -> None:
        """Compiles a kernel without a launch. Warm-up calls it in place of `launch`."""
        extra = {"launch_pdl": True} if self.pdl and "PDL" in kernel.arg_names else {}
        kernel.warmup(*args, grid=(1,), **constants, **extra)

    def _plain_enough(self) -> bool:
        """Returns whether the warp-specialised kernels can serve this layer: see `kernels/hopper.py`."""
        act, mode = self.spec.activation, self.numerics.mode
        sizes = self.N % 128 == 0 and self.K % 256 == 0 and not self.numerics.packed
        return sizes and mode in (FLOAT, TENSOR, BLOCK) and act.kind == "silu" and not act.limit and not self.spec.bias

    @staticmethod
    def bins(num_experts: int) -> int:
        return triton.next_power_of_2(num_experts + 1)

    def gemm_buffers(self, r13: Carver, r2: Carver, *, num_rows: int, max_tiles: int, tiles: Tiles, x_rows: int,
                     y: bool) -> Buffers:  # fmt: skip
        """Carves the buffers: h and partial sums in region 13, quantised rows in region 2. y takes the place of x's dead rows."""
        mode, K, N, f32 = self.numerics.mode, self.K, self.N, torch.float32
        h = r13.take((num_rows, N), self.stored if mode in (TENSOR, BLOCK) else self.dtype)
        split = tiles.gate_up.split
        part = None
        if split > 1:
            blocks = max_tiles * cdiv(N, tiles.gate_up.bn)
            assert blocks <= self.counter.numel(), "split sums are for few tiles"
            part = r13.take((blocks * split * 2 * tiles.bm * tiles.gate_up.bn,), f32)
        hq, hs = h, None
        if mode == BLOCK:
            hs = r13.take((num_rows, cdiv(N, 128)), f32)
        elif mode == ROW:
            hq, hs = r2.take((num_rows, N), self.stored), r2.take((num_rows,), f32)
        start = r2.used
        xq = r2.take((x_rows, K), self.stored) if x_rows else None
        xs = r2.take((x_rows, cdiv(K, 128) if mode == BLOCK else 1), f32) if x_rows and mode in (BLOCK, ROW) else None
        r2.used = start
        y_dtype = f32 if tiles.down.split > 1 else self.dtype
        return Buffers(num_rows=num_rows, max_tiles=max_tiles, xq=xq, xs=xs, h=h, hs=hs, hq=hq, part=part,
                       y=r2.take((tiles.down.split, num_rows, K), y_dtype) if y else None)  # fmt: skip

    def sort(self, b: Buffers, ids: torch.Tensor, *, bm: int, num_experts: int) -> None:
        """Fills order, inv and tiles from the ids of `b.num_rows` slots."""
        S, T, bins = b.num_rows, b.max_tiles, self.bins(num_experts)
        if S <= SMALL_SORT:
            block = 32 if self.device.type == "cuda" else 256
            padded = 256 if S <= 256 else SMALL_SORT
            self.launch(routing.route_small, cdiv(S, block), ids, b.order, b.inv, b.tiles, S, T, bm,
                        SP=padded, BINS=bins, B=block, PDL=self.pdl, num_warps=8)  # fmt: skip
            return
        assert b.counts is not None
        b.counts.zero_()
        self.launch(routing.count_slots, cdiv(S, 1024), ids, b.counts[0], S, BINS=bins, B=1024)
        self.launch(routing.place_slots, cdiv(S, 512), ids, b.counts[0], b.counts[1], b.order, b.inv, b.tiles, S, T,
                    bm, BINS=bins, B=512, PDL=self.pdl)  # fmt: skip

    def quantise_tokens(self, b: Buffers, x: torch.Tensor, scales, ids: torch.Tensor, weights: ExpertWeights, *,
                        expand: bool) -> None:  # fmt: skip
        """Quantises x (M, K) to xq, xs: a row a token, or (expand) a row a local slot. `scales`: x is quantised already."""
        groups = cdiv(self.K, 128)
        whole = self.numerics.mode == ROW
        per = triton.next_power_of_2(groups) if whole else 8 if x.shape[0] <= 64 else 64
        self.launch(quantise.quantise_tokens, (x.shape[0], cdiv(groups, per)), x, scales, ids, b.inv, b.xq, b.xs, weights.a1,
                    K=self.K, TOPK=ids.shape[1], TP=triton.next_power_of_2(ids.shape[1]), MODE=self.numerics.mode,
                    EXPAND=expand, GIVEN=scales is not None, B=per, PDL=self.pdl, num_warps=4 if per <= 8 else 8)  # fmt: skip

    def quantise_rows(self, x: torch.Tensor, xq, xs, scale, *, ids=None, tiles=None, num_rows: int, max_tiles: int,
                      bm: int, columns: int) -> None:  # fmt: skip
        """Quantises rows that lie expert by expert (tiles) or by slot (ids) to xq, xs."""
        per = triton.next_power_of_2(cdiv(columns, 128))
        self.launch(quantise.quantise_rows, min(num_rows, 8 * self.num_sms), x, ids, tiles, xq, xs, scale,
                    num_rows, max_tiles, bm, K=columns, IN_SLOTS=tiles is None, MODE=self.numerics.mode, B=per,
                    PDL=self.pdl, num_warps=4 if per <= 16 else 8)  # fmt: skip

    def gate_up(self, b: Buffers, x: torch.Tensor, xs, weights: ExpertWeights, tiles: Tiles, *, source: int,
                ids: torch.Tensor | None = None, fly: bool = False,
                strides: tuple[int, int, int] | None = None) -> None:  # fmt: skip
        """Launches the first GEMM. strides: see `scale_strides`. None: scales lie row by row."""
        c = tiles.gate_up
        if c.specialised:
            assert source == ROWS
            self._grouped(b, x, xs, weights, b.h, b.hs, c, tiles.bm, gated=True, strides=strides)
            return
        E, K, N = weights.num_experts, self.K, self.N
        block = (1, 2 if c.wide else 1, c.bn, c.bk)
        w = self.descriptor(weights, "w13_eNK", (E, 2, N, K), block)
        xd = TensorDescriptor(x, [x.shape[0], K], [K, 1], [tiles.bm, c.bk]) if source == ROWS else None
        work = b.max_tiles * cdiv(N, c.bn) * c.split
        self.launch(gemm.gate_up, self._programs(c, tiles.bm, work, gated=True),
                    x, xd, xs, w, weights.s13, weights.a1, weights.a2, weights.b13, ids, b.order, b.tiles, b.h, b.hs,
                    b.part, self.counter, b.num_rows, b.max_tiles, c.runs, *(strides or ROW_BY_ROW),
                    STRIDED=strides is not None, TOPK=1 if ids is None else ids.shape[1], SOURCE=source, FLY=fly, WIDE=c.wide,
                    BIAS=weights.b13 is not None, **self._constants(c, tiles.bm, E, b.num_rows, source), **self.act)  # fmt: skip

    def down(self, b: Buffers, weights: ExpertWeights, tiles: Tiles, y: torch.Tensor, *, source: int, ids=None) -> None:
        c, E, K, N = tiles.down, weights.num_experts, self.K, self.N
        if c.specialised:
            assert source == ROWS
            self._grouped(b, b.hq, b.hs, weights, y, None, c, tiles.bm, gated=False)
            return
        w = self.descriptor(weights, "w2_eKN", (E * K, N), (c.bn, c.bk))
        hd = TensorDescriptor(b.hq, [b.num_rows, N], [N, 1], [tiles.bm, c.bk]) if source == ROWS else None
        work = b.max_tiles * cdiv(K, c.bn) * c.split
        self.launch(gemm.down, self._programs(c, tiles.bm, work, gated=False),
                    b.hq, hd, b.hs, w, weights.s2, weights.a2, weights.b2, ids, b.tiles, y, b.num_rows, b.max_tiles,
                    c.runs, SOURCE=source, BIAS=weights.b2 is not None,
                    **self._constants(c, tiles.bm, E, b.num_rows, source))  # fmt: skip

    def _grouped(self, b: Buffers, x, xs, weights: ExpertWeights, out, outs, c: GemmTiles, bm: int, *,
                 gated: bool, strides: tuple[int, int, int] | None = None) -> None:  # fmt: skip
        """Launches either GEMM by the warp-specialised kernel, one program a multiprocessor."""
        block = self.numerics.mode == BLOCK
        assert bm == 128 or (bm == 192 and not block), "two warpgroups of 64 rows, or three"
        assert block or not c.narrow, "only products that are scaled gain"
        assert 0 <= c.lag < c.stages and (c.split == 1 or not gated), "a warpgroup would wait for ever; h is not summed"
        E = weights.num_experts
        name, scale, a1, a2 = ("w13_eNK", weights.s13, weights.a1, weights.a2) if gated else (
            "w2_eKN", weights.s2, weights.a2, None)  # fmt: skip
        inner, width = (self.K, self.N) if gated else (self.N, self.K)
        layout = NVMMASharedLayout(128, 8 * x.element_size(), 2)
        key = ("triton", name, "specialised", c.bk)
        if key not in weights.derived:
            rows = E * (2 * width if gated else width)
            w = getattr(weights, name)
            weights.derived[key] = LaidOutDescriptor(w, [rows, inner], [inner, 1], [128, c.bk], layout)
        xd = LaidOutDescriptor(x, [x.shape[0], inner], [inner, 1], [64, c.bk], layout)
        work = b.max_tiles * width // (128 if gated else 256) * c.split
        self.launch(hopper.grouped, min(self.num_sms, work), xd, xs, weights.derived[key], scale, a1, a2, b.tiles,
                    self.counter, out, outs, b.num_rows, b.max_tiles, c.runs, *(strides or ROW_BY_ROW),
                    STRIDED=strides is not None, INNER=inner, OUT=width,
                    MODE=self.numerics.mode, GATED=gated, BM=bm, STAGES=c.stages,
                    WIDTH=64 if c.narrow else 128 if block or bm == 192 else 256, LAG=c.lag, SPLIT=c.split, PDL=self.pdl,
                    num_warps=4)  # fmt: skip

    def reduce(self, b: Buffers, ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor, *, split: int,
               in_slots: bool) -> None:  # fmt: skip
        num_tokens, block = out.shape[0], 512 if out.shape[0] <= 64 else 1024
        self.launch(reduce.weighted_sum, (num_tokens, cdiv(self.K, block)), b.y, b.inv, ids, topk_weights, out,
                    b.num_rows, K=self.K, TOPK=ids.shape[1], SPLIT=split, IN_SLOTS=in_slots, B=block, PDL=self.pdl,
                    num_warps=4)  # fmt: skip

    def descriptor(self, weights: ExpertWeights, name: str, shape: tuple[int, ...], block: tuple[int, ...]):
        """Returns the TMA descriptor of a weight, made once for a block and kept with the weights. Packed weights need none."""
        if self.numerics.packed:
            return getattr(weights, name)
        key = ("triton", name, block)
        if key not in weights.derived:
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            weights.derived[key] = TensorDescriptor(getattr(weights, name), list(shape), strides, list(block))
        return weights.derived[key]

    def _constants(self, c: GemmTiles, bm: int, num_experts: int, num_rows: int, source: int) -> dict:
        assert self.numerics.mode != BLOCK or c.bk == 128, "a step is one block of scales"
        padded = (32 if num_rows <= 32 else DIRECT_SLOTS) if source == DIRECT else 1
        return {
            "K": self.K, "N": self.N, "MODE": self.numerics.mode, "CHANNEL": self.numerics.channel, "SWAP": c.swap,
            "PACKED": self.numerics.packed, "GROUP": self.numerics.group,
            "FLAT": c.flat, "BM": bm, "BN": c.bn, "BK": c.bk, "SPLIT": c.split, "SP": padded, "PDL": self.pdl,
            "BINS": self.bins(num_experts), "num_warps": c.warps, "num_stages": c.stages,
        }  # fmt: skip

    def _programs(self, c: GemmTiles, bm: int, work: int, *, gated: bool) -> int:
        """Returns the size of the grid: one wave, since an empty program costs about 1 us, or one program a work item."""
        if c.full_grid:
            return max(1, min(work, 64 * self.num_sms))
        group = self.numerics.group if self.numerics.packed else 0
        scheme = self.spec.quant.scheme
        fit = programs_at_once(c, bm, scheme=scheme, gated=gated, gpu=self.gpu, group=group)
        return max(1, min(work, fit * self.num_sms))


def scale_strides(scales: torch.Tensor | None) -> tuple[int, int, int] | None:
    """Returns None for scales `(e, T, G)` row by row, else their strides by expert, row (of all e*T) and block of columns."""
    if scales is None or scales.is_contiguous():
        return None
    expert, row, block = scales.stride()
    return expert - scales.shape[1] * row, row, block


def regions(workspace: Workspace | None) -> tuple[Carver, Carver]:
    if workspace is None:
        return Carver(), Carver()
    return Carver(workspace.workspace13), Carver(workspace.workspace2)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
