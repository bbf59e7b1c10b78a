"""The steps of a pool. A step goes to all ranks before any answer is awaited. A failed step raises its cause and culprit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from epserve.errors import RankFailed
from epserve.link.failure import Failure, RankLost, gone, root_cause
from epserve.link.transport import Rung
from epserve.rank.step import StepPlan, StepResult

from .members import Member, who
from .ranks import Ranks

log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Seconds for the other ranks to report a step that failed. It takes milliseconds, on a crowded machine more."""


class StepFailed(RankFailed):
    """A step failed. The same step may run again on the rebuilt group.

    Attributes:
        cause: rank, step, phase and error, in words.
        failure: the report that no other one explains. None: no rank has reported in time.
        member: the rank of that report.
    """

    def __init__(self, cause: str, failure: Failure | None = None, member: Member | None = None):
        super().__init__(cause)
        self.cause, self.failure, self.member = cause, failure, member

    @property
    def rank(self) -> int:
        """Returns the number of the failed rank, or -1 when no rank has reported."""
        return self.failure.rank if self.failure is not None else -1

    @property
    def spoilt(self) -> bool:
        """Whether the rank's process is of no further use."""
        return self.failure is not None and self.failure.spoilt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyStep:
    """A step by words that is written down but for its number. It runs as often as wanted, one run at a time.

    It is of use as long as `members`, their generation and the version of the layer's placement are the pool's own.

    Attributes:
        plans: one for each rank. Their `step` has no meaning.
        rungs: what each rank's words will say.
        out_MK: the result of the last run, in the memory that the ranks map.
        in_place: the ranks read the shards where they lie. Otherwise they read copies of their present values.
    """

    plans: Sequence[StepPlan]
    members: Sequence[Member]
    rungs: Sequence[Rung]
    out_MK: torch.Tensor
    in_place: bool


class PoolSteps:
    """Runs steps on all ranks. `tokens_done`: rank -> tokens of its finished steps."""

    def __init__(self, ranks: Ranks, on_failing: Callable[[str], None]):
        """on_failing: is called with the reason as soon as a step fails or is late. The exception follows with all reports."""
        self._ranks, self._on_failing = ranks, on_failing
        self.tokens_done: dict[int, int] = {}
        self._late: set[asyncio.Task[None]] = set()
        """Waits for answers of steps that were given up."""

    async def run(self, plans: Sequence[StepPlan], shards: Sequence[Sequence[torch.Tensor]]) -> StepResult:
        """Runs one collective step.

        Args:
            plans: one for each rank, with one number of the step. The pool adds generation and placement.
            shards: the tensors of each rank.

        Raises:
            RankFailed: the ranks are being rebuilt, so the step was not sent.
            StepFailed: a rank failed. `on_failing` has been called before.
        """
        ranks = self._ranks
        if not ranks.serving.is_set():
            raise RankFailed("the ranks are being rebuilt")
        shape = ranks.plan.spec.shape
        placement = ranks.arrangement.placements[plans[0].layer].version
        plans = [replace(plan, generation=ranks.generation, placement=placement) for plan in plans]
        # Other results go to where their requests want them on the rank's GPU.
        coming = [sum(part.rows for part in plan.parts if part.target is None) for plan in plans]
        out_MK = ranks.empty((sum(coming), plans[0].columns or shape.hidden), shape.dtype)
        futures: list[asyncio.Future[dict[str, Any]]] = []
        first = 0
        # No await between the submissions: every rank sees the steps in one order.
        members = list(ranks.members)
        for member, plan, shard, count in zip(members, plans, shards, coming, strict=True):
            assert member.link is not None
            futures.append(member.link.submit(plan.as_json(), shard, out_MK[first : first + count]))
            first += count
        running = ranks.running[plans[0].step] = asyncio.get_running_loop().create_future()
        try:
            await self._finish(plans[0], futures, members)
        finally:
            del ranks.running[plans[0].step]
            running.set_result(None)
        self.count(plans[0].tokens_per_rank, members)
        return _result(out_MK, plans, [future.result() for future in futures])

    def ready(self, plans: Sequence[StepPlan], shards: Sequence[Sequence[torch.Tensor]]) -> ReadyStep | None:
        """Writes a step down for `run_alone`, in the calling thread, which is not the loop's.

        Args:
            plans: as of `run`, without rows in regions of GPUs. Their `step` has no meaning.
            shards: as of `run`. Those that do not lie in the arena are copied now.

        Returns:
            The step, or None when it cannot go by words now.
        """
        ranks, counts = self._ranks, plans[0].tokens_per_rank
        members, arena = list(ranks.members), ranks.arena
        placement, generation = ranks.arrangement.placements[plans[0].layer], ranks.generation
        links = [member.link for member in members]
        if arena is None or len(members) != len(plans) or any(link is None or link.words is None for link in links):
            return None
        placed = [each for shard in shards if (each := self._placed(shard)) is not None]
        shape = ranks.plan.spec.shape
        out_MK = arena.empty((sum(counts), shape.hidden), shape.dtype)
        if out_MK is None or len(placed) < len(shards):
            return None
        plans = [replace(plan, generation=generation, placement=placement.version) for plan in plans]
        rungs, first = [], 0
        for link, plan, shard, count in zip(links, plans, placed, counts, strict=True):
            assert link is not None
            rungs.append(link.rung(plan.as_json(), shard, out_MK[first : first + count]))
            first += count
        in_place = all(
            one is other for pair in zip(shards, placed, strict=True) for one, other in zip(*pair, strict=True)
        )
        return ReadyStep(plans=plans, members=members, rungs=rungs, out_MK=out_MK, in_place=in_place)

    def run_alone(self, step: ReadyStep, number: int, judge: Callable[[StepFailed], None]) -> StepResult | None:
        """Runs a step by words, in the calling thread, which is not the loop's. No other step is under way.

        Args:
            step: from `ready`.
            number: of the step.
            judge: is called in the loop with the error of a step that failed.

        Returns:
            The outcome, or None when the step cannot run now, or is of no use any more. Nothing has begun then.

        Raises:
            StepFailed: as `run`.
        """
        alone = self._ranks.alone
        alone.begin()  # before the state is read. A change of the state, or of the placements, waits for its end afterwards
        try:
            if not self._serves(step):
                return None
            for member, rung in zip(step.members, step.rungs, strict=True):
                assert member.link is not None
                member.link.ring(rung, number)
            answers = self._answers_alone(step, number, judge)
            self.count(step.plans[0].tokens_per_rank, step.members)
            return _result(step.out_MK, step.plans, answers)
        finally:
            alone.end()

    def _serves(self, step: ReadyStep) -> bool:
        """Returns whether a step's ranks serve, and are those that it was written for."""
        ranks, plan = self._ranks, step.plans[0]
        placement = ranks.arrangement.placements[plan.layer]
        return (
            ranks.serving.is_set()
            and plan.generation == ranks.generation
            and plan.placement == placement.version
            and not placement.missing
            and len(step.members) == len(ranks.members)
            and all(one is other and one.link is not None and not one.link.lost
                    for one, other in zip(step.members, ranks.members, strict=True))
        )  # fmt: skip

    def _placed(self, shard: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns the tensors in the arena, or None when it has no room."""
        arena = self._ranks.arena
        placed = []
        for tensor in shard:
            if arena is not None and tensor.numel() and arena.offset_of(tensor) is None:
                copy = arena.empty(tuple(tensor.shape), tensor.dtype)
                if copy is None:
                    return None
                tensor = copy.copy_(tensor)
            placed.append(tensor)
        return placed

    def _answers_alone(self, step: ReadyStep, number: int, judge: Callable[[StepFailed], None]) -> list[dict[str, Any]]:
        """Waits for the answers of all ranks. Raises StepFailed."""
        members = step.members
        until = time.monotonic() + self._ranks.config.scheduler.step_timeout_s
        told: list[dict[str, Any] | None] = []
        for member in members:
            assert member.link is not None
            told.append(answer := member.link.answered(number, until))
            if answer is None or answer.get("failure"):
                until = min(until, time.monotonic() + SETTLE_S)  # peers report within milliseconds
        answers = [each for each in told if each is not None and not each.get("failure")]
        if len(answers) < len(members):
            failed = self._failed_alone(replace(step.plans[0], step=number), list(members), told, judge)
            asyncio.run_coroutine_threadsafe(failed, self._ranks.loop).result()
        return answers

    async def _failed_alone(
        self, plan: StepPlan, members: list[Member], told: Sequence[dict[str, Any] | None],
        judge: Callable[[StepFailed], None],
    ) -> NoReturn:  # fmt: skip
        """Finds the culprit of a step of another thread from each rank's answer. Raises StepFailed."""
        futures: list[asyncio.Future[dict[str, Any]]] = []
        for member, each in zip(members, told, strict=True):
            futures.append(future := asyncio.get_running_loop().create_future())
            if each is None:
                if member.link is None or member.link.lost:
                    future.set_exception(gone("the connection ended in a step"))
                else:
                    task = asyncio.ensure_future(member.link.outlast(plan.step))
                    self._late.add(task)
                    task.add_done_callback(self._late.discard)
            elif each.get("failure"):
                future.set_exception(RankLost(Failure(**each["failure"])))
            else:
                future.set_result(each)
        try:
            await self._finish(plan, futures, members)
        except StepFailed as error:
            judge(error)
            raise
        raise AssertionError("a step that failed has a failure")

    def count(self, tokens_per_rank: Sequence[int], members: Sequence[Member]) -> None:
        """Counts the tokens of a step that went well. The members may have changed since it ran."""
        self._ranks.tokens_total += sum(tokens_per_rank)
        for member, count in zip(members, tokens_per_rank, strict=False):
            self.tokens_done[member.rank] = self.tokens_done.get(member.rank, 0) + count

    async def _finish(
        self, plan: StepPlan, futures: list[asyncio.Future[dict[str, Any]]], members: list[Member]
    ) -> None:
        ranks = self._ranks
        # Steps in front of this one on the ranks count against its time too.
        limit = ranks.config.scheduler.step_timeout_s * len(self._ranks.running)
        _, waiting = await asyncio.wait(futures, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        failures = _failures(futures)
        if not failures and not waiting:
            return
        if not failures:
            late = [members[rank] for rank, future in enumerate(futures) if future in waiting]
            text = f"step {plan.step} of layer {plan.layer}: no answer within {limit:g} s from {who(late)}"
            self._on_failing(text)
            _ignore(waiting)
            raise StepFailed(text)
        self._on_failing(_describe(root_cause(failures), members))
        if waiting:  # peers report within milliseconds; the first report is not always the cause
            _, waiting = await asyncio.wait(futures, timeout=SETTLE_S)
            failures = _failures(futures)
            _ignore(waiting)
        # A rank that is put down because it cannot leave the step is not the cause of the failure.
        failures = [replace(each, consequence=each.consequence or members[each.rank].put_down) for each in failures]
        cause = root_cause(failures)
        text = _describe(cause, members)
        log.warning("%s%s", text, f"\n{cause.trace}".rstrip())
        raise StepFailed(text, cause, members[cause.rank])


def _result(out_MK: torch.Tensor, plans: Sequence[StepPlan], answers: Sequence[dict[str, Any]]) -> StepResult:
    """Ranks number the parts of their own share. The result has the numbers of the step."""
    left_out: dict[int, frozenset[int]] = {}
    refused: dict[int, Mapping[str, Any]] = {}
    not_finite: dict[int, Sequence[int]] = {}
    for plan, told in zip(plans, answers, strict=True):
        for own, experts in told["left_out"]:
            part = plan.parts[own].part
            left_out[part] = left_out.get(part, frozenset()).union(experts)
        # A part that is tied to a rank has all its rows there.
        refused |= {plan.parts[own].part: why for own, why in told["refused"]}
        not_finite |= {plan.parts[own].part: rows for own, rows in told["not_finite"]}
    phases = tuple(told["phases"] for told in answers)
    return StepResult(out_MK=out_MK, left_out=left_out, refused=refused, not_finite=not_finite, phases=phases)


def _describe(failure: Failure, members: Sequence[Member]) -> str:
    """Returns rank, step, phase, error and the place of the rank."""
    return f"{failure.describe()} [{members[failure.rank].where}]"


def _failures(futures: Sequence[asyncio.Future[dict[str, Any]]]) -> list[Failure]:
    """Returns the failures among the futures that have ended, in the order of ranks."""
    errors = [(rank, future.exception()) for rank, future in enumerate(futures) if future.done()]
    return [replace(error.failure, rank=rank) for rank, error in errors if isinstance(error, RankLost)]


def _ignore(futures: set[asyncio.Future[dict[str, Any]]]) -> None:
    """Reads the exceptions when they come, so that asyncio does not log them."""
    for future in futures:
        future.add_done_callback(lambda each: each.exception())
