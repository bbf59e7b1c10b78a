"""Every Triton expert kernel against float64, in Triton's interpreter. Run by test_triton_interpreter.py in its own process."""

import pytest
import torch

from tests.experts.triton_interpreter import exact_casts  # first: it patches the interpreter

from tests.support.triton_cases import CASES, relative_error, run_batched, run_standard, tolerance  # isort: skip

torch.set_num_threads(1)
BATCHED = [case for case in CASES if 0 < case.tokens <= 100]
AGAIN = [case for case in CASES if case.why in ("direct, split-K in both GEMMs", "sorted, split-K", "sorted by two launches",
         "fp8 dynamic, sorted", "fp8 blocks, expanded", "mxfp4 weights, split")]  # fmt: skip


def test_the_interpreter_casts_as_torch_does():
    exact_casts.check()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_standard(case):
    out, want = run_standard(case, "cpu")
    assert out.shape == (case.tokens, case.hidden) and out.dtype == case.dtype
    if case.tokens:
        assert relative_error(out, want) < tolerance(case)


@pytest.mark.parametrize("case", AGAIN, ids=str)
def test_order_of_tokens_and_stale_bytes_change_no_bit(case):
    first, _ = run_standard(case, "cpu", poison=True)
    second, _ = run_standard(case, "cpu", poison=False, shift=case.tokens // 3)
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", [case for case in BATCHED if case.quantised_input], ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_scales_are_read_where_they_lie(case, spare):
    """Row by row or column by column, of exactly these columns or of more: not one bit differs."""
    rows, _ = run_batched(case, "cpu", capacity=case.tokens + 3)
    columns, want = run_batched(case, "cpu", capacity=case.tokens + 3, spare=spare)
    assert torch.equal(rows, columns) and relative_error(columns, want) < tolerance(case)


@pytest.mark.parametrize("case", BATCHED, ids=str)
def test_batched(case):
    out, want = run_batched(case, "cpu", capacity=case.tokens + 3)
    assert relative_error(out, want) < tolerance(case)
