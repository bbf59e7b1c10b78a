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

from .torch_distributed import Journey, TorchDistributedPrepareAndFinalize, unpack


class AllGatherReduceScatterPrepareAndFinalize(TorchDistributedPrepareAndFinalize):
    """Dispatch is an all-gather; with `tokens_per_rank` nothing is exchanged before it, and the host
    never waits for the device unless `combine_order` is "slot".

    NOTE: the reduce-scatter is an all-to-all of partial sums followed by a sum in rank order: as many bytes as a ring
    would move, but added in float32 and in a fixed order, which a library's reduce-scatter does not promise. Partial
    sums travel in the model's dtype.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        quant_dispatch=frozenset({"fp8_block"}),
        async_receive=True,
    )

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        rows, quantised = self.rows_for_wire(x_MK, quant), self.sends_quantised(quant)
        counts = self._counts(x_MK, tokens_per_rank)
        parts = [*rows.parts(), routing.ids_Mt, routing.weights_Mt]
        transfer = self.wire.gather([_pad(part, max(counts)) for part in parts], phase="dispatch")

        def finish() -> Prepared:
            x, *scales, ids, weights = [_compact(part, counts) for part in transfer.wait()]
            mine = self.owner(ids) == self.ranks.rank
            local = Routing(
                ids_Mt=torch.where(mine, ids - self.starts_R[self.ranks.rank], -1).int(), weights_Mt=weights
            )
            return Prepared(
                x=unpack(x, quantised),
                scales=scales[0] if quantised else None,
                routing=local,
                handle=DispatchHandle(self.book, self._journey(routing, local, counts)),
            )

        return Receiver(self.book, finish)

    def _counts(self, x_MK, tokens_per_rank) -> list[int]:
        if tokens_per_rank is not None:
            return list(tokens_per_rank)
        mine = torch.full((1, 1), x_MK.shape[0], dtype=torch.int64, device=x_MK.device)
        (counts_R1,) = self.wire.gather([mine], phase="dispatch sizes").wait(host=True)
        return counts_R1[:, 0].tolist()

    def _journey(self, home: Routing, local: Routing, counts: list[int]) -> Journey:
        num_tokens, size = home.ids_Mt.shape[0], self.ranks.world_size
        owner_Mt, device = self.owner(home.ids_Mt), home.ids_Mt.device
        ranks = torch.arange(size, device=device)
        return Journey(
            home=home,
            local=local,
            tokens_S=torch.arange(num_tokens, device=device).repeat(size),
            slots_St=(owner_Mt[None] == ranks[:, None, None]).flatten(0, 1),
            sends=[num_tokens] * size,
            receives=counts,
        )

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        return self.combine(handle.take(self.book), y, reduce, out_MK)


def _pad(part: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows of unknown contents behind the real ones; `_compact` drops them unread."""
    if part.shape[0] == num_rows:
        return part
    padded = part.new_empty((num_rows, part.shape[1]))
    padded[: part.shape[0]] = part
    return padded


def _compact(part: torch.Tensor, counts: list[int]) -> torch.Tensor:
    if len(set(counts)) == 1:
        return part
    pieces = part.view(len(counts), max(counts), part.shape[1])
    return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])


class AllGatherReduceScatterManager(All2AllManager):
    prepare_finalize = AllGatherReduceScatterPrepareAndFinalize
