"""Memory of long-lived processes with glibc: the number of heaps, and the return of free memory to the system.

Requests of all sizes come and go on many threads, so each of glibc's heaps (as many as eight times the processors) grows to its
own high-water mark. Two heaps and a periodic return of free memory keep a process closer to its real use.

Large pieces of a server need another setting. By default glibc maps each piece anew and returns it as soon as it is free, so
each message begins with new pages: some 256 faults a MiB. On a virtual machine these were more than half of the server's
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
"""Free memory at the end of a server's heap that stays with the process. It bounds the cost."""
LARGEST_BYTES = 32 << 20
"""Pieces above it are mapped one by one as before. glibc allows no higher value."""

EXPECTED_BYTES = 8 << 20
"""A client's message of 1 MiB has at most five copies at one time."""


def settle() -> None:
    """Limits the heaps. Call it at a process's start, before it has threads. An operator's MALLOC_ARENA_MAX wins."""
    libc = _libc()
    if libc is not None and "MALLOC_ARENA_MAX" not in os.environ:
        libc.mallopt(M_ARENA_MAX, ARENAS)


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process, for servers, whose messages of a megabyte come and go. Returns False without glibc."""
    libc = _libc()
    if libc is None:
        return False
    return bool(libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)) and bool(libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def expect_messages() -> None:
    """Prepares glibc for messages in a client's process, which belongs to the application.

    It changes no setting. It frees one large piece, from which glibc learns by itself: pieces below this size then come from
    the heap, which keeps twice as much when they are free. It costs some microseconds and touches no page.
    MALLOC_MMAP_THRESHOLD_ and similar settings stay in force.
    """
    bytes(EXPECTED_BYTES)


def trim() -> bool:
    """Returns free memory to the system. Returns whether there was any. It takes milliseconds: keep it off event loops."""
    libc = _libc()
    return libc is not None and bool(libc.malloc_trim(0))


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except OSError:
        return None
