"""All-to-all in batched format: a row goes to each of its experts, into a block of fixed capacity per expert.

This is the portable twin of the low-latency libraries: the same shapes and the same division of labour.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epserve.errors import Incompatible
from epserve.modular_kernel import (
    All2AllManager,
    DispatchHandle,
    FusedMoEActivationFormat,
    Prepared,
    PrepareFinalizeCapability,
    Receiver,
    Routing,
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    weighted_sum,
)

from .transport.torch_distributed import TorchDistributedPrepareAndFinalize, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedJourney:
    """Carries the state of one batched dispatch from prepare to finalize."""

    home: Routing
    row_Mt: torch.Tensor
    """int64: index of the sent row in which each slot's result comes home. Entries of id -1 are undefined."""
    place_S: torch.Tensor
    """int64: index in `(e * T, K)` of each received row."""
    sends: list[int]
    receives: list[int]


class AllToAllBatchedPrepareAndFinalize(TorchDistributedPrepareAndFinalize):
    """Keeps the rows of an expert in the order of source rank and token, which is the same on any number of ranks.

    One row of results a slot comes home in the model's dtype. Finalize weights and adds the rows in slot order in
    float32, so both combine orders are "slot" here. A token that names an expert twice sends it one row, so T never
    overflows.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.BatchedExperts,
        quant_dispatch=frozenset({"fp8_block"}),
        async_receive=True,
    )

    def why_not_reduce(self, reduce: TopKWeightAndReduce) -> str | None:
        if isinstance(reduce, TopKWeightAndReduceDelegate | TopKWeightAndReduceNaiveBatched):
            return None
        return f"results must come as (e, T, K) for finalize to weight and add, these have {type(reduce).__name__}"

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        rows, quantised = self.rows_for_wire(x_MK, quant), self.sends_quantised(quant)
        ids_Mt, counts = routing.ids_Mt, self.spec.layout.counts
        tokens_S, row_Mt, sends_E = _one_row_per_expert(ids_Mt, self.spec.shape.num_experts)

        local = counts[self.ranks.rank]
        sizes = self.wire.exchange([sends_E[:, None]], counts, [local] * self.ranks.world_size, phase="dispatch sizes")
        receives_Re = sizes.wait(host=True)[0].view(self.ranks.world_size, local)
        sends = [int(piece.sum()) for piece in sends_E.cpu().split(counts)]
        receives = receives_Re.sum(1).tolist()
        parts = [part[tokens_S] for part in rows.parts()]
        transfer = self.wire.exchange(parts, sends, receives, phase="dispatch")

        def finish() -> Prepared:
            received = transfer.wait()
            capacity = self.num_dispatchers() * self.options.max_tokens_per_rank
            place_S = _places(receives_Re, capacity, sum(receives))
            blocks = []
            for part in received:
                block = part.new_empty((local * capacity, part.shape[1]))
                block[place_S] = part
                blocks.append(block.view(local, capacity, part.shape[1]))
            journey = BatchedJourney(home=routing, row_Mt=row_Mt, place_S=place_S, sends=sends, receives=receives)
            return Prepared(
                x=unpack(blocks[0], quantised),
                scales=blocks[1] if quantised else None,
                expert_num_tokens=receives_Re.sum(0).int(),
                handle=DispatchHandle(self.book, journey),
            )

        return Receiver(self.book, finish)

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        journey: BatchedJourney = handle.take(self.book)
        reason = self.why_not_reduce(reduce)
        if reason:
            raise Incompatible(reason)
        rows_SK = y.flatten(0, 1)[journey.place_S]
        transfer = self.wire.exchange([rows_SK], journey.receives, journey.sends, phase="combine")

        def finish() -> torch.Tensor:
            (rows_SK,) = transfer.wait()
            if rows_SK.shape[0] == 0:
                return out_MK.zero_()
            return out_MK.copy_(weighted_sum(rows_SK[journey.row_Mt], journey.home))

        return Receiver(self.book, finish)


def _one_row_per_expert(ids_Mt: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the token of each row, the row of each slot `(M, t)` and the number of rows of each expert `(E,)`.

    Rows are sorted by expert, then by token.
    """
    slots = torch.arange(ids_Mt.shape[1], device=ids_Mt.device)
    same_Mtt = ids_Mt[:, :, None] == ids_Mt[:, None, :]
    first_Mt = torch.where(same_Mtt, slots, ids_Mt.shape[1]).amin(-1)  # the first slot that names the same expert
    token, slot = ((ids_Mt >= 0) & (first_Mt == slots)).nonzero(as_tuple=True)
    expert, order = ids_Mt[token, slot].sort(stable=True)
    token, slot = token[order], slot[order]
    row_Mt = torch.zeros(ids_Mt.shape, dtype=torch.int64, device=ids_Mt.device)
    row_Mt[token, slot] = torch.arange(token.shape[0], device=ids_Mt.device)
    bounds = torch.arange(num_experts + 1, device=ids_Mt.device, dtype=expert.dtype)
    return token, row_Mt.gather(1, first_Mt), torch.searchsorted(expert, bounds).diff()


def _places(receives_Re: torch.Tensor, capacity: int, num_rows: int) -> torch.Tensor:
    """Returns the index in `(e * T)` of each row, given in arrival order (rank, expert, token). An expert's rows are adjacent."""
    local = receives_Re.shape[1]
    first_Re = receives_Re.cumsum(0) - receives_Re + torch.arange(local, device=receives_Re.device) * capacity
    counts = receives_Re.flatten()
    shift = first_Re.flatten() - (counts.cumsum(0) - counts)
    repeated = torch.repeat_interleave(shift, counts, output_size=num_rows)
    return repeated + torch.arange(num_rows, device=receives_Re.device)


class AllToAllBatchedManager(All2AllManager):
    prepare_finalize = AllToAllBatchedPrepareAndFinalize
