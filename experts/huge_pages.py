"""Host memory on huge pages: a pass over weights then misses the processor's page tables less often."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20
MADV_HUGEPAGE = 14  # asm-generic/mman-common.h


def on_huge_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns an empty tensor and asks the kernel to back its whole pages of 2 MiB by huge pages, as far as it has some."""
    made = torch.empty(shape, dtype=dtype)
    begin = -(-made.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    size = (made.data_ptr() + made.nbytes - begin) // PAGE_BYTES * PAGE_BYTES
    libc = _libc()
    if size > 0 and libc is not None and libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), MADV_HUGEPAGE):
        _told_once()  # this kernel has no huge pages, so ordinary pages serve
    return made


@functools.cache
def _told_once() -> None:
    log.warning(
        "this kernel gives no huge pages (transparent_hugepage): weights are read from ordinary ones, more slowly"
    )


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc if hasattr(libc, "madvise") else None
    except OSError:
        return None
