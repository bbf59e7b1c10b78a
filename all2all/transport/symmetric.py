"""Symmetric memory: one region of equal size on every rank of a group, which every other rank can load from and store to.

The providers, in order of preference on CUDA, are `CudaSharedMemory` (the driver's own shareable allocations, without global
state, so that a group can be rebuilt in the same process), `NvshmemHeap` (nvshmem4py) and `TorchSymmetricMemory`. No provider
uses multicast.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist

from epserve.errors import ConfigError, RankFailed
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.gathering import gather
from epserve.process.boot import host_key
from epserve.process.unix_peers import same_user

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Holds this rank's part as bytes, and the address of every rank's part in this process."""

    mine: torch.Tensor
    addresses: tuple[int, ...]
    provider: str
    parts: tuple[torch.Tensor, ...] = ()
    """Every rank's part as a tensor, if the provider has tensors of them."""
    release: Callable[[bool], None]
    """Frees the region. The caller calls it once, after the kernels that use the region have ended. With True it is collective.
    With False the group is broken, and it contacts no other rank."""


class Provider(Protocol):
    name: str

    @classmethod
    def unavailable(cls) -> str | None: ...

    @classmethod
    def allocate(cls, ranks: RankContext, num_bytes: int) -> Region: ...


def allocate(ranks: RankContext, num_bytes: int, providers: Sequence[type[Provider]]) -> Region:
    """Returns a zeroed region from the first provider that works on every rank. Collective.

    Raises:
        ConfigError: no provider works. The text lists the reason of each.
    """
    reasons = []
    for provider in providers:
        why = gather(ranks, provider.unavailable() or _too_little(ranks, num_bytes))
        if not any(why):
            region, error = None, None
            try:
                region = provider.allocate(ranks, num_bytes)
            except (RuntimeError, OSError, ImportError, ConfigError) as caught:
                error = f"{type(caught).__name__}: {caught}"
            why = gather(ranks, error)
            if region is not None and not any(why):
                region.mine.zero_()
                if region.mine.is_cuda:
                    torch.cuda.synchronize(region.mine.device)
                gather(ranks, None)  # no rank stores into a peer's region before it is zeroed
                return region
            if region is not None:
                region.release(False)
        reasons += [f"{provider.name}, rank {rank}: {text}" for rank, text in enumerate(why) if text]
    raise ConfigError(f"no symmetric memory of {num_bytes} bytes:" + "".join(f"\n  - {reason}" for reason in reasons))


def _too_little(ranks: RankContext, num_bytes: int) -> str | None:
    if ranks.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(ranks.device)
    if num_bytes * ranks.sharers <= free:
        return None
    shared = f" by each of {ranks.sharers} ranks" if ranks.sharers > 1 else ""
    return (
        f"{num_bytes / GIB:.2f} GiB asked{shared}, {free / GIB:.2f} of {total / GIB:.2f} GiB free;"
        " lower max_tokens_per_rank or batches_in_flight"
    )


class CudaSharedMemory:
    """Allocates by `cuMemCreate` and sends a file descriptor to the peers over Unix sockets. It serves ranks of one host.

    It works between processes that see one GPU each (Ray sets CUDA_VISIBLE_DEVICES so). A peer's memory stays mapped and
    readable after its process has died, so a store on its way to a dead rank does no harm.
    """

    name = "CUDA shared memory"

    @classmethod
    def unavailable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        return None if _installed("cuda.bindings") else "the package cuda-bindings is not installed"

    @classmethod
    def allocate(cls, ranks: RankContext, num_bytes: int) -> Region:
        device = ranks.device.index if ranks.device.index is not None else torch.cuda.current_device()
        torch.cuda.synchronize(device)  # the primary context exists and is current
        allocation = _DriverAllocation(device, num_bytes)
        peers: list[_DriverAllocation] = []

        def release(collective: bool) -> None:
            torch.cuda.synchronize(device)
            if collective:
                gather(ranks, None)  # no rank unmaps what a peer's kernel still uses
            while peers:
                peers.pop().free()
            allocation.free()

        try:
            descriptors = _swap_descriptors(ranks, allocation.descriptor())
            addresses = []
            for rank, descriptor in enumerate(descriptors):
                if rank == ranks.rank:
                    addresses.append(allocation.address)
                else:
                    peers.append(_DriverAllocation(device, num_bytes, descriptor))
                    addresses.append(peers[-1].address)
        except BaseException:
            release(False)
            raise
        mine = torch.as_tensor(_CudaBytes(allocation.address, num_bytes), device=torch.device("cuda", device))
        return Region(mine=mine, addresses=tuple(addresses), provider=cls.name, release=release)


class _CudaBytes:
    """Shows torch device memory that torch did not allocate."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class _DriverAllocation:
    """Maps device memory into this process: an allocation of its own or, with a descriptor, a peer's."""

    def __init__(self, device: int, num_bytes: int, descriptor: int | None = None):
        from cuda.bindings import driver

        self._driver = driver
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        place = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = kind
        wanted.location.type = place
        wanted.location.id = device
        grain = self._call(
            "cuMemGetAllocationGranularity",
            wanted,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        self._size = -(-num_bytes // int(grain)) * int(grain)
        self._kind = kind
        if descriptor is None:
            self._handle = self._call("cuMemCreate", self._size, wanted, 0)
        else:
            self._handle = self._call("cuMemImportFromShareableHandle", descriptor, kind)
            os.close(descriptor)
        start = self._call("cuMemAddressReserve", self._size, int(grain), 0, 0)
        self._call("cuMemMap", start, self._size, 0, self._handle, 0)
        access = driver.CUmemAccessDesc()
        access.location.type = place
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", start, self._size, [access], 1)
        self.address = int(start)

    def descriptor(self) -> int:
        return int(self._call("cuMemExportToShareableHandle", self._handle, self._kind, 0))

    def free(self) -> None:
        self._call("cuMemUnmap", self.address, self._size)
        self._call("cuMemAddressFree", self.address, self._size)
        self._call("cuMemRelease", self._handle)

    def _call(self, name: str, *arguments):
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status):
            raise RuntimeError(f"{name}: {status.name}")
        return values[0] if values else None


def _swap_descriptors(ranks: RankContext, mine: int) -> list[int]:
    """Returns a descriptor of every rank's memory, valid in this process. Collective. All ranks must be on one host."""
    descriptors = [-1] * ranks.world_size
    end = time.monotonic() + ranks.timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        name = f"\0epserve-{uuid.uuid4().hex}"  # abstract: no file to clean up
        door.bind(name)
        door.listen()
        hosts = gather(ranks, (host_key(), name))
        strangers = [rank for rank, (host, _) in enumerate(hosts) if host != hosts[ranks.rank][0]]
        if strangers:
            os.close(mine)
            raise OSError(f"ranks {strangers} are on other hosts")
        for rank, (_, address) in enumerate(hosts):
            if rank == ranks.rank:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
                wire.settimeout(ranks.timeout_s)
                wire.connect(address)
                socket.send_fds(wire, [struct.pack("i", ranks.rank)], [mine])
        missing = set(range(ranks.world_size)) - {ranks.rank}
        while missing:
            door.settimeout(max(end - time.monotonic(), 1e-3))
            wire, _ = door.accept()
            with wire:
                if not same_user(wire):  # this process would take a stranger's memory for a rank's
                    continue
                wire.settimeout(max(end - time.monotonic(), 1e-3))
                message, received, _, _ = socket.recv_fds(wire, 4, 1)
                (rank,) = struct.unpack("i", message)
                if rank not in missing:
                    raise RankFailed(
                        f"set-up: rank {ranks.rank} got memory of rank {rank}, missing are {sorted(missing)}"
                    )
                missing.discard(rank)
                descriptors[rank] = received[0]
    os.close(mine)
    return descriptors


def one_host(ranks: RankContext) -> bool:
    """Returns whether all ranks are on this host. Collective."""
    return len(set(gather(ranks, host_key()))) == 1


class NvshmemHeap:
    """Allocates in nvshmem4py's symmetric heap. A process sets NVSHMEM up once, for its first group, and keeps it."""

    name = "NVSHMEM"
    _set_up: tuple[int, int] | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"  # importing nvshmem proves nothing: it imports without a GPU
        missing = [name for name in ("nvshmem", "cuda.core") if not _installed(name)]
        return f"not installed: {', '.join(missing)} (pip install nvshmem4py-cu13)" if missing else None

    @classmethod
    def set_up(cls, ranks: RankContext) -> None:
        """Sets NVSHMEM up. The first use is collective, because the unique id travels through the process group."""
        place = (ranks.rank, ranks.world_size)
        # All ranks know of every refusal before any of them goes on to the exchange of the id.
        before = gather(ranks, cls._set_up)
        for rank, known in enumerate(before):
            if known is not None and tuple(known) != (rank, ranks.world_size):
                text = f"NVSHMEM runs in the process of rank {rank} as rank {known[0]} of {known[1]}"
                raise ConfigError(f"{text}, asked for rank {rank} of {ranks.world_size}")
        running = [rank for rank, known in enumerate(before) if known is not None]
        if len(running) == ranks.world_size:
            return
        if running:
            raise ConfigError(f"NVSHMEM runs in the processes of ranks {running} only, of {ranks.world_size}")
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # multicast is never used here
        import nvshmem.core as nvshmem
        from cuda.core import Device

        device = Device(ranks.device.index if ranks.device.index is not None else torch.cuda.current_device())
        device.set_current()
        uid = nvshmem.get_unique_id(empty=ranks.rank != 0)
        raw = uid._data.view(numpy.uint8).reshape(-1)  # nvshmem4py's own examples send it so: there is no public way
        raw[:] = numpy.frombuffer(bytes.fromhex(gather(ranks, raw.tobytes().hex())[0]), dtype=numpy.uint8)
        nvshmem.init(device=device, uid=uid, rank=place[0], nranks=place[1], initializer_method="uid")
        cls._set_up = place

    @classmethod
    def allocate(cls, ranks: RankContext, num_bytes: int) -> Region:
        cls.set_up(ranks)
        import nvshmem.core as nvshmem

        mine = nvshmem.tensor((num_bytes,), dtype=torch.uint8)
        peers = [
            mine if rank == ranks.rank else nvshmem.get_peer_tensor(mine, rank) for rank in range(ranks.world_size)
        ]

        def release(collective: bool) -> None:
            if (
                collective
            ):  # freeing is a collective of NVSHMEM: in a broken group the heap is left to the process's end
                torch.cuda.synchronize(ranks.device)
                gather(ranks, None)
                nvshmem.free_tensor(mine)

        addresses = tuple(peer.data_ptr() for peer in peers)
        parts = tuple(torch.as_tensor(_CudaBytes(address, num_bytes), device=ranks.device) for address in addresses)
        return Region(mine=mine, addresses=addresses, provider=cls.name, parts=parts, release=release)


class TorchSymmetricMemory:
    """Allocates torch.distributed's symmetric memory.

    NOTE: it fails between processes that see one GPU each ("overlapping devices").
    """

    name = "torch symmetric memory"

    @classmethod
    def unavailable(cls) -> str | None:
        return None if torch.cuda.is_available() else "no CUDA device"

    @classmethod
    def allocate(cls, ranks: RankContext, num_bytes: int) -> Region:
        import torch.distributed._symmetric_memory as symmetric

        mine = symmetric.empty(num_bytes, dtype=torch.uint8, device=ranks.device)
        group: Any = ranks.group if ranks.group is not None else dist.group.WORLD
        handle = symmetric.rendezvous(mine, group)
        kept: list[Any] = [handle]

        def release(collective: bool) -> None:
            torch.cuda.synchronize(ranks.device)
            if collective:
                gather(ranks, None)
            kept.clear()

        return Region(mine=mine, addresses=tuple(handle.buffer_ptrs), provider=cls.name, release=release)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


CUDA_PROVIDERS: tuple[type[Provider], ...] = (CudaSharedMemory, NvshmemHeap, TorchSymmetricMemory)
