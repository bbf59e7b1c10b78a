"""The dense experts' kernels against float64, in Triton's interpreter. Run by test_dense.py in its own process."""

import pytest
import torch

from tests.experts.triton_interpreter import exact_casts  # noqa: F401, first: it patches the interpreter

from epserve.modular_kernel import Activation  # isort: skip
from epserve.experts.triton import dense  # isort: skip
from epserve.experts.activation import activate  # isort: skip

torch.set_num_threads(1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 64, 256), (300, 200, 264), (129, 72, 8), (520, 64, 520)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_product(rows, inner, columns, dtype):
    """Sizes that no tile divides: nothing is read from, or written, beyond them."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn((rows, inner), generator=g).to(dtype)
    w = (torch.randn((columns, inner), generator=g) / inner**0.5).to(dtype)
    assert relative(dense.linear(x, w), x.double() @ w.double().T) < (4e-3 if dtype is torch.bfloat16 else 5e-4)


@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation(limit=0.5), Activation(kind="gelu"), Activation(kind="gelu_tanh"), Activation(kind="relu2"),
     Activation(kind="swigluoai", limit=0.7)],
    ids=str,
)  # fmt: skip
def test_activation_in_one_pass(activation):
    h = torch.randn((5, 2 * 1100), generator=torch.Generator().manual_seed(1)).half()
    assert relative(dense.activate_rows(h, activation), activate(h.double(), activation)) < 5e-4


def test_other_activations_take_torchs_way():
    for activation in (Activation(kind="gelu", gated=False), Activation(kind="swiglu_softcap", alpha=3.0, limit=2.0)):
        h = torch.randn((3, 64), generator=torch.Generator().manual_seed(2)).half()
        assert torch.equal(dense.activate_rows(h, activation), activate(h, activation))
