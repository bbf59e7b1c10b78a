"""What a backward step gives back: gradients of a request's routing weights beside those of rows, or those of a whole block.

Gates and shared experts are frozen, as experts are. Legend: M tokens of this rank, K hidden size, t top-k.
"""

from __future__ import annotations

import torch

from epserve.models import LayerWeights
from epserve.modular_kernel import GateSpec, Routing
from epserve.rank.gate import weights_of
from epserve.rank.step import joined_gradients


def step_result(
    found: tuple[torch.Tensor, torch.Tensor],
    both: tuple[torch.Tensor, torch.Tensor],
    routing: Routing,
    weights: LayerWeights,
    gate: GateSpec | None,
) -> torch.Tensor:
    """Returns the result of a backward step: `joined_gradients`, or the rows' gradient through a whole block.

    Args:
        found: the gradients of rows, through the routed experts, and of routing weights. Columns of the latter behind those of
            `routing` are padding.
        both: the rows, and the gradients of their results.
        routing: the logical experts that the gate, or the request, has chosen.
        weights: the layer's gate and shared experts.
        gate: the gate's arithmetic. None: the request has chosen, and the step had neither gate nor shared experts.
    """
    (dx_MK, dw_Mt), (x_MK, g_MK) = found, both
    dw_Mt = dw_Mt[:, : routing.ids_Mt.shape[1]]
    if gate is None:
        return joined_gradients(dx_MK, dw_Mt)
    with torch.enable_grad():
        leaf_MK = x_MK.detach().requires_grad_()
        outputs, given = [weights_of(leaf_MK, routing.ids_Mt, weights.gate, gate)], [dw_Mt]
        if weights.shared is not None:
            outputs.append(weights.shared.differentiable(leaf_MK))
            given.append(g_MK)
    total_MK = dx_MK.float()
    for output, gradient in zip(outputs, given, strict=True):
        (more_MK,) = torch.autograd.grad(output, leaf_MK, gradient)
        total_MK += more_MK
    return total_MK.to(dx_MK.dtype)
