"""What this machine, or the container around this process, lets its processes have."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # the first version of cgroups writes a number near 2^63 where there is no limit


def memory_bytes() -> int:
    """The memory of this machine, or of the container where that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((physical, *_limits("memory", "memory.max", "memory.limit_in_bytes")))


def most_threads() -> int:
    """How many threads, of all processes, this user or the container may have. NO_LIMIT: as many as the kernel has room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    own = soft if soft != resource.RLIM_INFINITY and os.geteuid() != 0 else NO_LIMIT
    return min((own, *_limits("pids", "pids.max", "pids.max")))


def cpu_quota() -> float:
    """How many cores the container may keep busy, infinite without a limit."""
    found = [float("inf")]
    for text in _texts("cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")  # the first version of cgroups has the period, 100 ms, in another file
        if quota.isdigit():
            found.append(int(quota) / int(period or 100_000))
    return min(found)


def _limits(controller: str, name: str, old_name: str) -> Iterator[int]:
    for text in _texts(controller, name, old_name):
        if text.isdigit() and int(text) < NO_LIMIT:
            yield int(text)


def _texts(controller: str, name: str, old_name: str) -> Iterator[str]:
    """What stands in a file of this process's cgroup and of those around it, in both versions of cgroups."""
    try:
        lines = OWN_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, file = (CGROUPS / controller, old_name) if controllers else (CGROUPS, name)
        inner = root / path.strip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root):
                break
            try:
                yield (folder / file).read_text(encoding="utf-8").strip()
            except OSError:
                continue  # a container sees its own group at the root
