"""Placement of experts: logical expert -> physical slots on ranks, replicas, and the policy that balances load.

A placement is frozen and versioned. All functions here are pure. Legend: M tokens, t = top-k, E logical experts,
P physical experts of all ranks, L most replicas of one expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from epserve.errors import ConfigError
from epserve.modular_kernel import ExpertLayout, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Physical slot p holds a copy of logical expert `physical_to_logical[p]`; every expert has at least one slot.

    `layout` assigns slots to ranks. `version` rises with each rebalance, so that ranks can check that they agree.
    `partial` allows experts without a slot, after the rank that held them is gone. Their tokens are computed without them.
    """

    version: int = 0
    num_logical: int
    layout: ExpertLayout
    physical_to_logical: tuple[int, ...]
    partial: bool = False
    replicas: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    """Physical slots of each logical expert, ascending."""
    missing: tuple[int, ...] = field(init=False)
    """Experts without a slot, ascending. Empty unless the placement is partial."""
    is_identity: bool = field(init=False, repr=False)
    _tables: dict = field(init=False, default_factory=dict, compare=False, repr=False, hash=False)

    def __post_init__(self):
        if len(self.physical_to_logical) != self.layout.num_experts:
            raise ConfigError(
                f"{len(self.physical_to_logical)} physical experts are placed, the ranks hold"
                f" {self.layout.num_experts} ({self.layout.counts}); make experts_per_rank add up to the first number"
            )
        slots: list[list[int]] = [[] for _ in range(self.num_logical)]
        for physical, logical in enumerate(self.physical_to_logical):
            if not 0 <= logical < self.num_logical:
                raise ConfigError(f"slot {physical} holds expert {logical}, outside 0..{self.num_logical - 1}")
            slots[logical].append(physical)
        homeless = [logical for logical, found in enumerate(slots) if not found]
        if homeless and not self.partial:
            raise ConfigError(f"experts without a slot: {homeless}")
        object.__setattr__(self, "missing", tuple(homeless))
        object.__setattr__(self, "replicas", tuple(map(tuple, slots)))
        object.__setattr__(self, "is_identity", self.physical_to_logical == tuple(range(self.num_logical)))

    @classmethod
    def identity(cls, num_experts: int, ranks: int | Sequence[int], *, slices: int = 1) -> Placement:
        """Returns one copy of each expert, in order. `ranks`: their number (as even as possible), or the experts of each."""
        if isinstance(ranks, int):
            layout = ExpertLayout.even(num_experts, ranks, slices=slices)
        else:
            layout = ExpertLayout(counts=tuple(ranks), slices=slices)
        if layout.num_experts != num_experts:
            raise ConfigError(
                f"experts_per_rank {layout.counts} holds {layout.num_experts} experts, the model has {num_experts};"
                f" make it add up to {num_experts} or leave it empty"
            )
        return cls(num_logical=num_experts, layout=layout, physical_to_logical=tuple(range(num_experts)))

    @classmethod
    def spread(
        cls, num_experts: int, layout: ExpertLayout, *, loads: Sequence[float] = (), version: int = 0
    ) -> Placement:
        """Returns copies by load, placed by load (`pack_slots`). It is the identity without redundancy and loads."""
        if layout.num_experts == num_experts and not loads:
            slots = tuple(range(num_experts))
        else:
            slots = pack_slots(loads or [1.0] * num_experts, layout)
        return cls(version=version, num_logical=num_experts, layout=layout, physical_to_logical=slots)

    def without(self, ranks: Collection[int], *, version: int, partial: bool = False) -> Placement | None:
        """Returns the placement that remains when `ranks` are gone, with the other ranks renumbered.

        Args:
            ranks: numbers of the lost ranks.
            version: version of the result.
            partial: allow experts without a copy, as long as some expert remains.

        Returns:
            None when an expert has no copy left (or, with `partial`, when no expert remains).
        """
        if self.layout.slices > 1:
            return None  # a slice of an expert has no copy
        kept = [rank for rank in range(self.layout.num_ranks) if rank not in ranks]
        slots = tuple(expert for rank in kept for expert in self.experts_of(rank))
        if not slots or (len(set(slots)) < self.num_logical and not partial):
            return None
        layout = ExpertLayout(counts=tuple(self.layout.counts[rank] for rank in kept))
        return Placement(
            version=version, num_logical=self.num_logical, layout=layout, physical_to_logical=slots, partial=partial
        )

    def reordered(self, ranks: Sequence[int]) -> Placement:
        """Returns the same placement with rank `ranks[r]` as rank r."""
        assert self.layout.slices == 1, "ranks that share experts are never lost apart"
        slots = tuple(expert for rank in ranks for expert in self.experts_of(rank))
        layout = ExpertLayout(counts=tuple(self.layout.counts[rank] for rank in ranks))
        return replace(self, layout=layout, physical_to_logical=slots)

    def with_version(self, version: int) -> Placement:
        return replace(self, version=version)

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Returns each rank's load when logical experts get `loads`, shared evenly over their copies."""
        shares = [loads[expert] / len(self.replicas[expert]) for expert in self.physical_to_logical]
        bounds = self.layout.offsets
        return [sum(shares[start:end]) for start, end in itertools.pairwise(bounds)]

    def imbalance(self, loads: Sequence[float]) -> float:
        """Returns the busiest rank's load over the mean. 1.0 is perfect, and also the value of idle ranks."""
        per_rank = self.rank_loads(loads)
        return max(per_rank) * len(per_rank) / total if (total := sum(per_rank)) else 1.0

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Returns the logical ids of the experts that `rank` holds (slices of), in slot order, to load from a checkpoint."""
        entry = rank // self.layout.slices
        return self.physical_to_logical[self.layout.offsets[entry] : self.layout.offsets[entry + 1]]

    def tables(self, device: torch.device, ids_dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `(E, L)` slots of `ids_dtype`, short rows padded with -1, and `(E,)` int64 replica counts.

        They are built once per device and dtype.

        A missing expert has one "slot" -1, which belongs to no rank.
        """
        key = device, ids_dtype
        if key not in self._tables:
            most = max(map(len, self.replicas))
            padded = [list(slots) + [-1] * (most - len(slots)) for slots in self.replicas]
            self._tables[key] = (
                torch.tensor(padded, dtype=ids_dtype, device=device),
                torch.tensor([max(len(slots), 1) for slots in self.replicas], dtype=torch.int64, device=device),
            )
        return self._tables[key]


def to_physical(routing: Routing, placement: Placement, *, token_offset: int | torch.Tensor = 0) -> Routing:
    """Maps logical ids to physical ids of the same dtype. -1 stays -1, and weights stay as they are.

    Token number `token_offset + row` takes replica number `token % replicas` of each of its experts. The choice depends
    only on the token's place in the batch, so a replay chooses the same replicas, and equal ids in one row stay equal.
    Ids must lie in -1 .. E-1 (see `check_routing`). `token_offset` may lie on the device, as `(1,)`: then nothing waits for it.
    """
    if placement.is_identity:
        return routing
    ids_Mt = routing.ids_Mt.long()
    slots_EL, counts_E = placement.tables(ids_Mt.device, routing.ids_Mt.dtype)
    known_Mt = ids_Mt.clamp(min=0)  # -1 looks up expert 0 and is masked again below
    token_M1 = (torch.arange(ids_Mt.shape[0], device=ids_Mt.device) + token_offset).unsqueeze(1)
    physical_Mt = slots_EL[known_Mt, token_M1 % counts_E[known_Mt]]
    return Routing(ids_Mt=physical_Mt.masked_fill_(ids_Mt < 0, -1), weights_Mt=routing.weights_Mt)


def left_out(ids_Mt: torch.Tensor, placement: Placement, parts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Finds the missing experts that the tokens of each part chose. Waits for the device, but only if any are missing.

    Args:
        ids_Mt: `(M, t)` logical ids.
        placement: the placement of the layer.
        parts: numbers of rows of the parts, in order. They add up to M.

    Returns:
        Part -> logical ids, ascending. Parts that miss no expert are absent.
    """
    if not placement.missing:
        return {}
    missing = torch.tensor(placement.missing, dtype=ids_Mt.dtype, device=ids_Mt.device)
    ids_Mt = torch.where(torch.isin(ids_Mt, missing), ids_Mt, -1).cpu()
    found = {part: ids_mt.unique().tolist() for part, ids_mt in enumerate(ids_Mt.split(list(parts)))}
    return {part: wanted for part, ids in found.items() if (wanted := tuple(each for each in ids if each >= 0))}


def pack_slots(loads: Sequence[float], layout: ExpertLayout) -> tuple[int, ...]:
    """Returns `physical_to_logical` for any layout, ranks of different sizes included.

    Each expert gets two copies before any gets three, if there are enough slots, so that the loss of a rank loses no expert.
    Further copies go to the highest load per copy, at most one for each rank. The heaviest copy goes first, to the least
    loaded rank with room. A rank gets a second copy of an expert only when nothing else is possible, since it brings no gain.
    """
    ranks, slots = layout.num_ranks, layout.num_experts
    least = 2 if ranks > 1 and slots >= 2 * len(loads) else 1
    copies = [least] * len(loads)
    if slots < len(loads):
        raise ConfigError(f"{slots} replicas are fewer than the {len(loads)} experts")
    for _ in range(slots - least * len(loads)):
        # A copy beyond one for each rank brings no gain, so it comes last. Experts without load share alike.
        hottest = max(range(len(loads)), key=lambda e: (copies[e] < ranks, loads[e] / copies[e], -copies[e]))
        copies[hottest] += 1
    shares = [load / number for load, number in zip(loads, copies, strict=True)]
    held: list[list[int]] = [[] for _ in layout.counts]
    totals = [0.0] * ranks
    # Copies of one expert come one after the other. Experts with most copies come first: they are hardest to keep apart.
    for expert in sorted(range(len(loads)), key=lambda e: (-shares[e], -copies[e], e)):
        for _ in range(copies[expert]):
            room = [rank for rank, count in enumerate(layout.counts) if len(held[rank]) < count]
            rank = min(room, key=lambda r: (expert in held[r], totals[r], len(held[r]), r))
            held[rank].append(expert)
            totals[rank] += shares[expert]
    _part_copies(held, shares)
    return tuple(expert for rank in held for expert in rank)


def _part_copies(held: list[list[int]], shares: Sequence[float]) -> None:
    """Swaps second copies on one rank for experts of the most similar share that it lacks, until no swap helps."""
    for here in held:
        for slot, expert in enumerate(here):
            if expert not in here[:slot]:
                continue
            swaps = [
                (abs(shares[other] - shares[expert]), rank, place)
                for rank, there in enumerate(held)
                if expert not in there
                for place, other in enumerate(there)
                if other not in here or there.count(other) > 1
            ]
            if swaps:
                _, rank, place = min(swaps)
                here[slot], held[rank][place] = held[rank][place], expert
