"""Experts shared by slices: the T ranks of a group hold the same experts, each N/T of their intermediate size (EP x TP).

Rank r is slice r % T of expert group r // T. An inner backend of any kind joins the ranks of equal slice:

    prepare    all-gather of the group's tokens, then the inner backend's dispatch of all of them
    experts    every rank on its slices: partial sums over N/T
    finalize   the inner backend's combine, then a reduce-scatter of partial sums within the group

With one expert group the inner backend is `local`, and that is plain tensor parallelism. The slices' partial sums travel in the
model's dtype and are added in float32 in the order of slices, so that repeats have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from epserve.errors import ConfigError
from epserve.modular_kernel import (
    All2AllManager,
    DispatchHandle,
    FusedMoEPrepareAndFinalizeModular,
    LayerSpec,
    Prepared,
    PrepareFinalizeOptions,
    RankContext,
    Receiver,
    Routing,
)

from .allgather_reducescatter import compact, pad
from .transport.torch_distributed import Transfer, Wire, pack_beside, subgroups, unpack_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Names the process groups of a rank: `group` of `size` ranks that share experts, and `column` of the same slice."""

    group: RankContext
    column: RankContext

    @classmethod
    def of(cls, ranks: RankContext, size: int) -> Place:
        """Makes the two process groups, rows first. Collective. Raises ConfigError."""
        if size < 1 or ranks.world_size % size:
            raise ConfigError(f"{ranks.world_size} ranks do not divide by tensor_parallel {size}")
        index, part = divmod(ranks.rank, size)
        rows = [list(range(first, first + size)) for first in range(0, ranks.world_size, size)]
        columns = [list(range(first, ranks.world_size, size)) for first in range(size)]
        groups, others = subgroups(ranks, rows), subgroups(ranks, columns)
        return cls(
            group=replace(ranks, rank=part, world_size=size, group=groups[index], hosts=_hosts(ranks, rows[index])),
            column=replace(
                ranks, rank=index, world_size=len(rows), group=others[part], hosts=_hosts(ranks, columns[part])
            ),
        )

    def destroy(self) -> None:
        for each in (self.group, self.column):
            if each.group is not None:
                dist.destroy_process_group(each.group)


def _hosts(ranks: RankContext, members: Sequence[int]) -> tuple[int, ...]:
    """Returns the hosts of a part of the ranks, if those of all are known."""
    return tuple(ranks.hosts[rank] for rank in members) if ranks.hosts else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Carries the state of one dispatch from prepare to finalize. `counts`: tokens of each rank of the group."""

    inner: DispatchHandle
    counts: list[int]


class TensorParallelPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Wraps an inner backend, which gets T times as many tokens and sets the format, the limits and `Prepared`."""

    def __init__(
        self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions, place: Place, inner: All2AllManager
    ):
        super().__init__(ranks, spec, options)
        if options.combine_order == "slot":
            raise ConfigError("combine_order is 'slot': slices are added by rank, so tensor_parallel must be 1")
        self.place, self.wire = place, Wire(place.group)
        wider = replace(options, max_tokens_per_rank=options.max_tokens_per_rank * place.group.world_size)
        self.inner = inner.get_handle(spec, wider)
        self.capability = replace(self.inner.capability, cuda_graph=False)  # type: ignore[misc]

    def num_local_experts(self) -> int:
        return self.inner.num_local_experts()

    def num_dispatchers(self) -> int:
        return self.inner.num_dispatchers()

    def max_rows(self) -> int:
        return self.inner.max_rows()

    def network_bytes(self) -> int:
        return self.inner.network_bytes() + self.wire.network_bytes

    def why_not_reduce(self, reduce):
        return self.inner.why_not_reduce(reduce)

    def check(self) -> None:
        self.inner.check()

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        counts, gathered = self._gather(x_MK, routing, tokens_per_rank)
        x, routed = self._gathered(gathered, counts, routing.ids_Mt.shape[1])
        prepared = self.inner.prepare(x, routed, quant=quant, tokens_per_rank=self._of_groups(tokens_per_rank))
        return self._outer(prepared, counts)

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        """Gathers the tokens of the group at once. The inner dispatch goes on until the receiver is called."""
        counts, gathered = self._gather(x_MK, routing, tokens_per_rank)
        x, routed = self._gathered(gathered, counts, routing.ids_Mt.shape[1])
        receive = self.inner.prepare_no_receive(
            x, routed, quant=quant, tokens_per_rank=self._of_groups(tokens_per_rank)
        )
        return Receiver(self.book, lambda: self._outer(receive(), counts))

    def finalize(self, handle, y, *, reduce, out_MK):
        return self.finalize_no_wait(handle, y, reduce=reduce, out_MK=out_MK)()

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        flight: Flight = handle.take(self.book)
        partial_SK = out_MK.new_empty((sum(flight.counts), out_MK.shape[1]))
        combine = self.inner.finalize_no_wait(flight.inner, y, reduce=reduce, out_MK=partial_SK)

        def finish() -> torch.Tensor:
            mine, size = out_MK.shape[0], self.place.group.world_size
            transfer = self.wire.exchange([combine()], flight.counts, [mine] * size, phase="combine of slices")
            (rows_SK,) = transfer.wait()
            total_MK = torch.zeros(out_MK.shape, dtype=torch.float32, device=out_MK.device)
            for slice_MK in rows_SK.split([mine] * size):  # in the order of slices
                total_MK += slice_MK
            return out_MK.copy_(total_MK)

        return Receiver(self.book, finish)

    def abandon(self) -> None:
        super().abandon()
        self.inner.abandon()

    def _gather(self, x_MK, routing: Routing, tokens_per_rank) -> tuple[list[int], Transfer]:
        cap = self.options.max_tokens_per_rank
        assert x_MK.shape[0] <= cap, f"{x_MK.shape[0]} rows in one round, the cap is {cap}: the kernel makes rounds"
        counts = self._counts(x_MK, tokens_per_rank)
        parts = [x_MK, pack_beside(routing.ids_Mt, routing.weights_Mt, None)]
        return counts, self.wire.gather([pad(part, max(counts)) for part in parts], phase="gather of tokens")

    def _gathered(self, transfer: Transfer, counts: list[int], top_k: int) -> tuple[torch.Tensor, Routing]:
        x, beside = (compact(part, counts) for part in transfer.wait())
        ids, weights, _ = unpack_beside(beside, top_k)
        # Ids travel as int32. The inner backend may take another dtype.
        return x.contiguous(), Routing(ids_Mt=ids, weights_Mt=weights).with_ids(self.inner.topk_indices_dtype())

    def _counts(self, x_MK, tokens_per_rank) -> list[int]:
        size = self.place.group.world_size
        if tokens_per_rank is not None:
            first = self.place.column.rank * size
            return list(tokens_per_rank[first : first + size])
        mine = torch.full((1, 1), x_MK.shape[0], dtype=torch.int64, device=x_MK.device)
        (counts_T1,) = self.wire.gather([mine], phase="gather of sizes").wait(host=True)
        return counts_T1[:, 0].tolist()

    def _of_groups(self, tokens_per_rank) -> list[int] | None:
        """Returns the tokens of each rank of the column, which are those of its whole group."""
        if tokens_per_rank is None:
            return None
        size = self.place.group.world_size
        return [sum(tokens_per_rank[first : first + size]) for first in range(0, len(tokens_per_rank), size)]

    def _outer(self, prepared: Prepared, counts: list[int]) -> Prepared:
        return replace(prepared, handle=DispatchHandle(self.book, Flight(inner=prepared.handle, counts=counts)))


class TensorParallelManager(All2AllManager):
    """Wraps another backend's manager, which serves the ranks of equal slice. The registry does not list this wrapper.

    `spec.layout` has one entry for each expert group. `spec.shape.intermediate` is the size of one slice.
    """

    prepare_finalize = TensorParallelPrepareAndFinalize

    def __init__(self, ranks: RankContext, inner: type[All2AllManager], size: int):
        super().__init__(ranks)
        self.place = Place.of(ranks, size)
        self.inner = inner(self.place.column)
        self._broken = False

    def make(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> TensorParallelPrepareAndFinalize:
        groups = self.place.column.world_size
        if spec.layout.num_ranks != groups:
            raise ConfigError(
                f"the layout places experts on {spec.layout.num_ranks} groups of ranks, there are {groups}"
            )
        return TensorParallelPrepareAndFinalize(self.ranks, spec, options, self.place, self.inner)

    def abandon(self) -> None:
        super().abandon()
        self.inner.abandon()
        self._broken = True

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            try:
                self.inner.destroy()
            finally:
                if not self._broken:  # the subgroups of a broken group end with their world
                    self.place.destroy()
