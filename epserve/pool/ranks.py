"""The ranks of a pool: who they are, how experts lie on them, and how newcomers are made, prepared and joined to a group.

What acts on them takes this object: `Supervisor` replaces lost ranks, `Changes` moves experts and resizes, `PoolSteps` runs
steps. None of them is known here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from epserve import all2all
from epserve.config import Config
from epserve.errors import CheckpointError, ConfigError, RankFailed
from epserve.link.door import LinkAddress
from epserve.link.shm import Arena
from epserve.link.transport import INLINE_BYTES, SocketLink
from epserve.models import ModelInfo, Stamp
from epserve.modular_kernel.measured.known_times import KnownTable
from epserve.rank.expert_load import LoadTotals
from epserve.rank.groups import GroupAddress, StoreActor
from epserve.rank.setup.cores import most_threads
from epserve.rank.setup.plan import RankPlan
from epserve.rank.step import Arrangement
from epserve.rank.weights.newcomers import Holders, Welcome

from .device_regions import DeviceRegions
from .holders import find_holders, suffice
from .members import Agents, Member, answer, call_all, check_gpus
from .ray_cluster import Gang
from .spares import Spares
from .standbys import Standbys

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 30.0  # a fresh process that imports torch


class Marks:
    """Seconds between the stages of one attempt to join the ranks."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def add(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in self.seconds.items())


def _with_threads(config: Config) -> Config:
    """With the most threads of a rank on a CPU, as this process was told them: Ray sets OMP_NUM_THREADS in its own."""
    engine = config.engine.model_copy(update={"cpu_threads": most_threads(config.engine.cpu_threads)})
    return config.model_copy(update={"engine": engine})


class Ranks:
    """`members[r]` is rank r. `on_state(state)`: called with "serving", "recovering" and "resizing". One event loop.

    `arrangement` says which experts each holds; `generation` numbers the groups that they formed. `on_lost(member)`: called
    when a member's link ends.
    """

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
        config = _with_threads(config)
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
        self._store: Any = None
        self.arena: Arena | None = None
        self.members: list[Member] = []
        self.load = LoadTotals(plan.layers, plan.placement.num_logical)
        self.generation = 0
        self.explanation: tuple[str, ...] = ()
        """What rank 0 measured and chose when the present group was made."""
        self.serving = asyncio.Event()
        self.started = self.closing = False
        self.regions = DeviceRegions(lambda: self.members, self.serving)
        self.on_lost: Callable[[Member], None] = lambda member: None
        self.running: dict[int, asyncio.Future] = {}
        """Steps that were sent, by number; done when they have ended."""
        self.tokens_total = 0
        """Of all steps on all ranks there ever were."""
        self._versions = itertools.count(1)
        self._reserving: asyncio.Future | None = None

    @property
    def num_ranks(self) -> int:
        return self.arrangement.config.engine.ranks

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

    def next_version(self) -> int:
        """For a placement that no step has named yet."""
        return next(self._versions)

    async def steps_done(self) -> None:
        """Waits for the steps that run now, however they end."""
        if self.running:
            await asyncio.wait(list(self.running.values()))

    async def reserve(self, more: int) -> None:
        self._reserving = asyncio.ensure_future(asyncio.to_thread(self.gang.reserve, more))
        await asyncio.shield(self._reserving)

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

    async def _connect(self, member: Member, address: LinkAddress) -> None:
        if address.host and self.config.cluster.data_path == "shared_memory":
            raise ConfigError(
                f"cluster.data_path: shared_memory, but rank {member.rank} runs on another host ({address.host}); set auto"
            )
        member.link = await SocketLink.open(address, lambda: self.on_lost(member), self.arena)

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
