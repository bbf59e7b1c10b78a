"""Memory of long-lived processes, where the C library is glibc: how many heaps there are, and what is given back when.

Requests of all sizes come and go on many threads, so each of glibc's heaps (as many as eight times the processors) grows to its
own high-water mark. Two heaps, and giving back what is free now and then, keep a process closer to what it uses.

A server's large pieces are another matter: by default glibc maps each anew and gives it back as soon as it is free, and each
message then begins with pages that are new: some 256 faults a MiB, which on a virtual machine were more than half of the server's
processor time for 16 MiB each way.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
ARENAS = 2
KEPT_BYTES = 128 << 20
"""Free memory at the end of a server's heap that stays with the process. Bounds what it costs."""
LARGEST_BYTES = 32 << 20
"""Pieces above it are mapped one by one as before: the most that glibc allows."""

EXPECTED_BYTES = 8 << 20
"""Of a client's message of 1 MiB there are five copies at most at one time."""


def settle() -> None:
    """At a process's start, before it has threads. An operator's MALLOC_ARENA_MAX counts."""
    libc = _libc()
    if libc is not None and "MALLOC_ARENA_MAX" not in os.environ:
        libc.mallopt(M_ARENA_MAX, ARENAS)


def keep_freed_memory() -> bool:
    """For servers, of the whole process: messages of a megabyte come and go all the time. False elsewhere than on glibc."""
    libc = _libc()
    if libc is None:
        return False
    return bool(libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)) and bool(libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def expect_messages() -> None:
    """For clients, whose process is somebody else's: no setting, but what glibc learns by itself from the first large piece that
    a program frees. Pieces below this size then come from the heap, which keeps twice as much when they are free. Costs some
    microseconds and touches no page; MALLOC_MMAP_THRESHOLD_ and the like stay in force."""
    bytes(EXPECTED_BYTES)


def trim() -> bool:
    """Gives free memory back to the system, and says whether there was any. Takes milliseconds; not for an event loop."""
    libc = _libc()
    return libc is not None and bool(libc.malloc_trim(0))


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except OSError:
        return None
