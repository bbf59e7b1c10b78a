"""Blocks of one shared mapping or of other memory. A block is free again when the last object over it is gone.

The module uses the standard library only.
NOTE: finalizers of tensors run at any time, in any thread, so they only append to a queue.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import functools
import mmap
import threading
import weakref
from typing import Any

ALIGNMENT = 64
"""In bytes: a cache line, which is enough for every dtype."""


class Spans:
    """Tracks the free parts of `size` bytes. First fit from low addresses. Thread-safe."""

    def __init__(self, size: int):
        self.size = size
        self._free = [(0, size)]  # sorted, never adjacent
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int | None:
        """Returns the offset of a free piece, or None when none is large enough. `free_with` says when it is free again."""
        wanted = _rounded(nbytes)
        with self._lock:
            self._collect()
            for index, (offset, size) in enumerate(self._free):
                if size >= wanted:
                    self._free[index : index + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                    return offset
        return None

    def free_with(self, holder: Any, offset: int, nbytes: int) -> None:
        """Frees a piece when `holder` is gone."""
        weakref.finalize(holder, self._returned.append, (offset, _rounded(nbytes))).atexit = False

    def room(self) -> tuple[int, int]:
        """Bytes that are free, and those of the largest piece."""
        with self._lock:
            self._collect()
            sizes = [size for _, size in self._free]
        return sum(sizes), max(sizes, default=0)

    def _collect(self) -> None:
        while self._returned:
            self._give_back(*self._returned.popleft())

    def _give_back(self, offset: int, size: int) -> None:
        index = bisect.bisect(self._free, (offset, size))
        if index < len(self._free) and offset + size == self._free[index][0]:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            self._free[index - 1] = offset, before + size
        else:
            self._free.insert(index, (offset, size))


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


class Blocks:
    """Hands out blocks of a mapping. First fit from low addresses, so that recently used pages are reused. Thread-safe."""

    def __init__(self, mapping: mmap.mmap):
        self.size = len(mapping)
        self._map: mmap.mmap | None = mapping
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._spans = Spans(self.size)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Any:
        """Returns a ctypes array of `nbytes`, or None when no piece is large enough or after close()."""
        with self._lock:
            if self._map is None:
                return None
            offset = self._spans.take(nbytes)
            if offset is None:
                return None
            # NOTE: not a memoryview: numpy would keep the map alive but not the view, whose end would free the block.
            block = _array_type(nbytes).from_buffer(self._map, offset)
        self._spans.free_with(block, offset, nbytes)
        return block

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Returns the offset of these bytes in the mapping, or None when they lie elsewhere."""
        offset = address - self._start
        return offset if 0 <= offset <= self.size - nbytes else None

    def room(self) -> tuple[int, int]:
        """Bytes that are free, and those of the largest piece."""
        return self._spans.room()

    def close(self) -> None:
        """Closes the mapping. Blocks in use keep it, and the last of them unmaps it."""
        with self._lock:
            mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()


@functools.lru_cache(maxsize=256)
def _array_type(nbytes: int) -> Any:
    """Caches ctypes array types: making one for each size takes longer than all other work here."""
    return ctypes.c_char * nbytes
