"""A call to the service as two operators of torch, begin and end, which no compiler looks into.

vLLM lets compilers trace through `apply` on CPUs. On GPUs its own operators around the whole block hide it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from epserve.client.session import Begun

_numbers = itertools.count()
_under_way: dict[int, tuple[Begun, torch.Tensor]] = {}
"""Ticket -> the call, and the result with the rows of all ranks."""
_latest: dict[str, int] = {}
"""Layer -> the ticket of its last call."""


def _begin(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: str) -> torch.Tensor:
    """Sends this rank's share of the rows, and returns a ticket for `_end`."""
    if (left := _latest.pop(layer, None)) is not None and left in _under_way:
        _under_way.pop(left)[0].drop()  # a forward pass that ended between the two
    context = get_forward_context()
    calls = context.no_compile_layers[layer].routed_experts.quant_method.calls
    first, last = share(valid_rows(context.attn_metadata, len(x)))
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    ids, weights = topk_ids[first:last].int(), topk_weights[first:last].float()
    number = next(_numbers)
    _under_way[number] = calls.begin(x[first:last], ids, weights, out=out[first:last]), out
    _latest[layer] = number
    return torch.tensor([number])


def _begin_fake(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: str) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _end(x: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    begun, out = _under_way.pop(int(ticket))
    begun.wait()
    return out


def _end_fake(x: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def share(tokens: int) -> tuple[int, int]:
    """The rows that this tensor-parallel rank asks for. All ranks have the same rows, and vLLM adds up their results."""
    size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    return tokens * rank // size, tokens * (rank + 1) // size


def valid_rows(attn_metadata: Any, tokens: int) -> int:
    """How many rows of a batch are tokens of requests. The rest is padding.

    A batch without metadata is a profile run, a warm-up, or that of an idle data-parallel rank.
    """
    if attn_metadata is None:
        return 0
    if not isinstance(attn_metadata, dict):
        return tokens
    counts = {getattr(each, "num_actual_tokens", None) for each in attn_metadata.values()}
    count = counts.pop() if len(counts) == 1 else None
    return count if isinstance(count, int) and count <= tokens else tokens


def register() -> None:
    direct_register_custom_op(op_name="epserve_begin", op_func=_begin, fake_impl=_begin_fake)
    direct_register_custom_op(op_name="epserve_end", op_func=_end, fake_impl=_end_fake)
