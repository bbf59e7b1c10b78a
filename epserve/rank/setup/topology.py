"""Where the ranks of a group are, and which backends reach from each of them to all others. Frozen data, pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from epserve.modular_kernel.capability import PrepareFinalizeCapability, Reach
from epserve.process import ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The place of one rank, as its own process sees it."""

    host: str
    """Equal for processes that reach each other without a network (`process.boot.host_key`)."""
    domain: str
    """The NVLink domain of the rank's GPU. It is the host where no domain spans several hosts."""
    address: str = ""
    """The address of the rank's node, for messages."""
    rdma: tuple[str, ...] = ()
    """Devices of the host with an active port that this process may open."""
    missing: tuple[tuple[str, str], ...] = ()
    """Pairs of a backend (`key`) and the reason why it cannot run in this process."""


def key(kind: str, name: str) -> str:
    """Returns the name of a backend among all kinds. `kind`: "all2all" or "experts"."""
    return f"{kind}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The places of all ranks, in rank order.

    `asked`: the backends (`key`) that every rank was asked about. `failed`: pairs of an all-to-all backend and the reason
    why an earlier attempt to build it on these ranks failed.
    """

    ranks: tuple[Location, ...]
    asked: frozenset[str] = frozenset()
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def hosts(self) -> tuple[int, ...]:
        """Returns the number of each rank's host. Hosts count from 0 in the order of their first ranks."""
        numbers: dict[str, int] = {}
        return tuple(numbers.setdefault(each.host, len(numbers)) for each in self.ranks)

    @property
    def num_hosts(self) -> int:
        return len({each.host for each in self.ranks})

    @property
    def num_domains(self) -> int:
        return len({each.domain for each in self.ranks})

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Returns the number of ranks on each host."""
        hosts = self.hosts
        return tuple(hosts.count(host) for host in range(self.num_hosts))

    @property
    def by_host(self) -> bool:
        """Returns whether the ranks of each host are consecutive."""
        hosts = self.hosts
        return list(hosts) == sorted(hosts)

    def describe(self) -> str:
        """Returns a text such as "2 hosts (10.0.0.1: ranks 0-7; 10.0.0.2: ranks 8-15)"."""
        hosts = self.hosts
        parts = []
        for number in range(self.num_hosts):
            ranks = [rank for rank, host in enumerate(hosts) if host == number]
            plural = "s" * (len(ranks) > 1)
            parts.append(f"{self.ranks[ranks[0]].address or f'host {number}'}: rank{plural} {ranges.shown(ranks)}")
        return f"{self.num_hosts} host{'s' * (self.num_hosts > 1)} ({'; '.join(parts)})"

    def knows(self, kind: str, name: str) -> bool:
        """Returns whether the ranks told if this backend can run in their processes."""
        return key(kind, name) in self.asked

    def unavailable(self, kind: str, name: str) -> str | None:
        """Returns the reason of the ranks on which the backend cannot run, or None. It names them unless all say the same."""
        wanted = key(kind, name)
        told = [dict(each.missing).get(wanted) for each in self.ranks]
        reasons = {reason: [rank for rank, each in enumerate(told) if each == reason] for reason in told if reason}
        if not reasons:
            return None
        reason, ranks = next(iter(reasons.items()))
        if len(ranks) == len(self.ranks):
            return reason
        place = self.ranks[ranks[0]].address
        return f"rank {ranges.shown(ranks)}{f' on {place}' if place else ''}: {reason}"

    def beyond(self, reach: Reach) -> str | None:
        """Returns the reason why a backend of this reach does not connect the ranks, or None."""
        if reach == "host" and self.num_hosts > 1:
            return f"it connects ranks of one host, these are on {self.describe()}"
        if reach in ("nvlink", "rdma") and self.num_domains > 1:
            domains = f"{self.num_domains} NVLink domains on {self.describe()}"
            if reach == "nvlink":
                return f"it connects ranks of one NVLink domain, these are in {domains}"
            lacking = [rank for rank, each in enumerate(self.ranks) if not each.rdma]
            if lacking:
                where = ", ".join(dict.fromkeys(self.ranks[rank].address or f"rank {rank}" for rank in lacking))
                return f"it needs RDMA between hosts, {where} has no active device (/sys/class/infiniband); {domains}"
        return None

    def why_not(self, name: str, record: PrepareFinalizeCapability) -> str | None:
        """Returns the reason why this all-to-all backend cannot serve these ranks, or None."""
        return dict(self.failed).get(name) or self.unavailable("all2all", name) or self.beyond(record.reach)

    def no_gain(self, record: PrepareFinalizeCapability) -> str | None:
        """Returns the reason why a backend for several hosts has nothing to save between these ranks, or None."""
        if record.spans_hosts and (self.num_hosts == 1 or max(self.host_sizes) == 1):
            return f"it saves bytes between hosts with several ranks each, these are on {self.describe()}"
        return None


def imagined(per_host: Collection[int], *, rdma: bool = False) -> Topology:
    """Returns a topology of hosts that are not there, with a number of ranks on each, for a plan."""
    ranks = [
        Location(host=f"host {host}", domain=f"host {host}", address=f"host {host}", rdma=("rdma",) * rdma)
        for host, count in enumerate(per_host)
        for _ in range(count)
    ]
    return Topology(ranks=tuple(ranks))


def in_host_order(hosts: Iterable[str]) -> list[int]:
    """Returns the indices of `hosts` with equal ones side by side. Hosts and the ranks of a host keep their order."""
    listed = list(hosts)
    first = {host: index for index, host in reversed(list(enumerate(listed)))}
    return sorted(range(len(listed)), key=lambda index: (first[listed[index]], index))
