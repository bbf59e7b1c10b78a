"""The Triton kernels compiled for GPUs that are not there. The stand-in for the driver is global: a process of its own for
each GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **env: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "python_files=check_*.py",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True,
                          text=True, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_machine_code_for_hopper():
    assert " passed" in run("tests/triton_aot/check_machine_code.py")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["80", "89", "100", "120"])
def test_compiles_for_other_gpus(capability):
    assert " passed" in run("tests/triton_aot/check_machine_code.py", EPSERVE_TEST_CAPABILITY=capability)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "100", "120"])
def test_default_tiles_fit_into_shared_memory(capability):
    assert " passed" in run("tests/triton_aot/check_shared_memory.py", EPSERVE_TEST_CAPABILITY=capability)


def test_thick_default_tiles_fit_into_the_smallest_shared_memory():
    few = run("tests/triton_aot/check_shared_memory.py", EPSERVE_TEST_CAPABILITY="120", EPSERVE_TEST_CASES="few")
    assert "2 passed" in few


def test_nothing_compiles_after_warm_up():
    assert " passed" in run("tests/triton_aot/check_late_compiles.py")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("capability", ["90", "100"])
def test_what_lies_around_a_librarys_products(capability):
    assert " passed" in run("tests/triton_aot/check_libraries.py", EPSERVE_TEST_CAPABILITY=capability)
