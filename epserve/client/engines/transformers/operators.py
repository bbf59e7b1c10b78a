"""Makes calls to a service operators of torch: compilers and exporters keep a call whole instead of tracing the client.

`epserve::experts` runs the routed experts of one layer, `epserve::block` a whole MoE block. Both name their service by a string,
so that a graph holds no connection. A graph that was exported in one process runs in another one after `connect` to the same
address, with the same gate and a service of the same checkpoint.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

import torch

from epserve.client.checks import check_no_gradient
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


def experts(
    service: str, layer: int, num_experts: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Runs the routed experts of `layer` for hidden states `(..., K)`, ids and weights `(..., t)`.

    Ids from `num_experts` on mean no expert. Raises InvalidRequest for inputs that require a gradient.
    """
    check_no_gradient(hidden, "hidden_states")
    check_no_gradient(weights, "topk_weights")
    return _experts(service, layer, num_experts, hidden, ids, weights)


def block(service: str, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """Runs the whole MoE block of `layer`, with gate and shared experts. Raises InvalidRequest for inputs with a gradient."""
    check_no_gradient(hidden, "hidden_states")
    return _block(service, layer, hidden)


@torch.library.custom_op("epserve::experts", mutates_args=(), tags=_TAGS)
def _experts(
    service: str, layer: int, num_experts: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    ids_Mt = ids.reshape(-1, ids.shape[-1])
    ids_Mt = torch.where(ids_Mt < num_experts, ids_Mt, -1).int()  # in transformers the id `num_experts` means none
    weights_Mt = weights.reshape(ids_Mt.shape).float()
    return _result(_service(service).forward(layer, _rows(hidden), ids_Mt, weights_Mt), hidden)


@torch.library.custom_op("epserve::block", mutates_args=(), tags=_TAGS)
def _block(service: str, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    return _result(_service(service).forward(layer, _rows(hidden)), hidden)


@_experts.register_fake
def _(service, layer, num_experts, hidden, ids, weights):
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@_block.register_fake
def _(service, layer, hidden):
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


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
    return out_MK.to(hidden.device).view(hidden.shape)
