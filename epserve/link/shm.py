"""Memory that the front end and the ranks on its host share. Its bytes are never sent: a frame has their offset.

The front end makes one `Arena` for all ranks. It is a memory file without a name, so that nothing is left over when a process
ends. It is sealed against another size, so that no process can cut it short under a reader. Only the front end allocates. A block
stays in use until no tensor over it is left. The link to a rank keeps the tensors that the rank may still read or write
(transport.py). A rank maps the same file (`Window`). On a GPU host it registers the mapping with CUDA, and copies to and from the
device run on the stream, without a buffer in between.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from typing import Any

import torch

from epserve.errors import ConfigError
from epserve.process import words
from epserve.process.blocks import Blocks

log = logging.getLogger(__name__)


class Arena:
    """The front end's side: `size` bytes of address space. It uses as much memory as its blocks ever took at one time."""

    def __init__(self, size: int):
        """Raises ConfigError when the system does not give the memory."""
        self.size = size
        try:
            self.fd = words.sealed_memory("epserve-steps", size)
            try:
                self._blocks = Blocks(mmap.mmap(self.fd, size))
            except BaseException:
                os.close(self.fd)
                raise
        except OSError as error:
            raise ConfigError(
                f"cluster.shared_memory_bytes: no {size} bytes of shared memory ({error.strerror}); fewer,"
                " or cluster.data_path: socket"
            ) from None

    def buffer(self, nbytes: int) -> Any:
        """Returns a writable buffer of `nbytes` bytes, or None when there is no room."""
        return self._blocks.take(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Returns a tensor of undefined values, or None when there is no room."""
        count = 1
        for extent in shape:
            count *= extent
        block = self._blocks.take(count * dtype.itemsize) if count else None
        return torch.frombuffer(block, dtype=dtype).view(shape) if block is not None else None

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the byte offset of a tensor, or None when it lies elsewhere or not in one piece."""
        if not tensor.is_contiguous():
            return None
        return self._blocks.offset_of(tensor.data_ptr(), tensor.nbytes)

    def room(self) -> tuple[int, int]:
        """Returns the free bytes, and the bytes of the largest free piece."""
        return self._blocks.room()

    def close(self) -> None:
        """Gives out no more blocks. The memory goes with the last tensor over it and the last rank that maps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._blocks.close()


class Window:
    """A rank's mapping of an arena. `pinned`: registered with CUDA."""

    def __init__(self, fd: int, size: int, *, pin: bool = False):
        """Takes the descriptor over. Raises OSError or ValueError unless it is memory that is sealed at this size."""
        self._map = words.map_sealed(fd, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size = size
        self.pinned = pin and _register(self._bytes)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Returns a tensor over the memory. Raises ValueError outside the bounds."""
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        if not 0 <= offset <= self.size - count:
            raise ValueError(f"bytes {offset} to {offset + count} of shared memory of {self.size}")
        return self._bytes[offset : offset + count].view(dtype).view(shape)

    def close(self) -> None:
        """Unmaps the memory once no tensor over it is left."""
        if self.pinned:
            with contextlib.suppress(RuntimeError):  # a device that has failed takes the registration along
                torch.cuda.synchronize()  # no copy may be under way
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self.pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        # The mapping goes with its last reference: tensors of a step that failed may live in a traceback.
        del self._map


def _register(memory: torch.Tensor) -> bool:
    """Pins the memory for copies that run beside the CPU. A refusal costs speed only."""
    result: Any = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) != 0:
        log.warning("shared memory of %d bytes is not pinned: cudaHostRegister says %s", memory.nbytes, result)
    return int(result) == 0
