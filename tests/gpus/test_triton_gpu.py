"""The experts on a GPU: rows beyond 2^31 elements, CUDA graphs, libraries' products, measured choice, 4-bit weights.

pytest -m gpu tests/gpus/test_triton_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from tests.gpus import triton_gpu
from tests.support import triton_cases

JOBS = [(index, batched) for index, case in enumerate(triton_cases.ALL) for batched in (False, True)
        if case.tokens and case.scheme in triton_cases.GROUPS]  # fmt: skip


def _name(job: tuple[int, bool]) -> str:
    return f"{'batched ' if job[1] else ''}{triton_cases.ALL[job[0]].why}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here")
@pytest.mark.parametrize("name", triton_gpu.CHECKS)
def test_on_a_gpu(name):
    needed = 60 if name.startswith("large") else 20 if name.startswith("measured") else 2
    if (free := torch.cuda.mem_get_info()[0] / 2**30) < needed:
        pytest.skip(f"needs {needed} GiB of GPU memory, {free:.0f} are free")
    if "specialised" in name and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    seen = triton_gpu.CHECKS[name]()
    if seen.startswith("not run"):
        pytest.skip(seen)
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here")
@pytest.mark.parametrize("job", JOBS, ids=_name)
def test_four_bit_weights_against_float64(job):
    right, seen = triton_cases.check(job)
    assert right, seen
