"""Batched experts by two batched matrix products over whole blocks: the host never looks at the counts."""

from __future__ import annotations

import torch

from epserve.modular_kernel import (
    ExpertsCapability,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceDelegate,
    WorkspaceShapes,
)

from . import rows
from .activation import activate


class BatchedMMExperts(FusedMoEExpertsModular):
    """Computes the undefined rows too: each stays by itself (see `rows`), and finalize reads none of them.

    It pays if blocks are small or well filled, and under a CUDA graph. `batched_loop` skips undefined rows instead.
    """

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.BatchedExperts}),
        devices=frozenset({"cpu", "cuda"}),
        cuda_graph=True,
    )

    def prepare_weights(self, weights):
        return rows.experts_with_zeros(weights)

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        shape, dtype = self.spec.shape, self.spec.shape.dtype
        width, inner = shape.intermediate * (2 if self.spec.activation.gated else 1), rows.padded_hidden(self.spec)
        return WorkspaceShapes(
            workspace13=(num_experts, capacity, width),
            workspace2=(num_experts, capacity, inner) if inner != shape.hidden else (0,),
            output=(num_experts, capacity, shape.hidden),
            dtype=dtype,
            output_dtype=dtype,
        )

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate()

    def apply(self, output, prepared, *, weights, workspace):
        w13_eNK, w2_eKN = rows.whole(weights.w13_eNK), rows.whole(weights.w2_eKN)
        x, hidden = prepared.x, prepared.x.shape[2]
        if w13_eNK.shape[2] != hidden:
            workspace.workspace2[..., :hidden] = x
            workspace.workspace2[..., hidden:] = 0
            x = workspace.workspace2
        h = torch.bmm(x, w13_eNK.transpose(1, 2), out=workspace.workspace13)
        if weights.b13 is not None:
            h += weights.b13[:, None]
        a = rows.fitted(activate(h, weights.activation), w2_eKN)
        torch.bmm(a, w2_eKN.transpose(1, 2), out=output)
        if weights.b2 is not None:
            output += weights.b2[:, None]
        return output
