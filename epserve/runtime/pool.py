"""The gang of ranks: started together, stepped together, arranged anew together.

    start -> serving -> (a rank dies, hangs or raises) -> recovering -> serving ... -> stopped
    serving -> (another number of ranks) -> resizing -> serving

`Pool` makes and joins the ranks and runs steps on them. `Supervisor` notices that one is gone and rebuilds, `Changes`
does what somebody asks for: another number of ranks, other places for experts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import all2all
from epserve.config import Config
from epserve.errors import CheckpointError, ConfigError, EpserveError, RankFailed
from epserve.expert_load import LoadTotals
from epserve.models import ModelInfo, Stamp
from epserve.modular_kernel.known_times import KnownTable
from epserve.rank_plan import RankPlan
from epserve.step import Arrangement, StepPlan

from .changes import Changes
from .cluster import Gang
from .device_regions import DeviceRegions
from .groups import GroupAddress, StoreActor
from .holders import find_holders, suffice
from .members import Agents, Member, answer, call_all, check_gpus
from .newcomers import Holders, Welcome
from .pool_steps import PoolSteps, who
from .shm import Arena
from .spares import Spares
from .standbys import FIRST_DELAY_S, Standbys, too_few
from .supervisor import Marks, Recovery, Supervisor
from .transport import INLINE_BYTES, LinkAddress, SocketLink

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 30.0  # a fresh process that imports torch


class Pool:
    """`on_state(state)`: called with "serving", "recovering" and "resizing". All methods run in one event loop."""

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
        self.config, self.plan, self.device, self.on_state = config, plan, device, on_state
        self.stamp, self.info = stamp, info
        self._times: dict[str, KnownTable] = {}  # what any rank has measured
        self.arrangement = Arrangement(config=config, placements=dict.fromkeys(plan.layers, plan.placement))
        self.gang, self.agents = Gang(config, device), Agents()
        self.spares = Spares(
            self.new_member, self.discard, enough=config.engine.spares, start_timeout_s=config.cluster.start_timeout_s
        )
        self.standbys = Standbys(
            lambda node_id: Member.stand_by(config, node_id, device=device), self.discard,
            per_node=config.engine.standbys, chosen=tuple(path.chosen for path in plan.paths),
            start_timeout_s=config.cluster.start_timeout_s,
        )  # fmt: skip
        self.supervisor, self.changes = Supervisor(self), Changes(self)
        self.regions, self.steps = DeviceRegions(self), PoolSteps(self)
        self._store: Any = None
        self.arena: Arena | None = None
        self.members: list[Member] = []
        self.load = LoadTotals(plan.layers, plan.placement.num_logical)
        self.generation = 0
        self.explanation: tuple[str, ...] = ()
        """What rank 0 measured and chose when the present group was made."""
        self.serving = asyncio.Event()
        self.started = self.closing = False
        self._reserving: asyncio.Future | None = None

    @property
    def num_ranks(self) -> int:
        return self.arrangement.config.engine.ranks

    @property
    def experts_missing(self) -> bool:
        """Whether some experts are on no rank until a process has started."""
        return self.supervisor.experts_missing

    @property
    def stuck(self) -> str:
        """Why the service will not come back by itself; empty: it will, or is there."""
        return self.supervisor.stuck

    @property
    def missing(self) -> dict[int, tuple[int, ...]]:
        """Layer -> experts that are on no rank while the others go on without; layers that miss none are absent."""
        return {layer: each.missing for layer, each in self.arrangement.placements.items() if each.missing}

    @property
    def interruptible(self) -> bool:
        """Whether a rank that waits on its device for one that is gone can be got out of that."""
        names = {
            name for each in self.members if each.report is not None for name in each.report.backends[0].split("/")
        }
        return all(all2all.REGISTRY.get(name).prepare_finalize.capability.interruptible for name in names)

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
        self.set_serving()
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

    async def reserve(self, more: int) -> None:
        self._reserving = asyncio.ensure_future(asyncio.to_thread(self.gang.reserve, more))
        await asyncio.shield(self._reserving)

    async def step(self, plan: StepPlan, shards: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """One collective step (`PoolSteps.run`)."""
        return await self.steps.run(plan, shards)

    async def steps_done(self) -> None:
        """Waits for the steps that run now, however they end."""
        await self.steps.ended()

    @property
    def tokens_total(self) -> int:
        return self.steps.tokens_total

    def rank_of(self, region: int) -> int:
        """Which rank has a client's region open. Raises InvalidRequest or NotReady where none has."""
        return self.regions.rank_of(region)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that reaches the ranks of this host without a copy, while there is room for such ones; small ones are sent."""
        worth = math.prod(shape) * dtype.itemsize > INLINE_BYTES
        shared = self.arena.empty(shape, dtype) if self.arena is not None and worth else None
        return shared if shared is not None else torch.empty(shape, dtype=dtype)

    def buffer(self, nbytes: int) -> Any:
        """As `empty`, for bytes; few of them are not worth a block."""
        shared = self.arena.buffer(nbytes) if self.arena is not None and nbytes > INLINE_BYTES else None
        return shared if shared is not None else bytearray(nbytes)

    # Making and joining ranks.

    def new_member(self, rank: int = -1) -> Member:
        """A standby where there is one on the node of a free place, else a process that starts in the background.

        -1: without a rank yet.
        """
        place = self.gang.take(self.standbys.nodes)
        last = place.last if place.last is not None and (place.last.visible or self.device == "cpu") else None
        if last is not None and (standby := self.standbys.take(last.node_id)) is not None:
            standby.occupy(rank, place)
            return standby
        return Member.create(self.config, rank, device=self.device, place=place)

    def discard(self, member: Member) -> None:
        member.discard()
        if member.place is not None:  # else a standby, or it was discarded before
            # Who never came up says nothing about the place: the next one there is started by Ray.
            self.gang.give(member.place, member.facts if member.report is not None or not member.stood_by else None)
            member.place = None

    def refill_standbys(self, **when: Any) -> None:
        nodes = {member.facts.node_id for member in self.members if member.facts is not None}
        self.standbys.refill(nodes, after=self.spares.filling, **when)

    async def prepare(self, new: Sequence[Member], arrangement: Arrangement) -> None:
        """Set up, connect and load; the ranks that serve notice nothing.

        Newcomers read the checkpoint; where one cannot, they take their weights from the ranks, if those hold them all.
        """
        try:
            await self._prepare(new, arrangement, self._welcome())
        except CheckpointError as error:
            holders = await find_holders(self.members, new, self.arrangement) if self.started else ()
            if not holders or not suffice(holders, new, arrangement):
                raise
            log.warning("newcomers take weights from the other ranks: %s", error)
            for member in new:
                if member.link is not None:  # of the first attempt
                    member.link.close()
            await self._prepare(new, arrangement, self._welcome(holders))

    def _welcome(self, holders: tuple[Holders, ...] = ()) -> Welcome:
        return Welcome(
            start=self.stamp, info=self.info, times=tuple(self._times.values()) if self.started else None,
            holders=holders, hurry=not self.serving.is_set(),
        )  # fmt: skip

    async def _prepare(self, new: Sequence[Member], arrangement: Arrangement, welcome: Welcome) -> None:
        limit = self.config.cluster.start_timeout_s
        known = [member for member in new if member.facts is not None]  # spares: one call instead of three
        await self._set_up([member for member in new if member.facts is None], arrangement, welcome)
        here = ray.get_runtime_context().get_node_id()
        taken = await asyncio.gather(*(member.take_over(arrangement, welcome, here, timeout=limit) for member in known))
        for member, (facts, address, report) in zip(known, taken, strict=True):
            member.facts, member.report = facts, report
            await self._connect(member, address)
        self.agents.cover([member.facts.node_id for member in known if member.facts is not None])

    async def _set_up(self, new: Sequence[Member], arrangement: Arrangement, welcome: Welcome) -> None:
        limit = self.config.cluster.start_timeout_s
        facts = await call_all(new, "set_up", arrangement, welcome, timeout=limit, numbered=True)
        for member, each in zip(new, facts, strict=True):
            member.facts = each
        check_gpus(
            [each.facts for each in {*self.members, *new} if each.facts is not None],
            arrangement.config.cluster.ranks_per_gpu,
        )
        self.agents.cover([each.node_id for each in facts])
        here = ray.get_runtime_context().get_node_id()

        async def connect(member: Member, local: bool) -> None:
            (address,) = await call_all([member], "listen", local, timeout=CLOSE_TIMEOUT_S * 2)
            await self._connect(member, address)

        await asyncio.gather(*(connect(m, each.node_id == here) for m, each in zip(new, facts, strict=True)))
        reports = await call_all(new, "load", timeout=limit)
        for member, report in zip(new, reports, strict=True):
            member.report = report

    async def unite(self, marks: Marks | None = None) -> None:
        """All members into the next generation of the group, as `arrangement` has them. `marks` gets the stages."""
        limit = self.config.cluster.start_timeout_s
        self.generation += 1
        for rank, member in enumerate(self.members):
            member.rank = rank
        address, _ = await asyncio.gather(
            self._group_address(),
            call_all(self.members, "leave", self.arrangement, timeout=limit, numbered=True),
        )
        if marks is not None:
            marks.add("leave")
        parts = await call_all(self.members, "join", address, timeout=limit)
        if marks is not None:
            marks.add("join")
            slowest: dict[str, float] = max(parts, key=lambda each: sum(each.values()))
            marks.seconds.update(slowest)
        explained = await call_all(self.members, "explain", timeout=limit)
        self.explanation = explained[0].notes
        for member, each in zip(self.members, explained, strict=True):
            self._times |= {table.key: table for table in each.times}
            member.experts_choices = each.choices
            if member.report is not None:
                member.report = replace(member.report, backends=each.backends, weights_bytes=each.weights_bytes)
        await self.regions.reopen()

    def set_serving(self) -> None:
        if self.closing:
            return
        lost = [member for member in self.members if not member.alive]
        if lost:  # died between warm-up and now; its report came while nobody listened
            self.supervisor.fail(f"processes are gone: {who(lost)}")
            return
        self.serving.set()
        self.on_state("serving")

    async def _connect(self, member: Member, address: LinkAddress) -> None:
        if address.host and self.config.cluster.data_path == "shared_memory":
            raise ConfigError(
                f"cluster.data_path: shared_memory, but rank {member.rank} runs on another host ({address.host}); set auto"
            )
        member.link = await SocketLink.open(address, lambda: self.supervisor.lost(member), self.arena)

    def _new_store(self) -> Any:
        """On this machine: behind a cut cable it would be missed only when Ray gives its node up, after 10 s or a minute."""
        here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        actor_class: Any = ray.remote(max_restarts=0, num_cpus=0)(StoreActor)
        return actor_class.options(scheduling_strategy=here).remote()

    async def _group_address(self) -> GroupAddress:
        """From the store's actor; a new store where the old one went down with its node."""
        for _ in range(2):
            if self._store is None:
                self._store = self._new_store()
            try:
                return await answer(self._store.address.remote(self.generation), STORE_TIMEOUT_S)
            except (RayError, TimeoutError):
                self._store = None
        raise RankFailed("the actor that holds the group's store cannot be started")


async def _ended(tasks: Sequence[asyncio.Future], *, cancel: bool = True) -> None:
    for task in tasks:
        if cancel:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
