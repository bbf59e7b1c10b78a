"""The oracle of the batched format: one expert after the other, over the rows that it really has."""

from __future__ import annotations

from epserve.modular_kernel import (
    Activation,
    ExpertsCapability,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceDelegate,
    WorkspaceShapes,
)

from . import rows
from .loop import expert_mlp


class BatchedLoopExperts(FusedMoEExpertsModular):
    """Takes and returns `(e, T, K)`. Rows past an expert's count are neither read nor written. The host reads the counts."""

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.BatchedExperts}),
        devices=frozenset({"cpu", "cuda"}),
        activations=frozenset(Activation.KINDS + Activation.RARE),
        output_norm=True,
    )

    def prepare_weights(self, weights):
        return rows.experts_with_zeros(weights)

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        shape, dtype = self.spec.shape, self.spec.shape.dtype
        output = (num_experts, capacity, shape.hidden)
        return WorkspaceShapes(workspace13=(0,), workspace2=(0,), output=output, dtype=dtype, output_dtype=dtype)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate()

    def apply(self, output, prepared, *, weights, workspace):
        for expert, count in enumerate(prepared.expert_num_tokens.tolist()):
            if count:
                output[expert, :count] = expert_mlp(prepared.x[expert, :count], weights, expert)
        return output
