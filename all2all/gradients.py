"""The all-to-all of a backward step: rows and the gradients of their results travel in one dispatch.

It serves all ranks, whatever all-to-all their forward steps take. It needs the ranks' process group alone, and its messages are
those of `all_to_all` with rows of 2K columns. Legend: M tokens of this rank, K hidden size, S rows received, t top-k.
"""

from __future__ import annotations

import torch

from epserve.modular_kernel import UNQUANTIZED, DispatchHandle, Prepared, Routing, TopKWeightAndReduce

from .all_to_all import AllToAllPrepareAndFinalize
from .transport.torch_distributed import Journey


class GradientAllToAll(AllToAllPrepareAndFinalize):
    """Dispatches to all ranks that hold a part of an expert: ranks that share experts by slices all get the rows."""

    @property
    def slices(self) -> int:
        return self.spec.layout.slices

    def dispatch(self, x_MK: torch.Tensor, g_MK: torch.Tensor, routing: Routing) -> Prepared:
        """Sends rows with the gradients `g_MK` `(M, K)` of their results. `Prepared.x` is `(S, 2K)`. Collective."""
        return self.prepare(torch.cat((x_MK, g_MK), dim=1), routing, quant=UNQUANTIZED)

    def give_back(
        self,
        handle: DispatchHandle,
        dx: torch.Tensor,
        dw_St: torch.Tensor,
        *,
        reduce: TopKWeightAndReduce,
        dx_MK: torch.Tensor,
        dw_Mt: torch.Tensor,
    ) -> None:
        """Brings both gradients home, added in the order of the forward's combine. Collective.

        Args:
            handle: of the dispatch.
            dx: the rows' gradients, as experts leave rows to `reduce`.
            dw_St: float32, the routing weights' gradients. Slots that are not this rank's have zeros.
            reduce: what the experts left to do.
            dx_MK: takes the rows' gradients.
            dw_Mt: takes the routing weights' gradients.
        """
        journey: Journey = handle.take(self.book)
        assert journey.tokens_S is not None
        receive = self.combine(journey, dx, reduce, dx_MK)
        transfer = self.wire.exchange([dw_St], journey.receives, journey.sends, phase="combine")
        receive()
        (dw_Rt,) = transfer.wait()
        dw_Mt.zero_()
        for tokens, each in zip(journey.tokens_S.split(journey.sends), dw_Rt.split(journey.sends), strict=True):
            dw_Mt.index_add_(0, tokens, each)  # a token occurs once in a piece, and pieces come in rank order
