"""What replaces lost ranks, in which order, and what a failed step tells: without processes."""

from __future__ import annotations

import ast
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from epserve import pool as room
from epserve.link.failure import Failure, RankLost
from epserve.pool.steps import PoolSteps, StepFailed
from epserve.pool.supervisor import Supervisor
from epserve.rank.step import PartRows, RegionRows, StepPlan


class Process:
    def __init__(self, rank, name):
        self.rank, self.name, self.alive = rank, name, True


class FourRanks:
    """Ranks 0 to 3. Lists say which processes wait, and what the rest could do without the lost ones."""

    def __init__(self, *, spares=0, standbys=0, copies=False, rest=False, when="wait"):
        self.config = SimpleNamespace(engine=SimpleNamespace(when_experts_missing=when))
        self.members = [Process(rank, "old") for rank in range(4)]
        self.arrangement, self.missing, self.discarded = "whole", {}, []
        self.copies, self.rest = copies, rest
        waiting = iter(range(spares))
        self.spares = SimpleNamespace(take=lambda: Process(-1, "spare") if next(waiting, None) is not None else None)
        self._standbys = standbys

    def discard(self, member):
        self.discarded.append(member)

    def put(self, rank, newcomer):
        newcomer.rank = rank
        self.members[rank] = newcomer

    def become(self, members, arrangement):
        self.members, self.arrangement = list(members), arrangement

    def without(self, lost, *, partial=False):
        return "less" if (self.rest if partial else self.copies) else None

    def standby(self, rank):
        self._standbys -= 1
        return Process(rank, "standby") if self._standbys >= 0 else None

    def new_process(self, rank):
        return Process(rank, "process")


@pytest.mark.parametrize(
    ("there", "by", "members", "told"),
    [
        ({"spares": 2, "copies": True}, "spare", ["old", "spare", "spare", "old"], []),
        ({"spares": 1, "copies": True}, "copies", ["old", "spare", "old"], [("fewer", {2})]),
        ({"copies": True, "rest": True, "when": "refuse"}, "copies", ["old", "old"], [("fewer", {1, 2})]),
        ({"rest": True, "when": "serve_without"}, "rest", ["old", "old"], [("fewer", {1, 2})]),
        ({"rest": True, "standbys": 2}, "standby", ["old", "standby", "standby", "old"], [("missing",)]),
        ({"spares": 1, "standbys": 1}, "standby", ["old", "spare", "standby", "old"], [("missing",)]),
        ({"standbys": 1, "when": "refuse"}, "process", ["old", "standby", "process", "old"], [("missing",)]),
        ({}, "process", ["old", "process", "process", "old"], [("missing",)]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_the_first_strategy_that_can_replaces_and_the_next_one_takes_what_it_leaves(there, by, members, told):
    ranks, events = FourRanks(**there), []
    supervisor = Supervisor(ranks)
    supervisor.on_fewer = lambda lost: events.append(("fewer", lost))
    supervisor.on_missing = lambda: events.append(("missing",))
    dead = ranks.members[1:3]
    assert supervisor._replace(dead) == by
    assert [member.name for member in ranks.members] == members and events == told
    assert ranks.discarded == dead and supervisor.experts_missing == (("missing",) in told)
    if len(members) == 4:
        assert [member.rank for member in ranks.members] == [0, 1, 2, 3] and ranks.arrangement == "whole"
    else:
        assert ranks.arrangement == "less"


class Link:
    def __init__(self, error=None, **told):
        self.error, self.told = error, {"phases": {}, "left_out": [], "refused": [], "not_finite": [], **told}

    def submit(self, header, tensors, out):
        self.plan = StepPlan.from_json(json.loads(json.dumps(header)))
        future = asyncio.get_running_loop().create_future()
        future.set_exception(self.error) if self.error is not None else future.set_result(self.told)
        return future


def failure(rank, message, *, consequence=False):
    report = Failure(rank=-1, phase="experts", step=7, message=message, consequence=consequence)
    return Link(RankLost(report))


def ranks_over(links):
    serving = asyncio.Event()
    serving.set()
    shape = SimpleNamespace(hidden=4, dtype=torch.float32)
    return SimpleNamespace(
        members=[SimpleNamespace(rank=n, link=link, where="here", put_down=False) for n, link in enumerate(links)],
        serving=serving, generation=3, running={}, tokens_total=0, empty=lambda size, dtype: torch.empty(size),
        plan=SimpleNamespace(spec=SimpleNamespace(shape=shape)),
        config=SimpleNamespace(scheduler=SimpleNamespace(step_timeout_s=30)),
        arrangement=SimpleNamespace(placements={1: SimpleNamespace(version=5)}),
    )  # fmt: skip


async def test_a_rank_numbers_its_own_parts_and_the_result_has_the_numbers_of_the_step():
    where = RegionRows(region=7, offset=64, dtype=torch.bfloat16)
    shares = [
        (PartRows(part=2, rows=3, target=where), PartRows(part=0, rows=1, source=where)),
        (PartRows(part=0, rows=2), PartRows(part=1, rows=2)),
    ]
    links = [
        Link(left_out=[[1, [4]]], not_finite=[[0, [2]]], phases={"gate": 1.0}),
        Link(left_out=[[0, [6, 4]]], refused=[[1, {"text": "no", "field": "region"}]], phases={"gate": 2.0}),
    ]
    ranks = ranks_over(links)
    plans = [StepPlan(step=7, layer=1, mode="block", tokens_per_rank=(4, 4), parts=parts) for parts in shares]
    result = await PoolSteps(ranks, lambda cause: None).run(plans, [[torch.ones(1, 4)]] * 2)
    assert result.out_MK.shape == (5, 4), "the rows of part 2 stay on the GPU"
    assert result.left_out == {0: {4, 6}} and result.not_finite == {2: [2]}
    assert result.refused == {1: {"text": "no", "field": "region"}}
    assert result.phases == ({"gate": 1.0}, {"gate": 2.0}) and ranks.tokens_total == 8
    for link, plan in zip(links, plans, strict=True):  # what arrives, but for the numbers of the parts
        own = tuple(replace(part, part=number) for number, part in enumerate(plan.parts))
        assert link.plan == replace(plan, generation=3, placement=5, parts=own)
    assert [link.plan.on_device for link in links] == [True, False]


@pytest.mark.parametrize(
    ("links", "rank", "spoilt", "text"),
    [
        ([failure(0, "closed by peer", consequence=True), failure(1, "boom")], 1, False, "rank 1, step 7, experts: boom"),
        ([failure(0, "CUDA error: ill"), Link()], 0, True, "rank 0, step 7, experts: CUDA error: ill"),
    ],
)  # fmt: skip
async def test_a_failed_step_raises_its_cause_its_rank_and_whether_that_is_spoilt(links, rank, spoilt, text):
    """It tells that it is failing before the reports are in, and blames the rank that no other report explains."""
    ranks, failing = ranks_over(links), []
    members, steps = ranks.members, PoolSteps(ranks, failing.append)
    plan = StepPlan(step=7, layer=1, mode="block", tokens_per_rank=(1, 1), parts=(PartRows(rows=1),))
    with pytest.raises(StepFailed) as raised:
        await steps.run([plan] * 2, [[torch.ones(1, 4)]] * 2)
    error = raised.value
    assert (error.rank, error.spoilt, error.member) == (rank, spoilt, members[rank])
    assert error.cause == str(error) == f"{text} [here]" and len(failing) == 1
    assert not ranks.running and not ranks.tokens_total and not steps.tokens_done


def test_members_arrangement_and_generation_change_in_one_module_only():
    owned, found = {"members", "arrangement", "generation"}, []
    for path in Path(room.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (each for one in targets for each in ast.walk(one or ast.Pass())):
                if isinstance(target, ast.Attribute) and target.attr in owned and isinstance(target.ctx, ast.Store):
                    found.append((path.name, target.attr))
    assert {name for name, _ in found} == {"ranks.py"} and {attr for _, attr in found} == owned
