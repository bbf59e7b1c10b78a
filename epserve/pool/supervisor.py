"""Notices ranks that died, hang or raise, and rebuilds: the service goes on with spares, with copies, or with a new process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ray.exceptions import RayError

from epserve.errors import EpserveError, OperatorError
from epserve.link.failure import Failure, RankLost
from epserve.rank.setup import plan as rank_plan
from epserve.rank.step import Arrangement

from .members import Member, last_seen, who
from .ranks import Marks, Ranks

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


class Supervisor:
    """Watches the ranks of one pool and rebuilds their group."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.cause = ""
        self.recoveries: list[Recovery] = []
        self.experts_missing = False
        self.stuck = ""
        """Why the service will not come back before somebody has done something; empty: it will, as far as is known."""
        self.on_missing: Callable[[], None] = lambda: None
        """Called when a recovery has to wait for a process to start, and when it is stuck."""
        self.on_fewer: Callable[[Collection[int]], None] = lambda ranks: None
        """Called with the ranks that are lost where the others go on without them."""
        self.on_rebuilt: Callable[[], None] = lambda: None
        """Called when the ranks serve again."""
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

    def set_serving(self) -> None:
        """The group is there: serve. A rank that died since it joined is told here, since its report came unheard."""
        ranks = self._ranks
        if ranks.closing:
            return
        if lost := [member for member in ranks.members if not member.alive]:
            self.fail(f"processes are gone: {who(lost)}")
            return
        ranks.serving.set()
        ranks.on_state("serving")

    def fail(self, cause: str, *, silent: Collection[Member] = ()) -> None:
        """Something is wrong with a rank: stop serving, rebuild. Safe to call again while that goes on."""
        ranks = self._ranks
        if ranks.closing or self.rebuilding or not ranks.started:
            return
        log.warning("recovering: %s", cause)
        self._silent = set(silent)
        self.rebuild(cause)

    def lost(self, member: Member) -> None:
        if member in self._ranks.members:
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
        self._ranks.serving.clear()
        self._ranks.on_state("resizing" if back is not None else "recovering")
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
        now, (blamed, when) = time.monotonic(), self._blamed
        self._blamed = member, now
        if failure.spoilt or (blamed is member and now - when < BLAME_S):
            self._spoilt.add(member)

    async def _watch(self) -> None:
        """Looks after all processes as long as the pool lives: whatever one look meets, the next one comes."""
        pause = self._ranks.config.scheduler.heartbeat_s / BEATS_PER_HEARTBEAT
        while True:
            await asyncio.sleep(pause)
            if self._ranks.serving.is_set():
                try:
                    await self._look(pause)
                except Exception:
                    log.exception("looking after the ranks failed; the next look comes in %.1f s", pause)

    async def _look(self, pause: float) -> None:
        """Asks all processes and their step threads. A silent one counts as hung, whether a step runs or not."""
        ranks, heartbeat = self._ranks, self._ranks.config.scheduler.heartbeat_s
        limit, members, asked = heartbeat - pause, list(ranks.members), time.monotonic()
        answers = await asyncio.gather(*(_lives(member, limit) for member in members))
        silent = [member for member, answered in zip(members, answers, strict=True) if not answered]
        if silent and time.monotonic() - asked > limit + pause:
            log.warning("this process itself had no time for %.1f s: nobody is judged", time.monotonic() - asked)
            return
        if silent and ranks.serving.is_set() and all(member in ranks.members for member in silent):
            self.fail(f"no sign of life for {heartbeat:g} s: {who(silent)}", silent=silent)
            return
        await ranks.spares.check(PING_TIMEOUT_S)
        await ranks.standbys.check(PING_TIMEOUT_S)
        if ranks.tokens_total != self._counted and time.monotonic() >= self._next_count:
            self._counted, self._next_count = ranks.tokens_total, time.monotonic() + LOAD_S
            await asyncio.gather(*(member.read_load(ranks.load) for member in members))

    async def _rebuild(self, back: Callable[[Exception], None] | None) -> None:
        ranks, start = self._ranks, time.monotonic()
        replaced: set[int] = set()
        by, planned = "regroup", back is not None
        if planned:
            await ranks.steps_done()
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
                new = [member for member in ranks.members if member.report is None]
                await ranks.prepare(new, ranks.arrangement)
                marks.add("weights")
                await ranks.unite(marks)
                break
            except (EpserveError, RayError, OSError) as error:
                log.warning("attempt %d to rebuild failed: %s", attempt + 1, error)
                if isinstance(error, RankLost) and 0 <= error.failure.rank < len(ranks.members):
                    self.blame(ranks.members[error.failure.rank], error.failure)
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
        self.set_serving()
        ranks.spares.refill()
        ranks.refill_standbys()
        self.on_rebuilt()

    def _replace(self, dead: list[Member]) -> str:
        """Fill the places of `dead`: with spares, else by doing without where copies allow it, else with new processes."""
        ranks = self._ranks
        for member in dead:
            ranks.discard(member)
        spares = ranks.spares.take(len(dead))
        for member, spare in zip(dead, spares, strict=False):
            spare.rank = member.rank
            ranks.members[member.rank] = spare
        missing = dead[len(spares) :]
        if not missing:
            return "spare"
        lost = {member.rank for member in missing}
        by, less = "copies", _without(ranks, lost)
        if less is None and ranks.config.engine.when_experts_missing != "wait":
            by, less = "rest", _without(ranks, lost, partial=True)
        if less is not None:
            self.on_fewer(lost)
            ranks.members = [member for member in ranks.members if member not in missing]
            ranks.arrangement = less
            for rank, member in enumerate(ranks.members):
                member.rank = rank
            if by == "rest":
                log.warning("experts that are on no rank until a process has started: %s", ranks.missing)
            return by
        self.experts_missing = True
        self.on_missing()
        new = [ranks.new_member(member.rank) for member in missing]
        for member in new:
            ranks.members[member.rank] = member
        return "standby" if all(member.stood_by for member in new) else "process"

    async def _find_dead(self) -> list[Member]:
        """Members without a usable process. Hung ones are killed; their peers then leave their collectives at once."""
        ranks, silent, self._silent = self._ranks, self._silent, set()
        await asyncio.gather(*(self._end(member, "gave no sign of life") for member in silent if member.alive))
        await asyncio.gather(*(self._end_if_silent(member) for member in ranks.members if member.alive))
        unreachable, self._unreachable = self._unreachable, set()
        if ranks.device == "cuda" or unreachable:
            for member in ranks.members:
                if member.alive and member.facts is not None:
                    member.actor.abort.remote(ranks.generation, sorted(unreachable - {member.facts.node_ip}))
        settle = SETTLE_CUDA_S if ranks.device == "cuda" else SETTLE_S
        pending = [future for member in ranks.members if member.link is not None for future in member.link.pending()]
        held = not ranks.interruptible
        if pending:
            await asyncio.wait(pending, timeout=SETTLE_HELD_S if held else settle)
        if held:
            await self._end_stuck()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ranks.steps_done(), settle)  # then it is known whose fault it was
        spoilt, self._spoilt = self._spoilt & set(ranks.members), set()
        await asyncio.gather(*(self._end(member, "fails again and again") for member in spoilt if member.alive))
        await self._end_stuck()
        return [member for member in ranks.members if not member.alive]

    async def _end_stuck(self) -> None:
        stuck = [each for each in self._ranks.members if each.alive and each.link and each.link.num_pending]
        for member in stuck:
            member.put_down = True
        await asyncio.gather(*(self._end(member, "did not leave its step") for member in stuck))

    async def _end_if_silent(self, member: Member) -> None:
        limit = min(PING_TIMEOUT_S, self._ranks.config.scheduler.heartbeat_s)
        asked = time.monotonic()
        if not await member.ping(limit):
            # Ray may know that a process is gone before its socket tells.
            waited = time.monotonic() - asked >= limit
            await self._end(member, f"did not answer for {limit:g} s" if waited else "is gone")

    async def _end(self, member: Member, why: str) -> None:
        assert member.facts is not None and member.link is not None
        log.warning("rank %d %s%s: killing it [%s]", member.rank, why, last_seen(member), member.where)
        if not await self._ranks.agents.kill(member.facts):
            self._unreachable.add(member.facts.node_ip)
            self._ranks.standbys.leave(member.facts.node_id)
        member.link.close()


def _without(ranks: Ranks, lost: set[int], *, partial: bool = False) -> Arrangement | None:
    """The present arrangement without the `lost` ranks. None where that would lose an expert (unless partial) or the last
    rank, or cannot be run."""
    arrangement, version = ranks.arrangement, ranks.next_version()
    placements = {}
    for layer, placement in arrangement.placements.items():
        possible = len(lost) < placement.layout.num_ranks
        less = placement.without(lost, version=version, partial=partial) if possible else None
        if less is None:
            return None
        placements[layer] = less
    first = next(iter(placements.values()))
    try:
        config = rank_plan.resized(arrangement.config, first.layout.counts, first.num_logical)
        rank_plan.check_layout(config, ranks.plan, first.layout)
    except EpserveError as error:
        log.warning("the other ranks cannot go on alone: %s", error)
        return None
    return Arrangement(config=config, placements=placements)


async def _lives(member: Member, limit: float) -> bool:
    """Both the process and its step thread answer, or the results of steps come in."""
    asked = time.monotonic()
    answers = await asyncio.gather(member.ping(limit), member.beat(limit))
    return all(answers) or (member.link is not None and member.link.heard > asked)
