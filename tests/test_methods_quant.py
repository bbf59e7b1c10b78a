"""Layouts of quantised checkpoints: what each library stores means the same after it is brought into `ExpertWeights`."""

import pytest
import torch

import all2all
import experts
from all2all.local import LocalPrepareAndFinalize
from epserve.backend_choice import method_for
from epserve.errors import CheckpointError, Incompatible
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
)
from epserve.modular_kernel.quantization import FP8
from experts.cutlass import CutlassExperts

K, N, E = 256, 128, 3
SHAPES = {"gate_proj": (N, K), "up_proj": (N, K), "down_proj": (K, N)}


def floats(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) * (1 + i) for i, (name, shape) in enumerate(SHAPES.items())}


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
        made |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}
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
    weights, config = method.weights([store(one) for one in values])
    assert config.scheme == scheme and weights.num_experts == E
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
    weights, config = ModelOptNvFp4FusedMoE.weights([stored])
    assert config.scheme == "nvfp4" and weights.w13_eNK.shape == (1, 2 * N, K // 2)
    want = torch.cat([exact["gate_proj"], exact["up_proj"]])
    assert torch.equal(unpacked(weights.w13_eNK[0], weights.s13[0]), want)
    assert torch.equal(unpacked(weights.w2_eKN[0], weights.s2[0]), exact["down_proj"])


def test_mxfp4_brings_gate_and_up_apart():
    g = torch.Generator().manual_seed(1)
    expert = {
        "gate_up_proj_blocks": torch.randint(0, 256, (2 * N, K // 32, 16), generator=g).to(torch.uint8),
        "gate_up_proj_scales": torch.randint(120, 130, (2 * N, K // 32), generator=g).to(torch.uint8),
        "gate_up_proj_bias": torch.randn(2 * N, generator=g),
        "down_proj_blocks": torch.randint(0, 256, (K, N // 32, 16), generator=g).to(torch.uint8),
        "down_proj_scales": torch.randint(120, 130, (K, N // 32), generator=g).to(torch.uint8),
        "down_proj_bias": torch.randn(K, generator=g),
    }
    weights, config = Mxfp4MoEMethod.weights([expert])
    assert config.scheme == "mxfp4" and weights.w13_eNK.shape == (1, 2 * N, K // 2)
    scale = torch.exp2(expert["gate_up_proj_scales"].float() - 127)
    whole = unpacked(expert["gate_up_proj_blocks"].flatten(1), scale)
    got = unpacked(weights.w13_eNK[0], torch.exp2(weights.s13[0].float() - 127))
    assert torch.equal(got[:N], whole[::2]) and torch.equal(got[N:], whole[1::2])
    assert torch.equal(weights.b13[0][N:], expert["gate_up_proj_bias"][1::2])
    assert torch.equal(weights.b2[0], expert["down_proj_bias"])


def test_static_scales_are_the_largest_of_the_layer():
    experts = [per_tensor(floats(seed)) for seed in range(E)]
    for i, expert in enumerate(experts):
        for name in SHAPES:
            expert[f"{name}.input_scale"] = torch.tensor(0.1 * (i + 1))
    weights, config = Fp8MoEMethod.weights(experts)
    assert not config.dynamic
    assert torch.allclose(weights.a1, torch.tensor([0.3])) and torch.allclose(weights.a2, torch.tensor([0.3]))
    assert Fp8MoEMethod.weights([per_tensor(floats(0))])[1].dynamic


def test_each_rank_holds_its_experts_scales():
    """A rank's part equals the same rows of the whole: nothing is derived across experts but a1 and a2."""
    experts = [per_channel(floats(seed)) for seed in range(4)]
    whole, _ = CompressedTensorsW8A8Fp8MoEMethod.weights(experts)
    part, _ = CompressedTensorsW8A8Fp8MoEMethod.weights(experts[2:])
    assert torch.equal(part.s13, whole.s13[2:]) and torch.equal(part.s2, whole.s2[2:])


def test_a_missing_scale_is_named():
    broken = per_channel(floats(0))
    del broken["up_proj.weight_scale"]
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale is missing"):
        CompressedTensorsW8A8Fp8MoEMethod.weights([broken])


def test_scales_of_the_wrong_length_are_refused():
    broken = per_channel(floats(0))
    broken["down_proj.weight_scale"] = broken["down_proj.weight_scale"][:-1]
    with pytest.raises(CheckpointError, match="255 values for 256"):
        CompressedTensorsW8A8Fp8MoEMethod.weights([broken])


def test_a_layer_of_another_scheme_is_refused():
    shape = ExpertShape(hidden=K, intermediate=N, num_experts=E, top_k=2)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(E, 1), quant=QuantConfig(scheme="int8_channel"))
    with pytest.raises(CheckpointError, match="stores fp8_block, fp8_tensor"):
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
    got, config = CompressedTensorsW8A8Fp8MoECutlassMethod.weights(stored)
    want, _ = CompressedTensorsW8A8Fp8MoEMethod.weights(stored)
    assert config.scheme == "fp8_channel"
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
    assert method_for("fp8_channel") is CompressedTensorsW8A8Fp8MoEMethod
    assert method_for("fp8_channel", "triton") is CompressedTensorsW8A8Fp8MoEMethod
    assert method_for("fp8_channel", "cutlass") is CompressedTensorsW8A8Fp8MoECutlassMethod
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
