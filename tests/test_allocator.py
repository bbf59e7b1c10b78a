"""Memory that threads have used and freed goes back to the system."""

import subprocess
import sys

from epserve import allocator

SCRIPT = """
import os, threading
from epserve import allocator
if {settled}:
    allocator.settle()

def work():
    for size in range(1000, 100_000, 700):  # small enough for arenas
        kept = [bytearray(size) for _ in range(30)]

def resident():
    fields = open("/proc/self/statm").read().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") >> 10

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
before = resident()
allocator.trim()
print(before, resident())
"""


def resident_kib(settled: bool) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(settled=settled)], capture_output=True, text=True, check=True, timeout=60
    )
    before, after = map(int, done.stdout.split())
    return before, after


def test_it_can_be_called_whatever_the_c_library_is(monkeypatch):
    monkeypatch.setattr(allocator, "_libc", lambda: None)
    allocator.settle()
    assert allocator.trim() is False


def test_free_memory_goes_back():
    before, after = resident_kib(settled=True)
    assert after <= before
    assert after < 40_000
