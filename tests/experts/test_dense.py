"""Dense experts in two halves: their kernels in Triton's interpreter, as compiled for sm_90, and on a GPU."""

import pytest
import torch

from epserve.experts.triton import dense
from epserve.models import SharedExperts
from epserve.modular_kernel import Activation
from epserve.modular_kernel.kernel import begin
from tests.support.own_process import run_checks


def experts(hidden=64, inner=48, dtype=torch.float32, device="cpu", gate=False) -> SharedExperts:
    g = torch.Generator().manual_seed(4)
    return SharedExperts(
        w13_SK=(torch.randn((2 * inner, hidden), generator=g) * hidden**-0.5).to(device, dtype),
        w2_KS=(torch.randn((hidden, inner), generator=g) * inner**-0.5).to(device, dtype),
        activation=Activation(),
        gate_1K=torch.randn((1, hidden), generator=g).to(device, dtype) if gate else None,
    )


def truth(shared: SharedExperts, x: torch.Tensor) -> torch.Tensor:
    wide = x.double().cpu()
    gate, up = (wide @ shared.w13_SK.double().cpu().T).chunk(2, -1)
    y = (gate * gate.sigmoid() * up) @ shared.w2_KS.double().cpu().T
    return y if shared.gate_1K is None else (wide @ shared.gate_1K.double().cpu().T).sigmoid() * y


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_halves_are_the_whole(rows, gate):
    shared, x = experts(gate=gate), torch.randn((rows, 64), generator=torch.Generator().manual_seed(1))
    finish = begin(shared, x)
    assert torch.equal(finish(), shared(x))
    assert torch.allclose(shared(x).double(), truth(shared, x), atol=1e-5)


def test_what_has_no_halves_runs_at_once():
    ran = []
    finish = begin(lambda x: ran.append(1) or 2 * x, torch.ones(3))
    assert ran == [1] and torch.equal(finish(), torch.full((3,), 2.0))


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    run_checks("tests/experts/triton_interpreter/check_dense.py", timeout=600, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [dense.MIN_ROWS - 1, dense.MIN_ROWS, 1000])
def test_on_a_gpu(rows):
    shared = experts(hidden=1024, inner=520, dtype=torch.bfloat16, device="cuda", gate=True)
    x = torch.randn((rows, 1024), generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    assert dense.suits(x, 520) == (rows >= dense.MIN_ROWS)
    want, got = truth(shared, x), shared(x).double().cpu()
    assert ((got - want).norm() / want.norm()).item() < 1e-2
    assert torch.equal(shared(x), begin(shared, x)())
