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

from .activation import activate


class BatchedMMExperts(FusedMoEExpertsModular):
    """Computes the undefined rows too: they stay among themselves, and finalize reads none of them.

    Worth it where blocks are small or well filled, and under a CUDA graph; `batched_loop` is the one that skips.
    """

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.BatchedExperts}),
        devices=frozenset({"cpu", "cuda"}),
        cuda_graph=True,
    )

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        shape, dtype = self.spec.shape, self.spec.shape.dtype
        width = shape.intermediate * (2 if self.spec.activation.gated else 1)
        return WorkspaceShapes(
            workspace13=(num_experts, capacity, width),
            workspace2=(0,),
            output=(num_experts, capacity, shape.hidden),
            dtype=dtype,
            output_dtype=dtype,
        )

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate()

    def apply(self, output, prepared, *, weights, workspace):
        h = torch.bmm(prepared.x, weights.w13_eNK.transpose(1, 2), out=workspace.workspace13)
        if weights.b13 is not None:
            h += weights.b13[:, None]
        torch.bmm(activate(h, weights.activation), weights.w2_eKN.transpose(1, 2), out=output)
        if weights.b2 is not None:
            output += weights.b2[:, None]
        return output
