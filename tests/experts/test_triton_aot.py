"""The Triton kernels compiled for GPUs that are not there. The stand-in for the driver is global: a process of its own for
each GPU.
"""

import os
import subprocess
import sys

import pytest

from tests.support.own_process import ROOT, run_checks

OLDEST = ROOT / ".venv" / "triton-oldest"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_machine_code_for_hopper():
    run_checks("tests/experts/triton_aot/check_machine_code.py")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["80", "89", "100", "120"])
def test_compiles_for_other_gpus(capability):
    run_checks("tests/experts/triton_aot/check_machine_code.py", EPSERVE_TEST_CAPABILITY=capability)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "100", "120"])
def test_default_tiles_fit_into_shared_memory(capability):
    run_checks("tests/experts/triton_aot/check_shared_memory.py", EPSERVE_TEST_CAPABILITY=capability)


def test_thick_default_tiles_fit_into_the_smallest_shared_memory():
    few = run_checks(
        "tests/experts/triton_aot/check_shared_memory.py", EPSERVE_TEST_CAPABILITY="120", EPSERVE_TEST_CASES="few"
    )
    assert "2 passed" in few


def test_nothing_compiles_after_warm_up():
    run_checks("tests/experts/triton_aot/check_late_compiles.py")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["90", "100"])
def test_what_lies_around_a_librarys_products(capability):
    run_checks("tests/experts/triton_aot/check_libraries.py", EPSERVE_TEST_CAPABILITY=capability)


@pytest.mark.slow
@pytest.mark.timeout(1400)
@pytest.mark.skipif(not (OLDEST / ".done").exists(), reason="no oldest Triton here: make test-slow puts it there")
def test_compiles_with_the_oldest_triton():
    path = f"{OLDEST}:{ROOT}"
    command = [sys.executable, "-c", "import triton; print(triton.__file__)"]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout
    assert found.startswith(f"{OLDEST}/"), found
    run_checks("tests/experts/triton_aot/check_machine_code.py", "-k", "standard or barrier", PYTHONPATH=path)
    run_checks("tests/experts/triton_aot/check_gate.py", PYTHONPATH=path)
