"""The ranks of a pool: its members, the arrangement of experts on them, and the generation of their group.

`Ranks` makes newcomers, prepares them and joins all members to a group. Only this module changes members, arrangement and
generation. `Supervisor` (lost ranks), `Changes` (moves, other numbers of ranks) and `PoolSteps` take this object. This module
knows none of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from epserve import all2all
from epserve.config import Config
from epserve.errors import BackendFailed, CheckpointError, ConfigError, EpserveError, RankFailed
from epserve.link.door import LinkAddress
from epserve.link.shm import Arena
from epserve.link.transport import INLINE_BYTES, SocketLink
from epserve.models import ModelInfo, Stamp
from epserve.modular_kernel.measured.known_times import KnownTable
from epserve.process.phases import Marks
from epserve.rank.actor import RankActor
from epserve.rank.expert_load import LoadTotals
from epserve.rank.groups import GroupAddress, StoreActor
from epserve.rank.placement import Placement
from epserve.rank.setup import plan as rank_plan
from epserve.rank.setup.backends import names_asked
from epserve.rank.setup.cores import most_threads
from epserve.rank.setup.plan import RankPlan
from epserve.rank.setup.topology import Topology, in_host_order
from epserve.rank.setup.topology import key as topology_key
from epserve.rank.step import Arrangement
from epserve.rank.weights.newcomers import Holders, Welcome

from .device_regions import DeviceRegions
from .holders import find_holders, suffice
from .loading import told
from .members import Agents, Member, answer, call_all, check_gpus
from .one_at_a_time import Alone
from .ray_cluster import Gang
from .reserves import SPARE, STANDBY, Reserve

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 30.0  # a fresh process that imports torch


def _with_threads(config: Config) -> Config:
    """Returns the configuration with the most threads of a CPU rank. Ray sets OMP_NUM_THREADS in its own processes."""
    engine = config.engine.model_copy(update={"cpu_threads": most_threads(config.engine.cpu_threads)})
    return config.model_copy(update={"engine": engine})


class Ranks:
    """Owns the members (`members[r]` is rank r), the arrangement of experts and the generation of the group.

    All methods run in one event loop. `on_lost(member)` is called when a member's link ends.
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
        """Starts nothing.

        Args:
            config: the service's configuration.
            plan: plan of one rank, made from the checkpoint.
            device: "cpu" or "cuda".
            stamp: state of the checkpoint's files. Ranks read no other checkpoint.
            info: contents of the checkpoint.
            on_state: is called with each new state.
        """
        config = _with_threads(config)
        self.config, self.plan, self.device, self.on_state = config, plan, device, on_state
        self.stamp, self.info = stamp, info
        self._times: dict[str, KnownTable] = {}  # times that any rank has measured
        self.arrangement = Arrangement(config=config, placements=dict.fromkeys(plan.layers, plan.placement))
        self.gang, self.agents = Gang(config, device), Agents()
        limit = config.cluster.start_timeout_s
        self.spares = Reserve(
            SPARE, lambda _: self.new_member(), self.discard, per_node=config.engine.spares, start_timeout_s=limit
        )
        self.standbys = Reserve(
            STANDBY, lambda node_id: Member.stand_by(config, node_id, device=device), self.discard,
            per_node=config.engine.standbys, start_timeout_s=limit, argument=tuple(path.chosen for path in plan.paths),
        )  # fmt: skip
        self._store: Any = None
        self.arena: Arena | None = None
        self.members: list[Member] = []
        self.load = LoadTotals(plan.layers, plan.placement.num_logical)
        self.generation = 0
        self.explanation: tuple[str, ...] = ()
        """Measurements and choices of rank 0, made with the present group."""
        self.serving = asyncio.Event()
        self.started = self.closing = False
        self.loop: Any = None
        """The event loop of `start`."""
        self.regions = DeviceRegions(lambda: self.members, self.serving)
        self.on_lost: Callable[[Member], None] = lambda member: None
        self.running: dict[int, asyncio.Future] = {}
        """Step number -> future that is done when the step has ended on all ranks."""
        self.alone = Alone()
        """The step that another thread than the loop's runs. No other step runs meanwhile."""
        self.tokens_total = 0
        """Tokens of all steps since the start, over all ranks."""
        self._versions = itertools.count(1)
        self._failed: dict[str, str] = {}  # all-to-all backends that could not be built, with the reason of a rank
        self._reserving: asyncio.Future | None = None

    @property
    def num_ranks(self) -> int:
        return self.arrangement.config.engine.ranks

    @property
    def missing(self) -> dict[int, tuple[int, ...]]:
        """Layer -> experts that are on no rank while the others go on without them. Complete layers are absent."""
        return {layer: each.missing for layer, each in self.arrangement.placements.items() if each.missing}

    @property
    def interruptible(self) -> bool:
        """Whether the wait of a rank's device for a lost rank can be ended from outside."""
        names = {
            name for each in self.members if each.report is not None for name in each.report.backends[0].split("/")
        }
        return all(all2all.REGISTRY.get(name).prepare_finalize.capability.interruptible for name in names)

    def expert_bytes(self, layer: int) -> int:
        """Returns the bytes of one expert of a layer (of a rank's slice of it)."""
        group = next(group for group in self.plan.groups if layer in group.layers)
        return group.expert_bytes(1)

    def next_version(self) -> int:
        """Returns a version that no step has named yet."""
        return next(self._versions)

    async def steps_done(self) -> None:
        """Waits for the steps that run now, however they end."""
        await self.alone.ended()
        if self.running:
            await asyncio.wait(list(self.running.values()))

    async def reserve(self, more: int) -> None:
        self._reserving = asyncio.ensure_future(asyncio.to_thread(self.gang.reserve, more))
        await asyncio.shield(self._reserving)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor that reaches the ranks of this host without a copy.

        It is a plain tensor when the shared memory is full, or when it is so small that it is sent.
        """
        worth = math.prod(shape) * dtype.itemsize > INLINE_BYTES
        shared = self.arena.empty(shape, dtype) if self.arena is not None and worth else None
        return shared if shared is not None else torch.empty(shape, dtype=dtype)

    def buffer(self, nbytes: int) -> Any:
        """Returns a buffer under the rules of `empty`."""
        shared = self.arena.buffer(nbytes) if self.arena is not None and nbytes > INLINE_BYTES else None
        return shared if shared is not None else bytearray(nbytes)

    # Members, arrangement and generation change in the following methods and in `unite`.

    def found(self) -> None:
        """Starts the first process of every rank."""
        self.members = [self.new_member(rank) for rank in range(self.num_ranks)]

    def side_by_side(self) -> None:
        """Numbers the located members anew, so that those of one host have consecutive numbers."""
        places = [each.facts.location.host if each.facts and each.facts.location else "" for each in self.members]
        self.become([self.members[index] for index in in_host_order(places)], self.arrangement)

    def put(self, rank: int, newcomer: Member) -> None:
        """Gives the number of a lost rank to another process."""
        newcomer.rank = rank
        self.members[rank] = newcomer

    def become(self, members: Sequence[Member], arrangement: Arrangement) -> None:
        """Makes these processes ranks 0, 1, ... of the arrangement. They still have to `unite`."""
        self.members, self.arrangement = list(members), arrangement
        for rank, member in enumerate(self.members):
            member.rank = rank

    def move(self, layer: int, placement: Placement) -> None:
        """Makes all later steps of the layer use the placement."""
        placements = {**self.arrangement.placements, layer: placement}
        self.arrangement = replace(self.arrangement, placements=placements)

    def without(self, lost: Collection[int], *, partial: bool = False) -> Arrangement | None:
        """Returns the present arrangement without these ranks.

        Args:
            lost: numbers of ranks.
            partial: experts may be on no rank afterwards.

        Returns:
            None when an expert would be lost (unless partial), when no rank would be left, or when the rest cannot run.
        """
        version, placements = self.next_version(), {}
        for layer, placement in self.arrangement.placements.items():
            possible = len(lost) < placement.layout.num_ranks
            less = placement.without(set(lost), version=version, partial=partial) if possible else None
            if less is None:
                return None
            placements[layer] = less
        first = next(iter(placements.values()))
        try:
            config = rank_plan.resized(self.arrangement.config, first.layout.counts, first.num_logical)
            rank_plan.check_layout(config, self.plan, first.layout)
        except EpserveError as error:
            log.warning("the other ranks cannot go on alone: %s", error)
            return None
        return replace(self.arrangement, config=config, placements=placements)

    # Newcomers.

    def new_member(self, rank: int = -1) -> Member:
        """Returns a standby or a new process. Rank -1: it has no rank yet."""
        return self.standby(rank) or self.new_process(rank)

    def standby(self, rank: int) -> Member | None:
        """Returns a standby that moves into a free place of its node, or None when there is no such place."""
        if (found := self.gang.take_again(self.standbys.nodes)) is None:
            return None
        place, last = found
        standby = self.standbys.take(last.node_id)
        assert standby is not None
        standby.occupy(rank, place)
        return standby

    def new_process(self, rank: int) -> Member:
        """Returns a process that starts in the background."""
        return Member.create(self.config, rank, device=self.device, place=self.gang.take())

    def discard(self, member: Member) -> None:
        """Ends a process and gives its place back."""
        member.discard()
        if member.place is not None:  # else a standby, or it was discarded before
            # A standby that never came up says nothing about the place: Ray starts the next process there.
            self.gang.give(member.place, member.facts if member.report is not None or not member.stood_by else None)
            member.place = None

    def refill_standbys(self, **when: Any) -> None:
        nodes = {member.facts.node_id for member in self.members if member.facts is not None}
        self.standbys.refill(nodes, after=self.spares.filling, **when)

    async def prepare(self, new: Sequence[Member], arrangement: Arrangement) -> None:
        """Sets newcomers up, connects them and loads their weights. The ranks that serve notice nothing.

        Newcomers read the checkpoint. If one of them cannot, they take their weights from the ranks that hold all of them.
        """
        try:
            await self._prepare(new, arrangement, self._welcome())
        except CheckpointError as error:
            holders = await find_holders(self.members, new, self.arrangement) if self.started else ()
            if not holders or not suffice(holders, new, arrangement):
                raise
            log.warning("newcomers take weights from the other ranks: %s", error)
            for member in new:
                if member.link is not None:  # from the first attempt
                    member.link.close()
            await self._prepare(new, arrangement, self._welcome(holders))

    def _welcome(self, holders: tuple[Holders, ...] = ()) -> Welcome:
        return Welcome(
            start=self.stamp, info=self.info, times=tuple(self._times.values()) if self.started else None,
            holders=holders, hurry=not self.serving.is_set(),
        )  # fmt: skip

    async def locate(self, new: Sequence[Member]) -> None:
        """Asks newcomers where they are. Spares have told it before."""
        strange = [member for member in new if member.facts is None or member.facts.location is None]
        found = await call_all(strange, RankActor.locate, timeout=self.config.cluster.start_timeout_s, numbered=True)
        for member, facts in zip(strange, found, strict=True):
            member.facts = facts
        known = [each.facts for each in {*self.members, *new} if each.facts is not None]
        check_gpus(known, self.config.cluster.ranks_per_gpu)
        self.agents.cover([member.facts.node_id for member in new if member.facts is not None])

    def topology(self, members: Sequence[Member]) -> Topology:
        """Returns where these members are, as ranks in the order of their numbers."""
        ordered = sorted(members, key=lambda member: member.rank)
        places = tuple(each.facts.location for each in ordered if each.facts is not None and each.facts.location)
        assert len(places) == len(members), "locate() comes first"
        asked = names_asked(self.config.engine, self.device).items()
        return Topology(
            ranks=places,
            asked=frozenset(topology_key(kind, name) for kind, names in asked for name in names),
            failed=tuple(self._failed.items()),
        )

    async def _prepare(self, new: Sequence[Member], arrangement: Arrangement, welcome: Welcome) -> None:
        limit = self.config.cluster.start_timeout_s
        await self.locate(new)
        there = [*(member for member in self.members if member not in new), *new]
        arrangement = replace(arrangement, topology=self.topology(there))
        here = ray.get_runtime_context().get_node_id()
        async with told(new):
            taken = await asyncio.gather(*(each.take_over(arrangement, welcome, here, timeout=limit) for each in new))
        for member, (facts, address, report) in zip(new, taken, strict=True):
            member.facts, member.report = facts, report
            await self._connect(member, address)

    async def unite(self, marks: Marks | None = None) -> None:
        """Joins all members to the next generation of the group, as `arrangement` has them. `marks` gets the stages.

        An all-to-all that no configuration named and that cannot be built on these ranks is left out, and they join again.
        """
        while True:
            try:
                return await self._unite(marks)
            except BackendFailed as error:
                if self.named(error.backend) or error.backend in self._failed:
                    raise
                self._failed[error.backend] = error.reason
                log.warning("%s; the ranks go on without it", error)

    def named(self, all2all_name: str) -> bool:
        """Returns whether the configuration names this backend, instead of leaving the choice to the service."""
        engine = self.config.engine
        return all2all_name == engine.all2all or all2all_name in engine.all2all_candidates

    async def _unite(self, marks: Marks | None) -> None:
        limit = self.config.cluster.start_timeout_s
        self.generation += 1
        topology = self.topology(self.members)
        self.arrangement = replace(self.arrangement, topology=topology)
        self.plan = rank_plan.plan_ranks(
            self.arrangement.config, self.info, device=self.device, here=False, topology=topology
        )
        self.standbys.argument = tuple(path.chosen for path in self.plan.paths)
        address, _ = await asyncio.gather(
            self._group_address(),
            call_all(self.members, RankActor.leave, self.arrangement, timeout=limit, numbered=True),
        )
        if marks is not None:
            marks.add("leave")
        parts = await call_all(self.members, RankActor.join, address, timeout=limit)
        if marks is not None:
            marks.add("join")
            slowest: dict[str, float] = max(parts, key=lambda each: sum(each.values()))
            marks.seconds.update(slowest)
        explained = await call_all(self.members, RankActor.explain, timeout=limit)
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
        """Starts the store's actor on this machine.

        Behind a cut cable its loss would show only when Ray gives its node up, after 10 s or a minute.
        """
        here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        actor_class: Any = ray.remote(max_restarts=0, num_cpus=0)(StoreActor)
        return actor_class.options(scheduling_strategy=here).remote()

    async def _group_address(self) -> GroupAddress:
        """Returns the address that the store's actor gives. Starts a new store when the old one went down with its node."""
        for _ in range(2):
            if self._store is None:
                self._store = self._new_store()
            try:
                return await answer(self._store.address.remote(self.generation), STORE_TIMEOUT_S)
            except (RayError, TimeoutError):
                self._store = None
        raise RankFailed("the actor that holds the group's store cannot be started")
