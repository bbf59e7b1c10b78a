"""Backward steps of one rank: the gradients of rows and routing weights, from rows and the gradients of their results.

A backward step computes its forward again, so that ranks keep nothing between the two. Experts are frozen.

Legend: M tokens of this rank, K hidden size, S rows received, t top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from epserve.all2all.gradients import GradientAllToAll
from epserve.experts import gradients
from epserve.experts.grouped_mm import sum_slots
from epserve.modular_kernel import (
    ExpertWeights,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNoOP,
)
from epserve.modular_kernel.capability import LayerSpec


class RankGradients:
    """Computes the backward steps of one group of layers on one process group."""

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions):
        self.spec, self.options = spec, options
        self._exchange = GradientAllToAll(ranks, spec, options)

    def warm_up(self, weights: ExpertWeights) -> None:
        """Compiles kernels for any number of rows. Not collective."""
        with torch.no_grad():
            gradients.warm_up(weights, self.spec.quant, self.spec.shape.dtype)

    def backward(
        self,
        x_MK: torch.Tensor,
        g_MK: torch.Tensor,
        routing: Routing,
        *,
        weights: ExpertWeights,
        tokens_per_rank: Sequence[int],
        on_phase: Callable[[str], object],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients through the routed experts. Collective.

        Args:
            x_MK: this rank's rows.
            g_MK: the gradients of their results, in the same dtype.
            routing: physical ids.
            weights: this rank's experts.
            tokens_per_rank: M of every rank. Batches above the cap of a round take several rounds on all ranks.
            on_phase: is told each phase as it begins.

        Returns:
            The rows' gradient `(M, K)` in their dtype, and the routing weights' gradient, float32 `(M, t)`.
        """
        dx_MK, dw_Mt = torch.empty_like(x_MK), torch.empty_like(routing.weights_Mt)
        cap, longest = self.options.max_tokens_per_rank, max(*tokens_per_rank, 1)
        for start in range(0, longest, cap):
            taken = slice(start, start + cap)
            on_phase("prepare")
            prepared = self._exchange.dispatch(x_MK[taken], g_MK[taken], routing.rows(start, start + cap))
            on_phase("experts")
            assert prepared.routing is not None
            reduce, dx, dw_St = self._experts(prepared.x, prepared.routing, weights)
            on_phase("finalize")
            self._exchange.give_back(prepared.handle, dx, dw_St, reduce=reduce, dx_MK=dx_MK[taken], dw_Mt=dw_Mt[taken])
        return dx_MK, dw_Mt

    def _experts(
        self, both_S2K: torch.Tensor, routing: Routing, weights: ExpertWeights
    ) -> tuple[TopKWeightAndReduce, torch.Tensor, torch.Tensor]:
        """Computes the received rows. Returns what is left to do for the rows' gradient, that gradient, and the weights'."""
        ids_St = routing.ids_Mt
        token, slot = (ids_St >= 0).nonzero(as_tuple=True)
        expert, order = ids_St[token, slot].sort(stable=True)
        token, slot = token[order], slot[order]
        counts = torch.bincount(expert, minlength=weights.num_experts).tolist()
        x_SK, g_SK = (each[token] for each in both_S2K.chunk(2, dim=1))
        dx, dw = gradients.slot_gradients(x_SK, g_SK, counts, weights, self.spec.quant)
        dw_St = torch.zeros_like(routing.weights_Mt)
        dw_St[token, slot] = dw
        if self.options.combine_order == "slot":
            dx_StK = dx.new_empty((*ids_St.shape, dx.shape[1]))
            dx_StK[token, slot] = dx
            return TopKWeightAndReduceContiguous(), dx_StK, dw_St
        if not len(dx):
            return TopKWeightAndReduceNoOP(), both_S2K.new_zeros((len(ids_St), dx.shape[1])), dw_St
        row_St = torch.zeros(ids_St.shape, dtype=torch.int64, device=ids_St.device)
        row_St[token, slot] = torch.arange(len(token), device=ids_St.device)
        return TopKWeightAndReduceNoOP(), sum_slots(dx, row_St, routing), dw_St
