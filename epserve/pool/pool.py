"""The gang of ranks: started together, stepped together, arranged anew together.

    start -> serving -> (a rank dies, hangs or raises) -> recovering -> serving ... -> stopped
    serving -> (another number of ranks) -> resizing -> serving

`Ranks` owns the members and joins them to groups. `PoolSteps` runs steps on them. `Supervisor` notices lost ranks and rebuilds
the group. `Changes` moves experts and changes the number of ranks. `Pool` joins the four, from start to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ray
import torch

from epserve.config import Config
from epserve.errors import ConfigError, EpserveError
from epserve.link.shm import Arena
from epserve.models import ModelInfo, Stamp
from epserve.rank.actor import RankActor
from epserve.rank.setup.plan import RankPlan
from epserve.rank.step import StepPlan, StepResult

from .changes import Changes
from .members import call_all
from .ranks import CLOSE_TIMEOUT_S, Ranks
from .reserves import too_few
from .steps import PoolSteps, ReadyStep, StepFailed
from .supervisor import Recovery, Supervisor

log = logging.getLogger(__name__)

FIRST_DELAY_S = 10.0  # from the start of the service to its first standby. A starting process takes a core for seconds.


class Pool(Ranks):
    """Joins the ranks and everything that acts on them."""

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
        """Takes the arguments of `Ranks`. Starts nothing."""
        super().__init__(config, plan, device=device, stamp=stamp, info=info, on_state=on_state)
        self.supervisor = Supervisor(self)
        self.changes, self.steps = Changes(self, self.supervisor), PoolSteps(self, self.supervisor.fail)
        self.on_lost = self.supervisor.lost
        self.supervisor.on_fewer, self.supervisor.on_rebuilt = self.changes.lose, self.changes.grow_back

    @property
    def experts_missing(self) -> bool:
        """Whether some experts are on no rank until a process has started. Requests may then have to wait."""
        return self.supervisor.experts_missing

    @property
    def stuck(self) -> str:
        """Returns the reason why the service cannot recover without an operator. Empty: it can, or it serves."""
        return self.supervisor.stuck

    @property
    def recoveries(self) -> list[Recovery]:
        return self.supervisor.recoveries

    async def start(self) -> None:
        """Returns when every rank has loaded, joined and run a step. Raises the root cause of all ranks' reports."""
        engine, self.loop = self.config.engine, asyncio.get_running_loop()
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
        self.spares.argument = self._welcome()  # the checkpoint as it is now, so that a spare takes no other one
        self._store = self._new_store()  # imports torch while the ranks do
        self.found()
        await self.locate(self.members)
        self.side_by_side()
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
        """Ends every actor that start() made. Nothing of this pool talks to Ray afterwards.

        reachable: Ray's control service answers. Without it, the processes are ended by their ids.
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
                await call_all(self.members, RankActor.close, timeout=CLOSE_TIMEOUT_S)
            for member in self.members:
                member.discard()
            self.agents.close()
            if self._store is not None:
                ray.kill(self._store)
            await asyncio.to_thread(self.gang.release)
        self.become((), self.arrangement)
        self._store = None

    def _kill_here(self) -> None:
        here = ray.util.get_node_ip_address()
        for member in [*self.members, *self.spares.take_all(), *self.standbys.take_all()]:
            if member.link is not None:
                member.link.close()
            if member.facts is not None and member.facts.node_ip == here:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.facts.pid, signal.SIGKILL)

    async def step(self, plans: Sequence[StepPlan], shards: Sequence[Sequence[torch.Tensor]]) -> StepResult:
        """Runs one collective step (`PoolSteps.run`). Raises RankFailed, and recovery is then under way."""
        try:
            return await self.steps.run(plans, shards)
        except StepFailed as error:
            self.supervisor.judge(error)
            raise

    def ready(self, plans: Sequence[StepPlan], shards: Sequence[Sequence[torch.Tensor]]) -> ReadyStep | None:
        """Writes a step down for `run_alone` (`PoolSteps.ready`)."""
        return self.steps.ready(plans, shards)

    def run_alone(self, step: ReadyStep, number: int) -> StepResult | None:
        """Runs a step in a thread of its own (`PoolSteps.run_alone`)."""
        return self.steps.run_alone(step, number, self.supervisor.judge)

    def shared(self, nbytes: int) -> Any:
        """Returns a buffer in the memory that the ranks of this host map, or None when there is none."""
        return self.arena.buffer(nbytes) if self.arena is not None else None

    def rank_of(self, region: int) -> int:
        """Returns the rank that has a client's region open. Raises InvalidRequest or NotReady when none has."""
        return self.regions.rank_of(region)


async def _ended(tasks: Sequence[asyncio.Future], *, cancel: bool = True) -> None:
    for task in tasks:
        if cancel:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
