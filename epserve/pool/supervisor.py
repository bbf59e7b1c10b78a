"""The walk of a lost rank, from top to bottom: noticed, ended, replaced, joined to a new group.

noticed    `lost` (its link ended), `_look` (it is silent), `PoolSteps` (a step failed or is late) -> `fail`
repeated   `_rebuild` repeats `_attempt` until one succeeds
fenced     `_fence` ends every process that hangs or is spoilt. The others then leave the step.
replaced   `_replace` tries spare, copies, rest, standby and process, in this order
joined     `Ranks.prepare` loads the newcomers' experts, `Ranks.unite` joins all ranks to the next generation
resumed    `_resume` serves again and starts the next spares and standbys
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ray.exceptions import RayError

from epserve.errors import EpserveError, OperatorError
from epserve.link.failure import Failure, RankLost
from epserve.process.phases import Marks

from .members import Member, last_seen, who
from .ranks import Ranks
from .steps import SETTLE_S, StepFailed

log = logging.getLogger(__name__)

BEATS_PER_HEARTBEAT = 4  # looks in one heartbeat, so that silence is known after one heartbeat and not after two
LOAD_S = 2.0  # pause between two readings of the expert load, if steps have run since
PING_TIMEOUT_S = 3.0  # a process that is alive answers in milliseconds, on a crowded machine in tenths of a second
# On GPUs, operations that can be ended from outside (NCCL, nvlink) have ended by then.
SETTLE_CUDA_S = 2.0
# DeepEP's kernels end only with the process. The time is for the host's part of a step and the work behind its last collective.
SETTLE_HELD_S = 0.4
# A rank that makes two steps fail within this time is replaced: it may lack memory, or its device is ill.
BLAME_S = 60.0
RETRY_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # pauses between attempts to rebuild. The last one repeats.
# Replaces the last pause when only an operator can help. Each attempt costs the start of a process.
STUCK_RETRY_S = 30.0
PLANNED_ATTEMPTS = 3  # attempts to reach another number of ranks, before the former one comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One finished recovery, for the log and the metrics.

    Attributes:
        cause: rank, step, phase and error.
        replaced: numbers of the lost ranks.
        by: the last strategy that was needed (`Supervisor._strategies`), or "regroup" when no rank was lost.
        seconds: from the notice to serving again.
        stages: seconds of the attempt that succeeded, in order: "fence" (dead processes are known and ended), "weights" (the
            newcomers hold their experts), "leave" (all ranks are out of the old group) and "join". Of "join", the slowest rank
            spent "group" and "warm-up".
    """

    cause: str
    replaced: tuple[int, ...]
    by: str
    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Walk:
    """The replacements of one recovery so far, over all attempts."""

    replaced: set[int] = field(default_factory=set)
    by: str = "regroup"


class Supervisor:
    """Supervises the ranks of one pool: notices lost ranks and rebuilds the group."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self.cause = ""
        self.recoveries: list[Recovery] = []
        self.experts_missing = False
        """Some experts are on no rank until a process has started."""
        self.stuck = ""
        """The reason why the service cannot recover without an operator. Empty: it can, as far as is known."""
        self.on_missing: Callable[[], None] = lambda: None
        """Is called when a recovery has to wait for a process to start, and when it is stuck."""
        self.on_fewer: Callable[[Collection[int]], None] = lambda ranks: None
        """Is called with the numbers of lost ranks before the others go on without them."""
        self.on_rebuilt: Callable[[], None] = lambda: None
        """Is called when the ranks serve again."""
        self._silent: set[Member] = set()
        self._unreachable: set[str] = set()  # addresses of nodes on which no process could be ended
        self._spoilt: set[Member] = set()
        self._blamed: tuple[Member | None, float] = None, 0.0
        self._rebuilding: asyncio.Task | None = None
        self._heart: asyncio.Task | None = None
        self._counted, self._next_count = 0, time.monotonic()  # tokens at the last reading, and time of the next one

    def start(self) -> None:
        self._heart = asyncio.ensure_future(self._watch())

    def close(self) -> list[asyncio.Task]:
        """Returns the tasks that the caller has to cancel and await."""
        return [task for task in (self._heart, self._rebuilding) if task is not None]

    # 1. A lost rank is noticed.

    def lost(self, member: Member) -> None:
        """The link to a rank has ended."""
        if member in self._ranks.members:
            self.fail(f"rank {member.rank}: its process is gone [{member.where}]")

    def judge(self, error: StepFailed) -> None:
        """Takes the facts of a failed step: its cause, and the rank that may have to be replaced.

        The step has called `fail` before it waited for the reports of all ranks.
        """
        if error.failure is not None and error.member is not None:
            self.cause = error.cause
            self._blame(error.member, error.failure)

    async def _watch(self) -> None:
        """Looks after all processes as long as the pool lives. A look that fails does not end the looking."""
        pause = self._ranks.config.scheduler.heartbeat_s / BEATS_PER_HEARTBEAT
        while True:
            await asyncio.sleep(pause)
            if self._ranks.serving.is_set():
                try:
                    await self._look(pause)
                except Exception:
                    log.exception("looking after the ranks failed; the next look comes in %.1f s", pause)

    async def _look(self, pause: float) -> None:
        """Asks all processes and their step threads. A silent one counts as hung, also while a step runs."""
        ranks, heartbeat = self._ranks, self._ranks.config.scheduler.heartbeat_s
        limit, members, asked = heartbeat - pause, list(ranks.members), time.monotonic()
        longest = ranks.config.scheduler.step_timeout_s
        answers = await asyncio.gather(*(_lives(member, limit, longest) for member in members))
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

    def fail(self, cause: str, *, silent: Collection[Member] = ()) -> None:
        """Stops serving and starts to rebuild. Does nothing while that goes on."""
        ranks = self._ranks
        if ranks.closing or self.rebuilding or not ranks.started:
            return
        log.warning("recovering: %s", cause)
        self._silent = set(silent)
        self.rebuild(cause)

    # 2. The group is rebuilt, in as many attempts as it takes.

    @property
    def rebuilding(self) -> bool:
        return self._rebuilding is not None and not self._rebuilding.done()

    def rebuild(self, cause: str, *, back: Callable[[Exception], None] | None = None) -> asyncio.Task:
        """Joins all members in the pool's arrangement and replaces lost ones, until that succeeds.

        Args:
            cause: the reason, for the log.
            back: undoes a planned change. It is called once, when the change fails.
        """
        assert not self.rebuilding
        self.cause = cause
        self._ranks.serving.clear()
        self._ranks.on_state("resizing" if back is not None else "recovering")
        self._rebuilding = asyncio.ensure_future(self._rebuild(back))
        return self._rebuilding

    async def settled(self, timeout: float) -> None:
        """Waits until no rebuilding goes on, at most `timeout` seconds."""
        if self.rebuilding:
            assert self._rebuilding is not None
            await asyncio.wait([self._rebuilding], timeout=timeout)

    async def _rebuild(self, back: Callable[[Exception], None] | None) -> None:
        ranks, start = self._ranks, time.monotonic()
        walk, planned = _Walk(), back is not None
        if planned:
            await ranks.steps_done()
        for attempt in range(1_000_000):
            last = STUCK_RETRY_S if self.stuck else RETRY_S[-1]
            await asyncio.sleep(RETRY_S[attempt] if attempt < len(RETRY_S) else last)
            try:
                marks = await self._attempt(walk)
                break
            except (EpserveError, RayError, OSError) as error:
                log.warning("attempt %d to rebuild failed: %s", attempt + 1, error)
                if isinstance(error, RankLost) and 0 <= error.failure.rank < len(ranks.members):
                    self._blame(ranks.members[error.failure.rank], error.failure)
                if back is not None and (isinstance(error, OperatorError) or attempt + 1 >= PLANNED_ATTEMPTS):
                    log.warning("%s failed; back to what there was", self.cause)
                    back(error)
                    back = None
                elif (
                    isinstance(error, OperatorError) and walk.by != "spare"
                ):  # without the spare there may be other ways
                    self.stuck = str(error)
                    self.on_missing()
        seconds = time.monotonic() - start
        if not planned or walk.replaced:
            lost = tuple(sorted(walk.replaced))
            done = Recovery(cause=self.cause, replaced=lost, by=walk.by, seconds=seconds, stages=marks.seconds)
            self.recoveries.append(done)
            log.warning("recovered in %.2f s by %s, lost ranks %s (%s)", seconds, walk.by, list(lost), marks)
        self._resume()

    async def _attempt(self, walk: _Walk) -> Marks:
        """Raises EpserveError, RayError or OSError. `walk` has the replaced ranks, also when it fails."""
        ranks, marks = self._ranks, Marks()
        dead = await self._fence()
        marks.add("fence")
        if dead:
            walk.replaced.update(member.rank for member in dead)
            walk.by = self._replace(dead)
        newcomers = [member for member in ranks.members if member.report is None]
        await ranks.prepare(newcomers, ranks.arrangement)
        marks.add("weights")
        await ranks.unite(marks)
        return marks

    # 3. Every process that hangs or is spoilt is ended, so that the others leave the step.

    async def _fence(self) -> list[Member]:
        """Ends hung processes; their peers then leave their collectives at once. Returns the members without a usable process."""
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
            await asyncio.wait_for(ranks.steps_done(), settle)  # then `judge` has named the culprit
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

    def _blame(self, member: Member, failure: Failure) -> None:
        """Marks a rank whose process is spoilt, or that made a step or a rebuilding fail just before, for replacement."""
        if failure.consequence:
            return
        now, (blamed, when) = time.monotonic(), self._blamed
        self._blamed = member, now
        if failure.spoilt or (blamed is member and now - when < BLAME_S):
            self._spoilt.add(member)

    # 4. The dead are replaced. Each strategy takes the dead that the ones before it left, and returns those that it leaves.

    @property
    def _strategies(self) -> tuple[tuple[str, Callable[[list[Member]], list[Member]]], ...]:
        return (
            ("spare", self._by_spares),  # processes that are ready take their places
            ("copies", self._by_copies),  # the other ranks hold every expert and go on
            ("rest", self._by_the_rest),  # the other ranks go on without some experts
            ("standby", self._by_standbys),  # processes that wait without weights take their places
            ("process", self._by_processes),  # new processes start
        )

    def _replace(self, dead: list[Member]) -> str:
        """Returns the name of the last strategy that was needed."""
        for member in dead:
            self._ranks.discard(member)
        by, left = "", dead
        for name, strategy in self._strategies:
            before, left = left, strategy(left)
            by = name if len(left) < len(before) else by
            if not left:
                break
        return by

    def _by_spares(self, dead: list[Member]) -> list[Member]:
        return self._fill(dead, lambda rank: self._ranks.spares.take())

    def _by_copies(self, dead: list[Member]) -> list[Member]:
        return self._go_on_without(dead)

    def _by_the_rest(self, dead: list[Member]) -> list[Member]:
        if self._ranks.config.engine.when_experts_missing == "wait":
            return dead
        left = self._go_on_without(dead, partial=True)
        if not left:
            log.warning("experts that are on no rank until a process has started: %s", self._ranks.missing)
        return left

    def _by_standbys(self, dead: list[Member]) -> list[Member]:
        self.experts_missing = True
        self.on_missing()
        return self._fill(dead, self._ranks.standby)

    def _by_processes(self, dead: list[Member]) -> list[Member]:
        return self._fill(dead, self._ranks.new_process)

    def _fill(self, dead: Sequence[Member], take: Callable[[int], Member | None]) -> list[Member]:
        left = []
        for member in dead:
            if (newcomer := take(member.rank)) is not None:
                self._ranks.put(member.rank, newcomer)
            else:
                left.append(member)
        return left

    def _go_on_without(self, dead: list[Member], *, partial: bool = False) -> list[Member]:
        ranks, lost = self._ranks, {member.rank for member in dead}
        if (less := ranks.without(lost, partial=partial)) is None:
            return dead
        self.on_fewer(lost)
        ranks.become([member for member in ranks.members if member not in dead], less)
        return []

    # 5. The ranks serve again.

    def _resume(self) -> None:
        self._rebuilding = None
        self.experts_missing = False
        self.stuck = ""
        self.set_serving()
        self._ranks.spares.refill()
        self._ranks.refill_standbys()
        self.on_rebuilt()

    def set_serving(self) -> None:
        """Serves with the group that has been joined, or fails at once when a rank died since: that report came unheard."""
        ranks = self._ranks
        if ranks.closing:
            return
        if dead := [member for member in ranks.members if not member.alive]:
            self.fail(f"processes are gone: {who(dead)}")
            return
        ranks.serving.set()
        ranks.on_state("serving")


async def _lives(member: Member, limit: float, step_limit: float) -> bool:
    """Returns whether both the process and its step thread answer, or results of steps come in."""
    asked = time.monotonic()
    answers = await asyncio.gather(member.ping(limit), member.beat(limit))
    if all(answers) or (member.link is not None and member.link.heard > asked):
        return True
    # The step thread may be at a step of lanes, which has a deadline of its own.
    return answers[0] and member.pulse is not None and member.pulse.step >= 0 and member.pulse.step_seconds < step_limit
