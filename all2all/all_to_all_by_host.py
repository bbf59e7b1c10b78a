"""All-to-all over several hosts: a row crosses the network once to each host that needs it, and is spread within the host.

The rank of the destination host with the sender's place on its own host receives the row, passes it on to the ranks of its host
and adds their partial sums before one row goes home. `all_to_all` sends one row to each *rank*, so that top-8 on eight ranks of a
host may send eight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from epserve.modular_kernel import (
    All2AllManager,
    DispatchHandle,
    ExpertLayout,
    FusedMoEActivationFormat,
    LayerSpec,
    Prepared,
    PrepareFinalizeCapability,
    PrepareFinalizeOptions,
    RankContext,
    Receiver,
    Routing,
)

from .all_to_all import AllToAllPrepareAndFinalize
from .transport.torch_distributed import TorchDistributedPrepareAndFinalize, pack_beside, subgroups, unpack_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Carries the state of one dispatch from prepare to finalize."""

    inner: DispatchHandle
    """The dispatch within the host, of this rank's own rows and of those that it passes on."""
    tokens_S: torch.Tensor
    """int64: index of this rank's token of each row that it sent to another host, ascending within a destination."""
    sends: list[int]
    receives: list[int]


class AllToAllByHostPrepareAndFinalize(TorchDistributedPrepareAndFinalize):
    """Dispatches by an exchange between hosts and `all_to_all` within each host.

    Partial sums are rounded to the model's dtype once a rank and once a host. Sums have a fixed order: this host first, then
    the other hosts by the number of the rank that adds up there.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        quant_dispatch=frozenset({"fp8_block"}),
        async_receive=True,
        needed_rows_only=True,
        combine_orders=frozenset({"rank"}),
        spans_hosts=True,
    )

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions, group: Any):
        """`group`: the process group of this host's ranks, None for one rank."""
        super().__init__(ranks, spec, options)
        hosts, mine = hosts_of(ranks), hosts_of(ranks)[ranks.rank]
        here = members(hosts, mine)
        place = here.index(ranks.rank)
        layout = spec.layout
        inner_ranks = replace(ranks, rank=place, world_size=len(here), group=group, hosts=())
        counts = tuple(layout.counts[rank] for rank in here)
        if not any(counts):
            counts = (1,) * len(here)  # a host without experts gets no row, and a layout must have some
        inner_spec = replace(
            spec, layout=ExpertLayout(counts=counts), shape=replace(spec.shape, num_experts=sum(counts))
        )
        # Rows that other hosts' ranks send here come on top of this rank's own.
        room = replace(options, max_tokens_per_rank=options.max_tokens_per_rank * ranks.world_size)
        self.inner = AllToAllPrepareAndFinalize(inner_ranks, inner_spec, room)
        device = ranks.device
        relays = torch.full((ranks.world_size,), -1, dtype=torch.int64)
        for host in set(hosts) - {mine}:
            there = members(hosts, host)
            relays[torch.tensor(there)] = there[place % len(there)]
        self.relays_R = relays.to(device)
        """The rank that takes this rank's rows for each rank of another host, or -1 for the ranks of this host."""
        host_of, number_of = torch.tensor(hosts), torch.full((layout.num_experts,), -1, dtype=torch.int32)
        owners = torch.repeat_interleave(torch.arange(layout.num_ranks), torch.tensor(layout.counts))
        for host in set(hosts):
            held = host_of[owners] == host
            number_of[held] = torch.arange(int(held.sum()), dtype=torch.int32)
        self.numbers_P = number_of.to(device)
        """The number of each physical expert among those of its host."""

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        assert x_MK.shape[0] <= self.options.max_tokens_per_rank, "the kernel makes rounds"
        ids_Mt = routing.ids_Mt
        owner_Mt = self.owner(ids_Mt)
        relay_Mt = torch.where(owner_Mt >= 0, self.relays_R[owner_Mt.clamp(min=0)], -2)  # -1: this host, -2: no expert
        number_Mt = self.numbers_P[ids_Mt.clamp(min=0).long()]
        ranks = torch.arange(self.ranks.world_size, device=ids_Mt.device)
        goes_RM = (relay_Mt[None] == ranks[:, None, None]).any(-1)
        dest_S, tokens_S = goes_RM.nonzero(as_tuple=True)
        there_St = relay_Mt[tokens_S] == dest_S[:, None]
        ids_St = torch.where(there_St, number_Mt[tokens_S], -1)
        sends, receives = self.wire.swap_counts(goes_RM.sum(1), phase="dispatch sizes between hosts")
        rows = self.rows_for_wire(x_MK, quant)
        scales = None if rows.scales is None else rows.scales[tokens_S]
        parts = [rows.x[tokens_S], pack_beside(ids_St.int(), routing.weights_Mt[tokens_S], scales)]
        transfer = self.wire.exchange(parts, sends, receives, phase="dispatch between hosts")
        own = Routing(ids_Mt=torch.where(relay_Mt == -1, number_Mt, -1), weights_Mt=routing.weights_Mt)

        def finish() -> Prepared:
            x, beside = transfer.wait()
            ids, weights, came = unpack_beside(beside, ids_Mt.shape[1])
            both = Routing(ids_Mt=torch.cat([own.ids_Mt, ids]), weights_Mt=torch.cat([own.weights_Mt, weights]))
            found = self.inner.prepare_rows(rows.followed_by(x, came), both, self.sends_quantised(quant))()
            trip = Trip(inner=found.handle, tokens_S=tokens_S, sends=sends, receives=receives)
            return replace(found, handle=DispatchHandle(self.book, trip))

        return Receiver(self.book, finish)

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        trip: Trip = handle.take(self.book)
        num_own = out_MK.shape[0]
        sums_SK = out_MK.new_empty((num_own + sum(trip.receives), out_MK.shape[1]))
        within = self.inner.finalize_no_wait(trip.inner, y, reduce=reduce, out_MK=sums_SK)

        def finish() -> torch.Tensor:
            own_MK, passed_SK = within().split([num_own, sum(trip.receives)])
            transfer = self.wire.exchange([passed_SK], trip.receives, trip.sends, phase="combine between hosts")
            total_MK = own_MK.float()
            (rows_SK,) = transfer.wait()
            for tokens, rows in zip(trip.tokens_S.split(trip.sends), rows_SK.split(trip.sends), strict=True):
                total_MK.index_add_(0, tokens, rows.float())  # a token occurs once in a piece: no race
            return out_MK.copy_(total_MK)

        return Receiver(self.book, finish)

    def network_bytes(self) -> int:
        """Returns the bytes of the exchange between hosts. The inner one stays on this host."""
        return self.wire.network_bytes

    def why_not_reduce(self, reduce):
        return self.inner.why_not_reduce(reduce)

    def abandon(self) -> None:
        super().abandon()
        self.inner.abandon()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.inner.close()


class AllToAllByHostManager(All2AllManager):
    """Makes the process group of its host's ranks once, for all configurations."""

    prepare_finalize = AllToAllByHostPrepareAndFinalize

    def __init__(self, ranks: RankContext):
        super().__init__(ranks)
        self._group: Any = None

    def make(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> AllToAllByHostPrepareAndFinalize:
        hosts = hosts_of(self.ranks)
        here = members(hosts, hosts[self.ranks.rank])
        if not self._made:
            every = [members(hosts, host) for host in range(max(hosts) + 1)]
            whole = len(here) == self.ranks.world_size
            self._group = self.ranks.group if whole else subgroups(self.ranks, every)[hosts[self.ranks.rank]]
        return self.prepare_finalize(self.ranks, spec, options, self._group)

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            group, self._group = self._group, None
            if group is not None and group is not self.ranks.group:
                dist.destroy_process_group(group)

    def abandon(self) -> None:
        super().abandon()
        self._group = None  # the rank leaves all of its groups together


def hosts_of(ranks: RankContext) -> tuple[int, ...]:
    """Returns the number of each rank's host. When it is unknown, all ranks count as on one host."""
    return ranks.hosts or (0,) * ranks.world_size


def members(hosts: tuple[int, ...], host: int) -> list[int]:
    """Returns the ranks of a host, ascending."""
    return [rank for rank, each in enumerate(hosts) if each == host]
