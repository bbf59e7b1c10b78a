"""How requests become steps: the pure planning functions, and the scheduler on ranks that compute in this process."""

import asyncio
import time

import pytest
import torch

from epserve.config import SchedulerConfig
from epserve.errors import DeadlineExceeded, InternalError, NotReady, Overloaded, RankFailed, TooLarge
from epserve.runtime.planning import Batch, Item, Priority, StepQueue, hand_out, last_in, shards, split_evenly
from epserve.runtime.scheduler import MAX_ATTEMPTS, Scheduler

HIDDEN = 4


def batch(count, *, layer=1, top_k=0, seconds=5.0, seed=0, client="", priority=Priority.NORMAL):
    generator = torch.Generator().manual_seed(seed * 1000 + count)
    ids = torch.randint(0, 8, (count, top_k), dtype=torch.int32, generator=generator) if top_k else None
    weights = torch.rand((count, top_k), generator=generator) if top_k else None
    hidden = torch.randn((count, HIDDEN), generator=generator)
    return Batch(
        layer=layer, hidden=hidden, ids=ids, weights=weights, deadline=time.monotonic() + seconds,
        client=client, priority=priority,
    )  # fmt: skip


class Waiting:
    """Stands for a caller's future in the pure tests."""

    def __init__(self, done=False):
        self._done = done

    def done(self):
        return self._done


def queue_of(*batches):
    queue = StepQueue()
    for each in batches:
        queue.add(Item(batch=each, future=Waiting()))
    return queue


def sizes(step):
    return [(piece.start, piece.stop) for piece in step.pieces]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, (0, 0, 0, 0)), (1, (1, 0, 0, 0)), (4, (1, 1, 1, 1)), (11, (3, 3, 3, 2))]
)
def test_split_evenly(num_tokens, expected):
    assert split_evenly(num_tokens, 4) == expected


def test_requests_with_one_key_join_and_others_keep_their_turn():
    queue = queue_of(batch(3), batch(2, layer=2), batch(4), batch(5, top_k=2), batch(1, top_k=3), batch(6, top_k=2))
    assert [(queue.take(100).key, len(queue)) for _ in range(4)] == [
        ((1, "block", 0), 4),
        ((2, "block", 0), 3),
        ((1, "routed", 2), 1),
        ((1, "routed", 3), 0),
    ]
    assert queue.take(100) is None


def test_a_long_request_is_cut_and_its_rest_stays_in_front():
    queue = queue_of(batch(10), batch(3))
    assert [sizes(queue.take(4)) for _ in range(4)] == [[(0, 4)], [(4, 8)], [(8, 10), (0, 2)], [(2, 3)]]


def test_those_whose_callers_are_gone_are_never_taken():
    queue = queue_of(batch(3), batch(4))
    next(iter(queue)).future = Waiting(done=True)
    assert sizes(queue.take(100)) == [(0, 4)]
    assert not len(queue)


def test_a_request_whose_step_failed_goes_alone():
    queue = queue_of(batch(3), batch(4), batch(5))
    failed = list(queue)[:2]
    queue.take(7)
    for item in failed:
        item.attempts, item.taken = 1, 0
    queue.put_back(failed)
    assert [sizes(queue.take(100)) for _ in range(3)] == [[(0, 3)], [(0, 4)], [(0, 5)]]
    assert not len(queue)


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_shards_and_hand_out_put_every_row_where_it_belongs(top_k, num_ranks):
    batches = [batch(count, top_k=top_k, seed=count) for count in (5, 1, 9, 2)]
    queue = queue_of(*batches)
    items, complete = list(queue), []
    while (step := queue.take(7)) is not None:
        counts = split_evenly(step.num_tokens, num_ranks)
        parts = shards(step, counts)
        assert [part[0].shape for part in parts] == [(count, HIDDEN) for count in counts]
        assert all(tensor.is_contiguous() for part in parts for tensor in part)
        rows = torch.cat([part[0] + (part[2].sum(1, keepdim=True) if top_k else 0) for part in parts])
        complete += hand_out(step, rows)
    assert complete == items
    for item, each in zip(items, batches, strict=True):
        expected = each.hidden + (each.weights.sum(1, keepdim=True) if top_k else 0)
        assert torch.equal(item.out_MK, expected)


def served(queue, max_tokens):
    """Client -> tokens of one step."""
    tokens = {}
    for piece in queue.take(max_tokens).pieces:
        tokens[piece.item.batch.client] = tokens.get(piece.item.batch.client, 0) + piece.num_tokens
    return tokens


def test_a_greedy_client_delays_a_small_one_by_one_step_at_most():
    queue = queue_of(*(batch(50, client="greedy") for _ in range(100)))
    assert served(queue, 100) == {"greedy": 100}
    for _ in range(20):  # comes back after each answer
        queue.add(Item(batch=batch(4, client="small"), future=Waiting()))
        assert served(queue, 100) == {"small": 4, "greedy": 96}


def test_clients_with_enough_to_do_get_equal_shares_of_tokens_whatever_the_size_of_their_requests():
    queue = queue_of(*(batch(size, client=str(size)) for size in (1, 10, 100, 1000) for _ in range(8000 // size)))
    totals = dict.fromkeys(("1", "10", "100", "1000"), 0)
    for _ in range(80):
        for client, tokens in served(queue, 100).items():
            totals[client] += tokens
    assert max(totals.values()) - min(totals.values()) <= 1000, totals  # one request of the largest


def test_a_greedy_client_on_one_layer_does_not_hold_up_another_layer():
    queue = queue_of(*(batch(50, layer=1, client="greedy") for _ in range(100)), batch(4, layer=2, client="small"))
    assert [queue.take(100).key[0] for _ in range(3)].count(2) == 1


def test_a_cut_request_lets_smaller_ones_pass_between_its_steps():
    queue = queue_of(batch(1000, client="large"))
    assert served(queue, 100) == {"large": 100}
    queue.add(Item(batch=batch(4, client="small"), future=Waiting()))
    assert served(queue, 100) == {"small": 4, "large": 96}


def test_priorities_are_shares_that_starve_nobody():
    queue = queue_of(*(batch(10, client=p.name, priority=p) for p in Priority for _ in range(2000)))
    totals = dict.fromkeys((p.name for p in Priority), 0)
    for _ in range(73):
        for client, tokens in served(queue, 100).items():
            totals[client] += tokens
    assert totals["HIGH"] == pytest.approx(6400, rel=0.02)
    assert totals["NORMAL"] == pytest.approx(800, rel=0.1)
    assert totals["LOW"] == pytest.approx(100, abs=20)
    late = queue_of(*(batch(10, client="normal") for _ in range(100)))
    late.take(100)
    late.add(Item(batch=batch(10, client="urgent", priority=Priority.HIGH), future=Waiting()))
    assert next(iter(served(late, 10))) == "urgent"


def test_the_queue_remembers_no_client_that_is_gone():
    queue = queue_of(*(batch(50, client="greedy") for _ in range(100)))
    for number in range(1000):
        queue.add(Item(batch=batch(1, client=str(number)), future=Waiting()))
        served(queue, 1 + number % 2)
    assert len(queue._clocks) <= 2 * len(queue) + 65
    while queue.take(1000):
        pass
    assert not queue._clocks
    assert not queue._lanes


def test_rows_of_an_earlier_attempt_count_no_more():
    queue = queue_of(batch(20))
    first, second = queue.take(8), queue.take(8)
    (item,) = {piece.item for piece in (*first.pieces, *second.pieces)}
    item.attempts, item.taken = 1, 0  # the first failed
    queue.put_back([item])
    assert hand_out(second, torch.zeros(8, HIDDEN)) == []
    assert item.done == 0
    rest = []
    while (step := queue.take(8)) is not None:
        rest += hand_out(step, torch.cat([piece.item.batch.hidden[piece.start : piece.stop] for piece in step.pieces]))
    assert rest == [item]
    assert torch.equal(item.out_MK, item.batch.hidden)


def test_who_leaves_a_full_queue():
    def items(*sizes, client):
        return [Item(batch=batch(size, client=client), future=Waiting()) for size in sizes]

    greedy, modest = items(30, 30, 30, client="greedy"), items(10, client="modest")
    waiting = [*greedy, *modest]
    assert last_in(waiting, batch(10, client="small"), 10) == [greedy[2]]
    assert last_in(waiting, batch(10, client="greedy"), 10) == []
    assert last_in(waiting, batch(70, client="as greedy"), 70) == [], "it would hold more than who has to go"
    greedy[2].taken = 1  # a step has begun it
    assert last_in(waiting, batch(10, client="small"), 10) == [greedy[1]]
    assert last_in(modest, batch(10, client="small"), 10) == []
    urgent = batch(60, client="urgent", priority=Priority.HIGH)
    assert last_in(waiting, urgent, 60) == [greedy[1], greedy[0]], "by tokens over weight"


class FakeRanks:
    """Adds the layer number to each row; `fail` takes exceptions for the next steps, `gate` holds steps back."""

    num_ranks = 2
    experts_missing = False

    def __init__(self):
        self.serving = asyncio.Event()
        self.serving.set()
        self.steps, self.fail = [], []
        self.gate = asyncio.Event()
        self.gate.set()

    async def step(self, plan, parts):
        self.steps.append(plan)
        await self.gate.wait()
        if self.fail:
            error = self.fail.pop(0)
            if error is not None:
                raise error
        return torch.cat([part[0] for part in parts]) + plan.layer


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
    assert (await scheduler.submit(batch(2))).shape == (2, HIDDEN)
    await scheduler.close()


async def test_many_clients_share_steps_and_get_their_own_rows(scheduler, ranks):
    batches = [batch(count, layer=layer, seed=count) for count in (1, 2, 3) for layer in (1, 2)]
    results = await asyncio.gather(*(scheduler.submit(each) for each in batches))
    for each, got in zip(batches, results, strict=True):
        assert torch.equal(got, each.hidden + each.layer)
    assert len(ranks.steps) == 2
    assert [plan.step for plan in ranks.steps] == [0, 1]
    assert scheduler.queued_tokens == 0


async def test_a_request_above_the_step_size_is_put_together_again(scheduler, ranks):
    big = batch(29)
    assert torch.equal(await scheduler.submit(big), big.hidden + 1)
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
    assert (await scheduler.submit(batch(1))).shape == (1, HIDDEN)


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
    assert (await small).shape == (3, HIDDEN)
    assert [len(await call) for call in greedy[:4]] == [8] * 4
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


class SlowRanks(FakeRanks):
    """Each step takes `seconds`; one at a time, as the ranks do."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.busy = seconds, asyncio.Lock()

    async def step(self, plan, parts):
        async with self.busy:
            await asyncio.sleep(self.seconds)
            return await super().step(plan, parts)


async def rounds(scheduler, clients, count):
    """Each client sends again as soon as it has its answer."""

    async def one(number):
        for _ in range(count):
            await scheduler.submit(batch(1, client=str(number)))

    started = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(clients)))
    return time.monotonic() - started


async def test_the_wait_for_joiners_ends_when_all_are_there_and_a_lone_client_never_waits():
    patient = Scheduler(SchedulerConfig(join_wait_ms=1000, join_wait_share=1), SlowRanks(0.05))
    assert await rounds(patient, 1, 5) < 0.5
    assert await rounds(patient, 8, 5) < 1.0, "eight came back at once: nobody waits a second for a ninth"
    await patient.close()


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.08), (0.5, 0.2)])
async def test_the_wait_for_joiners_is_never_more_than_its_share_of_a_step(share, most):
    scheduler = Scheduler(SchedulerConfig(join_wait_ms=1000, join_wait_share=share), SlowRanks(0.2))
    await rounds(scheduler, 2, 3)
    scheduler._joined_last = 100  # many were there a moment ago, and are gone
    started = time.monotonic()
    await scheduler.submit(batch(1))
    took = time.monotonic() - started
    assert took < 0.2 + most
    if share:
        assert took > 0.2 + 0.05, "it does wait for them"
    await scheduler.close()


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
    assert (await scheduler.submit(batch(2))).shape == (2, HIDDEN)
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
    assert torch.equal(await scheduler.submit(right), right.hidden + 1)


async def test_a_failed_step_is_replayed(scheduler, ranks):
    ranks.fail = [RankFailed("rank 1 died")]
    big = batch(20)
    assert torch.equal(await scheduler.submit(big), big.hidden + 1)
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
    assert (await call).shape == (2, HIDDEN)


async def test_deadline_during_recovery_is_retryable(scheduler, ranks):
    ranks.serving.clear()
    with pytest.raises(RankFailed, match="send the request again"):
        await scheduler.submit(batch(2, seconds=0.05))


async def test_a_request_that_breaks_ranks_each_time_is_given_back(scheduler, ranks):
    ranks.fail = [RankFailed("rank 1 died")] * MAX_ATTEMPTS
    with pytest.raises(RankFailed, match="failed 3 times on this request"):
        await scheduler.submit(batch(2))
    assert (await scheduler.submit(batch(2))).shape == (2, HIDDEN)


async def test_a_defect_is_reported_to_the_callers_of_that_step_only(scheduler, ranks):
    ranks.fail = [ValueError("no such thing")]
    with pytest.raises(InternalError, match="no such thing"):
        await scheduler.submit(batch(2))
    assert (await scheduler.submit(batch(2))).shape == (2, HIDDEN)


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
