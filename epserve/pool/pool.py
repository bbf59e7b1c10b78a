"""The gang of ranks: started together, stepped together, arranged anew together.

    start -> serving -> (a rank dies, hangs or raises) -> recovering -> serving ... -> stopped
    serving -> (another number of ranks) -> resizing -> serving

`Ranks` has the members and joins them to groups, `PoolSteps` runs steps on them, `Supervisor` notices that one is gone and
rebuilds, `Changes` does what somebody asks for: another number of ranks, other places for experts. `Pool` is all of them,
from start to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Literal

import ray
import torch

from epserve.config import Config
from epserve.errors import ConfigError, EpserveError
from epserve.link.shm import Arena
from epserve.models import ModelInfo, Stamp
from epserve.rank.setup.plan import RankPlan
from epserve.rank.step import StepPlan

from .changes import Changes
from .members import call_all
from .ranks import CLOSE_TIMEOUT_S, Ranks
from .standbys import FIRST_DELAY_S, too_few
from .steps import PoolSteps
from .supervisor import Recovery, Supervisor

log = logging.getLogger(__name__)


class Pool(Ranks):
    """The ranks and all that acts on them."""

    def __init__(
        self,
        config: Config,
        plan: RankPlan,
        *,
        device: str,
        stamp: Stamp,
        info: ModelInfo,
        on_state: Callable[[Literal["serving", "recovering", "resizing"]], None],
    ):
        """stamp, info: of the checkpoint from which the plan was made; ranks read no other one."""
        super().__init__(config, plan, device=device, stamp=stamp, info=info, on_state=on_state)
        self.supervisor = Supervisor(self)
        self.changes, self.steps = Changes(self, self.supervisor), PoolSteps(self, self.supervisor)
        self.on_lost = self.supervisor.lost
        self.supervisor.on_fewer, self.supervisor.on_rebuilt = self.changes.lose, self.changes.grow_back

    @property
    def experts_missing(self) -> bool:
        """Whether some experts are on no rank until a process has started."""
        return self.supervisor.experts_missing

    @property
    def stuck(self) -> str:
        """Why the service will not come back by itself; empty: it will, or is there."""
        return self.supervisor.stuck

    @property
    def recoveries(self) -> list[Recovery]:
        return self.supervisor.recoveries

    async def start(self) -> None:
        """Returns when every rank has loaded, joined and run a step. Raises the root cause of all ranks' reports."""
        engine = self.config.engine
        if self.device == "cuda" and (sharing := self.config.cluster.ranks_per_gpu) > 1:
            log.warning(
                "cluster.gpus_per_rank %g: up to %d ranks share a GPU. That is for trials, not for speed: they take turns on it,"
                " and NCCL sends what it sends through the host", self.config.cluster.gpus_per_rank, sharing,
            )  # fmt: skip
        if self.config.cluster.data_path != "sockets":
            self.arena = Arena(self.config.cluster.shared_memory_bytes)
        digested, _ = await asyncio.gather(
            asyncio.to_thread(self.stamp.with_digest), self.reserve(engine.ranks + engine.spares)
        )
        self.stamp = digested
        self.spares.welcome = self._welcome()
        self._store = self._new_store()  # imports torch while the ranks do
        self.members = [self.new_member(rank) for rank in range(engine.ranks)]
        await self.prepare(self.members, self.arrangement)
        await self.unite()
        reports = [member.report for member in self.members]
        backends = {report.backends for report in reports if report is not None}
        if len(backends) > 1:
            raise ConfigError(f"the ranks chose different backends {sorted(backends)}: name them in the configuration")
        nodes = [member.facts.node_id for member in self.members if member.facts is not None]
        if not self.interruptible and (advice := too_few(nodes, engine.standbys)):
            log.warning(advice)
        self.started = True
        self.supervisor.start()
        self.changes.start()
        self.supervisor.set_serving()
        self.spares.refill(delay=0)
        self.refill_standbys(delay=FIRST_DELAY_S)

    async def close(self, *, reachable: bool = True) -> None:
        """Ends every actor that start() made; afterwards nothing of this pool talks to Ray.

        reachable: whether Ray's control service answers; without it the processes are ended by their ids.
        """
        self.closing = True
        self.serving.clear()
        if self.arena is not None:
            self.arena.close()
        if not reachable:
            log.error("Ray's control service is gone: ending the ranks of this machine by their process ids")
            self._kill_here()
            await _ended([*self.changes.close(), *self.supervisor.close()])
            return
        await _ended([*self.changes.close(), *self.supervisor.close(), *self.spares.close(), *self.standbys.close()])
        if self._reserving is not None:
            self.gang.give_up()
            await _ended([self._reserving], cancel=False)
        if ray.is_initialized():
            with contextlib.suppress(EpserveError):  # a rank that cannot close is killed below
                await call_all(self.members, "close", timeout=CLOSE_TIMEOUT_S)
            for member in self.members:
                member.discard()
            self.agents.close()
            if self._store is not None:
                ray.kill(self._store)
            await asyncio.to_thread(self.gang.release)
        self.members, self._store = [], None

    def _kill_here(self) -> None:
        here = ray.util.get_node_ip_address()
        for member in [*self.members, *self.spares.take(self.spares.ready), *self.standbys.take_all()]:
            if member.link is not None:
                member.link.close()
            if member.facts is not None and member.facts.node_ip == here:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.facts.pid, signal.SIGKILL)

    async def step(self, plan: StepPlan, shards: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """One collective step (`PoolSteps.run`)."""
        return await self.steps.run(plan, shards)

    def rank_of(self, region: int) -> int:
        """Which rank has a client's region open. Raises InvalidRequest or NotReady where none has."""
        return self.regions.rank_of(region)


async def _ended(tasks: Sequence[asyncio.Future], *, cancel: bool = True) -> None:
    for task in tasks:
        if cancel:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
