"""Takes the device of a rank's process, also from a process before it once that has ended: files closed, memory free."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import torch

from epserve.errors import NotReady

from . import groups
from .reports import RankFacts

CUDA_ERROR_NOT_INITIALIZED = 3  # cuda.h
END_TIMEOUT_S = 10.0  # a killed process gives tens of GiB back in about a second
POLL_S = 0.002


def take(kind: str, before: RankFacts | None, *, shared: bool) -> tuple[torch.device, str]:
    """Takes the device. Returns it with the GPU's id, empty on a CPU.

    Args:
        kind: "cpu" or "cuda".
        before: the process whose place this one takes. None: the place is new.
        shared: whether several ranks share a GPU.

    Raises:
        NotReady: this process sees another GPU than the process before it.
    """
    torch.set_num_threads(1)
    if before is not None:
        wait_for_end(before)  # until then its memory is not free, here and on the GPU
    if kind != "cuda":
        return torch.device("cpu"), ""
    if before is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = before.visible  # read when the context is made
    device = torch.device("cuda", 0)  # Ray shows each rank its own GPU only
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the context
    if shared:
        groups.share_gpu()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if before is not None and uuid != before.gpu_uuid:
        raise NotReady(f"this process sees GPU {uuid} and was to take {before.gpu_uuid} over: another one must start")
    return device, uuid


def wait_for_end(facts: RankFacts) -> None:
    """Blocks until a process has ended, whether or not its parent has noticed. Raises NotReady after END_TIMEOUT_S."""
    end = time.monotonic() + END_TIMEOUT_S
    while lives(facts.pid, facts.started):
        if time.monotonic() > end:
            raise NotReady(f"process {facts.pid}, whose place is to be taken, has not ended within {END_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def lives(pid: int, started: int) -> bool:
    """Returns whether a thread of the process is left. A zombie with other threads still holds its files and its GPU open."""
    try:
        fields = _stat(pid)
        return int(fields[19]) == started and (fields[0] not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1)
    except OSError:
        return False


def start_ticks() -> int:
    """Returns the process's start in clock ticks after the machine's. A process id alone may be used again."""
    return int(_stat(os.getpid())[19])


def _stat(pid: int) -> list[str]:
    """Returns the fields of proc(5) stat from field 3, the state, on. The name before it may hold any character."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def driver_started() -> bool:
    """Returns whether any code in this process has called cuInit. Torch knows only its own calls."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED
