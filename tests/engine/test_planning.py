"""How requests become steps: the pure planning functions."""

from dataclasses import replace

import pytest
import torch

from epserve.engine.planning import Item, Priority, StepQueue, last_in
from epserve.engine.shares import fill, hand_out, part_rows, shards, spread
from epserve.rank.step import RegionRows
from tests.engine.fake_ranks import HIDDEN, batch


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


def key_of(step):
    (key,) = {piece.item.batch.key for piece in step}
    return key


def sizes(step):
    return [(piece.start, piece.stop) for piece in step]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, (0, 0, 0, 0)), (1, (1, 0, 0, 0)), (4, (1, 1, 1, 1)), (11, (3, 3, 3, 2))]
)
def test_split_evenly(num_tokens, expected):
    assert fill(num_tokens, (0,) * 4) == expected


def test_requests_with_one_key_join_and_others_keep_their_turn():
    queue = queue_of(batch(3), batch(2, layer=2), batch(4), batch(5, top_k=2), batch(1, top_k=3), batch(6, top_k=2))
    assert [(key_of(queue.take(100)), len(queue)) for _ in range(4)] == [
        ((1, "block", 0, False), 4),
        ((2, "block", 0, False), 3),
        ((1, "routed", 2, False), 1),
        ((1, "routed", 3, False), 0),
    ]
    assert not queue.take(100)


def test_forward_and_backward_requests_take_steps_of_their_own_in_one_order():
    def backward(count, **more):
        return replace(batch(count, **more), gradient=torch.zeros(count, 4))

    queue = queue_of(batch(3), backward(2), batch(4), backward(5), backward(1, top_k=2))
    assert [(key_of(queue.take(100))[1:], len(queue)) for _ in range(3)] == [
        (("block", 0, False), 3),
        (("block", 0, True), 1),
        (("routed", 2, True), 0),
    ]


def test_a_backward_token_counts_as_two():
    """A client that trains gets its share of the ranks' time, not of their tokens."""
    queue = queue_of(
        *(replace(batch(10, client="trains"), gradient=torch.zeros(10, 4)) for _ in range(4)),
        *(batch(10, client="infers", layer=2) for _ in range(8)),
    )
    turns = [queue.take(10)[0].item.batch.client for _ in range(12)]
    assert turns[:6].count("trains") == 2 and turns[:9].count("trains") == 3


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
    while step := queue.take(7):
        shares = spread(step, num_ranks)
        counts = [sum(share.num_tokens for share in mine) for mine in shares]
        assert max(counts) - min(counts) <= 1
        parts = shards(step, shares)
        assert [part[0].shape for part in parts] == [(count, HIDDEN) for count in counts]
        assert all(tensor.is_contiguous() for part in parts for tensor in part)
        rows = torch.cat([part[0] + (part[2].sum(1, keepdim=True) if top_k else 0) for part in parts])
        complete += hand_out(step, rows, shares)
    assert complete == items
    for item, each in zip(items, batches, strict=True):
        expected = each.hidden + (each.weights.sum(1, keepdim=True) if top_k else 0)
        assert torch.equal(item.out_MK, expected)


@pytest.mark.parametrize(
    ("num_tokens", "held", "expected", "why"),
    [
        (8, (4, 0), (2, 6), "the rest evens the ranks out"),
        (3, (9, 0, 0), (0, 2, 1), "a rank that has too much gets nothing"),
        (0, (5, 0), (0, 0), "there is no rest"),
        (7, (1, 9, 2, 0), (3, 0, 1, 3), "three ranks below, one above"),
    ],
)
def test_fill_evens_out_what_ranks_hold(num_tokens, held, expected, why):
    assert fill(num_tokens, held) == expected, why


def in_region(each, number, *, source=True, target=True):
    """The same request with its rows in a region: byte 0 on for the input, byte 4096 on for the output."""
    rows = RegionRows(region=number, offset=0, dtype=torch.float32)
    return replace(
        each,
        source=rows if source else None,
        target=replace(rows, offset=4096) if target else None,
        hidden=torch.empty_like(each.hidden, device="meta") if source else each.hidden,
    )


@pytest.mark.parametrize(("source", "target"), [(True, True), (True, False), (False, True)])
def test_rows_that_are_tied_to_a_rank_go_there_and_nowhere_else(source, target):
    plain, tied = batch(9, seed=1), batch(6, seed=2)
    queue = queue_of(batch(4, seed=3), in_region(tied, 7, source=source, target=target), plain)
    items, complete, offsets = list(queue), [], []
    while step := queue.take(12):  # the last one is cut
        pins = [1 if piece.item.batch.region is not None else None for piece in step]
        shares = spread(step, 3, pins)
        for rank, mine in enumerate(shares):
            here = [piece for piece in mine if piece.item.batch.region is not None]
            assert not here or rank == 1
        rows_of = [part_rows(mine) for mine in shares]
        assert [sum(part.rows for part in parts) for parts in rows_of] == [
            sum(p.num_tokens for p in mine) for mine in shares
        ]
        on_devices = [[part for part in parts if part.source or part.target] for parts in rows_of]
        assert not on_devices[0]
        assert not on_devices[2]
        offsets += [(part.rows, part.source, part.target) for part in on_devices[1]]
        parts = shards(step, shares)
        rows = [part[0] for part in parts]
        if source and not target and on_devices[1]:  # what the rank would bring home of its region's rows
            rows[1] = torch.cat([tied.hidden, rows[1]])
        elif target and not source and on_devices[1]:
            rows[1] = rows[1][6:]
        complete += hand_out(step, torch.cat(rows), shares)
    assert complete == items
    assert items[0].out_MK.shape == (4, HIDDEN)
    assert torch.equal(items[2].out_MK, plain.hidden)
    where = RegionRows(region=7, offset=0, dtype=torch.float32)
    assert offsets == [(6, where if source else None, replace(where, offset=4096) if target else None)]
    if target:
        assert items[1].out_MK.is_meta
    else:
        assert torch.equal(items[1].out_MK, tied.hidden)


def test_a_long_request_in_a_region_is_cut_at_rows():
    queue = queue_of(in_region(batch(20), 7))
    seen = []
    while step := queue.take(8):
        ((only,),) = [part_rows(mine) for mine in spread(step, 2, [1]) if mine]
        seen.append((only.rows, only.source.offset, only.target.offset))
    row = HIDDEN * 4
    assert seen == [(8, 0, 4096), (8, 8 * row, 4096 + 8 * row), (4, 16 * row, 4096 + 16 * row)]


def served(queue, max_tokens):
    """Client -> tokens of one step."""
    tokens = {}
    for piece in queue.take(max_tokens):
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
    assert [key_of(queue.take(100))[0] for _ in range(3)].count(2) == 1


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
    (item,) = {piece.item for piece in (*first, *second)}
    item.attempts, item.taken = 1, 0  # the first failed
    queue.put_back([item])
    assert hand_out(second, torch.zeros(8, HIDDEN), spread(second, 2)) == []
    assert item.done == 0
    rest = []
    while step := queue.take(8):
        rows = torch.cat([piece.item.batch.hidden[piece.start : piece.stop] for piece in step])
        rest += hand_out(step, rows, spread(step, 2))
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
