"""Makes calls to a service operators of torch: compilers and exporters keep a call whole instead of tracing the client.

`epserve::experts` runs the routed experts of one layer, `epserve::block` a whole MoE block. Both name their service by a string,
so that a graph holds no connection. A graph that was exported in one process runs in another one after `connect` to the same
address, with the same gate and a service of the same checkpoint. Their gradients are operators too: `epserve::experts_backward`
and `epserve::block_backward`.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

import torch

from epserve.client.autograd import refuse_second_derivative
from epserve.errors import ConfigError


class Service(Protocol):
    """Is the interface of an open connection: `service.Service`."""

    def forward(
        self,
        layer: int,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def backward(
        self,
        layer: int,
        hidden: torch.Tensor,
        gradient: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


_services: WeakValueDictionary[str, Service] = WeakValueDictionary()
# NOTE: a call waits for the network on the host, which no CUDA graph can hold.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def register(service: Service, wanted: str) -> str:
    """Returns the name by which graphs find `service`: `wanted`, with a number if another open service has that name."""
    name, number = wanted, 1
    while name in _services:
        number += 1
        name = f"{wanted} #{number}"
    _services[name] = service
    return name


def forget(name: str) -> None:
    _services.pop(name, None)


@torch.library.custom_op("epserve::experts", mutates_args=(), tags=_TAGS)
def experts(
    service: str, layer: int, num_experts: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Runs the routed experts of `layer` for hidden states `(..., K)`, ids and weights `(..., t)`.

    Ids from `num_experts` on mean no expert.
    """
    ids_Mt = _ids(ids, num_experts)
    weights_Mt = weights.reshape(ids_Mt.shape).float()
    return _result(_service(service).forward(layer, _rows(hidden), ids_Mt, weights_Mt), hidden)


@torch.library.custom_op("epserve::block", mutates_args=(), tags=_TAGS)
def block(service: str, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Runs the whole MoE block of `layer`, with gate and shared experts."""
    return _result(_service(service).forward(layer, _rows(hidden)), hidden)


@torch.library.custom_op("epserve::experts_backward", mutates_args=(), tags=_TAGS)
def experts_backward(
    service: str,
    layer: int,
    num_experts: int,
    hidden: torch.Tensor,
    gradient: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradients of hidden states and weights from the `gradient` of the result of `experts`."""
    ids_Mt = _ids(ids, num_experts)
    weights_Mt = weights.reshape(ids_Mt.shape).float()
    rows, of_weights = _service(service).backward(layer, _rows(hidden), _rows(gradient), ids_Mt, weights_Mt)
    assert of_weights is not None
    return _result(rows, hidden), of_weights.to(weights.dtype).contiguous().view(weights.shape)


@torch.library.custom_op("epserve::block_backward", mutates_args=(), tags=_TAGS)
def block_backward(service: str, layer: int, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Computes the gradient of hidden states from that of the result of `block`. The gate's own weights have none."""
    return _result(_service(service).backward(layer, _rows(hidden), _rows(gradient))[0], hidden)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@experts.register_fake
def _(service, layer, num_experts, hidden, ids, weights):
    return _like(hidden)


@block.register_fake
def _(service, layer, hidden):
    return _like(hidden)


@experts_backward.register_fake
def _(service, layer, num_experts, hidden, gradient, ids, weights):
    return _like(hidden), _like(weights)


@block_backward.register_fake
def _(service, layer, hidden, gradient):
    return _like(hidden)


def _keep_experts(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *ctx.place, hidden, ids, weights = inputs
    ctx.save_for_backward(hidden, ids, weights)


def _experts_gradients(ctx: Any, gradient: torch.Tensor) -> tuple:
    hidden, ids, weights = ctx.saved_tensors
    of_hidden, of_weights = experts_backward(*ctx.place, hidden, gradient, ids, weights)
    return None, None, None, of_hidden, None, of_weights


def _keep_block(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    *ctx.place, hidden = inputs
    ctx.save_for_backward(hidden)


def _block_gradients(ctx: Any, gradient: torch.Tensor) -> tuple:
    return None, None, block_backward(*ctx.place, *ctx.saved_tensors, gradient)


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
    refuse_second_derivative()


experts.register_autograd(_experts_gradients, setup_context=_keep_experts)
block.register_autograd(_block_gradients, setup_context=_keep_block)
experts_backward.register_autograd(_no_second_derivative)
block_backward.register_autograd(_no_second_derivative)


def _ids(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    ids_Mt = ids.reshape(-1, ids.shape[-1])
    return torch.where(ids_Mt < num_experts, ids_Mt, -1).int()  # in transformers the id `num_experts` means none


def _service(name: str) -> Service:
    found = _services.get(name)
    if found is None:
        raise ConfigError(
            f"the connection of this model is closed ({name}): load it, or run its graph, while"
            " epserve.transformers.connect to the same address, with the same gate and checkpoint, is open"
        )
    return found


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _result(out_MK: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return out_MK.to(hidden.device).contiguous().view(hidden.shape)
