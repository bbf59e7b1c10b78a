"""The grouped products of gradients compiled for a GPU that is not there. Run by test_triton_gradients.py in its own process."""

import os

import pytest
import torch
import triton

from epserve.experts.kernels import gradients as kernels
from epserve.experts.triton.gradients import BK, BN, THICK, THIN
from tests.experts.triton_aot import fake_driver
from tests.experts.triton_aot.compiled import machine_code

CAPABILITY = int(os.environ.get("EPSERVE_TEST_CAPABILITY", "90"))
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}
fake_driver.install(CAPABILITY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile", [THIN, THICK])
def test_compiles_without_spills(tile, transposed, dtype):
    x, w = torch.empty(1, dtype=dtype), torch.empty(1, dtype=dtype)
    made = kernels.grouped.warmup(
        x, w, x, torch.empty(1, dtype=torch.int32), 5, 2048, 7168, 4096 * 7168, 7168, TRANSPOSED=transposed, BM=tile,
        BN=BN, BK=BK, num_warps=8 if tile == THICK else 4, num_stages=3, grid=(1,),
    )  # fmt: skip
    assert made.metadata.shared <= SHARED_MEMORY[CAPABILITY]
    code = machine_code(made)
    assert "MMA" in code, "on tensor cores"
    assert not [line for line in code.splitlines() if "STL" in line]
    assert triton.__version__
