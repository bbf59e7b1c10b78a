"""All-gather and reduce-scatter: every token visits every rank. Few, large messages whose sizes do not depend on the ids."""

from __future__ import annotations

import torch

from epserve.modular_kernel import (
    All2AllManager,
    DispatchHandle,
    FusedMoEActivationFormat,
    Prepared,
    PrepareFinalizeCapability,
    Receiver,
    Routing,
)

from .transport.torch_distributed import Journey, TorchDistributedPrepareAndFinalize, pack_beside, unpack, unpack_beside


class AllGatherReduceScatterPrepareAndFinalize(TorchDistributedPrepareAndFinalize):
    """Dispatches by an all-gather and combines by a reduce-scatter.

    With `tokens_per_rank` the ranks exchange nothing before the all-gather, and the host never waits for the device
    unless `combine_order` is "slot".

    NOTE: the reduce-scatter is an all-to-all of partial sums followed by a sum in rank order. It moves as many bytes as
    a ring, but it adds in float32 and in a fixed order, which a library's reduce-scatter does not promise. Partial sums
    travel in the model's dtype.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        quant_dispatch=frozenset({"fp8_block"}),
        async_receive=True,
    )

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        rows, quantised = self.rows_for_wire(x_MK, quant), self.sends_quantised(quant)
        counts = self._counts(x_MK, tokens_per_rank)
        parts = [rows.x, pack_beside(routing.ids_Mt, routing.weights_Mt, rows.scales)]
        transfer = self.wire.gather([pad(part, max(counts)) for part in parts], phase="dispatch")
        offsets, top_k = self.spec.layout.offsets, routing.ids_Mt.shape[1]
        start, stop = offsets[self.ranks.rank], offsets[self.ranks.rank + 1]

        def finish() -> Prepared:
            x, beside = (compact(part, counts) for part in transfer.wait())
            ids, weights, scales = unpack_beside(beside, top_k)
            local_ids = torch.where((ids >= start) & (ids < stop), ids - start, -1)
            local = Routing(ids_Mt=local_ids, weights_Mt=weights)
            handle = DispatchHandle(self.book, self._journey(routing, local, counts))
            return Prepared(x=unpack(x, quantised), scales=scales, routing=local, handle=handle)

        return Receiver(self.book, finish)

    def _counts(self, x_MK, tokens_per_rank) -> list[int]:
        if tokens_per_rank is not None:
            return list(tokens_per_rank)
        mine = torch.full((1, 1), x_MK.shape[0], dtype=torch.int64, device=x_MK.device)
        (counts_R1,) = self.wire.gather([mine], phase="dispatch sizes").wait(host=True)
        return counts_R1[:, 0].tolist()

    def _journey(self, home: Routing, local: Routing, counts: list[int]) -> Journey:
        slots_St = None
        if self.options.combine_order == "slot":
            ranks = torch.arange(self.ranks.world_size, device=home.ids_Mt.device)
            slots_St = (self.owner(home.ids_Mt)[None] == ranks[:, None, None]).flatten(0, 1)
        sends = [home.ids_Mt.shape[0]] * self.ranks.world_size
        return Journey(home=home, local=local, tokens_S=None, slots_St=slots_St, sends=sends, receives=counts)

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        return self.combine(handle.take(self.book), y, reduce, out_MK)


def pad(part: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns `part` with rows of undefined contents appended up to `num_rows`. `compact` drops those rows unread."""
    if part.shape[0] == num_rows:
        return part
    padded = part.new_empty((num_rows, part.shape[1]))
    padded[: part.shape[0]] = part
    return padded


def compact(part: torch.Tensor, counts: list[int]) -> torch.Tensor:
    if len(set(counts)) == 1:
        return part
    pieces = part.view(len(counts), max(counts), part.shape[1])
    return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])


class AllGatherReduceScatterManager(All2AllManager):
    prepare_finalize = AllGatherReduceScatterPrepareAndFinalize
