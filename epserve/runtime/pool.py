"""The gang of ranks: started together, stepped together, rebuilt together when one of them dies or hangs.

    start -> serving -> (a rank dies, hangs or raises) -> recovering -> serving ... -> stopped

Recovery keeps the survivors' weights: hung processes are killed, dead ranks get a new actor that loads, all ranks leave
the old process group and join the next generation of it, all warm up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
import torch
from ray.exceptions import RayError

from epserve.config import Config
from epserve.errors import ConfigError, EpserveError, RankFailed
from epserve.expert_load import LoadTotals
from epserve.rank_plan import RankPlan
from epserve.worker import StepPlan

from .cluster import Gang
from .failure import Failure, RankLost, root_cause
from .members import Agents, Member, answer, call_all, check_distinct_gpus
from .rank import GroupAddress, StoreActor
from .transport import SocketLink

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LOAD_BEATS = 2  # every so many heartbeats the expert load is read, where steps have run since
PING_TIMEOUT_S = 3.0  # a process that is alive answers in milliseconds, on a crowded machine in tenths of a second
SILENCE_S = 10.0  # then a process counts as hung: far above what a crowded machine does, far below the 65 s of Ray
SETTLE_S = 2.0  # how long survivors may take to report a step that failed elsewhere; gloo tells them in milliseconds
CLOSE_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 30.0  # a fresh process that imports torch
RETRY_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # pauses between attempts to rebuild; the last one repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One finished recovery, for the log and the metrics."""

    cause: str
    replaced: tuple[int, ...]
    seconds: float


class Pool:
    """`on_state(state)`: called with "serving" and "recovering". All methods run in one event loop."""

    def __init__(
        self,
        config: Config,
        plan: RankPlan,
        *,
        device: str,
        on_state: Callable[[Literal["serving", "recovering"]], None],
    ):
        self._config, self._plan, self._device, self._on_state = config, plan, device, on_state
        self._gang, self._agents = Gang(config, device), Agents()
        self._store: Any = None
        self.members: list[Member] = []
        self.tokens_done = [0] * config.engine.ranks
        self.load = LoadTotals(plan.layers, plan.placement.layout.num_experts)
        self._phases: dict[int, tuple[dict[str, float], ...]] = {}
        self.generation = 0
        self.recoveries: list[Recovery] = []
        self.serving = asyncio.Event()
        self._in_flight = 0
        self._started = self._closing = False
        self._cause = ""
        self._recovery: asyncio.Task | None = None
        self._heart: asyncio.Task | None = None
        self._reserving: asyncio.Future | None = None

    async def start(self) -> None:
        """Returns when every rank has loaded, joined and run a step. Raises the root cause of all ranks' reports."""
        self._reserving = asyncio.ensure_future(asyncio.to_thread(self._gang.reserve))
        self._place = await asyncio.shield(self._reserving)
        self._store = self._new_store()  # imports torch while the ranks do
        self.members = [self._new_member(rank) for rank in range(self._config.engine.ranks)]
        await self._bring_up(self.members)
        reports = [member.report for member in self.members]
        backends = {report.backends for report in reports if report is not None}
        if len(backends) > 1:
            raise ConfigError(f"the ranks chose different backends {sorted(backends)}: name them in the configuration")
        self._started = True
        self._heart = asyncio.ensure_future(self._watch())
        self._set_serving()

    async def close(self, *, reachable: bool = True) -> None:
        """Ends every actor that start() made; afterwards nothing of this pool talks to Ray.

        reachable: whether Ray's control service answers; without it the processes are ended by their ids.
        """
        self._closing = True
        self.serving.clear()
        for task in (self._heart, self._recovery):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._reserving is not None:
            self._gang.give_up()
            with contextlib.suppress(Exception):  # whoever waited for it has been told
                await self._reserving
        if not reachable:
            log.error("Ray's control service is gone: ending the ranks of this machine by their process ids")
            self._kill_here()
        elif ray.is_initialized():
            with contextlib.suppress(EpserveError):  # a rank that cannot close is killed below
                await call_all(self.members, "close", timeout=CLOSE_TIMEOUT_S)
            for member in self.members:
                member.discard()
            self._agents.close()
            if self._store is not None:
                ray.kill(self._store)
            await asyncio.to_thread(self._gang.release)
        self.members, self._store = [], None

    def _kill_here(self) -> None:
        here = ray.util.get_node_ip_address()
        for member in self.members:
            if member.link is not None:
                member.link.close()
            if member.facts is not None and member.facts.node_ip == here:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.facts.pid, signal.SIGKILL)

    async def step(self, plan: StepPlan, shards: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """One collective step: shard r goes to rank r, and the result `(M, K)` has the rows of all ranks in order.

        Raises RankFailed; recovery is then under way and the same step may be run again after it.
        """
        if not self.serving.is_set():
            raise RankFailed("the ranks are being rebuilt")
        shape = self._plan.spec.shape
        out_MK = torch.empty((sum(plan.tokens_per_rank), shape.hidden), dtype=shape.dtype)
        header = {
            "step": plan.step,
            "generation": self.generation,
            "layer": plan.layer,
            "mode": plan.mode,
            "tokens_per_rank": plan.tokens_per_rank,
        }
        futures, first = [], 0
        # No await between the submissions: every rank sees the steps in one order.
        for member, shard, count in zip(self.members, shards, plan.tokens_per_rank, strict=True):
            assert member.link is not None
            futures.append(member.link.submit(header, shard, out_MK[first : first + count]))
            first += count
        self._in_flight += 1
        try:
            await self._finish(plan, futures)
        finally:
            self._in_flight -= 1
        for rank, count in enumerate(plan.tokens_per_rank):
            self.tokens_done[rank] += count
        self._phases[plan.step] = tuple(future.result() for future in futures)
        return out_MK

    def take_phases(self, step: int) -> tuple[dict[str, float], ...]:
        """Each rank's seconds by phase, once, after `step` has returned."""
        return self._phases.pop(step, ())

    async def _finish(self, plan: StepPlan, futures: list[asyncio.Future[dict[str, float]]]) -> None:
        # Steps in front of this one on the ranks count against its time too.
        limit = self._config.scheduler.step_timeout_s * self._in_flight
        done, waiting = await asyncio.wait(futures, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        failures = _failures(done)
        if not failures and not waiting:
            return
        if not failures:
            ranks = [rank for rank, future in enumerate(futures) if future in waiting]
            text = f"step {plan.step} of layer {plan.layer}: no answer from ranks {ranks} within {limit:g} s"
            self._fail(text)
            _ignore(waiting)
            raise RankFailed(text)
        self._fail(root_cause(failures).describe())
        if waiting:  # peers report within milliseconds; the first report is not always the cause
            done, waiting = await asyncio.wait(futures, timeout=SETTLE_S)
            failures = _failures(done)
            _ignore(waiting)
        cause = root_cause(failures)
        self._cause = cause.describe()
        log.warning("%s\n%s", self._cause, cause.trace)
        raise RankFailed(self._cause)

    # Supervision.

    def _fail(self, cause: str) -> None:
        """Something is wrong with a rank: stop serving, rebuild. Safe to call again while that goes on."""
        rebuilding = self._recovery is not None and not self._recovery.done()
        if self._closing or rebuilding or not self._started:
            return
        log.warning("recovering: %s", cause)
        self._cause = cause
        self.serving.clear()
        self._on_state("recovering")
        self._recovery = asyncio.ensure_future(self._recover())

    def _lost(self, rank: int) -> None:
        self._fail(f"rank {rank}: its process is gone")

    async def _watch(self) -> None:
        """Pings all ranks each second. A silent process counts as hung, whether a step runs or not."""
        limit = min(self._config.scheduler.step_timeout_s, SILENCE_S)
        beat = counted = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if not self.serving.is_set():
                continue
            answers = await asyncio.gather(*(member.ping(limit) for member in self.members))
            silent = [member.rank for member, answered in zip(self.members, answers, strict=True) if not answered]
            if silent and self.serving.is_set():
                self._fail(f"ranks {silent} did not answer for {limit:g} s")
            beat += 1
            if beat % LOAD_BEATS == 0 and sum(self.tokens_done) != counted:
                counted = sum(self.tokens_done)
                await asyncio.gather(*(member.read_load(self.load) for member in self.members))

    async def _recover(self) -> None:
        start = time.monotonic()
        replaced: set[int] = set()
        for attempt in range(1_000_000):
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            try:
                dead = await self._find_dead()
                replaced.update(member.rank for member in dead)
                for member in dead:
                    member.discard()
                    self.members[member.rank] = self._new_member(member.rank)
                await self._bring_up([self.members[member.rank] for member in dead])
                break
            except (EpserveError, RayError, OSError) as error:
                log.warning("recovery attempt %d failed: %s", attempt + 1, error)
        done = Recovery(cause=self._cause, replaced=tuple(sorted(replaced)), seconds=time.monotonic() - start)
        self.recoveries.append(done)
        log.warning("recovered in %.2f s, replaced ranks %s", done.seconds, list(done.replaced))
        self._recovery = None
        self._set_serving()

    async def _find_dead(self) -> list[Member]:
        """Members without a usable process. Hung ones are killed; their peers then leave their collectives at once."""
        await asyncio.gather(*(self._end_if_silent(member) for member in self.members if member.alive))
        if self._device == "cuda":
            for member in self.members:
                if member.alive:
                    member.actor.abort.remote()
        pending = [future for member in self.members if member.link is not None for future in member.link.pending()]
        if pending:
            await asyncio.wait(pending, timeout=SETTLE_S)
        stuck = [member for member in self.members if member.alive and member.link and member.link.num_pending]
        await asyncio.gather(*(self._end(member, "did not leave its step") for member in stuck))
        return [member for member in self.members if not member.alive]

    async def _end_if_silent(self, member: Member) -> None:
        if not await member.ping(PING_TIMEOUT_S):
            await self._end(member, f"did not answer for {PING_TIMEOUT_S:g} s")

    async def _end(self, member: Member, why: str) -> None:
        assert member.facts is not None and member.link is not None
        phase = f" (last seen in {member.pulse.phase!r})" if member.pulse is not None else ""
        log.warning("rank %d %s%s: killing process %d", member.rank, why, phase, member.facts.pid)
        await self._agents.kill(member.facts)
        member.link.close()

    def _new_member(self, rank: int) -> Member:
        return Member.create(self._config, rank, device=self._device, group=self._place)

    async def _bring_up(self, new: list[Member]) -> None:
        """Set up and load the new members, then take all into the next generation of the group."""
        limit = self._config.cluster.start_timeout_s
        facts = await call_all(new, "set_up", timeout=limit)
        for member, each in zip(new, facts, strict=True):
            member.facts = each
        known = [member.facts for member in self.members if member.facts is not None]
        check_distinct_gpus(known)
        self._agents.cover([each.node_id for each in known])
        here = ray.get_runtime_context().get_node_id()
        await asyncio.gather(*(self._connect(member, here) for member in new))
        reports = await call_all(new, "load", timeout=limit)
        for member, report in zip(new, reports, strict=True):
            member.report = report
        self.generation += 1
        address = await self._group_address()
        survivors = [member for member in self.members if member not in new]
        await call_all(survivors, "leave", timeout=self._config.scheduler.step_timeout_s)
        await call_all(self.members, "join", address, timeout=limit)

    async def _connect(self, member: Member, here: str) -> None:
        assert member.facts is not None
        (address,) = await call_all([member], "listen", member.facts.node_id == here, timeout=CLOSE_TIMEOUT_S * 2)
        member.link = await SocketLink.open(member.rank, address, self._lost)

    def _new_store(self) -> Any:
        return ray.remote(max_restarts=0, num_cpus=0)(StoreActor).remote()

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

    def _set_serving(self) -> None:
        if self._closing:
            return
        lost = [member.rank for member in self.members if not member.alive]
        if lost:  # died between warm-up and now; its report came while nobody listened
            self._fail(f"ranks {lost}: their processes are gone")
            return
        self.serving.set()
        self._on_state("serving")


def _failures(done: set[asyncio.Future[dict[str, float]]]) -> list[Failure]:
    errors = [future.exception() for future in done]
    return [error.failure for error in errors if isinstance(error, RankLost)]


def _ignore(futures: set[asyncio.Future[dict[str, float]]]) -> None:
    """Their exceptions come later and are nobody's business any more."""
    for future in futures:
        future.add_done_callback(lambda each: each.exception())
