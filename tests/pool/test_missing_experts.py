"""Ranks that are lost with neither spare nor copies: requests that need their experts wait, are refused, or go without."""

import asyncio
import os
import signal
import time

import pytest
import pytest_asyncio
import torch

from epserve.engine.engine import Batch
from epserve.errors import ExpertsMissing, NotReady
from epserve.models.demo import reference_block
from tests.support.checkpoints import LAYER, write
from tests.support.recovering import BACK_S, NOTICE_S, TOLERANCE, ask, pids, running, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("recovery"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path):
    return reference_block(path, LAYER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bare(path):
    """Three ranks with neither spare nor copies, which go on without what is lost."""
    async with running(path, ranks=3, when_experts_missing="refuse") as engine:
        yield engine


def routed(experts, count=5):
    """Tokens that all go to `experts`."""
    x = torch.randn((count, 64), generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([experts] * count, dtype=torch.int32)
    weights = torch.full(ids.shape, 0.5)
    return Batch(layer=LAYER, hidden=x, ids=ids, weights=weights, deadline=time.monotonic() + 120)


async def lose_a_rank(engine, rank):
    await until(lambda: len(engine.status().ranks) == 3 and engine.state() == "serving", BACK_S, "all ranks")
    lost = engine.status().ranks[rank].experts
    os.kill(pids(engine)[rank], signal.SIGKILL)
    await until(lambda: len(engine.status().ranks) == 2 and engine.state() == "serving", NOTICE_S, "going on without")
    assert engine._pool.recoveries[-1].by == "rest"
    assert engine.status().missing_experts == dict.fromkeys(engine.layers, tuple(sorted(lost)))
    return lost


async def test_only_tokens_that_need_missing_experts_are_refused(bare, reference):
    """Routed requests by their ids; the others are gated on the ranks, so that they are refused after that."""
    whole = await bare.forward(routed([0, 7]))
    lost = await lose_a_rank(bare, 1)
    kept = [expert for expert in range(8) if expert not in lost]
    assert torch.allclose(await bare.forward(routed([0, 7])), whole, **TOLERANCE)
    with pytest.raises(ExpertsMissing, match=f"experts {lost[0]} of layer {LAYER} are on no rank") as info:
        await bare.forward(routed([kept[0], lost[0]]))
    assert info.value.retryable and info.value.experts == (lost[0],) and info.value.layer == LAYER
    x = torch.randn((64, 64), generator=torch.Generator().manual_seed(64))
    mine = Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + 120)
    with pytest.raises(ExpertsMissing) as info:
        await bare.forward(mine)  # 64 tokens visit every expert
    assert set(info.value.experts) == set(lost)
    answered = refused = 0
    for row in x.split(1):  # and token by token some get through
        try:
            y = await bare.forward(Batch(layer=LAYER, hidden=row, deadline=time.monotonic() + 120))
        except ExpertsMissing:
            refused += 1
            continue
        torch.testing.assert_close(y, reference(row), **TOLERANCE)
        answered += 1
    assert answered and refused
    with pytest.raises(NotReady, match="a lost rank is being replaced"):
        await bare.rebalance()
    await until(lambda: not bare.status().missing_experts and bare.state() == "serving", BACK_S, "whole again")
    assert len(bare.status().ranks) == 3
    await ask(bare, reference, count=64)


async def test_joined_requests_are_refused_one_by_one(bare):
    """Requests of one step: those that need nothing missing are answered, each of the others learns its own experts."""
    lost = await lose_a_rank(bare, 0)
    kept = [expert for expert in range(8) if expert not in lost]
    wanted = [[kept[0], kept[1]], [kept[0], lost[0]], [lost[0], lost[1]], [kept[1], kept[2]]] * 4
    steps = bare.status().steps
    outcomes = await asyncio.gather(*(bare.forward(routed(each)) for each in wanted), return_exceptions=True)
    assert bare.status().steps - steps < len(wanted)
    for experts, outcome in zip(wanted, outcomes, strict=True):
        if missing := tuple(each for each in experts if each in lost):
            assert isinstance(outcome, ExpertsMissing) and outcome.experts == missing
        else:
            assert isinstance(outcome, torch.Tensor)
    await until(lambda: not bare.status().missing_experts and bare.state() == "serving", BACK_S, "whole again")


async def test_answers_without_missing_experts_say_so(bare, monkeypatch):
    """serve_without: an expert that is nowhere adds nothing, and the request is told which."""
    monkeypatch.setattr(bare._scheduler, "_serve_without", True)
    kept, going = bare.status().ranks[0].experts[0], bare.status().ranks[2].experts[0]
    whole = routed([kept, going])
    answer, alone = await bare.answer(whole), await bare.forward(routed([kept, -1]))
    expected = answer.out_MK
    assert answer.left_out == set()
    assert going in await lose_a_rank(bare, 2)
    less = await bare.answer(routed([kept, going]))
    assert less.left_out == {going}
    torch.testing.assert_close(less.out_MK, alone, **TOLERANCE)
    assert not torch.allclose(less.out_MK, expected, **TOLERANCE)
    await until(lambda: not bare.status().missing_experts and bare.state() == "serving", BACK_S, "whole again")
    again = await bare.answer(routed([kept, going]))
    torch.testing.assert_close(again.out_MK, expected, **TOLERANCE)
    assert again.left_out == set()
