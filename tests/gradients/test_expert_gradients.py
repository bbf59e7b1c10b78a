"""Gradients through one rank's experts: every activation, quantised and packed weights, sizes that are no whole tiles."""

import pytest
import torch

from epserve.experts import dequantised, gradients
from epserve.experts.activation import activate, normalise_output
from epserve.modular_kernel import UNQUANTIZED, Activation, ExpertWeights, QuantConfig
from epserve.modular_kernel.packing import Packing
from epserve.modular_kernel.weights import ExpertSizes, empty_weights

E, COUNTS = 3, [4, 0, 5]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_weights(activation: Activation, dtype: torch.dtype, hidden: int, inner: int, bias: bool) -> ExpertWeights:
    rows = inner * (2 if activation.gated else 1)
    return ExpertWeights(
        w13_eNK=(normal(1, E, rows, hidden) / hidden**0.5).to(dtype),
        w2_eKN=(normal(2, E, hidden, inner) / inner**0.5).to(dtype),
        b13=normal(3, E, rows).to(dtype) if bias else None,
        b2=normal(4, E, hidden).to(dtype) if bias else None,
        activation=activation,
    )


def reference(x_SK, g_SK, weights: ExpertWeights, quant: QuantConfig):
    """By autograd in float64."""
    x, w = x_SK.double().requires_grad_(), torch.ones(len(x_SK), dtype=torch.float64, requires_grad=True)
    parts = []
    for expert, rows in enumerate(x.split(COUNTS)):
        w13, w2 = (each.double() for each in dequantised.matrices(weights, expert, quant, torch.float32))
        h = rows @ w13.T + (0 if weights.b13 is None else weights.b13[expert].double())
        z = activate(h, weights.activation) @ w2.T + (0 if weights.b2 is None else weights.b2[expert].double())
        if weights.activation.output_norm_eps is not None:
            z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + weights.activation.output_norm_eps)
        parts.append(z)
    return torch.autograd.grad(torch.cat(parts) * w[:, None], (x, w), g_SK.double())


def check(weights: ExpertWeights, quant: QuantConfig, dtype: torch.dtype, hidden: int, bound: float) -> None:
    x, g = (normal(seed, sum(COUNTS), hidden).to(dtype) for seed in (5, 6))
    with torch.no_grad():
        got = gradients.slot_gradients(x, g, COUNTS, weights, quant)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for each, want in zip(got, reference(x, g, weights, quant), strict=True):
        assert (each.double() - want).norm() / want.norm() < bound


ACTIVATIONS = (
    Activation(),
    Activation(kind="silu", limit=0.5),
    Activation(kind="gelu"),
    Activation(kind="gelu_tanh"),
    Activation(kind="relu2", gated=False),
    Activation(kind="swigluoai", limit=0.7),
    Activation(kind="swiglu_softcap", limit=1.5, alpha=2.0),
    Activation(output_norm_eps=1e-5),  # y itself is needed then
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: f"{each.kind}-{each.limit}-{each.output_norm_eps}")
def test_every_activation(activation, bias):
    weights = plain_weights(activation, torch.float32, 40, 24, bias)
    check(weights, UNQUANTIZED, torch.float32, 40, 1e-5)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (72, 24), (67, 13)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_every_dtype_and_size(dtype, bound, hidden, inner):
    check(plain_weights(Activation(), dtype, hidden, inner, True), UNQUANTIZED, dtype, hidden, bound)


@pytest.mark.parametrize("scheme", QuantConfig.SCHEMES[1:])
def test_every_quantised_scheme(scheme):
    """The weights count as what they mean; random codes are weights like others."""
    quant = QuantConfig(scheme=scheme, group=32 if scheme == "int4" else 128)
    sizes = ExpertSizes(hidden=256, intermediate=128, dtype=torch.bfloat16)
    weights = empty_weights(sizes, quant, E, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for codes in (weights.w13_eNK, weights.w2_eKN):
        random = torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8)
        if codes.dtype.is_floating_point:
            random = (normal(8, *codes.shape)).to(codes.dtype).view(torch.uint8)  # no NaN among them
        codes.view(torch.uint8).copy_(random)
    for scale in (weights.s13, weights.s2):
        if scale.dtype == torch.uint8:
            scale.copy_(torch.randint(118, 123, scale.shape, generator=generator))
        else:
            scale.copy_((torch.rand(scale.shape, generator=generator) + 0.5) / 64)
    check(weights, quant, torch.bfloat16, 256, 2e-2)


def test_what_4_bits_mean():
    """The even code of a byte is low; int4 has offset 8; e8m0 has bias 127."""
    codes = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8)
    meant = {
        "int4": (torch.tensor([[2.0]]), QuantConfig(scheme="int4", group=4), [-14.0, -12.0, -2.0, 14.0]),
        "mxfp4": (torch.tensor([[128]], dtype=torch.uint8), QuantConfig(scheme="mxfp4"), [1.0, 2.0, 12.0, -12.0]),
    }
    for scale, quant, want in meant.values():
        wide = codes.repeat(1, quant.shared // 4)
        assert dequantised.values(wide, scale, quant, torch.float32)[0, :4].tolist() == want


def test_packed_weights_are_unpacked():
    weights = plain_weights(Activation(), torch.bfloat16, 64, 32, False)
    packing = Packing(rows=16)

    def packed(w_eNK):
        e, n, k = w_eNK.shape
        return w_eNK.view(e, n // 16, 16, k).transpose(2, 3).reshape(e, n, k)

    same = ExpertWeights(w13_eNK=packed(weights.w13_eNK), w2_eKN=packed(weights.w2_eKN), packing=packing)
    x, g = (normal(seed, sum(COUNTS), 64).bfloat16() for seed in (5, 6))
    with torch.no_grad():
        got, want = (gradients.slot_gradients(x, g, COUNTS, each, UNQUANTIZED) for each in (same, weights))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_normalised_outputs_are_those_of_the_forward():
    """The float64 reference above has the norm written out."""
    y = normal(9, 3, 8)
    want = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(normalise_output(y, Activation(output_norm_eps=1e-5)), want)
