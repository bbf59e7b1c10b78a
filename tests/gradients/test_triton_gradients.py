"""The Triton kernel of gradients: in the interpreter, and compiled for GPUs that are not there. Each in a process of its own."""

import pytest

from tests.support.own_process import run_checks


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_in_the_interpreter():
    run_checks("tests/gradients/check_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_compiled(capability):
    run_checks("tests/gradients/check_compiled.py", EPSERVE_TEST_CAPABILITY=capability)
