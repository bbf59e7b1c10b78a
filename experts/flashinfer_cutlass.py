"""FlashInfer's fused CUTLASS experts: one library call permutes, multiplies twice, weights and adds.

https://docs.flashinfer.ai/generated/flashinfer.fused_moe.cutlass_fused_moe.html documents the call. This module, like other users
of the library, relies on two facts that are not documented: the first matrix has the rows of up before those of gate, and
experts of other ranks are skipped. Legend: M rows, K hidden size, N intermediate size, e local experts, t top-k.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from epserve.errors import Incompatible
from epserve.modular_kernel import (
    ExpertsCapability,
    ExpertWeights,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduceNoOP,
    WorkspaceShapes,
)

NAME = "flashinfer_cutlass"


class FlashInferCutlassExperts(FusedMoEExpertsModular):
    """Turns `(M, K)` rows and local slots into the weighted and reduced `(M, K)`. The library allocates its own workspace.

    NOTE: the first matrix is kept a second time, with its halves swapped: two thirds more memory for the experts.
    """

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        quant_schemes=frozenset({"none", "fp8_block"}),
        activations=frozenset({"silu", "swigluoai"}),
        ungated=False,
        bias=False,
        hidden_multiple_of=16,
        intermediate_multiple_of=16,
        block_aligned=True,
    )

    def __init__(self, spec):
        super().__init__(spec)
        if spec.quant.scheme == "fp8_block" and spec.shape.dtype is not torch.bfloat16:
            raise Incompatible(f"{NAME}: fp8_block takes bfloat16 rows, these are {spec.shape.dtype}")

    @classmethod
    def unavailable(cls):
        if find_spec("flashinfer") is None:
            return "the package flashinfer is not installed: pip install flashinfer-python"
        if not torch.cuda.is_available():
            return "no CUDA device"
        if torch.cuda.get_device_capability() < (9, 0):
            return f"compute capability {torch.cuda.get_device_capability()}, FlashInfer's CUTLASS experts need (9, 0)"
        return None

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        dtype = self.spec.shape.dtype
        output = (num_rows, self.spec.shape.hidden)
        return WorkspaceShapes(workspace13=(0,), workspace2=(0,), output=output, dtype=dtype, output_dtype=dtype)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def prepare_weights(self, weights):
        """Puts the first matrix and its scales into the library's order, and readies the activation's numbers, once."""
        if NAME not in weights.derived:
            weights.derived[NAME] = self._derive(weights)
        return weights

    def apply(self, output, prepared, *, weights, workspace):
        ids_Mt, num_experts = prepared.routing.ids_Mt, weights.num_experts
        if prepared.x.shape[0] == 0 or num_experts == 0:
            return output.zero_()
        from flashinfer.fused_moe import cutlass_fused_moe

        made = self.prepare_weights(weights).derived[NAME]
        blockwise = self.spec.quant.scheme == "fp8_block"
        here_Mt = ids_Mt >= 0
        # Slots without an expert on this rank name the first expert of another rank, which must then exist.
        elsewhere = torch.where(here_Mt, ids_Mt, num_experts)
        cutlass_fused_moe(
            prepared.x,
            elsewhere.contiguous(),
            torch.where(here_Mt, prepared.routing.weights_Mt, 0.0),
            made["w31"],
            weights.w2_eKN,
            output.dtype,
            [made["s31"], weights.s2] if blockwise else [],
            ep_size=2,
            ep_rank=0,
            output=output,
            use_deepseek_fp8_block_scale=blockwise,
            **made["activation"],
        )
        # The library's contents of rows without an expert on this rank are undefined.
        return output.masked_fill_(~here_Mt.any(1, keepdim=True), 0.0)

    def _derive(self, weights: ExpertWeights) -> dict[str, Any]:
        kind, limit, alpha = weights.activation.kind, weights.activation.limit, weights.activation.alpha
        numbers: dict[str, float | None] = {}
        if kind == "swigluoai" or limit is not None:
            oai = kind == "swigluoai"
            numbers = {"swiglu_alpha": alpha if oai else 1.0, "swiglu_beta": 1.0 if oai else 0.0, "swiglu_limit": limit}
        on = {"dtype": torch.float32, "device": weights.w13_eNK.device}
        activation = {
            name: torch.full((weights.num_experts,), number, **on)  # type: ignore[call-overload]
            for name, number in numbers.items()
            if number is not None
        }
        s31 = None if weights.s13 is None else _swapped(weights.s13)
        return {"w31": _swapped(weights.w13_eNK), "s31": s31, "activation": activation}


def _swapped(rows: torch.Tensor) -> torch.Tensor:
    """Swaps the halves of `(e, gate then up, ...)` to up, then gate."""
    gate, up = rows.chunk(2, dim=1)
    return torch.cat((up, gate), dim=1)
