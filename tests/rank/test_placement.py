"""Placement: logical to physical ids, replicas and uneven ranks."""

from __future__ import annotations

import pytest
import torch

from epserve.errors import ConfigError
from epserve.modular_kernel import ExpertLayout, Routing
from epserve.rank.placement import Placement, to_physical


def routing(ids) -> Routing:
    ids_Mt = torch.tensor(ids, dtype=torch.int32)
    return Routing(ids_Mt=ids_Mt, weights_Mt=torch.arange(ids_Mt.numel()).float().view(ids_Mt.shape))


REPLICATED = Placement(
    version=3, num_logical=4, layout=ExpertLayout(counts=(3, 0, 4)), physical_to_logical=(0, 2, 1, 3, 2, 0, 2)
)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "counts"),
    [
        (60, 8, (8, 8, 8, 8, 7, 7, 7, 7)),  # Qwen1.5-MoE on one host: other systems refuse 60 on 8
        (5, 2, (3, 2)),
        (3, 4, (1, 1, 1, 0)),  # a rank without experts still enters every step
        (8, 8, (1,) * 8),
        (2, 1, (2,)),
    ],
)
def test_identity_places_every_expert_once(num_experts, num_ranks, counts):
    placement = Placement.identity(num_experts, num_ranks)
    assert placement.layout.counts == counts
    held = [placement.experts_of(rank) for rank in range(num_ranks)]
    assert tuple(map(len, held)) == counts
    assert [expert for rank in held for expert in rank] == list(range(num_experts))
    for rank, experts in enumerate(held):
        assert all(placement.layout.rank_of(expert) == rank for expert in experts)


def test_identity_keeps_the_ids():
    batch = routing([[4, -1], [2, 2]])
    out = to_physical(batch, Placement.identity(5, 2))
    assert torch.equal(out.ids_Mt, batch.ids_Mt) and torch.equal(out.weights_Mt, batch.weights_Mt)


def test_explicit_counts_must_hold_all_experts():
    assert Placement.identity(5, (1, 0, 4)).experts_of(2) == (1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"holds 4 experts, the model has 5"):
        Placement.identity(5, (2, 2))


def test_replicas_are_chosen_by_token_number():
    assert REPLICATED.replicas == ((0, 5), (2,), (1, 4, 6), (3,))
    out = to_physical(routing([[0, 2], [0, 2], [1, 2], [3, 2]]), REPLICATED)
    assert out.ids_Mt.tolist() == [[0, 1], [5, 4], [2, 6], [3, 1]]
    assert out.ids_Mt.dtype == torch.int32 and out.ids_Mt.is_contiguous()


def test_token_offset_makes_a_split_batch_choose_like_the_whole():
    whole = routing([[token % 4, (token * 3) % 4] for token in range(23)])
    expected = to_physical(whole, REPLICATED, token_offset=100).ids_Mt
    for cut in (0, 1, 7, 23):
        parts = [
            to_physical(whole.rows(0, cut), REPLICATED, token_offset=100),
            to_physical(whole.rows(cut, 23), REPLICATED, token_offset=100 + cut),
        ]
        assert torch.equal(torch.cat([part.ids_Mt for part in parts]), expected)


def test_minus_one_and_duplicates_in_a_row():
    """Ids [5, 5] must name one copy twice, and -1 must not become a copy of expert 0."""
    batch = routing([[2, 2, -1], [-1, -1, -1], [0, 2, 0]])
    out = to_physical(batch, REPLICATED)
    assert out.ids_Mt.tolist() == [[1, 1, -1], [-1, -1, -1], [0, 6, 0]]
    assert torch.equal(out.weights_Mt, batch.weights_Mt)


def test_every_physical_id_holds_the_asked_expert():
    ids = torch.randint(-1, 4, (500, 6), generator=torch.Generator().manual_seed(1)).int()
    out = to_physical(Routing(ids_Mt=ids, weights_Mt=torch.ones(500, 6)), REPLICATED, token_offset=11)
    held = torch.tensor([*REPLICATED.physical_to_logical, -1])
    assert torch.equal(held[out.ids_Mt.long()].int(), ids)
    assert set(out.ids_Mt.unique().tolist()) == {-1, *range(7)}  # every copy gets work


def test_empty_batch():
    empty = Routing(ids_Mt=torch.empty(0, 2, dtype=torch.int32), weights_Mt=torch.empty(0, 2))
    assert to_physical(empty, REPLICATED).ids_Mt.shape == (0, 2)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((0, 1), r"2 physical experts are placed, the ranks hold 3"),
        ((0, 1, 3), r"slot 2 holds expert 3, outside 0..2"),
        ((0, 1, 1), r"experts without a slot: \[2\]"),
    ],
)
def test_impossible_placements_are_refused(slots, message):
    with pytest.raises(ConfigError, match=message):
        Placement(num_logical=3, layout=ExpertLayout(counts=(2, 1)), physical_to_logical=slots)
