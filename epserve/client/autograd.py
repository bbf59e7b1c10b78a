"""This module joins calls to torch's autograd: the backward pass of a tensor that `Client.forward` gave is a call too.

It imports torch, so the client imports it for tensors that require a gradient only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from epserve.errors import InvalidRequest

from .cuda_region import CudaClientRegion

Forward = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Maps hidden states and routing weights to the result."""
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]
"""Maps hidden states, the gradient of the result and routing weights to the gradients of the first and the last. It keeps
rows that are not finite."""


def recorded_forward(
    client: Any, layer: int, hidden: Any, topk_ids: Any, topk_weights: Any, *, wire_format: str, region: Any,
    timeout: float | None, request_id: str, not_finite_rows: list[int] | None,
) -> torch.Tensor:  # fmt: skip
    """Does the same as Client.forward for tensors of which one requires a gradient. Raises InvalidRequest for arguments
    that a backward call does not take."""
    if not isinstance(hidden, torch.Tensor):
        text = "hidden_states: a numpy array beside topk_weights that require a gradient; send a torch tensor"
        raise InvalidRequest(text, field="hidden_states")
    if wire_format != "plain":
        text = f"wire_format: {wire_format!r} has no gradient, since rows lose precision on the way; use plain"
        raise InvalidRequest(text, field="wire_format")
    if isinstance(region, CudaClientRegion):
        text = "region: a region of a GPU has no gradient; use a region of system memory, or none"
        raise InvalidRequest(text, field="region")

    def forward(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        settings = {"timeout": timeout, "request_id": request_id, "region": region, "not_finite_rows": not_finite_rows}
        return client.forward(layer, x, topk_ids, w, **settings)

    def backward(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return client.backward(layer, x, g, topk_ids, w, timeout=timeout, region=region, not_finite_rows=[])

    return recorded(forward, backward, hidden, topk_weights)


def recorded(forward: Forward, backward: Backward, hidden: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Returns `forward(hidden, weights)` as a tensor whose gradient `backward` computes."""
    return _Call.apply(forward, backward, hidden, weights)


def gradients(
    backward: Backward, hidden: torch.Tensor, gradient: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of hidden states and routing weights, in their dtypes.

    A row whose gradient is not finite gets NaN, as it would in this process, and is not sent: a scaler of the loss looks for
    such values and lowers its scale.
    """
    gradient = gradient.to(hidden.dtype)
    bad = gradient.isfinite().all(-1).logical_not()
    spoilt = bool(bad.any())
    if spoilt:
        gradient = gradient.masked_fill(bad[:, None], 0)
    dhidden, dweights = backward(hidden, gradient, weights)
    if dweights is not None:
        assert weights is not None
        dweights = dweights.to(weights.dtype)
    if spoilt:
        dhidden = dhidden.masked_fill(bad[:, None], torch.nan)
        dweights = None if dweights is None else dweights.masked_fill(bad[:, None], torch.nan)
    return dhidden, dweights


def refuse_second_derivative() -> NoReturn:
    """Raises InvalidRequest."""
    raise InvalidRequest(
        "output_gradients: a second derivative was asked for, and the service computes first ones alone; do not differentiate"
        " gradients of remote experts again",
        field="output_gradients",
    )


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, hidden: Any, weights: Any) -> Any:
        ctx.call = backward
        ctx.save_for_backward(hidden, weights)
        return forward(hidden.detach(), None if weights is None else weights.detach())

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        hidden, weights = ctx.saved_tensors
        return None, None, *_Gradients.apply(ctx.call, hidden, gradient[0], weights)


class _Gradients(torch.autograd.Function):
    """A node of its own in a graph of gradients (`create_graph`), so that only its use is refused."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, hidden: Any, gradient: Any, weights: Any) -> Any:
        return gradients(backward, hidden.detach(), gradient, None if weights is None else weights.detach())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()
