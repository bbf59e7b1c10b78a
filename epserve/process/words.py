"""Words of shared memory: 64-bit values that another process sees whole, and waits for one of them.

A word has a number in its upper half, which the writer counts up, and a value in its lower half. A waiting process sleeps
in the kernel (futex) on the upper half.

NOTE: the order of memory is x86's: stores become visible in the order of the program, and loads are made in that order.
An aligned 64-bit store through a memoryview is one instruction. Machines with a weaker order need a fence, which Python
does not have, so `why_not` refuses them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import socket
import sys
import time

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SYS_FUTEX = 202  # x86-64
FUTEX_WAIT, FUTEX_WAKE = 0, 1  # shared between processes
MANY = 1 << 30
CONNECT_S = 5.0
LONGEST_SLEEP_S = 1.0
"""A longer wait is several sleeps."""
SPIN_CORES = 8
SPIN_S = 20e-6 if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= SPIN_CORES else 0.0
"""A waiting thread looks this long before it sleeps, on hosts with cores to spare. On few cores it would keep the process
that it waits for from running."""

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str:
    """Returns why this machine cannot share words. Empty: it can."""
    if sys.platform != "linux" or not hasattr(os, "eventfd"):
        return f"they need Linux, this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"they need the memory order of x86-64, this is {platform.machine()}"
    return ""


def sealed_memory(name: str, size: int) -> int:
    """Returns the descriptor of a memory file that no process can cut short. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_sealed(fd: int, size: int) -> mmap.mmap:
    """Maps a memory file and closes the descriptor. Raises OSError, or ValueError for memory that is not sealed."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size != size:
            raise ValueError(f"the shared memory is not sealed, or not of {size} bytes")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def receive_descriptors(name: str, key: bytes) -> tuple[int, int]:
    """Returns the memory and the bell that an abstract Unix socket hands out for a key. Raises OSError, or ValueError for a
    key that the socket does not know."""
    sock, memory, bell = hold_descriptors(name, key)
    sock.close()
    return memory, bell


def hold_descriptors(name: str, key: bytes) -> tuple[socket.socket, int, int]:
    """Returns the connection too. Its end tells the other side that this process uses the memory no more."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect("\0" + name)
        sock.sendall(key)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 2)
        if len(descriptors) != 2:
            for each in descriptors:
                os.close(each)
            raise ValueError("the socket does not know the key")
    except BaseException:
        sock.close()
        raise
    return sock, descriptors[0], descriptors[1]


class Words:
    """The words of a mapping, by their byte offset in it."""

    def __init__(self, mapping: mmap.mmap):
        self._words = memoryview(mapping).cast("B").cast("Q")
        self._halves = memoryview(mapping).cast("B").cast("I")
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._addresses: dict[int, ctypes.c_void_p] = {}
        """The upper half of each word that was waited for, as the kernel takes it."""

    def load(self, offset: int) -> int:
        return self._words[offset >> 3]

    def store(self, offset: int, number: int, value: int = 0) -> None:
        """Makes everything that this thread stored before visible to a reader that sees this word."""
        self._words[offset >> 3] = (number & 0xFFFFFFFF) << 32 | value

    def store_half(self, offset: int, value: int) -> None:
        """Stores 32 bits, visible after everything that this thread stored before."""
        self._halves[offset >> 2] = value & 0xFFFFFFFF

    def load_half(self, offset: int) -> int:
        return self._halves[offset >> 2]

    def wake(self, offset: int) -> None:
        """Wakes all that wait for this word."""
        _syscall(SYS_FUTEX, self._address(offset), FUTEX_WAKE, MANY, None, None, 0)

    def wait(self, offset: int, number: int, until: float) -> None:
        """Sleeps while the word's number is `number`, until `until` (time.monotonic) at most. It may return early."""
        halves, half = self._halves, (offset >> 2) + 1
        if SPIN_S:
            end = time.perf_counter() + SPIN_S
            while time.perf_counter() < end:
                if halves[half] != number:
                    return
        left = min(until - time.monotonic(), LONGEST_SLEEP_S)
        if left > 0 and halves[half] == number:
            timeout = _TimeSpec(int(left), int(left % 1 * 1e9))
            expected = ctypes.c_uint32(number)
            _syscall(SYS_FUTEX, self._address(offset), FUTEX_WAIT, expected, ctypes.byref(timeout), None, 0)

    def _address(self, offset: int) -> ctypes.c_void_p:
        if (found := self._addresses.get(offset)) is None:
            found = self._addresses[offset] = ctypes.c_void_p(self._start + offset + 4)
        return found
