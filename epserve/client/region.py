"""This module is the client's side of a shared-memory region: the memory, its free parts, and the tensors in it. Its
only I/O is with files."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

from epserve.errors import CallerError, InvalidRequest, NotReady
from epserve.process.blocks import ALIGNMENT, Blocks
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import wire

from .checks import LARGEST_INT64, shape_of, whole_number
from .ring import AsyncBell, Bell

FOLDER = Path("/dev/shm")
WORTH_BYTES = 16 << 10
"""A smaller tensor outside the region goes with the message, since a block costs more than those bytes."""


class Registration:
    """A registration is the state that regions of both kinds share."""

    def __init__(self) -> None:
        self.name = ""
        self.bell = Bell("", b"")
        self.async_bell: AsyncBell | None = None
        self._quarantined: list[Any] = []
        self._lost = self._closed = False

    def registered(self, reply: pb.HoldRegionReply) -> None:
        """Notes that the server has the region open."""
        self.name = reply.region
        self.bell = Bell(reply.doorbell, reply.doorbell_key)

    def lost(self) -> None:
        """Notes that the server has forgotten the region."""
        self._lost = True
        self.bell.close()

    def close(self) -> None:
        self._closed = True
        self.bell.close()
        self._quarantined.clear()

    def quarantine(self, block: Any) -> None:
        """Keeps a block out of use: the server may still write there for a call that was given up."""
        self._quarantined.append(block)

    def check_registered(self) -> None:
        """Raises NotReady when the server does not know the region, or has forgotten it."""
        if self._closed or self._lost:
            why = (
                "is closed" if self._closed else "is no longer registered, since its connection ended; register another"
            )
            raise NotReady(f"region {self.name} {why}")


class ClientRegion(Registration):
    """The region is `size` bytes that this process and the server share. `Client.register_region` makes and registers
    it.

    Tensors made here keep their bytes for as long as they live, even when the region is closed first.
    """

    def __init__(self, size: int):
        """Makes the memory. Raises InvalidRequest when it is not available."""
        number = whole_number(size)
        if number is None or not ALIGNMENT <= number <= LARGEST_INT64:
            text = f"size: {size!r} is not a whole number of bytes, {ALIGNMENT} or more (64 << 20 is 64 MiB)"
            raise InvalidRequest(text, field="size")
        super().__init__()
        self.size = size = number
        self._path = FOLDER / f"epserve-client-{os.getpid()}-{secrets.token_hex(8)}"
        mapping = _shared_memory(self._path, size)
        self._proof = secrets.token_bytes(32)
        mapping[: len(self._proof)] = self._proof
        self._blocks = Blocks(mapping)

    def request(self) -> pb.HoldRegionRequest:
        return pb.HoldRegionRequest(key=self._path.name, byte_size=self.size, proof=self._proof)

    def registered(self, reply: pb.HoldRegionReply) -> None:
        """Removes the file's name, so that the memory goes away with the last process that uses it, however that
        process ends."""
        super().registered(reply)
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        self._path.unlink(missing_ok=True)
        self._blocks.close()

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Returns a tensor in the region with undefined values: torch for a torch dtype, else numpy. Raises
        InvalidRequest."""
        shape = shape_of(shape)
        name = str(dtype).removeprefix("torch.") if str(dtype).startswith("torch.") else _numpy_name(dtype)
        if name not in wire.DTYPES:
            raise InvalidRequest(f"dtype: {dtype} cannot be sent (allowed: {', '.join(wire.DTYPES)})", field="dtype")
        header = pb.Tensor(dtype=wire.DTYPES[name], shape=shape)
        block = self.block(wire.num_bytes(header))
        return wire.view(block, header, as_torch=str(dtype).startswith("torch."))

    def block(self, nbytes: int) -> Any:
        """Returns memory of the region as a ctypes array, which is free again when the last tensor over it is gone."""
        if self._closed:
            raise CallerError("the region is closed")
        block = self._blocks.take(nbytes)
        if block is None:
            free, largest = self._blocks.room()
            text = f"region: {nbytes} bytes are wanted, {free} of {self.size} are free, {largest} of them in one piece"
            raise InvalidRequest(f"{text}; register a larger region, or let go of tensors", field="region")
        return block

    def copied(self, data: memoryview) -> tuple[Any, pb.RegionSlice]:
        """Copies these bytes to a block, and returns the block and its place."""
        block = self.block(len(data))
        target = memoryview(block).cast("B")
        target[:] = data
        return block, self.slice_of_block(block)

    def slice_of(self, data: memoryview) -> pb.RegionSlice | None:
        """Returns the place of these bytes in the region, or None when they lie elsewhere. Raises NotReady when the
        server does not know the region."""
        self.check_registered()
        if data.readonly or not len(data):
            return None
        offset = self._blocks.offset_of(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))
        if offset is None:
            return None
        return pb.RegionSlice(region=self.name, offset=offset, byte_size=len(data))

    def slice_of_block(self, block: Any) -> pb.RegionSlice:
        offset = self._blocks.offset_of(ctypes.addressof(block), len(block))
        assert offset is not None
        return pb.RegionSlice(region=self.name, offset=offset, byte_size=len(block))


def _numpy_name(dtype: Any) -> str:
    import numpy as np

    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        return str(dtype)


def _shared_memory(path: Path, size: int) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a full /dev/shm would otherwise end this process at its first write
            return mmap.mmap(fd, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise InvalidRequest(f"region: no {size} bytes of shared memory: {error.strerror}", field="size") from None
