"""Experts whose products are a library's, against float64: our kernels in Triton's interpreter, the library by its stand-in."""

import importlib.machinery
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.experts.triton_interpreter import exact_casts  # noqa: F401  first: it patches the interpreter

from epserve.modular_kernel import Activation  # isort: skip
from epserve.experts.cutlass import CutlassExperts  # isort: skip
from epserve.experts.deepgemm import DeepGemmExperts  # isort: skip
from tests.experts import fake_grouped_gemms as fake  # isort: skip
from tests.support.triton_cases import Case, relative_error, run_standard, tolerance  # isort: skip

torch.set_num_threads(1)
SIZES = [
    {"why": "no rows", "tokens": 0},
    {"why": "all slots remote", "tokens": 3, "routing": "remote"},
    {"why": "the same expert twice in a row", "tokens": 5, "routing": "twice"},
]
ROWWISE = [
    *(Case(scheme=scheme, dynamic=dynamic, **size) for size in SIZES
      for scheme, dynamic in (("none", False), ("fp8_tensor", False), ("fp8_tensor", True), ("fp8_channel", False))),
    Case(why="slots of two programs", tokens=520, local=2, total=2, top_k=1),
    Case(why="sizes that no group of columns divides", tokens=5, hidden=336, intermediate=208, scheme="fp8_channel"),
    Case(why="sizes that no group of columns divides, bf16", tokens=5, hidden=336, intermediate=208),
    Case(why="clamped swiglu", tokens=5, activation=Activation(kind="swigluoai", limit=7.0)),
    Case(why="gelu", tokens=5, scheme="fp8_channel", activation=Activation(kind="gelu")),
]  # fmt: skip
BLOCKS = [
    *(Case(scheme="fp8_block", quantised_input=ready, **size) for size in SIZES for ready in (False, True)),
    Case(why="an expert with more rows than a tile", tokens=140, local=2, total=2, routing="hot", scheme="fp8_block"),
    Case(why="several blocks a row", tokens=5, scheme="fp8_block", hidden=512, intermediate=384),
]


def judge(case: Case, experts) -> None:
    out, want = run_standard(case, "cpu", experts=experts)
    assert out.shape == (case.tokens, case.hidden) and out.dtype == case.dtype
    if case.tokens:
        assert relative_error(out, want) < tolerance(case)
        assert torch.equal(out, run_standard(case, "cpu", experts=experts, shift=case.tokens // 2)[0])


@pytest.mark.parametrize("case", ROWWISE, ids=lambda case: f"{case.scheme}-{'dynamic-' * case.dynamic}{case}")
def test_cutlass(case, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_grouped_mm", fake.private_scaled_grouped_mm)
    judge(case, CutlassExperts(case.spec))


def test_cutlass_by_the_public_function_alone(monkeypatch):
    monkeypatch.delattr(torch, "_scaled_grouped_mm")
    monkeypatch.setattr(F, "scaled_grouped_mm", fake.public_scaled_grouped_mm)
    case = Case(why="any", tokens=7, scheme="fp8_channel")
    judge(case, CutlassExperts(case.spec))


@pytest.mark.parametrize("version", [fake.DeepGemm, fake.DeepGemmByEnds])
@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: f"{'quantised-' * case.quantised_input}{case}")
def test_deepgemm(case, version, monkeypatch):
    library = version()
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    experts = DeepGemmExperts(case.spec)
    assert experts.wants_owner == (version is fake.DeepGemm)
    judge(case, experts)
    assert library.calls == (4 if case.tokens else 0)


def test_deepgemm_says_what_is_missing(monkeypatch):
    assert "the package deep_gemm is not installed" in DeepGemmExperts.unavailable()
    library = fake.DeepGemm()
    library.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    assert DeepGemmExperts.unavailable() is None
    monkeypatch.setattr(fake.DeepGemm, "get_mk_alignment_for_contiguous_layout", staticmethod(lambda: 256))
    assert "multiples of 256 rows, 128 was expected" in DeepGemmExperts.unavailable()
    monkeypatch.delattr(fake.DeepGemm, "m_grouped_fp8_gemm_nt_contiguous")
    assert "version 2 or newer is needed" in DeepGemmExperts.unavailable()
