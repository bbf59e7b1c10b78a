"""Experts whose products are a library's: our kernels around them compile for GPUs that are not there, all of them at warm-up.

The library itself does nothing here.
"""

import dataclasses
import os
import random
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from epserve.experts.cutlass import CutlassExperts
from epserve.experts.deepgemm import DeepGemmExperts
from epserve.modular_kernel import Workspaces
from tests.experts.triton_aot import fake_driver
from tests.experts.triton_aot.check_late_compiles import Keys
from tests.experts.triton_aot.compiled import apply, machine_code, prepare, stub_weights
from tests.support.triton_cases import Case

CAPABILITY = int(os.environ.get("EPSERVE_TEST_CAPABILITY", "90"))
fake_driver.install(CAPABILITY)
SIZES = {"local": 8, "total": 8, "hidden": 512, "intermediate": 14336, "top_k": 2}
SCHEMES = [(CutlassExperts, "none", False), (CutlassExperts, "fp8_tensor", False), (CutlassExperts, "fp8_tensor", True),
           (CutlassExperts, "fp8_channel", False), (DeepGemmExperts, "fp8_block", False)]  # fmt: skip


@pytest.fixture(autouse=True)
def idle_libraries(monkeypatch):
    def product(a, *args, **options):
        return torch.empty((a.shape[0], 8), dtype=torch.bfloat16)

    monkeypatch.setattr(F, "grouped_mm", product)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)
    library = types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=lambda *args: None)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)


def case_of(scheme: str, dynamic: bool) -> Case:
    return Case(why="any", tokens=0, scheme=scheme, dynamic=dynamic, **SIZES)


@pytest.mark.parametrize(("backend", "scheme", "dynamic"), SCHEMES)
def test_kernels_compile_without_spills(backend, scheme, dynamic):
    case, found = case_of(scheme, dynamic), {}
    if scheme != "none" and CAPABILITY < 89:
        pytest.skip("no e4m3 before compute capability 8.9")
    experts = backend(case.spec)

    def record(kernel, programs, *args, **constants):
        compiled = kernel.warmup(*args, grid=(1,), **constants)
        found[compiled.metadata.name] = compiled

    experts.launcher().launch = record
    apply(experts, case, prepare(case, 600), stub_weights(case), Workspaces("cpu"))
    assert set(found) == {"count_slots", "place_rows", "quantise_tokens", "activate_rows", "weighted_sum"}
    for name, compiled in found.items():
        assert CAPABILITY != 90 or "STL" not in machine_code(compiled), f"{name} spills registers"


@pytest.mark.parametrize(("backend", "scheme", "dynamic"), SCHEMES)
def test_nothing_compiles_after_warm_up(backend, scheme, dynamic):
    # Other sizes than above: a variant that was compiled in this process is not asked for again.
    case, most = dataclasses.replace(case_of(scheme, dynamic), local=4, total=4, hidden=768, intermediate=640), 1024
    experts, weights, spaces = backend(case.spec), stub_weights(case), Workspaces("cpu")
    with Keys() as warm:
        experts.warm_up(weights, most)
    assert 5 <= len(warm.seen) <= 20
    with Keys() as later:
        for tokens in [1, 2, 15, 16, 17, 31, most] + [random.Random(1).randint(1, most) for _ in range(100)]:
            quantised = scheme == "fp8_block" and tokens % 2 == 0
            apply(experts, case, prepare(case, tokens, quantised=quantised, shift=tokens % 3), weights, spaces)
    assert later.seen <= warm.seen, {name for name, _ in later.seen - warm.seen}
    assert len(later.seen) >= 5
