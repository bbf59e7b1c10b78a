"""Finds out where this process is: its host, the NVLink domain of its GPU, RDMA devices, and the backends that can run here."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

from epserve import all2all, experts
from epserve.config import EngineConfig
from epserve.process.boot import host_key

from .backends import names_asked
from .topology import Location, key

RDMA_CLASS, RDMA_DEVICES = Path("/sys/class/infiniband"), Path("/dev/infiniband")
ACTIVE = "4:"  # /sys/class/infiniband/*/ports/*/state reads "4: ACTIVE"
FABRIC_COMPLETED, NVML_SUCCESS = 3, 0  # nvml.h: the GPU is registered with its fabric, and without an error


def locate(engine: EngineConfig, device: str, *, gpu_uuid: str = "", address: str = "") -> Location:
    """Returns this process's location. The first call may import packages of backends, which takes seconds.

    Args:
        engine: names the backends that come into question.
        device: "cpu" or "cuda".
        gpu_uuid: the rank's GPU. Empty on a CPU.
        address: the address of this node.
    """
    host = host_key()
    missing = []
    for kind, names in names_asked(engine, device).items():
        registry: Any = all2all.REGISTRY if kind == "all2all" else experts.REGISTRY
        missing += [(key(kind, name), reason) for name in names if (reason := registry.get(name).unavailable())]
    return Location(
        host=host,
        domain=(nvlink_domain(gpu_uuid) if gpu_uuid else "") or host,
        address=address,
        rdma=rdma_devices(),
        missing=tuple(missing),
    )


def rdma_devices(known: Path = RDMA_CLASS, openable: Path = RDMA_DEVICES) -> tuple[str, ...]:
    """Returns the RDMA devices with an active port. Empty when this process may open none of the host's verbs devices.

    Args:
        known: the kernel's folder of RDMA devices.
        openable: the folder of device files. A container has them only if it was given them.
    """
    if not any(os.access(file, os.R_OK | os.W_OK) for file in openable.glob("uverbs*")):
        return ()
    return tuple(sorted(each.name for each in known.glob("*") if any(map(_active, each.glob("ports/*/state")))))


def _active(state: Path) -> bool:
    try:
        return state.read_text(encoding="ascii").startswith(ACTIVE)
    except OSError:
        return False


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h. NVML's Python bindings have had another size of the first member."""

    _fields_ = [
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]


@cache
def nvlink_domain(gpu_uuid: str) -> str:
    """Returns the fabric cluster and clique of a GPU, such as those of an NVL72 rack. Empty: its NVLinks end at its host."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        fabric_of, by_uuid = nvml.nvmlDeviceGetGpuFabricInfo, nvml.nvmlDeviceGetHandleByUUID
    except (OSError, AttributeError):  # no driver, or one from before fabrics
        return ""
    name = gpu_uuid if gpu_uuid.startswith("GPU-") else f"GPU-{gpu_uuid}"
    if nvml.nvmlInit_v2() != NVML_SUCCESS:
        return ""
    try:
        device, info = ctypes.c_void_p(), _FabricInfo()
        if by_uuid(name.encode(), ctypes.byref(device)) != NVML_SUCCESS:
            return ""
        if fabric_of(device, ctypes.byref(info)) != NVML_SUCCESS:
            return ""
    finally:
        nvml.nvmlShutdown()
    return domain_of(bytes(info.cluster), info.clique, state=info.state, status=info.status)


def domain_of(cluster: bytes, clique: int, *, state: int, status: int) -> str:
    """Returns the name of a domain from NVML's record of a GPU. A cluster of zeros is a fabric inside one host."""
    if state != FABRIC_COMPLETED or status != NVML_SUCCESS or not any(cluster):
        return ""
    return f"{cluster.hex()}.{clique}"
