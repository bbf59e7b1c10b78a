"""Blocks of one shared mapping, or of other memory: free again when the last object over them has gone. Standard library only.

NOTE: finalizers of tensors run at any time, in any thread, so that they only append to a queue.
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
"""Bytes; a cache line, and enough for every dtype."""


class Spans:
    """Which parts of `size` bytes are free. First fit from low addresses. From any thread."""

    def __init__(self, size: int):
        self.size = size
        self._free = [(0, size)]  # sorted, never adjacent
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int | None:
        """Where a piece begins; None where none is large enough. `free_with` says when it comes back."""
        wanted = _rounded(nbytes)
        with self._lock:
            self._collect()
            for index, (offset, size) in enumerate(self._free):
                if size >= wanted:
                    self._free[index : index + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                    return offset
        return None

    def free_with(self, holder: Any, offset: int, nbytes: int) -> None:
        """A piece is free again when `holder` has gone."""
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
    """Of a mapping. First fit from low addresses, so that the pages that were used last are used again. From any thread."""

    def __init__(self, mapping: mmap.mmap):
        self.size = len(mapping)
        self._map: mmap.mmap | None = mapping
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._spans = Spans(self.size)
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Any:
        """A ctypes array of `nbytes`; None where no piece is large enough, or after close()."""
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
        """Where in the mapping these bytes lie; None: elsewhere."""
        offset = address - self._start
        return offset if 0 <= offset <= self.size - nbytes else None

    def room(self) -> tuple[int, int]:
        """Bytes that are free, and those of the largest piece."""
        return self._spans.room()

    def close(self) -> None:
        """Blocks that are in use keep the mapping; the last of them unmaps it."""
        with self._lock:
            mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()


@functools.lru_cache(maxsize=256)
def _array_type(nbytes: int) -> Any:
    """ctypes makes a new type for each size, which takes longer than all else here."""
    return ctypes.c_char * nbytes
