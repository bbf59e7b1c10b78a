"""The oracle: one expert after the other, in plain torch. Every other experts class is compared with this one."""

from __future__ import annotations

import torch

from epserve.modular_kernel import (
    Activation,
    ExpertsCapability,
    ExpertWeights,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceContiguous,
    WorkspaceShapes,
)

from . import rows
from .activation import activate, normalise_output


def expert_mlp(x_mK: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """Computes one expert on its rows: `(m, K)` -> `(m, K)`."""
    b13 = None if weights.b13 is None else weights.b13[expert]
    b2 = None if weights.b2 is None else weights.b2[expert]
    w13_NK, w2_KN = weights.matrices(expert)
    h = activate(rows.linear(x_mK, w13_NK, b13), weights.activation)
    return normalise_output(rows.linear(h, w2_KN, b2), weights.activation)


class LoopExperts(FusedMoEExpertsModular):
    """Computes in Standard format and leaves one row a slot, `(M, t, K)`. Rows of slots without an expert stay undefined."""

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cpu", "cuda"}),
        activations=frozenset(Activation.KINDS + Activation.RARE),
        output_norm=True,
    )

    def prepare_weights(self, weights):
        return rows.experts_with_zeros(weights)

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        shape, dtype = self.spec.shape, self.spec.shape.dtype
        output = (num_rows, top_k, shape.hidden)
        return WorkspaceShapes(workspace13=(0,), workspace2=(0,), output=output, dtype=dtype, output_dtype=dtype)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceContiguous()

    def apply(self, output, prepared, *, weights, workspace):
        ids_Mt = prepared.routing.ids_Mt
        x_MK = rows.fitted(prepared.x, rows.whole(weights.w13_eNK))
        for expert in range(weights.num_experts):
            token, slot = (ids_Mt == expert).nonzero(as_tuple=True)
            if token.numel():
                output[token, slot] = expert_mlp(x_MK[token], weights, expert)
        return output
