"""Memory of made-up GPUs: a file of /dev/shm stands for an allocation, and its name for the handle. For tests on the CPU.

Rank `r` computes on GPU `uuid_of(r)`, and opens nothing of another one. What a client and a rank do with such memory is what
they do with a GPU's, but for the driver's calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import Any

import torch

from epserve.client import cuda_region as client_cuda_region
from epserve.rank.actor import RankActor
from epserve.rank.device_memory import Refused

SHM = Path("/dev/shm")
GRANULE = 4096
HIDDEN = 64
SIZE = 1 << 20


def uuid_of(number: int) -> str:
    return f"00000000-0000-0000-0000-{number:012d}"


class FakeGpuMemory:
    """The client's side, as `client_cuda_region.GpuMemory`; device: the number of the GPU, which also ends a device's name."""

    def __init__(self, size: int, device: Any):
        self.number = int(str(device or 0).rsplit(":", 1)[-1])
        self.device, self.gpu_uuid, self.size = torch.device("cpu"), uuid_of(self.number), size
        name = f"gpu{self.number}-{secrets.token_hex(8)}"
        self.path = SHM / name
        self.handle = name.encode().ljust(64, b"\0")
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, -(-size // GRANULE) * GRANULE)
        self._map = mmap.mmap(fd, 0)
        os.close(fd)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.free = weakref.finalize(self, self.path.unlink, missing_ok=True)  # as the process's end does to a GPU's

    def piece(self, offset: int, nbytes: int) -> tuple[Any, torch.Tensor]:
        holder = (ctypes.c_ubyte * nbytes).from_buffer(self._map, offset)
        return holder, torch.frombuffer(holder, dtype=torch.uint8)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        offset = tensor.data_ptr() - self._start
        return offset if 0 <= offset <= self.size - tensor.nbytes and tensor.is_contiguous() else None

    def finish(self) -> None:
        pass


class FakeDeviceMemory:
    """The rank's side, as `device_memory.CudaMemory`. `num_open`: how many are."""

    def __init__(self, number: int):
        self._number = number
        self.num_open = 0

    def open(self, handle: bytes) -> _Opened:
        name = handle.rstrip(b"\0").decode(errors="replace")
        if not name.startswith(f"gpu{self._number}-"):
            raise Refused("the driver cannot open this handle (another GPU's)", "handle")
        try:
            return _Opened(SHM / name, self)
        except OSError as error:
            raise Refused(f"the driver cannot open this handle ({error.strerror})", "handle") from None


class _Opened:
    def __init__(self, path: Path, memory: FakeDeviceMemory):
        fd = os.open(path, os.O_RDWR)
        self.bytes = torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
        os.close(fd)
        self._memory = memory
        memory.num_open += 1

    def close(self) -> None:
        self._memory.num_open -= 1


class RankOnFakeGpu(RankActor):
    """A CPU rank that says it computes on a GPU."""

    def _take_device(self) -> str:
        super()._take_device()
        return uuid_of(self._rank)

    @property
    def _overlaps(self) -> bool:
        """Answers come later, as a GPU's do."""
        return True

    def _device_memory(self) -> FakeDeviceMemory:
        return FakeDeviceMemory(self._rank)


@contextlib.contextmanager
def clients_on_made_up_gpus(monkeypatch):
    """Clients' memory lies on made-up GPUs; what was made, and goes at the end."""
    made: list[FakeGpuMemory] = []

    class Remembered(FakeGpuMemory):
        def __init__(self, size, device):
            super().__init__(size, device)
            made.append(self)

    monkeypatch.setattr(client_cuda_region, "GpuMemory", Remembered)
    yield made
    for memory in made:
        memory.free()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(1000 * seed + count))
