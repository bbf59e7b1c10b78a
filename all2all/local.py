"""The all-to-all of one rank: no rows travel, and finalize weights and reduces."""

from __future__ import annotations

from epserve.modular_kernel import (
    All2AllManager,
    DispatchHandle,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    PrepareFinalizeCapability,
)


class LocalPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Takes physical ids as local slots. The handle keeps the routing for the weighted sum."""

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard, max_ranks=1, cuda_graph=True
    )

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        return Prepared(x=x_MK, routing=routing, handle=DispatchHandle(self.book, routing))

    def finalize(self, handle, y, *, reduce, out_MK):
        return reduce.apply(y, handle.take(self.book), out_MK)


class LocalAll2AllManager(All2AllManager):
    prepare_finalize = LocalPrepareAndFinalize
