"""One rank as the engine sees it: its actor, its process and its data path. Calls have deadlines and return reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from epserve.config import Config
from epserve.errors import ConfigError, EpserveError
from epserve.link.door import LinkAddress
from epserve.link.failure import Failure, RankLost, root_cause
from epserve.link.transport import SocketLink
from epserve.modular_kernel.measured.selection import Choice
from epserve.rank.actor import RankActor
from epserve.rank.expert_load import LoadTotals
from epserve.rank.reports import Outcome, Pulse, RankFacts
from epserve.rank.step import Arrangement, LoadReport

from .agent import NodeAgent
from .ray_cluster import Place

log = logging.getLogger(__name__)
R = TypeVar("R")

GROUPS = {"work": 1, "background": 1, "control": 2}
KILL_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 2.0


async def answer(reference, timeout: float) -> Any:
    """Returns the value of a Ray call. Raises TimeoutError or RayError."""

    async def value():
        return await reference

    return await asyncio.wait_for(value(), timeout)


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One process of the pool.

    Attributes:
        rank: number of the rank. -1: a spare or a standby.
        place: its place in the gang. None: a standby.
        stood_by: it was a standby.
        facts, report, link: there once the rank is up.
        pulse: its last answer to a ping.
        put_down: its process was ended because it could not leave a step that another rank had made fail.
        experts_choices: its measured choices, made with the present group.
        hands_out: the address of its experts, once experts have moved.
    """

    rank: int
    actor: Any
    place: Place | None = None
    stood_by: bool = False
    facts: RankFacts | None = None
    report: LoadReport | None = None
    link: SocketLink | None = None
    pulse: Pulse | None = None
    put_down: bool = False
    experts_choices: tuple[Choice, ...] = ()
    hands_out: LinkAddress | None = None

    @classmethod
    def create(cls, config: Config, rank: int, *, device: str, place: Place) -> Member:
        cpus, gpus = config.cluster.cpus_per_rank, config.cluster.gpus_per_rank if device == "cuda" else 0
        where = PlacementGroupSchedulingStrategy(placement_group=place.group, placement_group_bundle_index=place.bundle)
        options = _actor_class().options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where)
        return cls(rank=rank, actor=options.remote(config, device), place=place)

    @classmethod
    def stand_by(cls, config: Config, node_id: str, *, device: str) -> Member:
        """Starts a process on this node for which Ray reserves nothing. The actor's `stand_by` must be the next call."""
        where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        options = _actor_class().options(num_cpus=0, num_gpus=0, scheduling_strategy=where)
        return cls(rank=-1, actor=options.remote(config, device))

    def occupy(self, rank: int, place: Place) -> None:
        """Moves a standby into a place that a process left. The next call reports an error of this one."""
        assert place.last is not None
        self.rank, self.place, self.stood_by = rank, place, True
        self.actor.call.remote(RankActor.occupy.__name__, place.last)

    @property
    def alive(self) -> bool:
        return self.link is not None and not self.link.lost

    @property
    def where(self) -> str:
        if self.facts is None:
            return "not placed yet"
        return f"node {self.facts.node_ip}, process {self.facts.pid}, {self.facts.gpu_uuid or self.facts.device}"

    async def call(self, method: Callable, *args, timeout: float, background: bool = False) -> Outcome:
        """Calls a method of `RankActor`. Never raises: a process that is gone or silent is a failure like any other."""
        remote, name = self.actor.background if background else self.actor.call, method.__name__
        try:
            return await answer(remote.remote(name, *args), timeout)
        except TimeoutError:
            return self._failed(name, f"no answer within {timeout:g} s", consequence=True)
        except RayError as error:
            return self._failed(name, f"process gone ({_reason(error)})", consequence=False)

    async def take_over(self, arrangement: Arrangement, welcome: Any, here: str, *, timeout: float) -> Any:
        """Makes a spare or standby a rank. Returns its facts, its address and its report. Raises an EpserveError."""
        assert self.facts is not None
        local = self.facts.node_id == here
        (answered,) = await call_all(
            [self], RankActor.take_over, arrangement, welcome, local, timeout=timeout, numbered=True
        )
        return answered

    async def ping(self, timeout: float) -> bool:
        """Returns whether the process answers within `timeout` seconds."""
        try:
            self.pulse = await answer(self.actor.ping.remote(), timeout)
        except (TimeoutError, RayError):
            return False
        return True

    async def read_load(self, totals: LoadTotals) -> None:
        """Adds this rank's counts to the totals. A rank that does not answer keeps its last counts."""
        assert self.facts is not None
        with contextlib.suppress(TimeoutError, RayError):
            counts = await answer(self.actor.load_counts.remote(), LOAD_TIMEOUT_S)
            totals.update((self.facts.node_id, self.facts.pid), counts)

    async def beat(self, timeout: float) -> bool:
        """Returns whether the thread that runs the steps answers. While a step runs, its own deadline counts instead."""
        if self.link is None or self.link.num_pending:
            return True
        beat = self.link.beat()
        beat.add_done_callback(lambda each: each.cancelled() or each.exception())  # the end of a link is told elsewhere
        done, _ = await asyncio.wait([beat], timeout=timeout)
        return bool(done)

    def discard(self) -> None:
        """Forgets a rank whose process is gone or about to go."""
        if self.link is not None:
            self.link.close()
        with contextlib.suppress(RayError):
            ray.kill(self.actor, no_restart=True)

    def _failed(self, method: str, message: str, *, consequence: bool) -> Outcome:
        failure = Failure(rank=self.rank, phase=method, step=-1, message=message, consequence=consequence)
        return Outcome(failure=failure)


def _actor_class() -> Any:
    # No restarts and no retries by Ray: a restarted rank would be outside the process group.
    return ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(RankActor)  # type: ignore[call-overload]


async def call_all(
    members: Sequence[Member],
    method: Callable[..., R],
    *args,
    timeout: float,
    numbered: bool = False,
    background: bool = False,
) -> list[R]:
    """Calls a method of all members at once. Returns their values, or raises the root cause of all failures.

    Args:
        members: the members to call.
        method: a method of `RankActor`.
        args: its arguments.
        timeout: in seconds.
        numbered: each member gets its rank before the other arguments.
        background: the calls may run while steps and other calls run.
    """

    def one(member: Member):
        rank = (member.rank,) if numbered else ()
        return member.call(method, *rank, *args, timeout=timeout, background=background)

    outcomes = await asyncio.gather(*map(one, members))
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if failures:
        raise as_error(root_cause(failures))
    return [outcome.value for outcome in outcomes]


def as_error(failure: Failure) -> EpserveError:
    if failure.error is not None:
        return failure.error
    log.debug("%s\n%s", failure.describe(), failure.trace)
    return RankLost(failure)


def check_gpus(facts: Sequence[RankFacts], ranks_per_gpu: int = 1) -> None:
    """Raises ConfigError when a GPU has more than `ranks_per_gpu` ranks. They would share its memory and deadlock in NCCL."""
    owners: dict[str, list[RankFacts]] = {}
    for each in facts:
        if not each.gpu_uuid:
            continue
        others = owners.setdefault(each.gpu_uuid, [])
        if len(others) == ranks_per_gpu:
            named = ", ".join(str(other.rank) for other in others)
            who = f"ranks {named} and {each.rank} on node {each.node_ip} {'both' if ranks_per_gpu == 1 else 'all'}"
            allowed = f", cluster.gpus_per_rank allows {ranks_per_gpu}" if ranks_per_gpu > 1 else ""
            raise ConfigError(
                f"{who} see GPU {each.gpu_uuid}{allowed}: Ray did not set CUDA_VISIBLE_DEVICES for them. Unset"
                " RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
                + (
                    ""
                    if ranks_per_gpu > 1
                    else ", and leave cluster.gpus_per_rank at 1; below 1 ranks share GPUs, for trials"
                )
            )
        others.append(each)


class Agents:
    """Keeps a small actor on each node that holds ranks. It ends hung processes there."""

    def __init__(self):
        self._agents: dict[str, Any] = {}

    def cover(self, node_ids: Sequence[str]) -> None:
        for node_id in set(node_ids) - set(self._agents):
            place = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            actor_class: Any = ray.remote(max_restarts=-1)(NodeAgent)
            self._agents[node_id] = actor_class.options(num_cpus=0, scheduling_strategy=place).remote()

    async def kill(self, facts: RankFacts) -> bool:
        """Sends SIGKILL. Returns False when the node does not answer: its processes are gone with it, or behind a cut cable."""
        agent = self._agents.get(facts.node_id)
        if agent is None:
            return False
        try:
            await answer(agent.kill.remote(facts.pid), KILL_TIMEOUT_S)
        except (TimeoutError, RayError) as error:
            log.warning("node %s: cannot end process %d: %s", facts.node_ip, facts.pid, type(error).__name__)
            return False
        return True

    def close(self) -> None:
        for agent in self._agents.values():
            with contextlib.suppress(RayError):
                ray.kill(agent)
        self._agents.clear()


def who(members: Sequence[Member]) -> str:
    """Names ranks, their places, and their phases at the last ping."""
    return "; ".join(f"rank {member.rank} ({member.where}{last_seen(member)})" for member in members)


def last_seen(member: Member) -> str:
    """Names the phase at the last ping. Empty before the first."""
    return f", last seen in {member.pulse.phase!r} of step {member.pulse.step}" if member.pulse is not None else ""


def _reason(error: RayError) -> str:
    """Returns the name of Ray's error. For a process that ended in its start, the only report of the exception is in its text."""
    text = str(error).strip()
    return text.splitlines()[-1].strip() if "in its creation task" in text else type(error).__name__
