"""The Triton kernels in Triton's interpreter, on the CPU. It must be chosen before Triton is imported: a process of its own."""

import pytest

from tests.support.own_process import run_checks


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("checks", ["check_experts.py", "check_libraries.py", "check_widened.py"])
def test_kernels_in_the_interpreter(checks):
    run_checks(f"tests/experts/triton_interpreter/{checks}", TRITON_INTERPRET="1")
