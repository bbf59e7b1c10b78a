"""When a process of this machine has really ended: its files are closed, its memory is free, here and on its GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

from epserve.errors import NotReady

from .reports import RankFacts

END_TIMEOUT_S = 10.0  # a killed process gives tens of GiB back in about a second
POLL_S = 0.002


def wait_for_end(facts: RankFacts) -> None:
    """Blocks until this process has ended, whether its parent knows it yet or not. Raises NotReady."""
    end = time.monotonic() + END_TIMEOUT_S
    while lives(facts.pid, facts.started):
        if time.monotonic() > end:
            raise NotReady(f"process {facts.pid}, whose place is to be taken, has not ended within {END_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def lives(pid: int, started: int) -> bool:
    """Whether a thread of it is left. A zombie whose other threads still end has its files, among them its GPU, open."""
    try:
        fields = _stat(pid)
        return int(fields[19]) == started and (fields[0] not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1)
    except OSError:
        return False


def start_ticks() -> int:
    """When this process started, in clock ticks after the machine did: a process id alone may be used again."""
    return int(_stat(os.getpid())[19])


def _stat(pid: int) -> list[str]:
    """From field 3, the state, on (proc(5)); the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
