"""Standby processes: on each node one that has imported what a rank needs. It holds no weights and has touched no GPU.

A spare occupies a place of its own, on a GPU host a GPU. A standby waits beside the ranks and moves into the place of one whose
process is gone, on the same node and the same GPU: what it saves is the start of a Python with torch. It reads its weights then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from epserve.rank.setup.backends import Chosen

from .members import Member

log = logging.getLogger(__name__)

FIRST_DELAY_S = 10.0  # after the service is up: a starting process takes a core for seconds
DELAY_S = 1.5  # after one was used; spares, which come first, start after a second
RETRY_S = 30.0  # after one that could not start


def too_few(nodes: Iterable[str], per_node: int) -> str:
    """What to say where ranks on `nodes` (one entry a rank) can only be lost together; empty: there are standbys for all."""
    most = max(Counter(nodes).values(), default=0)
    if most < 2 or per_node >= most:
        return ""
    return (
        f"a rank that is lost within a step takes those along that wait for it, since nothing ends kernels of this all-to-all."
        f" A node has up to {most} ranks and engine.standbys is {per_node}: set it to {most}, so that all are back within seconds"
    )


class Standbys:
    """`make(node_id)` starts a process there, `drop` ends one. `per_node`: how many are to be ready on each node with ranks."""

    def __init__(
        self,
        make: Callable[[str], Member],
        drop: Callable[[Member], None],
        *,
        per_node: int,
        chosen: tuple[Chosen, ...],
        start_timeout_s: float,
    ):
        """chosen: the backends whose modules are imported."""
        self._make, self._drop, self._per_node = make, drop, per_node
        self._chosen, self._timeout = chosen, start_timeout_s
        self._ready: dict[str, list[Member]] = {}
        self._wanted: set[str] = set()
        self._filling: asyncio.Task | None = None

    @property
    def ready(self) -> int:
        return sum(map(len, self._ready.values()))

    @property
    def nodes(self) -> Collection[str]:
        """Where one is ready."""
        return {node for node, each in self._ready.items() if each}

    def take(self, node_id: str) -> Member | None:
        """One of this node, which is the caller's from now on. Its successor comes with `refill`."""
        return each.pop() if (each := self._ready.get(node_id)) else None

    def take_all(self) -> list[Member]:
        taken = [member for each in self._ready.values() for member in each]
        self._ready.clear()
        return taken

    def leave(self, node_id: str) -> None:
        """Nothing on this node answers: its standbys must not be asked either."""
        for member in self._ready.pop(node_id, []):
            self._drop(member)

    def refill(self, nodes: Iterable[str], *, delay: float = DELAY_S, after: asyncio.Task | None = None) -> None:
        """Start what is missing on `nodes`, one after the other, in the background and once `after` has ended."""
        self._wanted = set(nodes)
        for node in set(self._ready) - self._wanted:
            self.leave(node)
        if self._per_node and (self._filling is None or self._filling.done()):
            self._filling = asyncio.ensure_future(self._fill(delay, after))

    async def check(self, timeout: float) -> None:
        """Replace those that do not answer any more."""
        asked = [(each, member) for each in self._ready.values() for member in each]
        answers = await asyncio.gather(*(member.ping(timeout) for _, member in asked))
        for (each, member), answered in zip(asked, answers, strict=True):
            if not answered and member in each:
                log.warning("a standby does not answer: replacing it")
                each.remove(member)
                self._drop(member)
                self.refill(self._wanted)

    def close(self) -> list[asyncio.Task]:
        """Ends all of them; the tasks that are to be awaited."""
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
        while (node := self._missing()) is not None:
            member = self._make(node)
            try:
                outcome = await member.call("stand_by", self._chosen, timeout=self._timeout)
            except asyncio.CancelledError:
                self._drop(member)
                raise
            if outcome.failure is None and node in self._wanted:
                member.facts = outcome.value
                self._ready.setdefault(node, []).append(member)
                log.info("a standby is ready on node %s", member.facts.node_ip)
                continue
            self._drop(member)
            if outcome.failure is not None:
                log.warning("a standby could not start: %s", outcome.failure.describe())
                await asyncio.sleep(RETRY_S)
