"""Experts by torch's grouped matrix product: the slots of local experts, sorted by expert, one product a projection.

Legend of suffixes: M rows, t top-k, K hidden size, N intermediate size, S slots whose expert is on this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from epserve.modular_kernel import (
    Activation,
    ExpertsCapability,
    ExpertWeights,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    Routing,
    TopKWeightAndReduceNoOP,
    WorkspaceShapes,
)

from . import rows
from .activation import activate, normalise_output
from .loop import expert_mlp


class GroupedMMExperts(FusedMoEExpertsModular):
    """Computes in Standard format. It weights and reduces itself, in slot order and float32, without atomics.

    Slots of other ranks get no row, so the host reads the number of local slots once a call. Every row stride must be a
    multiple of 16 bytes (torch's condition), which is 8 columns of the 16-bit dtypes. For float32 4 columns would do.
    """

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cpu", "cuda"}),
        activations=frozenset(Activation.KINDS + Activation.RARE),
        output_norm=True,
        hidden_multiple_of=8,
        intermediate_multiple_of=8,
    )

    def prepare_weights(self, weights):
        return rows.experts_with_zeros(weights)

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        shape, dtype = self.spec.shape, self.spec.shape.dtype
        output = (num_rows, shape.hidden)
        return WorkspaceShapes(workspace13=(0,), workspace2=(0,), output=output, dtype=dtype, output_dtype=dtype)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def apply(self, output, prepared, *, weights, workspace):
        ids_Mt = prepared.routing.ids_Mt
        token, slot = (ids_Mt >= 0).nonzero(as_tuple=True)
        if token.numel() == 0:
            return output.zero_()
        expert_S, order = ids_Mt[token, slot].sort(stable=True)
        token, slot = token[order], slot[order]
        row_Mt = torch.zeros(ids_Mt.shape, dtype=torch.int64, device=ids_Mt.device)
        row_Mt[token, slot] = torch.arange(token.shape[0], device=ids_Mt.device)
        mlp = _mlp if weights.packing is None else _unpacked_mlp
        y_SK = mlp(prepared.x[token], expert_S.long(), weights)
        return output.copy_(sum_slots(y_SK, row_Mt, prepared.routing))


def _mlp(x_SK: torch.Tensor, expert_S: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    bounds = torch.arange(1, weights.num_experts + 1, device=x_SK.device)
    ends_e = torch.searchsorted(expert_S, bounds).int()
    w13_eNK, w2_eKN = rows.whole(weights.w13_eNK), rows.whole(weights.w2_eKN)
    h = F.grouped_mm(rows.fitted(x_SK, w13_eNK), w13_eNK.transpose(1, 2), offs=ends_e)
    if weights.b13 is not None:
        h = h + weights.b13[expert_S]
    a = rows.fitted(activate(h, weights.activation), w2_eKN)
    y_SK = F.grouped_mm(a, w2_eKN.transpose(1, 2), offs=ends_e)
    return normalise_output(y_SK if weights.b2 is None else y_SK + weights.b2[expert_S], weights.activation)


def _unpacked_mlp(x_SK: torch.Tensor, expert_S: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """Computes with weights that another class packed. It unpacks one expert after the other, which pays with many rows each."""
    experts, counts = expert_S.unique_consecutive(return_counts=True)
    parts = zip(x_SK.split(counts.tolist()), experts.tolist(), strict=True)
    return torch.cat([expert_mlp(x_mK, weights, expert) for x_mK, expert in parts])


def sum_slots(y_SK: torch.Tensor, row_Mt: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Computes `weighted_sum` without the `(M, t, K)` rows in memory, one column of slots at a time."""
    total = torch.zeros((row_Mt.shape[0], y_SK.shape[1]), dtype=torch.float32, device=y_SK.device)
    for slot in range(row_Mt.shape[1]):
        term = y_SK[row_Mt[:, slot]].float() * routing.weights_Mt[:, slot, None]
        total += torch.where((routing.ids_Mt[:, slot] >= 0)[:, None], term, 0.0)
    return total
