"""The C library's allocator, told what a server does: messages of a megabyte come and go all the time.

By default glibc gives large pieces back to the system as soon as they are free, and each message then begins with pages that
are new: some 256 faults a MiB, which on a virtual machine were more than half of the server's processor time for 16 MiB each way.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 128 << 20
"""Free memory at the end of a heap that stays with the process. Bounds what it costs."""
LARGEST_BYTES = 32 << 20
"""Pieces above it are mapped one by one as before: the most that glibc allows."""


def keep_freed_memory() -> bool:
    """Of the whole process. False where the C library has no such options."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
