"""Waits for the real end of a process on this machine: closed files, and free memory on the host and on its GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

from epserve.errors import NotReady

from .reports import RankFacts

END_TIMEOUT_S = 10.0  # a killed process gives tens of GiB back in about a second
POLL_S = 0.002


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
