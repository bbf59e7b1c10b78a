"""All-to-all in Standard format: a row goes once to each rank that holds at least one of its experts."""

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

from .transport.torch_distributed import (
    Journey,
    Rows,
    TorchDistributedPrepareAndFinalize,
    pack_beside,
    unpack,
    unpack_beside,
)


class AllToAllPrepareAndFinalize(TorchDistributedPrepareAndFinalize):
    """Dispatches by two collectives of uneven splits: one for the rows, one for their local slots, weights and scales.

    The splits depend on the ids, so the ranks exchange their sizes first, even where `tokens_per_rank` is known. The
    host waits for that exchange. Partial sums come home in the model's dtype and are added in float32 in rank order, so
    they are rounded once a rank. `combine_order="slot"` rounds once a slot instead, for any number of ranks.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        quant_dispatch=frozenset({"fp8_block"}),
        async_receive=True,
        needed_rows_only=True,
    )

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        return self.prepare_rows(self.rows_for_wire(x_MK, quant), routing, self.sends_quantised(quant))

    def prepare_rows(self, rows: Rows, routing: Routing, quantised: bool) -> Receiver[Prepared]:
        """Starts the dispatch of rows that are in the form in which they travel."""
        owner_Mt = self.owner(routing.ids_Mt)
        entry_R = torch.arange(self.ranks.world_size, device=owner_Mt.device) // self.slices
        goes_RM = (owner_Mt[None] == entry_R[:, None, None]).any(-1)
        sends, receives = self.wire.swap_counts(goes_RM.sum(1), phase="dispatch sizes")

        dest_S, tokens_S = goes_RM.nonzero(as_tuple=True)
        entry_S = entry_R[dest_S]
        slots_St = owner_Mt[tokens_S] == entry_S[:, None]
        ids_St = torch.where(slots_St, routing.ids_Mt[tokens_S] - self.starts_R[entry_S][:, None], -1)
        scales = None if rows.scales is None else rows.scales[tokens_S]
        parts = [rows.x[tokens_S], pack_beside(ids_St.int(), routing.weights_Mt[tokens_S], scales)]
        transfer = self.wire.exchange(parts, sends, receives, phase="dispatch")
        top_k = routing.ids_Mt.shape[1]

        def finish() -> Prepared:
            x, beside = transfer.wait()
            ids, weights, scales = unpack_beside(beside, top_k)
            local = Routing(ids_Mt=ids, weights_Mt=weights)
            journey = Journey(
                home=routing, local=local, tokens_S=tokens_S, slots_St=slots_St, sends=sends, receives=receives
            )
            return Prepared(
                x=unpack(x, quantised),
                scales=scales,
                routing=local,
                handle=DispatchHandle(self.book, journey),
            )

        return Receiver(self.book, finish)

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        return self.combine(handle.take(self.book), y, reduce, out_MK)


class AllToAllManager(All2AllManager):
    prepare_finalize = AllToAllPrepareAndFinalize
