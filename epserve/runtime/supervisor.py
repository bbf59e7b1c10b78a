"""Notices ranks that died, hang or raise, and rebuilds: the service goes on with spares, with copies, or with a new process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from epserve import rank_plan
from epserve.errors import EpserveError, OperatorError
from epserve.step import Arrangement

from .failure import Failure, RankLost
from .members import Member, last_seen

if TYPE_CHECKING:
    from .pool import Pool

log = logging.getLogger(__name__)

BEATS_PER_HEARTBEAT = 4  # asked so often, so that silence is known after one heartbeat and not after two
LOAD_S = 2.0  # so often the expert load is read, where steps have run since
PING_TIMEOUT_S = 3.0  # a process that is alive answers in milliseconds, on a crowded machine in tenths of a second
# How long survivors may take to report a step that failed elsewhere: milliseconds, on a crowded machine more. On GPUs what can
# be ended from outside has ended by then (NCCL, nvlink); DeepEP's kernels cannot, and only the end of the process ends them.
SETTLE_S = 5.0
SETTLE_CUDA_S = 2.0
SETTLE_HELD_S = 0.4  # with those: for what a step does on the host and behind its last collective
BLAME_S = (
    60.0  # a rank that makes two steps fail within this time is replaced: it may lack memory, or its device is ill
)
RETRY_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # pauses between attempts to rebuild; the last one repeats
STUCK_RETRY_S = (
    30.0  # instead of the last one, where only an operator can help: each attempt costs the start of a process
)
PLANNED_ATTEMPTS = 3  # to another number of ranks; then back to what there was


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One finished recovery, for the log and the metrics.

    `by`: "spare", "copies" (the other ranks hold copies of all experts), "rest" (they do not, and go on without),
    "standby" (a process that waited without weights), "process" (a new one), "regroup" (nobody was lost).
    `stages`: seconds of the attempt that succeeded, in order: "fence" (who is dead is known and ended), "weights" (a
    newcomer holds its experts), "leave" (all are out of the old group), "join", of which the slowest rank spent "group"
    and "warm-up".
    """

    cause: str
    replaced: tuple[int, ...]
    by: str
    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)


class Marks:
    """Seconds between the stages of one attempt."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def add(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in self.seconds.items())


class Supervisor:
    """Of one pool."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self.cause = ""
        self.recoveries: list[Recovery] = []
        self.experts_missing = False
        self.stuck = ""
        """Why the service will not come back before somebody has done something; empty: it will, as far as is known."""
        self.on_missing: Callable[[], None] = lambda: None
        """Called when a recovery has to wait for a process to start, and when it is stuck."""
        self._silent: set[Member] = set()
        self._unreachable: set[str] = set()  # addresses of nodes on which nothing could be ended
        self._spoilt: set[Member] = set()
        self._blamed: tuple[Member | None, float] = None, 0.0
        self._rebuilding: asyncio.Task | None = None
        self._heart: asyncio.Task | None = None
        self._counted, self._next_count = (
            0,
            time.monotonic(),
        )  # tokens when the load was last read, and when it may be again

    def start(self) -> None:
        self._heart = asyncio.ensure_future(self._watch())

    def close(self) -> list[asyncio.Task]:
        return [task for task in (self._heart, self._rebuilding) if task is not None]

    def fail(self, cause: str, *, silent: Collection[Member] = ()) -> None:
        """Something is wrong with a rank: stop serving, rebuild. Safe to call again while that goes on."""
        pool = self._pool
        if pool.closing or self.rebuilding or not pool.started:
            return
        log.warning("recovering: %s", cause)
        self._silent = set(silent)
        self.rebuild(cause)

    def lost(self, member: Member) -> None:
        if member in self._pool.members:
            self.fail(f"rank {member.rank}: its process is gone [{member.where}]")

    @property
    def rebuilding(self) -> bool:
        return self._rebuilding is not None and not self._rebuilding.done()

    def rebuild(self, cause: str, *, back: Callable[[Exception], None] | None = None) -> asyncio.Task:
        """Take all members into the pool's arrangement, replacing those that are gone, until it succeeds.

        back: of a planned change; called once when that fails, it makes the pool what it was before.
        """
        assert not self.rebuilding
        self.cause = cause
        self._pool.serving.clear()
        self._pool.on_state("resizing" if back is not None else "recovering")
        self._rebuilding = asyncio.ensure_future(self._rebuild(back))
        return self._rebuilding

    async def settled(self, timeout: float) -> None:
        """Waits for a rebuilding that goes on, at most that long."""
        if self.rebuilding:
            assert self._rebuilding is not None
            await asyncio.wait([self._rebuilding], timeout=timeout)

    def blame(self, member: Member, failure: Failure) -> None:
        """A step, or joining the others, failed because of this rank.

        Its process is replaced where it is spoilt, or failed just before as well.
        """
        if failure.consequence:
            return
        now, (who, when) = time.monotonic(), self._blamed
        self._blamed = member, now
        if failure.spoilt or (who is member and now - when < BLAME_S):
            self._spoilt.add(member)

    async def _watch(self) -> None:
        """Looks after all processes as long as the pool lives: whatever one look meets, the next one comes."""
        pause = self._pool.config.scheduler.heartbeat_s / BEATS_PER_HEARTBEAT
        while True:
            await asyncio.sleep(pause)
            if self._pool.serving.is_set():
                try:
                    await self._look(pause)
                except Exception:
                    log.exception("looking after the ranks failed; the next look comes in %.1f s", pause)

    async def _look(self, pause: float) -> None:
        """Asks all processes and their step threads. A silent one counts as hung, whether a step runs or not."""
        pool, heartbeat = self._pool, self._pool.config.scheduler.heartbeat_s
        limit, members, asked = heartbeat - pause, list(pool.members), time.monotonic()
        answers = await asyncio.gather(*(_lives(member, limit) for member in members))
        silent = [member for member, answered in zip(members, answers, strict=True) if not answered]
        if silent and time.monotonic() - asked > limit + pause:
            log.warning("this process itself had no time for %.1f s: nobody is judged", time.monotonic() - asked)
            return
        if silent and pool.serving.is_set() and all(member in pool.members for member in silent):
            where = "; ".join(f"rank {member.rank} ({member.where}{last_seen(member)})" for member in silent)
            self.fail(f"no sign of life for {heartbeat:g} s: {where}", silent=silent)
            return
        await pool.spares.check(PING_TIMEOUT_S)
        await pool.standbys.check(PING_TIMEOUT_S)
        if pool.tokens_total != self._counted and time.monotonic() >= self._next_count:
            self._counted, self._next_count = pool.tokens_total, time.monotonic() + LOAD_S
            await asyncio.gather(*(member.read_load(pool.load) for member in members))

    async def _rebuild(self, back: Callable[[Exception], None] | None) -> None:
        pool, start = self._pool, time.monotonic()
        replaced: set[int] = set()
        by, planned = "regroup", back is not None
        if planned:
            await pool.steps_done()
        for attempt in range(1_000_000):
            last = STUCK_RETRY_S if self.stuck else RETRY_S[-1]
            await asyncio.sleep(RETRY_S[attempt] if attempt < len(RETRY_S) else last)
            try:
                marks = Marks()
                dead = await self._find_dead()
                marks.add("fence")
                if dead:
                    replaced.update(member.rank for member in dead)
                    by = self._replace(dead)
                new = [member for member in pool.members if member.report is None]
                await pool.prepare(new, pool.arrangement)
                marks.add("weights")
                await pool.unite(marks)
                break
            except (EpserveError, RayError, OSError) as error:
                log.warning("attempt %d to rebuild failed: %s", attempt + 1, error)
                if isinstance(error, RankLost) and 0 <= error.failure.rank < len(pool.members):
                    self.blame(pool.members[error.failure.rank], error.failure)
                if back is not None and (isinstance(error, OperatorError) or attempt + 1 >= PLANNED_ATTEMPTS):
                    log.warning("%s failed; back to what there was", self.cause)
                    back(error)
                    back = None
                elif isinstance(error, OperatorError) and by != "spare":  # without the spare there may be other ways
                    self.stuck = str(error)
                    self.on_missing()
        seconds = time.monotonic() - start
        if not planned or replaced:
            done = Recovery(
                cause=self.cause, replaced=tuple(sorted(replaced)), by=by, seconds=seconds, stages=marks.seconds
            )
            self.recoveries.append(done)
            log.warning("recovered in %.2f s by %s, lost ranks %s (%s)", seconds, by, list(done.replaced), marks)
        self._rebuilding = None
        self.experts_missing = False
        self.stuck = ""
        pool.set_serving()
        pool.spares.refill()
        pool.refill_standbys()
        pool.changes.grow_back()

    def _replace(self, dead: list[Member]) -> str:
        """Fill the places of `dead`: with spares, else by doing without where copies allow it, else with new processes."""
        pool = self._pool
        for member in dead:
            pool.discard(member)
        spares = pool.spares.take(len(dead))
        for member, spare in zip(dead, spares, strict=False):
            spare.rank = member.rank
            pool.members[member.rank] = spare
        missing = dead[len(spares) :]
        if not missing:
            return "spare"
        lost = {member.rank for member in missing}
        by, less = "copies", _without(pool, lost)
        if less is None and pool.config.engine.when_experts_missing != "wait":
            by, less = "rest", _without(pool, lost, partial=True)
        if less is not None:
            pool.changes.lose(lost)
            pool.members = [member for member in pool.members if member not in missing]
            pool.arrangement = less
            for rank, member in enumerate(pool.members):
                member.rank = rank
            if by == "rest":
                log.warning("experts that are on no rank until a process has started: %s", pool.missing)
            return by
        self.experts_missing = True
        self.on_missing()
        new = [pool.new_member(member.rank) for member in missing]
        for member in new:
            pool.members[member.rank] = member
        return "standby" if all(member.stood_by for member in new) else "process"

    async def _find_dead(self) -> list[Member]:
        """Members without a usable process. Hung ones are killed; their peers then leave their collectives at once."""
        pool, silent, self._silent = self._pool, self._silent, set()
        await asyncio.gather(*(self._end(member, "gave no sign of life") for member in silent if member.alive))
        await asyncio.gather(*(self._end_if_silent(member) for member in pool.members if member.alive))
        unreachable, self._unreachable = self._unreachable, set()
        if pool.device == "cuda" or unreachable:
            for member in pool.members:
                if member.alive and member.facts is not None:
                    member.actor.abort.remote(pool.generation, sorted(unreachable - {member.facts.node_ip}))
        settle = SETTLE_CUDA_S if pool.device == "cuda" else SETTLE_S
        pending = [future for member in pool.members if member.link is not None for future in member.link.pending()]
        held = not pool.interruptible
        if pending:
            await asyncio.wait(pending, timeout=SETTLE_HELD_S if held else settle)
        if held:
            await self._end_stuck()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pool.steps_done(), settle)  # then it is known whose fault it was
        spoilt, self._spoilt = self._spoilt & set(pool.members), set()
        await asyncio.gather(*(self._end(member, "fails again and again") for member in spoilt if member.alive))
        await self._end_stuck()
        return [member for member in pool.members if not member.alive]

    async def _end_stuck(self) -> None:
        stuck = [each for each in self._pool.members if each.alive and each.link and each.link.num_pending]
        for member in stuck:
            member.put_down = True
        await asyncio.gather(*(self._end(member, "did not leave its step") for member in stuck))

    async def _end_if_silent(self, member: Member) -> None:
        limit = min(PING_TIMEOUT_S, self._pool.config.scheduler.heartbeat_s)
        asked = time.monotonic()
        if not await member.ping(limit):
            # Ray may know that a process is gone before its socket tells.
            waited = time.monotonic() - asked >= limit
            await self._end(member, f"did not answer for {limit:g} s" if waited else "is gone")

    async def _end(self, member: Member, why: str) -> None:
        assert member.facts is not None and member.link is not None
        log.warning("rank %d %s%s: killing it [%s]", member.rank, why, last_seen(member), member.where)
        if not await self._pool.agents.kill(member.facts):
            self._unreachable.add(member.facts.node_ip)
            self._pool.standbys.leave(member.facts.node_id)
        member.link.close()


def _without(pool: Pool, ranks: set[int], *, partial: bool = False) -> Arrangement | None:
    """The same without `ranks`; None where that would lose an expert (unless partial) or the last rank, or cannot be run."""
    arrangement, version = pool.arrangement, pool.changes.next_version()
    placements = {}
    for layer, placement in arrangement.placements.items():
        possible = len(ranks) < placement.layout.num_ranks
        less = placement.without(ranks, version=version, partial=partial) if possible else None
        if less is None:
            return None
        placements[layer] = less
    first = next(iter(placements.values()))
    try:
        config = rank_plan.resized(arrangement.config, first.layout.counts, first.num_logical)
        rank_plan.check_layout(config, pool.plan, first.layout)
    except EpserveError as error:
        log.warning("the other ranks cannot go on alone: %s", error)
        return None
    return Arrangement(config=config, placements=placements)


async def _lives(member: Member, limit: float) -> bool:
    """Both the process and its step thread answer, or the results of steps come in."""
    asked = time.monotonic()
    answers = await asyncio.gather(member.ping(limit), member.beat(limit))
    return all(answers) or (member.link is not None and member.link.heard > asked)
