"""The scheduler on ranks that compute in this process."""

import asyncio

import pytest
import torch

from epserve.config import SchedulerConfig
from epserve.engine.scheduler import MAX_ATTEMPTS, Scheduler
from epserve.errors import DeadlineExceeded, InternalError, NotReady, Overloaded, RankFailed, TooLarge
from tests.engine.fake_ranks import HIDDEN, FakeRanks, batch


@pytest.fixture
async def ranks():
    return FakeRanks()


@pytest.fixture
async def scheduler(ranks):
    scheduler = Scheduler(SchedulerConfig(max_step_tokens=8, max_queued_tokens=40), ranks)
    yield scheduler
    await scheduler.close()


async def test_missing_experts_are_refused_where_that_is_configured(ranks):
    scheduler = Scheduler(SchedulerConfig(), ranks, wait_for_ranks=False)
    ranks.serving.clear()
    waiting = asyncio.ensure_future(scheduler.submit(batch(3)))
    await asyncio.sleep(0.01)
    assert not waiting.done()  # a spare takes over in a moment
    ranks.experts_missing = True
    scheduler.refuse_waiting()
    with pytest.raises(RankFailed, match="when_experts_missing is refuse"):
        await waiting
    with pytest.raises(RankFailed, match="when_experts_missing is refuse"):
        await scheduler.submit(batch(2))
    ranks.experts_missing = False
    ranks.serving.set()
    assert (await scheduler.submit(batch(2))).out_MK.shape == (2, HIDDEN)
    await scheduler.close()


async def test_many_clients_share_steps_and_get_their_own_rows(scheduler, ranks):
    batches = [batch(count, layer=layer, seed=count) for count in (1, 2, 3) for layer in (1, 2)]
    results = await asyncio.gather(*(scheduler.submit(each) for each in batches))
    for each, got in zip(batches, results, strict=True):
        assert torch.equal(got.out_MK, each.hidden + each.layer)
    assert len(ranks.steps) == 2
    assert [plan.step for plan in ranks.steps] == [0, 1]
    assert scheduler.queued_tokens == 0


async def test_a_request_above_the_step_size_is_put_together_again(scheduler, ranks):
    big = batch(29)
    assert torch.equal((await scheduler.submit(big)).out_MK, big.hidden + 1)
    assert [plan.tokens_per_rank for plan in ranks.steps] == [(4, 4), (4, 4), (4, 4), (3, 2)]


async def test_overload_names_the_limit_and_when_to_come_back(scheduler, ranks):
    ranks.gate.clear()
    waiting = [asyncio.ensure_future(scheduler.submit(batch(20))) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded, match="40 tokens queued, 1 more would pass the limit of 40") as info:
        await scheduler.submit(batch(1))
    assert 0 < info.value.retry_after_s <= 5
    other = asyncio.ensure_future(scheduler.submit(batch(3, layer=2)))  # the limit is per layer
    ranks.gate.set()
    await asyncio.gather(*waiting, other)
    assert (await scheduler.submit(batch(1))).out_MK.shape == (1, HIDDEN)


async def test_a_full_queue_makes_room_for_a_small_client(scheduler, ranks):
    ranks.gate.clear()
    greedy = [asyncio.ensure_future(scheduler.submit(batch(8, client="greedy"))) for _ in range(5)]
    await asyncio.sleep(0.01)
    small = asyncio.ensure_future(scheduler.submit(batch(3, client="small")))
    await asyncio.sleep(0.01)
    assert [call.done() for call in greedy] == [False] * 4 + [True]
    with pytest.raises(Overloaded, match="this client's are most of them") as info:
        await greedy[4]
    assert info.value.retry_after_s > 0
    assert scheduler.queued_tokens == 35
    with pytest.raises(Overloaded, match="6 more would pass"):
        await scheduler.submit(batch(6, client="greedy"))
    ranks.gate.set()
    assert (await small).out_MK.shape == (3, HIDDEN)
    assert [len((await call).out_MK) for call in greedy[:4]] == [8] * 4
    assert scheduler.queued_tokens == 0
    assert scheduler.pushed_out == 1


async def test_steps_of_consecutive_layers_are_in_flight_together(scheduler, ranks):
    ranks.gate.clear()
    calls = [asyncio.ensure_future(scheduler.submit(batch(2, layer=layer, client=str(layer)))) for layer in (1, 2, 3)]
    await asyncio.sleep(0.02)
    assert [plan.layer for plan in ranks.steps] == [1, 2], "two, and the third waits for one of them"
    ranks.gate.set()
    await asyncio.gather(*calls)
    assert [plan.layer for plan in ranks.steps] == [1, 2, 3]


async def test_a_request_above_the_queue_size_never_fits(scheduler):
    with pytest.raises(TooLarge, match=r"41 tokens; scheduler\.max_queued_tokens is 40"):
        await scheduler.submit(batch(41))


async def test_expired_work_is_never_dispatched(scheduler, ranks):
    ranks.gate.clear()
    first = [asyncio.ensure_future(scheduler.submit(batch(8))) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match="in the queue"):
        await scheduler.submit(batch(1, layer=7, seconds=0.05))
    with pytest.raises(DeadlineExceeded, match="before the request was queued"):
        await scheduler.submit(batch(1, layer=7, seconds=-1))
    ranks.gate.set()
    await asyncio.gather(*first)
    await scheduler.submit(batch(1))
    assert {plan.layer for plan in ranks.steps} == {1}


async def test_a_deadline_while_the_step_runs_ends_the_call_not_the_step(scheduler, ranks):
    ranks.gate.clear()
    with pytest.raises(DeadlineExceeded, match="while its step ran"):
        await scheduler.submit(batch(1, seconds=0.05))
    ranks.gate.set()
    assert (await scheduler.submit(batch(2))).out_MK.shape == (2, HIDDEN)
    assert scheduler.steps_done == 2


async def test_a_thousand_cancels_leave_nothing_behind(scheduler, ranks):
    for number in range(1000):
        call = asyncio.ensure_future(scheduler.submit(batch(1 + number % 9)))
        await asyncio.sleep(0 if number % 3 else 0.0005)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert await scheduler.drain(5)
    assert scheduler.queued_tokens == 0
    right = batch(3)
    assert torch.equal((await scheduler.submit(right)).out_MK, right.hidden + 1)


async def test_a_failed_step_is_replayed(scheduler, ranks):
    ranks.fail = [RankFailed("rank 1 died")]
    big = batch(20)
    assert torch.equal((await scheduler.submit(big)).out_MK, big.hidden + 1)
    assert scheduler.replays == 1


async def test_replay_waits_until_the_ranks_serve_again(scheduler, ranks):
    ranks.fail = [RankFailed("rank 1 died")]
    ranks.gate.clear()
    call = asyncio.ensure_future(scheduler.submit(batch(2)))
    await asyncio.sleep(0.01)
    ranks.serving.clear()
    ranks.gate.set()
    await asyncio.sleep(0.05)
    assert not call.done()
    assert len(ranks.steps) == 1
    ranks.serving.set()
    assert (await call).out_MK.shape == (2, HIDDEN)


async def test_deadline_during_recovery_is_retryable(scheduler, ranks):
    ranks.serving.clear()
    with pytest.raises(RankFailed, match="send the request again"):
        await scheduler.submit(batch(2, seconds=0.05))


async def test_a_request_that_breaks_ranks_each_time_is_given_back(scheduler, ranks):
    ranks.fail = [RankFailed("rank 1 died")] * MAX_ATTEMPTS
    with pytest.raises(RankFailed, match="failed 3 times on this request"):
        await scheduler.submit(batch(2))
    assert (await scheduler.submit(batch(2))).out_MK.shape == (2, HIDDEN)


async def test_a_defect_is_reported_to_the_callers_of_that_step_only(scheduler, ranks):
    ranks.fail = [ValueError("no such thing")]
    with pytest.raises(InternalError, match="no such thing"):
        await scheduler.submit(batch(2))
    assert (await scheduler.submit(batch(2))).out_MK.shape == (2, HIDDEN)


async def test_close_answers_whoever_waits(ranks):
    scheduler = Scheduler(SchedulerConfig(), ranks)
    ranks.gate.clear()
    calls = [asyncio.ensure_future(scheduler.submit(batch(2, layer=layer))) for layer in range(5)]
    await asyncio.sleep(0.01)
    assert not await scheduler.drain(0.05)
    await scheduler.close()
    for call in calls:
        with pytest.raises(NotReady):
            await asyncio.wait_for(call, 1)
