"""Memory of long-lived processes: glibc's malloc keeps what it once had, in as many arenas as eight times the processors.

Requests of all sizes come and go on many threads, so each arena grows to its own high-water mark. Two arenas, and giving
back what is free now and then, keep a process at what it uses. Elsewhere than on glibc nothing happens.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

M_ARENA_MAX = -8  # malloc.h
ARENAS = 2


def settle() -> None:
    """At a process's start, before it has threads. An operator's MALLOC_ARENA_MAX counts."""
    libc = _libc()
    if libc is not None and "MALLOC_ARENA_MAX" not in os.environ:
        libc.mallopt(M_ARENA_MAX, ARENAS)


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
