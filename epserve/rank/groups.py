"""Process groups of the ranks: the actor that holds their store, joining a group, and leaving one with lost ranks."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import struct
import threading
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from epserve.link.door import LinkAddress

from .store import RankStore, StoreServer

SIOCGIFADDR = 0x8915  # linux/sockios.h: address of an interface
LEAVE_TIMEOUT_S = 5.0  # normally tenths of a second; a library that hangs here does not return
_stores: list[RankStore] = []
_leaving = threading.Lock()  # torch has one default group for each process, and two threads may want to end it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """The address of the process groups' store. Each generation has its own prefix in the store."""

    store: LinkAddress
    generation: int


class StoreActor:
    """Owns the store of all generations. The actor is not a rank, so that no rank's death ends the store."""

    def __init__(self):
        self._store = StoreServer(ray.util.get_node_ip_address())

    def address(self, generation: int) -> GroupAddress:
        self._store.forget(f"{_prefix(generation - 2)}/")  # ranks may still be leaving generation - 1
        return GroupAddress(store=self._store.address, generation=generation)


def join(address: GroupAddress, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> Any:
    """Returns the process group of this generation. Collective. Errors of torch pass through, its timeout included."""
    interface = interface_of(ray.util.get_node_ip_address())
    if interface:
        # Gloo otherwise resolves the host name. Debian maps it to 127.0.1.1, and peers on other nodes then hang.
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    # Torch otherwise ends this process when its watchdog sees that another rank is gone. The supervisor decides that.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    timeout = timedelta(seconds=timeout_s)
    store = _store_at(address.store, timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(_prefix(address.generation), store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return dist.group.WORLD


def neighbours(group: Any, num_ranks: int, rank: int, key: int) -> tuple[int, int]:
    """Collective, on CPUs: this rank's number among the ranks whose key is the same, and how many they are."""
    if group is None:
        return 0, 1
    keys = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(keys, torch.tensor([key]), group=group)
    same = [other for other, each in enumerate(keys) if int(each) == key]
    return same.index(rank), len(same)


def _store_at(address: LinkAddress, timeout: timedelta) -> RankStore:
    """Returns one store object for all generations. Old ones stay, since torch's threads may use one longer than its group."""
    if not _stores or _stores[-1].address != address:
        _stores.append(RankStore(address, timeout))
    _stores[-1].set_timeout(timeout)
    return _stores[-1]


def _prefix(generation: int) -> str:
    return f"gen{generation}"


def share_gpu() -> None:
    """Prepares NCCL for a GPU that several ranks share. Call it before this process's first group."""
    address = ray.util.get_node_ip_address()
    # NCCL rejects two ranks of one host on one GPU. Each rank therefore claims its own host, and they talk over sockets.
    os.environ["NCCL_HOSTID"] = f"{address}-{os.getpid()}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_of(address) or "lo")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def leave(device: torch.device) -> None:
    """Leaves the process group, if there is one, without waiting for peers. Thread-safe."""
    if not _leaving.acquire(timeout=LEAVE_TIMEOUT_S):
        raise RuntimeError(f"this rank did not let go of its process group within {LEAVE_TIMEOUT_S:g} s")
    try:
        if not dist.is_initialized():
            return
        if device.type == "cuda":
            # NCCL's kernels wait on the device for a rank that is gone, and an orderly end would wait for them.
            # NOTE: an aborted collective ends as if it had succeeded, with undefined values in its buffers.
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        gc.collect()  # the connections close with the last reference, which may be in a cycle
    finally:
        _leaving.release()


def hang_up(addresses: Collection[str]) -> int:
    """Shuts down all TCP connections of this process to these hosts, also those of libraries. Returns their number."""
    count = 0
    for name in os.listdir("/proc/self/fd") if addresses else ():
        try:
            number = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            sock = socket.socket(fileno=number)
        except OSError:  # not a socket
            os.close(number)
            continue
        with sock, contextlib.suppress(OSError):  # not connected
            peer = sock.getpeername()
            if isinstance(peer, tuple) and peer[0].removeprefix("::ffff:") in addresses:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def interface_of(address: str) -> str:
    """Returns the network interface that owns an IPv4 address. Empty when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                packed = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(packed[20:24]) == address:
                    return name
    return ""
