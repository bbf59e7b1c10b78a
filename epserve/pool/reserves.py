"""Processes that wait to become ranks: warm spares and standbys.

A spare has imported torch, opened the checkpoint and perhaps copied it, and has no rank yet. It occupies a place of its own, on
a GPU host a GPU. A standby has imported the modules of a rank. It holds no weights and has touched no GPU. It waits beside the
ranks and moves into the place of a rank whose process is gone, on the same node and the same GPU. It saves the start of a
Python with torch, and reads its weights then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from epserve.rank.actor import RankActor
from epserve.rank.reports import RankFacts

from .members import Member

log = logging.getLogger(__name__)

ANYWHERE = ""
"""The node of processes that Ray places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of waiting process. `method` gets a new process ready.

    `delay_s`: pause before missing ones start. The requests that waited for a recovery come first, since a starting process
    takes a core for seconds. `retry_s`: pause after one that could not start.
    """

    name: str
    method: Callable[..., RankFacts]
    delay_s: float
    retry_s: float


SPARE = Kind(name="spare", method=RankActor.warm, delay_s=1.0, retry_s=5.0)
STANDBY = Kind(name="standby", method=RankActor.stand_by, delay_s=1.5, retry_s=30.0)  # spares come first


class Reserve:
    """Keeps processes of one kind ready. It starts missing ones in the background, one after the other."""

    def __init__(
        self,
        kind: Kind,
        make: Callable[[str], Member],
        drop: Callable[[Member], None],
        *,
        per_node: int,
        start_timeout_s: float,
        argument: Any = None,
    ):
        """Starts nothing.

        Args:
            make: starts a process on a node, given by its id, or ANYWHERE.
            drop: ends a process.
            per_node: number of processes to keep ready on each node that `refill` names.
            argument: argument of the kind's method.
        """
        self._kind, self._make, self._drop = kind, make, drop
        self._per_node, self._timeout = per_node, start_timeout_s
        self.argument = argument
        self._ready: dict[str, list[Member]] = {}
        self._wanted: set[str] = set()
        self._filling: asyncio.Task | None = None

    @property
    def members(self) -> list[Member]:
        """The processes that are ready."""
        return [member for each in self._ready.values() for member in each]

    @property
    def ready(self) -> int:
        return len(self.members)

    @property
    def nodes(self) -> Collection[str]:
        """The nodes that have a ready process."""
        return {node for node, each in self._ready.items() if each}

    @property
    def filling(self) -> asyncio.Task | None:
        """The task that starts processes, or the last one that did."""
        return self._filling

    def take(self, node_id: str = ANYWHERE) -> Member | None:
        """Hands a ready process of this node to the caller. Its successor comes with `refill`."""
        return each.pop(0) if (each := self._ready.get(node_id)) else None

    def take_all(self) -> list[Member]:
        taken = self.members
        self._ready.clear()
        return taken

    def leave(self, node_id: str) -> None:
        """Drops the processes of a node that does not answer, without asking them."""
        for member in self._ready.pop(node_id, []):
            self._drop(member)

    def refill(
        self, nodes: Iterable[str] = (ANYWHERE,), *, delay: float | None = None, after: asyncio.Task | None = None
    ) -> None:
        """Starts missing processes on `nodes` in the background, `delay` seconds after the task `after` has ended."""
        self._wanted = set(nodes)
        for node in set(self._ready) - self._wanted:
            self.leave(node)
        if self._per_node and (self._filling is None or self._filling.done()):
            self._filling = asyncio.ensure_future(self._fill(self._kind.delay_s if delay is None else delay, after))

    async def check(self, timeout: float) -> None:
        """Replaces processes that do not answer within `timeout` seconds."""
        asked = [(each, member) for each in self._ready.values() for member in each]
        answers = await asyncio.gather(*(member.ping(timeout) for _, member in asked))
        for (each, member), answered in zip(asked, answers, strict=True):
            if not answered and member in each:
                log.warning("a %s does not answer: replacing it", self._kind.name)
                each.remove(member)
                self._drop(member)
                self.refill(self._wanted)

    def close(self) -> list[asyncio.Task]:
        """Ends all processes. Returns the tasks that the caller has to await."""
        for member in self.take_all():
            self._drop(member)
        if self._filling is None:
            return []
        self._filling.cancel()
        return [self._filling]

    def _missing(self) -> str | None:
        return next((node for node in sorted(self._wanted) if len(self._ready.get(node, ())) < self._per_node), None)

    async def _fill(self, delay: float, after: asyncio.Task | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        await asyncio.sleep(delay)
        name = self._kind.name
        while (node := self._missing()) is not None:
            member = self._make(node)
            try:
                outcome = await member.call(self._kind.method, self.argument, timeout=self._timeout)
            except asyncio.CancelledError:
                self._drop(member)
                raise
            if outcome.failure is None and node in self._wanted:
                member.facts = outcome.value
                each = self._ready.setdefault(node, [])
                each.append(member)
                log.info("a %s is ready on node %s (%d of %d)", name, member.facts.node_ip, len(each), self._per_node)
                continue
            self._drop(member)
            if outcome.failure is not None:
                log.warning("a %s could not start: %s", name, outcome.failure.describe())
                await asyncio.sleep(self._kind.retry_s)


def too_few(nodes: Iterable[str], per_node: int) -> str:
    """Returns the warning for ranks that can only be lost together, or "" when there are standbys for all of them.

    Args:
        nodes: node of each rank.
        per_node: number of standbys on each node.
    """
    most = max(Counter(nodes).values(), default=0)
    if most < 2 or per_node >= most:
        return ""
    return (
        f"a rank that is lost within a step takes those along that wait for it, since nothing ends kernels of this all-to-all."
        f" A node has up to {most} ranks and engine.standbys is {per_node}: set it to {most}, so that all are back within seconds"
    )
