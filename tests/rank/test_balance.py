"""Where experts move: the published balancing example, groups that stay on hosts, few moves, and none for nothing."""

from __future__ import annotations

import random

import pytest

from epserve.errors import ConfigError
from epserve.modular_kernel import ExpertLayout
from epserve.rank.placement import Placement
from epserve.rank.setup.balance import ONE_HOST, Hosts, balanced_packing, num_moved, propose, spread

# The example of the published algorithm: 12 experts in 4 groups, 16 replicas, 2 nodes of 4 GPUs.
LOADS = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)
SLOTS = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)
TWO_HOSTS = Hosts(sizes=(4, 4), num_groups=4)
EVEN = ExpertLayout(counts=(2,) * 8)


def placed(slots, layout=EVEN, num_logical=12) -> Placement:
    return Placement(num_logical=num_logical, layout=layout, physical_to_logical=tuple(slots))


def groups_of(placement: Placement, hosts: Hosts) -> list[set[int]]:
    size = placement.num_logical // hosts.num_groups
    return [{expert // size for rank in ranks for expert in placement.experts_of(rank)} for ranks in hosts.ranks()]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_published_example_is_met(layer):
    """Groups lie on the same hosts as there, and the busiest rank has no more load."""
    ours, theirs = placed(spread(LOADS[layer], EVEN, TWO_HOSTS)), placed(SLOTS[layer])
    assert sorted(map(sorted, groups_of(ours, TWO_HOSTS))) == sorted(map(sorted, groups_of(theirs, TWO_HOSTS)))
    assert ours.imbalance(LOADS[layer]) <= theirs.imbalance(LOADS[layer]) + 1e-9


def test_packs_are_of_equal_size():
    assert balanced_packing([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert balanced_packing([1, 9], 2) == [[0], [1]]
    with pytest.raises(ConfigError, match="3 items do not divide into 2 packs"):
        balanced_packing([1, 1, 1], 2)


@pytest.mark.parametrize(
    ("hosts", "layout", "bound", "why"),
    [
        (TWO_HOSTS, EVEN, True, "groups divide over two hosts"),
        (Hosts(sizes=(4, 4)), EVEN, False, "a gate without groups"),
        (Hosts(sizes=(8,), num_groups=4), EVEN, False, "one host"),
        (Hosts(sizes=(2, 2, 4), num_groups=4), EVEN, False, "four groups on three hosts"),
        (Hosts(sizes=(5, 3), num_groups=4), EVEN, True, "uneven hosts with room for six experts each"),
        (Hosts(sizes=(6, 2), num_groups=4), EVEN, False, "no room for six experts on the small host"),
        (Hosts(sizes=(4, 3), num_groups=4), EVEN, False, "hosts of a rank that is being replaced"),
        (ONE_HOST, EVEN, False, "nobody knows where the ranks are"),
    ],
)
def test_groups_stay_on_hosts_where_they_divide_and_fit(hosts, layout, bound, why):
    assert hosts.bound(12, layout) is bound, why
    if bound:
        planned = placed(spread(LOADS[0], layout, hosts), layout)
        assert not hosts.apart(planned)
        homes = groups_of(planned, hosts)
        assert not homes[0] & homes[1], "no group is on two hosts"


def test_groups_that_are_on_several_hosts_are_brought_together():
    """As after a start with copies, which are placed before anything is known of hosts."""
    mixed = placed(spread(LOADS[0], EVEN, ONE_HOST))
    loads = LOADS[1]
    assert TWO_HOSTS.apart(mixed)
    found = propose(mixed, loads, TWO_HOSTS, version=1)
    assert found.moved and not TWO_HOSTS.apart(found.placement) and found.after <= found.before


def test_few_swaps_are_preferred_to_a_new_plan_that_is_hardly_better():
    """One hot expert beside another one: two swapped slots make it even, a plan from nothing would move almost all."""
    loads = [10.0, 9.0, *[1.0] * 30]
    current = placed(range(32), ExpertLayout(counts=(4,) * 8), 32)
    found = propose(current, loads, ONE_HOST, version=7)
    assert found.placement.version == 7 and not found.reason
    assert found.moved <= 4 and found.moved == num_moved(current, found.placement)
    assert found.before == current.imbalance(loads) > found.after == found.placement.imbalance(loads)
    best = placed(spread(loads, current.layout, ONE_HOST), current.layout, 32)
    assert found.after <= best.imbalance(loads) * 1.03


def test_a_plan_that_only_renames_ranks_and_slots_moves_nothing():
    current = placed((3, 0, 2, 1), ExpertLayout(counts=(2, 2)), 4)
    found = propose(current, [3.0, 2.0, 2.0, 2.0], ONE_HOST, version=1)
    assert found.moved == 0 and "less than 2% is not worth a move" in found.reason
    assert found.placement is current and found.before == found.after


def test_nothing_moves_for_nothing():
    """An expert hotter than a rank's share: no placement without a copy helps, whatever else is exchanged."""
    current = placed(range(8), ExpertLayout(counts=(4, 4)), 8)
    hot = [100.0, *[1.0] * 7]
    swapped = propose(current, hot, ONE_HOST, version=1)
    assert swapped.moved == 0 and "has 1.93 of the mean and would have 1.93" in swapped.reason
    assert "no token was counted" in propose(current, [0.0] * 8, ONE_HOST, version=1).reason
    above = propose(current, [3.0, *[1.0] * 7], ONE_HOST, version=1, above=1.5)
    assert above.moved == 0 and "at most 1.50 is asked for" in above.reason


@pytest.mark.parametrize("seed", range(20))
def test_proposals_keep_every_expert_and_their_word(seed):
    """Random loads, layouts, copies and hosts, twice in a row: the second proposal finds little or nothing to do."""
    chance = random.Random(seed)
    hosts = chance.choice([ONE_HOST, Hosts(sizes=(4, 4), num_groups=8), Hosts(sizes=(2, 6), num_groups=2)])
    counts = tuple(chance.choice([4, 5, 6]) for _ in range(8))
    layout = ExpertLayout(counts=counts)
    num_experts = 16 if sum(counts[:2]) < 16 else 8
    current = placed(spread([1.0] * num_experts, layout, hosts), layout, num_experts)
    loads = [chance.paretovariate(1.2) for _ in range(num_experts)]
    found = propose(current, loads, hosts, version=1)
    assert set(found.placement.physical_to_logical) == set(range(num_experts))
    assert found.after <= found.before and found.moved == num_moved(current, found.placement)
    if found.moved:
        assert found.after <= found.before * 0.98 + 1e-9
    again = propose(found.placement, loads, hosts, version=2)
    assert (again.after <= found.after and again.moved <= found.moved) or not found.moved
