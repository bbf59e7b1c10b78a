"""Makes the inputs of the experts' benchmark: shapes, weights, routing, the float64 reference and the floor.

The same seeds give the same tensors on every run. The floor is the larger of the bytes (weights of the active experts, x, out)
at 4.3 TB/s, the rate of a copy on an H200, and 2 * pairs * 3 * N * K operations at 790 (bf16) or 1500 (fp8) TFLOP/s. Weights of
4 bits are multiplied as bf16. A kernel that almost only reads can come in just under it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from epserve.modular_kernel import ExpertLayout, ExpertShape, ExpertWeights, LayerSpec, QuantConfig

BYTES_PER_S = 4.3e12
FLOPS_PER_S = {"bf16": 790e12, "fp8_block": 1500e12, "fp8_tensor": 1500e12, "fp8_channel": 1500e12}  # 4 bits: as bf16
TOLERANCE = {"bf16": 5e-3, "fp8_block": 6e-2, "fp8_tensor": 6e-2}  # relative L2 error
MORE_TOLERANCE = {"fp8_channel": 6e-2, "int4": 5e-3, "mxfp4": 5e-3, "nvfp4": 5e-3}
"""Without times of peers."""
WEIGHT_BYTES = {"bf16": 2.0, "int4": 0.5 + 2 / 128, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""The bytes of one weight with its share of a scale, as checkpoints have them. The e4m3 kinds have 1."""
GROUPS = {"int4": 128, "mxfp4": 32, "nvfp4": 16}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
STATIC_SCALES = 6.5 / 448.0, 16.0 / 448.0  # activation scales of fp8_tensor: before w13, before w2


@dataclass(frozen=True, slots=True)
class Shape:
    """One rank's expert layer. The rank holds experts 0 .. local_experts-1 of those that the gate chooses from."""

    local_experts: int
    global_experts: int
    hidden: int
    intermediate: int
    topk: int

    def spec(self, dtype: str, device: str) -> LayerSpec:
        shape = ExpertShape(hidden=self.hidden, intermediate=self.intermediate, num_experts=self.global_experts,
                            top_k=self.topk)  # fmt: skip
        layout = ExpertLayout.even(self.global_experts, self.global_experts // self.local_experts)
        return LayerSpec(shape=shape, layout=layout, device=device, quant=QuantConfig(scheme=scheme_of(dtype)))


def scheme_of(dtype: str) -> str:
    return "none" if dtype == "bf16" else dtype


SHAPES = {
    "dsv3_ep8": Shape(32, 256, 7168, 2048, 8),
    "qwen3_235b": Shape(128, 128, 4096, 1536, 8),
    "mixtral8x7": Shape(8, 8, 4096, 14336, 2),
}


@dataclass(slots=True)
class Inputs:
    x: torch.Tensor  # (M, K) bf16
    ids_local: torch.Tensor  # (M, topk) int32, -1 for experts of other ranks
    weights: torch.Tensor  # (M, topk) fp32, rows sum to 1
    pairs: int  # (token, local expert) pairs
    active: int  # local experts with at least one token


def make_weights(shape: Shape, dtype: str, device: str) -> ExpertWeights:
    """Returns weights with value = stored * scale. `QuantConfig` gives the scales' layout. The gate's rows are first."""
    e, k, n = shape.local_experts, shape.hidden, shape.intermediate
    generator = torch.Generator(device=device).manual_seed(1)
    if dtype in GROUPS:
        (w13, s13), (w2, s2) = (_packed(s, dtype, generator) for s in ((e, 2 * n, k), (e, k, n)))
        return ExpertWeights(w13_eNK=w13, w2_eKN=w2, s13=s13, s2=s2)
    stored = torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn
    w13, w2 = (torch.empty(s, dtype=stored, device=device) for s in ((e, 2 * n, k), (e, k, n)))
    s13 = s2 = a1 = a2 = None
    if dtype == "fp8_block":
        s13 = torch.empty((e, 2 * n // 128, k // 128), device=device)
        s2 = torch.empty((e, k // 128, n // 128), device=device)
    elif dtype == "fp8_tensor":
        s13 = torch.full((e,), 6.0 / math.sqrt(k) / 448.0, device=device)
        s2 = torch.full((e,), 6.0 / math.sqrt(n) / 448.0, device=device)
        a1, a2 = (torch.full((1,), scale, device=device) for scale in STATIC_SCALES)
    elif dtype == "fp8_channel":
        s13, s2 = (torch.full(s, 6.0 / math.sqrt(c) / 448.0, device=device) for s, c in (((e, 2 * n), k), ((e, k), n)))
    for expert in range(e):
        for target, scales in ((w13, s13), (w2, s2)):
            rows, columns = target.shape[1:]
            value = torch.randn((rows, columns), device=device, generator=generator, dtype=torch.bfloat16)
            value.mul_(1.0 / math.sqrt(columns))
            if dtype == "fp8_tensor":
                assert scales is not None
                value = (value.float() / scales[expert]).clamp_(-448, 448)
            elif dtype == "fp8_channel":
                assert scales is not None
                value = (value.float() / scales[expert][:, None]).clamp_(-448, 448)
            elif dtype == "fp8_block":
                assert scales is not None
                blocks = value.float().view(rows // 128, 128, columns // 128, 128)
                scales[expert] = blocks.abs().amax(dim=(1, 3)).clamp_(min=1e-10) / 448.0
                value = (blocks / scales[expert][:, None, :, None]).view(rows, columns)
            target[expert].copy_(value)
    return ExpertWeights(w13_eNK=w13, w2_eKN=w2, s13=s13, s2=s2, a1=a1, a2=a2)


def _packed(size: tuple[int, int, int], dtype: str, generator: torch.Generator):
    """Returns random codes, two a byte, and scales that give values of about 1 / sqrt(columns), as `QuantConfig` has them."""
    e, rows, columns = size
    device, groups = generator.device, (e, rows, columns // GROUPS[dtype])
    codes = torch.randint(0, 256, (e, rows, columns // 2), dtype=torch.uint8, device=device, generator=generator)
    unit = 1.0 / math.sqrt(columns) / (4.6 if dtype == "int4" else 2.9)  # root mean square of all 16 values
    if dtype == "mxfp4":
        top = 127 + round(math.log2(unit))
        return codes, torch.randint(top - 1, top + 2, groups, dtype=torch.uint8, device=device, generator=generator)
    return codes, unit * (0.5 + torch.rand(groups, device=device, generator=generator))


def num_sets(m: int) -> int:
    """Sets of inputs that are timed in turn, so that thin batches do not all find the same experts' weights in the cache."""
    return 8 if m <= 64 else 4 if m <= 1024 else 2


def make_inputs(shape: Shape, m: int, device: str, seed: int, skew: str = "uniform") -> Inputs:
    generator = torch.Generator().manual_seed(1000 + seed)
    scores = torch.rand((m, shape.global_experts), generator=generator)
    if skew == "hot":  # expert 0 for every token, the others uniform
        scores[:, 0] = 2.0
    elif (
        skew == "zipf"
    ):  # Gumbel top-k draws without replacement, with popularity 1/rank. Expert 0 leads, ranks are spread
        popularity = 1.0 / (1 + torch.arange(shape.global_experts) * 37 % shape.global_experts)
        scores = popularity.log() - (-scores.log()).log()
    ids = scores.topk(shape.topk, dim=1).indices.to(torch.int32)
    if shape.global_experts > shape.local_experts and m <= 4:  # a tiny batch must not miss this rank altogether
        for token in range(m):
            if not bool((ids[token] < shape.local_experts).any()):
                ids[token, 0] = (seed * 5 + token * 7) % shape.local_experts
    weights = torch.rand((m, shape.topk), generator=generator) + 0.1
    weights = weights / weights.sum(1, keepdim=True)
    x_generator = torch.Generator(device=device).manual_seed(7000 + seed)
    x = torch.randn((m, shape.hidden), device=device, generator=x_generator, dtype=torch.bfloat16)
    is_local = ids < shape.local_experts
    ids_local, local = torch.where(is_local, ids, -1), ids[is_local]
    return Inputs(x, ids_local.to(device), weights.to(device), local.numel(), local.unique().numel())


def dequantize(w: torch.Tensor, scale: torch.Tensor | None, expert: int, dtype: str) -> torch.Tensor:
    """`(rows, columns)` in float64."""
    if dtype in GROUPS:
        assert scale is not None
        codes = torch.stack((w[expert] & 0xF, w[expert] >> 4), -1).flatten(1).long()
        table = torch.arange(-8, 8) if dtype == "int4" else torch.tensor(E2M1)
        factor = torch.exp2(scale[expert].double() - 127) if dtype == "mxfp4" else scale[expert].double()
        return table.double().to(w.device)[codes] * factor.repeat_interleave(GROUPS[dtype], 1)
    value = w[expert].double()
    if scale is None:
        return value
    if scale.ndim < 3:
        return value * (scale[expert] if scale.ndim == 1 else scale[expert][:, None]).double()
    rows, columns = value.shape
    blocks = value.view(rows // 128, 128, columns // 128, 128) * scale[expert].double()[:, None, :, None]
    return blocks.view(rows, columns)


def relative_error(weights: ExpertWeights, inputs: Inputs, out: torch.Tensor, tokens: int, dtype: str) -> float:
    """L2 error of `out` against float64 experts on at most `tokens` tokens, the last one among them.

    Raises ValueError when a value is not finite.
    """
    if not bool(torch.isfinite(out).all()):
        raise ValueError("the output has values that are not finite")
    m, n = out.shape[0], weights.w13_eNK.shape[1] // 2
    rows = torch.linspace(0, m - 1, min(m, tokens), dtype=torch.float64, device=out.device).round().long().unique()
    x, ids, scale = inputs.x[rows].double(), inputs.ids_local[rows].long(), inputs.weights[rows].double()
    want = torch.zeros_like(x)
    for expert in ids[ids >= 0].unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        h = x[token] @ dequantize(weights.w13_eNK, weights.s13, expert, dtype).t()
        activated = torch.nn.functional.silu(h[:, :n]) * h[:, n:]
        y = activated @ dequantize(weights.w2_eKN, weights.s2, expert, dtype).t()
        want.index_add_(0, token, y * scale[token, k][:, None])
    return ((out[rows].double() - want).norm() / want.norm().clamp(min=1e-20)).item()


def floor_us(shape: Shape, dtype: str, m: int, pairs: float, active: float) -> float:
    layer = 3 * shape.intermediate * shape.hidden
    moved = active * layer * WEIGHT_BYTES.get(dtype, 1.0) + 2 * m * shape.hidden * 2
    return max(moved / BYTES_PER_S, 2.0 * pairs * layer / FLOPS_PER_S.get(dtype, FLOPS_PER_S["bf16"])) * 1e6
