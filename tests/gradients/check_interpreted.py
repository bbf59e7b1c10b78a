"""The grouped products of gradients in Triton's interpreter. Run by test_triton_gradients.py in its own process."""

import pytest
import torch

from tests.experts.triton_interpreter import exact_casts  # noqa: F401, first: it patches the interpreter

from epserve.experts import gradients  # isort: skip
from epserve.experts.triton.gradients import THICK, THIN, Grouped  # isort: skip
from epserve.modular_kernel import UNQUANTIZED, Activation, QuantConfig  # isort: skip
from epserve.modular_kernel.packing import Packing  # isort: skip
from tests.gradients.test_expert_gradients import normal, plain_weights, reference  # isort: skip

torch.set_num_threads(1)
BOUND = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("tile", [THIN, THICK])
@pytest.mark.parametrize("counts", [[3, 0, 40, 1], [0, 0, 0, 5], [32, 32, 0, 0], [129, 0, 0, 0], [0]])
def test_each_row_meets_its_experts_weight(counts, tile):
    """Sizes that no tile divides. Rows of other experts, and memory behind the tensors, are not touched."""
    total, K, N = sum(counts), 72, 136
    x, w = normal(1, total, K), normal(2, len(counts), N, K)
    grouped = Grouped(torch.tensor(counts), total, tile=tile)
    parts = x.split(counts)
    want = torch.cat([rows @ each.T for rows, each in zip(parts, w, strict=True)])
    torch.testing.assert_close(grouped.linear(x, w), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grouped.product(want, w), torch.cat(
        [rows @ each for rows, each in zip(want.split(counts), w, strict=True)]), rtol=1e-4, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("activation", [Activation(), Activation(kind="swigluoai", limit=0.7)], ids=str)
def test_gradients(dtype, activation):
    weights = plain_weights(activation, dtype, 72, 40, True)
    x, g = (normal(seed, 9, 72).to(dtype) for seed in (5, 6))
    with torch.no_grad():
        got = gradients.grouped_gradients(x, g, weights, (0, [4, 0, 5]), UNQUANTIZED)
        alone = [gradients.expert_gradients(x[:4], g[:4], weights, 0, UNQUANTIZED)]
    for each, want in zip(got, reference(x, g, weights, UNQUANTIZED), strict=True):
        assert (each.double() - want).norm() / want.norm() < BOUND[dtype]
    torch.testing.assert_close(got[0][:4], alone[0][0], rtol=2e-2, atol=2e-2)


def test_experts_in_parts(monkeypatch):
    """Quantised weights are made plain for as many experts as fit; the parts are the whole."""
    weights = plain_weights(Activation(), torch.float32, 64, 32, False)
    packed = [each.view(3, -1, 16, each.shape[2]).transpose(2, 3).reshape(each.shape).contiguous()
              for each in (weights.w13_eNK, weights.w2_eKN)]  # fmt: skip
    stored = type(weights)(w13_eNK=packed[0], w2_eKN=packed[1], packing=Packing(rows=16))
    x, g = (normal(seed, 9, 64) for seed in (5, 6))
    monkeypatch.setattr("epserve.experts.triton.gradients.suits", lambda x: True)
    found = []
    for scratch in (1, 1 << 30):
        monkeypatch.setattr(gradients, "SCRATCH_BYTES", scratch)
        with torch.no_grad():
            found.append(gradients.slot_gradients(x, g, [4, 0, 5], stored, UNQUANTIZED))
    want = reference(x, g, weights, UNQUANTIZED)
    for part, whole, true in zip(*found, want, strict=True):
        assert torch.equal(part, whole)
        torch.testing.assert_close(part.double(), true, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        gradients.warm_up(weights, UNQUANTIZED, torch.float32)


def test_fp8_blocks():
    quant = QuantConfig(scheme="fp8_block", dynamic=True)
    plain = plain_weights(Activation(), torch.float32, 128, 128, False)
    scales = torch.rand((3, 2, 1)) + 0.5, torch.rand((3, 1, 1)) + 0.5
    weights = type(plain)(w13_eNK=plain.w13_eNK.to(torch.float8_e4m3fn), w2_eKN=plain.w2_eKN.to(torch.float8_e4m3fn),
                          s13=scales[0], s2=scales[1])  # fmt: skip
    x, g = (normal(seed, 9, 128) for seed in (5, 6))
    with torch.no_grad():
        got = gradients.grouped_gradients(x, g, weights, (0, [4, 0, 5]), quant)
    for each, want in zip(got, reference(x, g, weights, quant), strict=True):
        assert (each.double() - want).norm() / want.norm() < 1e-4
