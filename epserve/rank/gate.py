"""The gate: hidden states to the top-k expert ids and weights of each token. Pure functions.

On the CPU it computes what the routers of Hugging Face transformers compute, in the same order of operations and the same
dtypes, so that ids and weights agree bit for bit. On CUDA devices two kernels (`experts/triton/gate.py`) take its place. They
follow the same definition in exact products and float32 sums, and take the lowest expert id first among equal scores. Cases
that they do not cover run through torch there too, in parts or whole, with the same rule for equal scores.

Legend: M tokens, K hidden size, E logical experts, G groups of experts, t = top-k.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from epserve.experts import rows
from epserve.modular_kernel import GateSpec, GateWeights, Routing

BLOCK, ROUTED = "block", "routed"
"""The modes of a step: the rank gates its tokens, or each request brings its routing."""


def modes_of(gate: GateSpec) -> tuple[str, ...]:
    """Returns the modes in which a layer can be asked for. Without a gate every request brings its routing."""
    return (ROUTED,) if gate.scoring == "client" else (BLOCK, ROUTED)


def route(x_MK: torch.Tensor, weights: GateWeights, spec: GateSpec, *, ids_dtype: torch.dtype = torch.int32) -> Routing:
    """Returns logical expert ids and weights of each token. `(0, K)` gives `(0, t)`. Other kernels call it `select_experts`.

    ids_dtype: int32 or int64, the dtype that the step's prepare/finalize takes (`topk_indices_dtype`).
    """
    assert spec.scoring != "client", "requests of this model bring their routing"
    kernels = _kernels(x_MK, weights.weight_EK)
    if (
        kernels is not None
        and kernels.multiplies(x_MK, weights, spec)
        and kernels.chooses(spec, weights.weight_EK.shape[0])
    ):
        return kernels.route(x_MK, weights, spec, ids_dtype=ids_dtype)
    return route_logits(_logits(x_MK, weights, spec), weights.correction_bias_E, spec, ids_dtype=ids_dtype)


def weights_of(x_MK: torch.Tensor, ids_Mt: torch.Tensor, weights: GateWeights, spec: GateSpec) -> torch.Tensor:
    """Returns the float32 weights of experts that `route` has chosen, by operators that have a derivative.

    The choice itself has none, and is not made again: its kernels and torch may differ between nearly equal scores.
    """
    logits_ME = _logits(x_MK, weights, spec)
    scores_ME = logits_ME if spec.scoring == "softmax_of_topk" else _scores(logits_ME, spec.scoring)
    return _weights(scores_ME.gather(1, ids_Mt.long()), logits_ME.dtype, spec).float()


def _logits(x_MK: torch.Tensor, weights: GateWeights, spec: GateSpec) -> torch.Tensor:
    if spec.logits_float32:
        return F.linear(x_MK.float(), weights.weight_EK.float(), _float(weights.bias_E))
    return rows.linear(x_MK, weights.weight_EK, weights.bias_E)


def route_logits(
    logits_ME: torch.Tensor,
    correction_bias_E: torch.Tensor | None,
    spec: GateSpec,
    *,
    ids_dtype: torch.dtype = torch.int32,
) -> Routing:
    """Computes the part of `route` after the matrix product."""
    assert (correction_bias_E is not None) == spec.correction_bias
    kernels = _kernels(logits_ME)
    if kernels is not None and logits_ME.dtype in kernels.DTYPES and kernels.chooses(spec, logits_ME.shape[1]):
        return kernels.choose(logits_ME, correction_bias_E, spec, ids_dtype=ids_dtype)
    if spec.scoring == "softmax_of_topk":
        chosen_Mt, ids_Mt = _top(logits_ME, spec.top_k, spec.sorted)
    else:
        scores_ME = _scores(logits_ME, spec.scoring)
        choice_ME = scores_ME if correction_bias_E is None else scores_ME + correction_bias_E
        if spec.num_groups > 1:
            choice_ME = _limit_to_groups(choice_ME, spec)
        ids_Mt = _top(choice_ME, spec.top_k, spec.sorted)[1]
        chosen_Mt = scores_ME.gather(1, ids_Mt)
    ids_Mt = ids_Mt.to(ids_dtype).contiguous()
    return Routing(ids_Mt=ids_Mt, weights_Mt=_weights(chosen_Mt, logits_ME.dtype, spec).float())


def _weights(chosen_Mt: torch.Tensor, dtype: torch.dtype, spec: GateSpec) -> torch.Tensor:
    """Computes the weights of the chosen experts from their scores, or from their logits with "softmax_of_topk"."""
    weights_Mt = torch.softmax(chosen_Mt, dim=-1) if spec.scoring == "softmax_of_topk" else chosen_Mt
    if spec.renormalise:
        weights_Mt = weights_Mt / (weights_Mt.sum(dim=-1, keepdim=True) + spec.renormalise_epsilon)
    if spec.routed_scaling_factor != 1.0:
        weights_Mt = weights_Mt * spec.routed_scaling_factor
    return weights_Mt.to(dtype) if spec.round_weights else weights_Mt


def fitted(weights: GateWeights, spec: GateSpec, dtype: torch.dtype) -> GateWeights:
    """Returns the gate's weights in the device's best form. Waits for the device.

    On the CPU zeros lie behind the rows. On CUDA a float32 weight takes the model's 16-bit `dtype` if that loses nothing.
    Checkpoints store 16 bits even if the product is in float32. The short form takes half the bytes and uses tensor cores.
    """
    weight_EK = weights.weight_EK
    if weight_EK.device.type == "cpu" and not spec.logits_float32:
        return replace(weights, weight_EK=rows.with_zeros(weight_EK))
    if not weight_EK.is_cuda or not spec.logits_float32 or weight_EK.dtype != torch.float32 or dtype.itemsize != 2:
        return weights
    narrow_EK = weight_EK.to(dtype)
    return replace(weights, weight_EK=narrow_EK) if torch.equal(narrow_EK.float(), weight_EK) else weights


def warm_up(
    weights: GateWeights, spec: GateSpec, dtype: torch.dtype, ids_dtypes: Iterable[torch.dtype] = (torch.int32,)
) -> None:
    """Compiles the kernels for any number of hidden states of `dtype` on the weights' device, if there are kernels.

    ids_dtypes: every dtype of ids that a step may ask for.
    """
    kernels = _kernels(weights.weight_EK)
    if kernels is not None and spec.scoring != "client" and kernels.chooses(spec, weights.weight_EK.shape[0]):
        for ids_dtype in ids_dtypes:
            kernels.warm_up(weights, spec, dtype, ids_dtype=ids_dtype)


def _kernels(*tensors: torch.Tensor):
    """Returns the module of the gate's kernels if it can take these tensors. The kernels have no derivative."""
    if not tensors[0].is_cuda or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
        return None
    return _kernel_module()


@functools.cache
def _kernel_module():
    """Returns the module, or None when Triton is not installed or does not run on this device."""
    if importlib.util.find_spec("triton") is None:
        return None
    from epserve.experts.triton import gate as triton_gate

    return triton_gate if triton_gate.unavailable() is None else None


def _top(values: torch.Tensor, k: int, in_order: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest values of the last dimension and their indices.

    On a GPU the lowest index comes first among equals, as in the kernels. On the CPU torch.topk decides, as in transformers.
    """
    if values.is_cuda:
        return _stable_top(values, k)
    found = torch.topk(values, k, dim=-1, sorted=in_order)
    return found.values, found.indices


def _stable_top(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.sort(values, dim=-1, descending=True, stable=True)
    return found.values[..., :k], found.indices[..., :k]


def _scores(logits_ME: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "softmax":
        return torch.softmax(logits_ME, dim=-1, dtype=torch.float32)
    return logits_ME.float().sigmoid()


def _limit_to_groups(choice_ME: torch.Tensor, spec: GateSpec) -> torch.Tensor:
    choice_MGe = choice_ME.unflatten(1, (spec.num_groups, -1))
    if spec.group_score == "top2_sum":
        group_MG = choice_MGe.topk(2, dim=-1).values.sum(dim=-1)
    else:
        group_MG = choice_MGe.amax(dim=-1)
    best = _top(group_MG, spec.top_groups, False)[1]
    excluded_MG = torch.ones_like(group_MG, dtype=torch.bool).scatter_(1, best, False)
    return choice_MGe.masked_fill(excluded_MG.unsqueeze(-1), float("-inf")).flatten(1)


def _float(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.float()


def whole(routing: Routing, top_k: int) -> Routing:
    """Pads to the kernels' number of columns, since a request may name fewer experts a token than the model does."""
    missing = top_k - routing.ids_Mt.shape[1]
    if missing == 0:
        return routing
    return Routing(
        ids_Mt=torch.nn.functional.pad(routing.ids_Mt, (0, missing), value=-1),
        weights_Mt=torch.nn.functional.pad(routing.weights_Mt, (0, missing)),
    )
