"""Thick batches of 4-bit experts, whose weights are widened once: in Triton's interpreter against float64."""

import dataclasses

import pytest
import torch

from tests.experts.triton_interpreter import exact_casts  # noqa: F401  first: it patches the interpreter

from epserve.modular_kernel import Activation  # isort: skip
from epserve.experts.triton import widened  # isort: skip
from epserve.experts.triton.experts import TritonExperts  # isort: skip
from tests.support.triton_cases import Case, relative_error, run_standard, tolerance  # isort: skip

torch.set_num_threads(1)
CASES = [
    *(Case(why="more experts than have rows", tokens=5, scheme=scheme) for scheme in ("int4", "mxfp4", "nvfp4")),
    Case(why="sorted, rows on other ranks", tokens=70, local=2, total=4, scheme="int4"),
    Case(why="all slots remote", tokens=9, routing="remote", scheme="mxfp4"),
    Case(why="biases and a clamp", tokens=6, scheme="mxfp4", bias=True, activation=Activation(kind="swigluoai", limit=7.0)),
    Case(why="columns that a program does not fill", tokens=5, hidden=640, intermediate=384, scheme="int4"),
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that ran; every batch with rows counts as thick."""
    names: list[str] = []
    monkeypatch.setattr(widened, "ROWS_PER_EXPERT", 1e-9)
    original = widened.Widened._widen

    def widen(self, *args):
        names.append("widen")
        original(self, *args)

    monkeypatch.setattr(widened.Widened, "_widen", widen)
    return names


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.scheme}-{case}")
def test_widened_weights_give_the_layer(case, launched):
    out, want = run_standard(case, "cpu")
    assert launched == ["widen", "widen"]
    if want.norm() == 0:
        assert out.norm() == 0
    else:
        assert relative_error(out, want) < tolerance(case)
    plain = dataclasses.replace(case, dtype=torch.float16)
    assert TritonExperts(plain.spec).widened() is None, "float16 has no range for the scales"


def test_only_thick_batches_take_scratch(monkeypatch):
    case = Case(why="any", tokens=0, local=4, total=16, top_k=2, scheme="int4")
    experts = TritonExperts(case.spec)
    wide, first = experts.widened(), 192 * 16 // 2
    assert wide is not None and wide.serves(first, 2, 4) and not wide.serves(first - 1, 2, 4)
    scratch = 4 * 2 * case.intermediate * case.hidden * 2
    below, above = (sum(experts.workspace_shapes(rows, 2, 4).workspace13) for rows in (first - 1, first))
    assert above >= scratch + 256 * case.hidden and below != above
    assert any(f"{first} rows and more widen int4" in line for line in experts.explain())
    monkeypatch.setattr(wide, "_memory", 31 * scratch)
    assert not wide.serves(first, 2, 4), "scratch is at most a 32nd of the memory"
