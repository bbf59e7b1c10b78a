"""Memory for messages, the server's and a client's, is used again instead of going back to the system and coming anew."""

import resource
import subprocess
import sys

import pytest

# Page faults of 100 megabyte-sized messages, after the first ones.
SCRIPT = """
import ctypes, resource, sys
from epserve.process.allocator import expect_messages, keep_freed_memory
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault is a page, whatever the system's setting
if sys.argv[1] == "kept" and not keep_freed_memory():
    print(-1); sys.exit()
if sys.argv[1] == "expected":
    expect_messages()
several = int(sys.argv[2])
def message():
    held = [bytes(1 << 20) + b"x" for _ in range(several)]
for _ in range(3):
    message()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100 // several + 1):
    message()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, several: int = 16) -> int:
    """several: messages that are held at one time."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, str(several)], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


def test_pages_are_new_once():
    kept = faults("kept")
    if kept < 0:
        pytest.skip("the C library is not glibc")
    pages = (100 << 20) // resource.getpagesize()
    assert kept < pages // 20, f"{kept} faults for {pages} pages"
    assert faults("default") > 5 * max(kept, 100), "what is done about it does something"


def test_a_clients_pages_are_new_once_without_a_setting():
    """Four copies of 1 MiB, as one call holds them."""
    if faults("kept") < 0:
        pytest.skip("the C library is not glibc")
    pages = (100 << 20) // resource.getpagesize()
    expected = faults("expected", 4)
    assert expected < pages // 20, f"{expected} faults for {pages} pages"
    assert faults("default", 4) > 5 * max(expected, 100), "what is done about it does something"
