"""A stand-in for `flashinfer.fused_moe` on the CPU, of its documented call, and strict where the library is.

`cutlass_fused_moe(input (M, K), token_selected_experts (M, t) int32, token_final_scales (M, t) float32, fc1 (e, 2N, K) with the
rows of up before those of gate, fc2 (e, K, N), output_dtype, quant_scales, ...)`. Ids count over all ranks; others' are skipped.
Rows that no expert of this rank adds to are left as they were: NaN, if nobody fills them.
"""

from __future__ import annotations

import sys
import types

import torch

CALLS: list[dict] = []


def cutlass_fused_moe(
    input,
    token_selected_experts,
    token_final_scales,
    fc1_expert_weights,
    fc2_expert_weights,
    output_dtype,
    quant_scales,
    fc1_expert_biases=None,
    fc2_expert_biases=None,
    input_sf=None,
    swiglu_alpha=None,
    swiglu_beta=None,
    swiglu_limit=None,
    tp_size=1,
    tp_rank=0,
    ep_size=1,
    ep_rank=0,
    cluster_size=1,
    cluster_rank=0,
    output=None,
    enable_alltoall=False,
    use_deepseek_fp8_block_scale=False,
):
    ids, scales, local = token_selected_experts, token_final_scales, fc1_expert_weights.shape[0]
    num_rows, hidden = input.shape
    assert num_rows > 0 and local > 0, "the library launches grids of no blocks"
    assert ids.dtype == torch.int32 and scales.dtype == torch.float32 and ids.shape == scales.shape
    for tensor in (input, ids, scales, fc1_expert_weights, fc2_expert_weights):
        assert tensor.is_contiguous()
    assert fc2_expert_weights.shape[1] == hidden and fc1_expert_weights.shape[2] == hidden
    assert fc1_expert_weights.shape[1] == 2 * fc2_expert_weights.shape[2], "gated"
    assert ids.min() >= 0 and ids.max() < local * ep_size, "ids outside all ranks' experts"
    assert scales.isfinite().all()
    assert (output.shape, output.dtype) == (input.shape, output_dtype)
    if use_deepseek_fp8_block_scale:
        assert input.dtype == torch.bfloat16, "the block path quantises by itself"
        weights = [_blocks(w, s) for w, s in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)]
    else:
        assert not quant_scales and fc1_expert_weights.dtype == input.dtype
        weights = [fc1_expert_weights.float(), fc2_expert_weights.float()]
    for each in (swiglu_alpha, swiglu_beta, swiglu_limit):
        assert each is None or (each.dtype == torch.float32 and each.shape == (local,))
    CALLS.append({"rows": num_rows, "ep_size": ep_size})
    output.fill_(float("nan"))
    for row in range(num_rows):
        total, found = torch.zeros(hidden), False
        for slot in range(ids.shape[1]):
            expert = int(ids[row, slot]) - ep_rank * local
            if not 0 <= expert < local:
                continue
            up, gate = (weights[0][expert] @ input[row].float()).chunk(2)
            if swiglu_limit is not None:
                gate, up = (
                    gate.clamp(max=float(swiglu_limit[expert])),
                    up.clamp(-float(swiglu_limit[expert]), float(swiglu_limit[expert])),
                )
            alpha = 1.0 if swiglu_alpha is None else swiglu_alpha[expert]
            beta = 0.0 if swiglu_beta is None else swiglu_beta[expert]
            total += scales[row, slot] * (weights[1][expert] @ (gate * torch.sigmoid(alpha * gate) * (up + beta)))
            found = True
        if found:
            output[row] = total.to(output_dtype)
    return [output]


def _blocks(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    assert weights.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales.is_contiguous()
    assert scales.shape == (weights.shape[0], weights.shape[1] // 128, weights.shape[2] // 128)
    return weights.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)


def install() -> None:
    """As the package, in this process."""
    package, module = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.fused_moe")
    module.cutlass_fused_moe = cutlass_fused_moe  # type: ignore[attr-defined]
    package.fused_moe = module  # type: ignore[attr-defined]
    sys.modules["flashinfer"], sys.modules["flashinfer.fused_moe"] = package, module
