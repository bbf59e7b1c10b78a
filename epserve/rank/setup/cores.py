"""The processor cores that one rank on a CPU may use: its fair share of those of its host, on one NUMA node where that fits."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .machine import cpu_quota

BOOT = Path("/proc/sys/kernel/random/boot_id")
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The cores that this process may run on, by NUMA node, and `quota`: how many of them a container may keep busy."""

    nodes: tuple[tuple[int, ...], ...]
    quota: float = math.inf

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for node in self.nodes for core in node)

    @property
    def key(self) -> int:
        """The same for processes that share cores: the kernel's boot and the cores, as a number of 62 bits."""
        text = f"{_text(BOOT)} {self.cores}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2

    @property
    def usable(self) -> int:
        return max(int(min(len(self.cores), self.quota)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank gets. `cores`: where its threads run, empty: anywhere."""

    threads: int
    cores: tuple[int, ...] = ()


def this_host(system: Path = NODES, allowed: frozenset[int] | None = None) -> Host:
    """Reads `system`; allowed: in place of the cores that the system gives this process."""
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    folders = sorted(system.glob("node[0-9]*"), key=lambda each: int(each.name.removeprefix("node")))
    found = [tuple(sorted(allowed & parse_list(_text(folder / "cpulist")))) for folder in folders]
    nodes = tuple(node for node in found if node)
    if sum(map(len, nodes)) != len(allowed):  # a system that tells no nodes, or not all
        nodes = (tuple(sorted(allowed)),)
    return Host(nodes=nodes, quota=cpu_quota())


def share_of(host: Host, index: int, sharers: int, most: int | None = None) -> Share:
    """Of rank number `index` among `sharers` ranks on the host. most: no more threads than that.

    All shares together have no more threads than the host has usable cores, unless there are more ranks than cores: then each
    has one. Ranks are bound to whole nodes, and only on hosts with several: one rank a node is the layout that this favours.
    """
    nodes = len(host.nodes)
    fair = max(host.usable // sharers, 1)
    cores: tuple[int, ...] = ()
    if nodes > 1:
        first, last = index * nodes // sharers, max((index + 1) * nodes // sharers, index * nodes // sharers + 1)
        cores = tuple(core for node in host.nodes[first:last] for core in node)
        together = sum(other * nodes // sharers == first for other in range(sharers)) if last - first == 1 else 1
        fair = min(fair, max(len(cores) // together, 1))
    return Share(threads=min(fair, most or fair), cores=cores)


def bind(cores: Sequence[int]) -> None:
    """All threads of this process, and those that they start, run on these cores; memory that they touch first is near them."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has ended meanwhile


def parse_list(text: str) -> frozenset[int]:
    """The kernel's "0-3,8,10-11"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def shown(cores: Sequence[int]) -> str:
    """As the kernel writes them: "0-3,8"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def most_threads(asked: int | None) -> int | None:
    """What a user asked for: the setting, else OMP_NUM_THREADS. Ray sets that in its workers, so read it in the service."""
    named = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return asked or (max(int(named), 1) if named.isdigit() else None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
