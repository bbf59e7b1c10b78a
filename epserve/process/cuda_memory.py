"""GPU memory that two processes share by CUDA IPC: made and exported here, opened there. The driver's own calls, through ctypes.

Nothing is imported but the standard library until a tensor over such memory is wanted. What the driver does when memory goes
away under an importer was measured with `tests/gpus/cuda_ipc_facts.py`.
"""

from __future__ import annotations

import ctypes
import functools
import uuid
from typing import Any

HANDLE_BYTES = 64  # sizeof(CUipcMemHandle)
GRANULE = 2 << 20
"""The driver cuts smaller allocations out of blocks of this size, and a handle opens the whole block."""
LAZY_ENABLE_PEER_ACCESS = 1  # cuda.h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
DEVICE_ORDINAL = 9  # cuda.h, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
HOST_PORTABLE, HOST_MAPPED = 1, 2  # cuda.h, CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP
WAIT_EQUAL = 1  # cuda.h, CU_STREAM_WAIT_VALUE_EQ
DRIVER = "libcuda.so.1"
"""The driver's library. It comes with the GPU's kernel module, so that nothing is linked to it."""


class DriverError(Exception):
    """A call of the driver failed; the text has the call and the driver's name for the error."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@functools.cache
def _driver() -> ctypes.CDLL:
    """Raises DriverError where there is no GPU's driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise DriverError(f"no CUDA driver on this machine ({error})") from None
    _check(driver, "cuInit", driver.cuInit(0))
    return driver


def _check(driver: ctypes.CDLL, call: str, code: int) -> None:
    if code:
        raise DriverError(f"{call}: {_name(driver, code)}")


def _name(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or str(code).encode()).decode()


def error_name(code: int) -> str:
    """The driver's name of an error."""
    return _name(_driver(), code)


def _call(name: str, *args: Any) -> None:
    driver = _driver()
    _check(driver, name.removesuffix("_v2"), getattr(driver, name)(*args))


def gpu_uuid(ordinal: int) -> str:
    """Of a GPU that this process sees, as torch writes it: without "GPU-"."""
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
    return str(uuid.UUID(bytes=bytes(raw)))


def allocate(nbytes: int) -> int:
    """The address of memory on the current device that shares its block with nothing else. Raises DriverError."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-nbytes // GRANULE) * GRANULE))
    return address.value


def free(address: int) -> None:
    _call("cuMemFree_v2", ctypes.c_uint64(address))


def export(address: int) -> bytes:
    """The handle of an allocation's start. Raises DriverError for memory that has none, such as expandable segments."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.reserved)


def open_handle(handle: bytes) -> int:
    """The address here of what another process exported. Raises DriverError. Each opening needs its own `close_handle`."""
    raw, address = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*handle)), ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), raw, ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS))
    return address.value


def close_handle(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def extent(address: int) -> tuple[int, int]:
    """Start and size of the allocation around an address."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def ordinal_of(address: int) -> int:
    """Which of the GPUs that this process sees the memory lies on."""
    ordinal = ctypes.c_int(-1)
    _call("cuPointerGetAttribute", ctypes.byref(ordinal), ctypes.c_int(DEVICE_ORDINAL), ctypes.c_uint64(address))
    return ordinal.value


def context() -> int:
    """The context that is current in this thread, 0 without one."""
    found = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(found))
    return found.value or 0


def register_host(address: int, nbytes: int) -> int:
    """Lets GPUs read and write whole pages of host memory. Returns their address on a GPU. Raises DriverError."""
    _call(
        "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes),
        ctypes.c_uint(HOST_PORTABLE | HOST_MAPPED),
    )  # fmt: skip
    there = ctypes.c_uint64()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), ctypes.c_void_p(address), ctypes.c_uint(0))
    return there.value


def unregister_host(address: int) -> None:
    _call("cuMemHostUnregister", ctypes.c_void_p(address))


def write_word(stream: int, address: int, value: int) -> None:
    """Queues a store of 32 bits. All that the stream did before is visible to every device that sees it."""
    _call(
        "cuStreamWriteValue32_v2", ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value),
        ctypes.c_uint(0),
    )  # fmt: skip


def wait_for_word(stream: int, address: int, value: int) -> None:
    """Queues a wait until the 32 bits there are `value`."""
    _call(
        "cuStreamWaitValue32_v2", ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value),
        ctypes.c_uint(WAIT_EQUAL),
    )  # fmt: skip


class Bytes:
    """`nbytes` at an address, for `torch.as_tensor`: the tensor keeps this object for as long as it lives."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def tensor(memory: Bytes, device: Any) -> Any:
    """A uint8 tensor over it."""
    import torch

    return torch.as_tensor(memory, device=device)
