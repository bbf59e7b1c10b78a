"""Where experts should move so that the load of a layer is even: whole plans, and the few moves that come close to one.

The policy is DeepSeek's published expert-parallel load balancer. Groups of experts go to hosts, then each expert gets copies
within its host by load, then the copies are packed onto the host's ranks. A token of a gate that chooses from few groups then
crosses the network to few hosts. All functions here are pure.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from epserve.errors import ConfigError
from epserve.modular_kernel import ExpertLayout
from epserve.rank.placement import Placement, pack_slots

LEAST_GAIN = 0.02
"""A move lowers the busiest rank's load by this part at least. Smaller gains are within the changes of load between batches."""
NEAR = 1.02  # few moves that come so close to the best plan are preferred to the plan
LIGHTEST = 4  # ranks that a swap from the busiest rank may go to
MOST_SWAPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The next placement of a layer and its gain. `moved` counts slots whose expert changes. Imbalance: busiest rank over mean.

    `reason` says why no expert should move. Empty: they should.
    """

    placement: Placement
    moved: int
    before: float
    after: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Ranks of each host, in rank order, and the groups that the gate chooses from. One host: groups do not matter."""

    sizes: tuple[int, ...]
    num_groups: int = 1

    def bound(self, num_experts: int, layout: ExpertLayout) -> bool:
        """Returns whether groups stay on hosts: they divide over the hosts, and each host has room for its share."""
        hosts = len(self.sizes)
        if hosts < 2 or self.num_groups < 2 or self.num_groups % hosts or num_experts % self.num_groups:
            return False
        if layout.slices > 1 or sum(self.sizes) != layout.num_ranks:
            return False
        return all(sum(layout.counts[rank] for rank in ranks) >= num_experts // hosts for ranks in self.ranks())

    def ranks(self) -> list[range]:
        starts = itertools.accumulate(self.sizes, initial=0)
        return [range(start, end) for start, end in itertools.pairwise(starts)]

    def apart(self, placement: Placement) -> bool:
        """Returns whether some group has experts on several hosts, although groups could stay on hosts."""
        if not self.bound(placement.num_logical, placement.layout):
            return False
        size = placement.num_logical // self.num_groups
        homes = [{each // size for rank in ranks for each in placement.experts_of(rank)} for ranks in self.ranks()]
        return sum(map(len, homes)) > len(set().union(*homes))


ONE_HOST = Hosts(sizes=())


def propose(current: Placement, loads: Sequence[float], hosts: Hosts, *, version: int, above: float = 1.0) -> Proposal:
    """Returns the placement for these loads that is worth its moves.

    Args:
        current: the layer's placement. The result has the same layout.
        loads: tokens of each logical expert.
        hosts: where the ranks are.
        version: version of the result.
        above: no expert moves while the imbalance is at most this.

    Groups that lie on several hosts and need not are brought together, if the load gets no less even by it.
    """
    was = current.imbalance(loads)

    def stay(reason: str) -> Proposal:
        return Proposal(placement=current, moved=0, before=was, after=was, reason=reason)

    if not any(loads):
        return stay("no token was counted")
    if was <= above:
        return stay(f"the busiest rank has {was:.2f} of the mean, at most {above:.2f} is asked for")
    best = _settled(spread(loads, current.layout, hosts), current, hosts)
    apart = hosts.apart(current)
    few = None if apart else _swapped(current, loads, hosts)
    candidates = [_placed(current, slots, version) for slots in (best, few) if slots]
    goal = min(each.imbalance(loads) for each in candidates)
    if goal > was * (1 if apart else 1 - LEAST_GAIN):
        least = f"less than {LEAST_GAIN:.0%} is not worth a move"
        return stay(f"the busiest rank has {was:.2f} of the mean and would have {goal:.2f}; {least}")
    near = [each for each in candidates if each.imbalance(loads) <= max(goal * NEAR, above)]
    chosen = min(near, key=lambda each: (num_moved(current, each), each.imbalance(loads)))
    return Proposal(placement=chosen, moved=num_moved(current, chosen), before=was, after=chosen.imbalance(loads))


def num_moved(old: Placement, new: Placement) -> int:
    """Returns the number of slots whose expert differs."""
    pairs = zip(old.physical_to_logical, new.physical_to_logical, strict=True)
    return sum(before != after for before, after in pairs)


def balanced_packing(loads: Sequence[float], num_packs: int) -> list[list[int]]:
    """Packs items 0 .. n-1 into `num_packs` packs of equal size: the heaviest first, to the lightest pack with room."""
    if len(loads) % num_packs:
        raise ConfigError(f"{len(loads)} items do not divide into {num_packs} packs")
    room = len(loads) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        pack = min((p for p in range(num_packs) if len(packs[p]) < room), key=lambda p: totals[p])
        packs[pack].append(item)
        totals[pack] += loads[item]
    return packs


def spread(loads: Sequence[float], layout: ExpertLayout, hosts: Hosts) -> tuple[int, ...]:
    """Returns `physical_to_logical` for these loads, with the experts of a group on one host when `hosts` binds them."""
    if not hosts.bound(len(loads), layout):
        return pack_slots(loads, layout)
    size = len(loads) // hosts.num_groups
    groups = [range(start, start + size) for start in range(0, len(loads), size)]
    packs = balanced_packing([sum(loads[expert] for expert in group) for group in groups], len(hosts.sizes))
    slots: list[int] = []
    for ranks, pack in zip(hosts.ranks(), packs, strict=True):
        experts = [expert for group in pack for expert in groups[group]]
        here = ExpertLayout(counts=tuple(layout.counts[rank] for rank in ranks))
        slots += [experts[each] for each in pack_slots([loads[expert] for expert in experts], here)]
    return tuple(slots)


def _placed(current: Placement, slots: Sequence[int], version: int) -> Placement:
    return Placement(
        version=version, num_logical=current.num_logical, layout=current.layout, physical_to_logical=tuple(slots)
    )


def _settled(slots: Sequence[int], current: Placement, hosts: Hosts) -> list[int]:
    """Returns the same plan with hosts, ranks and slots exchanged where they are alike, so that most experts stay."""
    layout = current.layout
    new = [list(slots[start:end]) for start, end in itertools.pairwise(layout.offsets)]
    old = [list(current.experts_of(rank * layout.slices)) for rank in range(layout.num_ranks)]
    blocks = hosts.ranks() if hosts.bound(current.num_logical, layout) else [range(layout.num_ranks)]
    kinds = [tuple(layout.counts[rank] for rank in block) for block in blocks]
    there = _matched(
        [[expert for rank in block for expert in new[rank]] for block in blocks],
        [[expert for rank in block for expert in old[rank]] for block in blocks],
        kinds,
    )
    held: list[list[int]] = [[] for _ in old]
    for place, block in enumerate(blocks):
        planned = [new[rank] for rank in blocks[there[place]]]
        before = [old[rank] for rank in block]
        ranks = _matched(planned, before, [len(each) for each in before])
        for index, rank in enumerate(block):
            held[rank] = _in_place(planned[ranks[index]], before[index])
    return [expert for rank in held for expert in rank]


def _matched(new: Sequence[Sequence[int]], old: Sequence[Sequence[int]], kinds: Sequence) -> list[int]:
    """Returns for each old place the new contents that share most with it, of the same kind, each once. Greedy."""
    news, olds = [Counter(each) for each in new], [Counter(each) for each in old]
    shared = sorted(
        (-(news[a] & olds[b]).total(), a != b, a, b)
        for a in range(len(new))
        for b in range(len(old))
        if kinds[a] == kinds[b]
    )
    found: dict[int, int] = {}
    used: set[int] = set()
    for _, _, contents, place in shared:
        if place not in found and contents not in used:
            found[place] = contents
            used.add(contents)
    return [found[place] for place in range(len(old))]


def _in_place(planned: Sequence[int], before: Sequence[int]) -> list[int]:
    """Returns the planned experts of a rank, each in its old slot if it has one."""
    left = Counter(planned)
    kept: list[int | None] = []
    for expert in before:
        stays = left[expert] > 0
        left[expert] -= stays
        kept.append(expert if stays else None)
    rest = iter(left.elements())
    return [next(rest) if expert is None else expert for expert in kept]


def _swapped(current: Placement, loads: Sequence[float], hosts: Hosts) -> list[int] | None:
    """Returns the present plan after swaps between the busiest rank and light ones, as long as they help. None: none helps."""
    layout = current.layout
    held = [list(current.experts_of(rank * layout.slices)) for rank in range(layout.num_ranks)]
    share = [load / max(len(slots), 1) for load, slots in zip(loads, current.replicas, strict=True)]
    totals = [sum(share[expert] for expert in each) for each in held]
    bound = hosts.bound(current.num_logical, layout)
    host_of = [host for host, ranks in enumerate(hosts.ranks()) for _ in ranks] if bound else [0] * len(held)
    swaps = 0
    while swaps < MOST_SWAPS:
        busiest = max(range(len(held)), key=totals.__getitem__)
        light = sorted((rank for rank in range(len(held)) if host_of[rank] == host_of[busiest]), key=totals.__getitem__)
        best = max(
            (_best_swap(held, share, totals, busiest, rank) for rank in light[:LIGHTEST] if rank != busiest),
            default=None,
        )
        if best is None or best[0] <= 1e-9 * totals[busiest]:
            break
        _, rank, mine, theirs = best
        delta = share[held[busiest][mine]] - share[held[rank][theirs]]
        held[busiest][mine], held[rank][theirs] = held[rank][theirs], held[busiest][mine]
        totals[busiest], totals[rank] = totals[busiest] - delta, totals[rank] + delta
        swaps += 1
    return [expert for rank in held for expert in rank] if swaps else None


def _best_swap(
    held: Sequence[Sequence[int]], share: Sequence[float], totals: Sequence[float], busiest: int, rank: int
) -> tuple[float, int, int, int]:
    """Returns the gain of the best swap between two ranks, the other rank, and the slots on both. Gain 0: there is none."""
    gap, best = totals[busiest] - totals[rank], (0.0, rank, 0, 0)
    there = sorted((share[expert], slot) for slot, expert in enumerate(held[rank]))
    keys = [each for each, _ in there]
    for slot, expert in enumerate(held[busiest]):
        if expert in held[rank]:
            continue
        at = bisect.bisect_left(keys, share[expert] - gap / 2)
        for value, other in there[max(at - 1, 0) : at + 2]:
            delta = share[expert] - value
            gain = min(delta, gap - delta)
            if gain > best[0] and held[rank][other] not in held[busiest]:
                best = (gain, rank, slot, other)
    return best
