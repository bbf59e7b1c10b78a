"""The ranks that can give a newcomer its weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from epserve.link.door import LinkAddress
from epserve.rank.actor import RankActor
from epserve.rank.step import Arrangement
from epserve.rank.weights.newcomers import Holders

from .members import Member, call_all

HAND_OUT_TIMEOUT_S = 10.0


async def find_holders(
    members: Sequence[Member], new: Sequence[Member], present: Arrangement, layers: Collection[int] = ()
) -> tuple[Holders, ...]:
    """Finds the holders of experts among the ranks that serve. Addresses are for this machine only if all processes are on it.

    Args:
        members: all members.
        new: newcomers among them, which hold no experts yet.
        present: the arrangement of the ranks that serve.
        layers: layers of interest. Empty: all.

    Returns:
        The holders of each slice.

    Raises:
        EpserveError: a rank is lost.
    """
    serving = [each for each in members if each.alive and each.report is not None and each not in new]
    nodes = {each.facts.node_id if each.facts is not None else None for each in [*serving, *new]}
    local = len(nodes) == 1 and None not in nodes
    silent = [each for each in serving if each.hands_out is None or (not each.hands_out.host and not local)]
    addresses = await call_all(silent, RankActor.hand_out, local, timeout=HAND_OUT_TIMEOUT_S, background=True)
    for member, address in zip(silent, addresses, strict=True):
        member.hands_out = address
    slices = present.config.engine.tensor_parallel
    found: list[dict[int, dict[int, list[LinkAddress]]]] = [
        {layer: {} for layer in present.placements} for _ in range(slices)
    ]
    for layer in layers or present.placements:
        placement = present.placements[layer]
        for member in serving:
            assert member.hands_out is not None
            for expert in placement.experts_of(member.rank):
                found[member.rank % slices][layer].setdefault(expert, []).append(member.hands_out)
    return tuple(found)


def suffice(holders: tuple[Holders, ...], new: Sequence[Member], wanted: Arrangement) -> bool:
    """Returns whether the holders have all experts that `new` are to hold in the `wanted` arrangement."""
    return all(
        expert in holders[member.rank % len(holders)].get(layer, {})
        for member in new
        for layer, placement in wanted.placements.items()
        for expert in placement.experts_of(member.rank)
    )
