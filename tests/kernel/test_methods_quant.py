"""Layouts of quantised checkpoints: what each library stores means the same after it is brought into `ExpertWeights`."""

import pytest
import torch

from epserve import all2all, experts
from epserve.all2all.local import LocalPrepareAndFinalize
from epserve.errors import CheckpointError, Incompatible
from epserve.experts.cutlass import CutlassExperts
from epserve.modular_kernel import (
    Backends,
    ExpertLayout,
    ExpertShape,
    LayerSpec,
    QuantConfig,
    UnquantizedFusedMoEMethod,
    why_not,
)
from epserve.modular_kernel.methods_quant import (
    CompressedTensorsW8A8Fp8MoECutlassMethod,
    CompressedTensorsW8A8Fp8MoEMethod,
    CompressedTensorsW8A8Int8MoEMethod,
    Fp8MoEMethod,
    ModelOptFp8FusedMoE,
    ModelOptNvFp4FusedMoE,
    Mxfp4MoEMethod,
    method_for,
    with_input_scales,
)
from epserve.modular_kernel.quantization import FP8
from epserve.modular_kernel.weights import ExpertSizes

K, N, E = 256, 128, 3
SHAPES = {"gate_proj": (N, K), "up_proj": (N, K), "down_proj": (K, N)}


def floats(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) * (1 + i) for i, (name, shape) in enumerate(SHAPES.items())}


def loaded(method, experts, scheme, **quant):
    """What a rank holds after each matrix went through the method class; experts: mappings of `gate_proj.weight` and so on."""
    quant = QuantConfig(scheme=scheme, **quant)
    sizes = ExpertSizes(hidden=K, intermediate=N, dtype=torch.bfloat16)
    weights = method.create_weights(sizes, quant, len(experts), torch.device("cpu"))
    for slot, expert in enumerate(experts):
        for role in ("gate", "up", "down"):
            prefix = f"{role}_proj."
            matrix = {name.removeprefix(prefix): each for name, each in expert.items() if name.startswith(prefix)}
            method.load_weights(weights, slot, role, matrix, quant=quant)
    return weights


def per_tensor(values):
    made = {}
    for name, w in values.items():
        scale = w.abs().max() / 448
        made |= {f"{name}.weight": (w / scale).to(FP8), f"{name}.weight_scale": scale.reshape(1)}
    return made


def per_channel(values, to=FP8, top=448):
    made = {}
    for name, w in values.items():
        scale = w.abs().amax(1, keepdim=True) / top
        codes = (w / scale).to(FP8) if to == FP8 else (w / scale).round().to(to)
        made |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    return made


def blocks(values):
    made = {}
    for name, w in values.items():
        tiles = w.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / scale[:, None, :, None]).reshape(w.shape).to(FP8)
        made |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    return made


def nvfp4(values):
    """Exact: values that 4 bits, a scale of 16 and a global one can hold."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    made, exact = {}, {}
    for i, (name, w) in enumerate(values.items()):
        g = torch.Generator().manual_seed(i)
        codes = torch.randint(0, 16, w.shape, generator=g)
        scale = torch.randint(1, 4, (w.shape[0], w.shape[1] // 16), generator=g).to(FP8)
        exact[name] = (
            table[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * scale.float().repeat_interleave(16, 1) * 0.5
        )
        packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        made |= {f"{name}.weight": packed, f"{name}.weight_scale": scale, f"{name}.weight_scale_2": torch.tensor(0.5)}
    return made, exact


def meaning(weights, scheme, expert):
    """(w13, w2) of one expert in float32."""
    found = []
    for codes, scale in ((weights.w13_eNK, weights.s13), (weights.w2_eKN, weights.s2)):
        w = codes[expert].float()
        if scheme == "fp8_block":
            w = w * scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        elif scheme != "none":
            s = scale[expert]
            w = w * (s if s.ndim == 0 else s[:, None])
        found.append(w)
    return found


@pytest.mark.parametrize(
    ("method", "store", "scheme", "bound"),
    [
        (Fp8MoEMethod, blocks, "fp8_block", 0.04),
        (Fp8MoEMethod, per_tensor, "fp8_tensor", 0.05),
        (ModelOptFp8FusedMoE, per_tensor, "fp8_tensor", 0.05),
        (CompressedTensorsW8A8Fp8MoEMethod, per_channel, "fp8_channel", 0.04),
        (CompressedTensorsW8A8Fp8MoEMethod, per_tensor, "fp8_tensor", 0.05),
        (CompressedTensorsW8A8Int8MoEMethod, lambda v: per_channel(v, torch.int8, 127), "int8_channel", 0.02),
    ],
)
def test_means_what_was_stored(method, store, scheme, bound):
    values = [floats(seed) for seed in range(E)]
    weights = loaded(method, [store(one) for one in values], scheme)
    assert weights.num_experts == E and scheme in {config.scheme for config in method.quant_configs()}
    assert weights.w13_eNK.shape == (E, 2 * N, K) and weights.w2_eKN.shape == (E, K, N)
    for expert, value in enumerate(values):
        want = torch.cat([value["gate_proj"], value["up_proj"]]), value["down_proj"]
        for got, true in zip(meaning(weights, scheme, expert), want, strict=True):
            assert (got - true).norm() / true.norm() < bound


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def unpacked(codes, scale):
    """What packed rows mean: two a byte, the even one low."""
    values = E2M1[torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).long()]
    return values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)


def test_nvfp4_is_exact():
    stored, exact = nvfp4(floats(0))
    weights = loaded(ModelOptNvFp4FusedMoE, [stored], "nvfp4")
    assert weights.w13_eNK.shape == (1, 2 * N, K // 2)
    want = torch.cat([exact["gate_proj"], exact["up_proj"]])
    assert torch.equal(unpacked(weights.w13_eNK[0], weights.s13[0]), want)
    assert torch.equal(unpacked(weights.w2_eKN[0], weights.s2[0]), exact["down_proj"])


def test_mxfp4_brings_gate_and_up_apart():
    g = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2 * N, K // 32, 16), generator=g).to(torch.uint8)
    scales = torch.randint(120, 130, (2 * N, K // 32), generator=g).to(torch.uint8)
    sizes, quant = ExpertSizes(hidden=K, intermediate=N, dtype=torch.bfloat16), QuantConfig(scheme="mxfp4")
    weights = Mxfp4MoEMethod.create_weights(sizes, quant, 1, torch.device("cpu"))
    matrix = {"weight": blocks, "weight_scale": scales}
    Mxfp4MoEMethod.load_weights(weights, 0, "gate_up", matrix, quant=quant, interleaved=True)
    assert weights.w13_eNK.shape == (1, 2 * N, K // 2)
    whole = unpacked(blocks.flatten(1), torch.exp2(scales.float() - 127))
    got = unpacked(weights.w13_eNK[0], torch.exp2(weights.s13[0].float() - 127))
    assert torch.equal(got[:N], whole[::2]) and torch.equal(got[N:], whole[1::2])


def test_static_scales_are_the_largest_of_the_layer():
    weights = loaded(Fp8MoEMethod, [per_tensor(floats(0))], "fp8_tensor")
    first, second = ([torch.tensor(0.1 * (i + 1)) for i in range(count)] for count in (3, 2))
    found = with_input_scales(weights, first, second)
    assert torch.allclose(found.a1, torch.tensor([0.3])) and torch.allclose(found.a2, torch.tensor([0.2]))


def test_gate_and_up_get_the_larger_of_their_scales():
    """The other one's codes are rounded to it: what they mean stays within half a step of e4m3."""
    stored = per_tensor(floats(0))
    weights = loaded(Fp8MoEMethod, [stored], "fp8_tensor")
    scales = [stored[f"{name}_proj.weight_scale"] for name in ("gate", "up")]
    assert scales[0] != scales[1] and weights.s13[0] == max(scales)
    kept = ("gate", "up")[scales[0] < scales[1]]
    rows = weights.w13_eNK[0, :N] if kept == "gate" else weights.w13_eNK[0, N:]
    assert torch.equal(rows.float(), stored[f"{kept}_proj.weight"].float())


def test_each_rank_holds_its_experts_scales():
    """A rank's part equals the same rows of the whole: nothing is derived across experts but a1 and a2."""
    experts = [per_channel(floats(seed)) for seed in range(4)]
    whole, part = (loaded(CompressedTensorsW8A8Fp8MoEMethod, of, "fp8_channel") for of in (experts, experts[2:]))
    assert torch.equal(part.s13, whole.s13[2:]) and torch.equal(part.s2, whole.s2[2:])


def test_a_missing_scale_is_named():
    broken = per_channel(floats(0))
    del broken["up_proj.weight_scale"]
    with pytest.raises(CheckpointError, match=r"weight_scale is missing; found: weight"):
        loaded(CompressedTensorsW8A8Fp8MoEMethod, [broken], "fp8_channel")


def test_scales_of_the_wrong_length_are_refused():
    broken = per_channel(floats(0))
    broken["down_proj.weight_scale"] = broken["down_proj.weight_scale"][:-1]
    with pytest.raises(CheckpointError, match="255 values for 256"):
        loaded(CompressedTensorsW8A8Fp8MoEMethod, [broken], "fp8_channel")


def test_a_layer_of_another_scheme_is_refused():
    shape = ExpertShape(hidden=K, intermediate=N, num_experts=E, top_k=2)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(E, 1), quant=QuantConfig(scheme="int8_channel"))
    with pytest.raises(
        CheckpointError, match="stores fp8_block, fp8_channel, fp8_tensor, the layer is declared as int8_channel"
    ):
        Fp8MoEMethod(spec, backends=None)


def _cutlass_method(**preferences):
    shape = ExpertShape(hidden=K, intermediate=N, num_experts=E, top_k=2)
    spec = LayerSpec(
        shape=shape, layout=ExpertLayout.even(E, 1), device="cuda", quant=QuantConfig(scheme="fp8_channel")
    )
    backends = Backends(all2all=all2all.REGISTRY, experts=experts.REGISTRY, **preferences)
    return CompressedTensorsW8A8Fp8MoECutlassMethod(spec, backends)


def test_the_cutlass_method_reads_the_same_and_multiplies_with_cutlass_alone(monkeypatch):
    stored = [per_channel(floats(seed)) for seed in range(E)]
    methods = CompressedTensorsW8A8Fp8MoECutlassMethod, CompressedTensorsW8A8Fp8MoEMethod
    got, want = (loaded(method, stored, "fp8_channel") for method in methods)
    assert all(torch.equal(got.tensors()[name].float(), value.float()) for name, value in want.tensors().items())
    monkeypatch.setattr(CutlassExperts, "unavailable", classmethod(lambda cls: None))
    assert isinstance(_cutlass_method().make_experts(LocalPrepareAndFinalize), CutlassExperts)
    assert isinstance(
        _cutlass_method(prefer_experts=("triton", "cutlass")).make_experts(LocalPrepareAndFinalize),
        CutlassExperts,
    )
    with pytest.raises(Incompatible, match="multiplies with 'cutlass', configured is triton"):
        _cutlass_method(prefer_experts=("triton",)).make_experts(LocalPrepareAndFinalize)
    monkeypatch.setattr(CutlassExperts, "unavailable", classmethod(lambda cls: "no CUDA device"))
    with pytest.raises(Incompatible, match="cutlass: no CUDA device"):
        _cutlass_method().make_experts(LocalPrepareAndFinalize)


def test_a_service_takes_the_cutlass_method_by_the_backends_name():
    assert method_for("fp8_channel", quant_method="compressed-tensors") is CompressedTensorsW8A8Fp8MoEMethod
    assert method_for("fp8_channel", quant_method="modelopt") is ModelOptFp8FusedMoE
    assert method_for("fp8_channel", "triton", "compressed-tensors") is CompressedTensorsW8A8Fp8MoEMethod
    assert method_for("fp8_channel", "cutlass", "compressed-tensors") is CompressedTensorsW8A8Fp8MoECutlassMethod
    assert method_for("none", "cutlass") is UnquantizedFusedMoEMethod


@pytest.mark.parametrize(
    ("scheme", "dtype", "reason"),
    [
        ("fp8_block", torch.bfloat16, "quantisation fp8_block"),
        ("none", torch.float16, "compute in bfloat16, not float16"),
        ("fp8_channel", torch.bfloat16, None),
    ],
)
def test_what_cutlass_has_is_in_its_record(scheme, dtype, reason):
    shape = ExpertShape(hidden=K, intermediate=N, num_experts=E, top_k=2, dtype=dtype)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(E, 1), device="cuda", quant=QuantConfig(scheme=scheme))
    reasons = why_not(LocalPrepareAndFinalize.capability, CutlassExperts.capability, spec)
    assert (reason in reasons[0]) if reason else reasons == ()
