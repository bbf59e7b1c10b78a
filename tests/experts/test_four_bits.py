"""The assembler that widens 4-bit weights, on every byte: Triton's interpreter cannot run it, and a GPU is not needed."""

import pytest
import torch

from tests.experts import ptx_words
from tests.support.triton_cases import E2M1

four_bits = pytest.importorskip("epserve.experts.kernels.four_bits")
WORDS = [0x01000001 * byte & 0xFF0000FF | (255 - byte) << 8 | (byte ^ 0x5A) << 16 for byte in range(256)]


def values(word: int, texts: tuple[str, ...], *scales: int) -> torch.Tensor:
    """The 8 values of a word, in the order in which they are stored."""
    found = [ptx_words.run(text, word, *scales) for text in texts]
    return torch.tensor([value for pair in found for value in ptx_words.halves(pair)], dtype=torch.float64)


def codes(word: int) -> torch.Tensor:
    return torch.tensor([word >> (4 * i) & 0xF for i in range(8)])


def both(scale: float) -> tuple[int, int]:
    """What the kernel makes of a float scale: high and low part."""
    high = ptx_words.halves(ptx_words.pair(scale, scale))[0]
    return ptx_words.pair(high, high), ptx_words.pair(scale - high, scale - high)


@pytest.mark.parametrize("exponent", [0, 1, 90, 127, 130, 190])
def test_mxfp4_is_exact(exponent):
    field = min(exponent + 64, 254)
    for word in WORDS:
        got = values(word, four_bits.ASM_MXFP4.value, field << 7 | field << 23) * four_bits.REST.value
        if exponent > 64:  # below, a product is smaller than any weight that a sum in float32 would keep
            assert torch.equal(got, E2M1.double()[codes(word)] * 2.0 ** (exponent - 127))
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("scale", [1.0, 0.0123456, 3.7e-5, 17.3, -0.6])
@pytest.mark.parametrize("scheme", ["int4", "nvfp4"])
def test_float_scales_round_about_once(scheme, scale):
    held = torch.tensor(scale, dtype=torch.float32).item()
    integers = scheme == "int4"
    part, rest = (1.0, 1.0) if integers else (four_bits.PART.value, four_bits.REST.value)
    texts = (four_bits.ASM_INT4 if integers else four_bits.ASM_FP4).value
    worst = 0.0
    for word in WORDS:
        meaning = (codes(word).double() - 8 if integers else E2M1.double()[codes(word)]) * held
        got = values(word, texts, *both(held * part)) * rest
        assert torch.equal(got == 0, meaning == 0)
        worst = max(worst, ((got - meaning).abs() / meaning.abs().clamp(min=1e-30)).max().item())
    assert worst < 1.01 * 2**-8  # rounded once: at most 2^-8; with a scale of one bf16 it would be twice that


def test_the_order_of_k_keeps_pairs_and_words():
    """What `order_of_k` says, in plain numbers: k-th product -> column. 32 columns at a time; pairs stay together."""
    order = [k // 32 * 32 + k // 2 % 4 * 8 + k // 8 % 4 * 2 + k % 2 for k in range(128)]
    assert sorted(order) == list(range(128))
    assert all(order[k + 1] == order[k] + 1 for k in range(0, 128, 2))
    for lane in range(4):  # the columns that one thread of four multiplies are whole words
        mine = {order[base + 2 * lane + i] for base in range(0, 128, 8) for i in (0, 1)}
        assert mine == {8 * word + i for word in range(lane, 16, 4) for i in range(8)}
