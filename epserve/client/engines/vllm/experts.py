"""What stands in the place of vLLM's experts: a method without weights that asks the service."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.models.utils import extract_layer_index

from epserve.client.engines.asked import Asked
from epserve.client.engines.comparison import Wanted, fingerprint_of
from epserve.client.session import LayerCalls, Session
from epserve.errors import ConfigError, Incompatible
from epserve.modular_kernel import Activation

from . import operators
from .settings import LOAD_FORMAT, asked_by

_KINDS = {"swigluoai_uninterleave": "swigluoai"}
"""Activations of vLLM that epserve has by another name."""


@functools.cache
def session(asked: Asked) -> Session:
    """The connection of this process, made with its first layer, after vLLM has forked."""
    return asked.connect()


@functools.cache
def _fingerprint(name: str) -> str | None:
    return fingerprint_of(name, lambda each: transformers.utils.cached_file(each, "config.json", local_files_only=True))


@functools.cache
def install() -> None:
    """Gives models of the load format "epserve" this method. Subclasses of RoutedExperts get it too, whatever their names."""
    original = RoutedExperts._get_quant_method

    @functools.wraps(original)
    def _get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        config = get_current_vllm_config()
        if config.load_config.load_format != LOAD_FORMAT:
            return original(self, prefix, quant_config, moe_config)
        return RemoteExperts(moe_config, config, prefix)

    RoutedExperts._get_quant_method = _get_quant_method


class RemoteExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """The experts of one layer. `create_weights` makes none, and `apply` asks the service."""

    supports_internal_mk = True
    """Data parallel: each rank sends its own tokens, and no rank gathers those of another."""
    mk_can_overlap_shared_experts = True
    """`apply` calls the shared experts, while the service computes."""
    is_monolithic = False
    """vLLM chooses the experts."""
    topk_indices_dtype = torch.int32

    def __init__(self, moe: Any, config: Any, prefix: str):
        super().__init__(moe)
        asked = asked_by(config)
        if asked is None:
            raise ConfigError(
                f"--load-format {LOAD_FORMAT}: needs a service; set --additional-config or EPSERVE_TARGET"
            )
        self._session, self._config, self._prefix = session(asked), config, prefix
        self.calls: LayerCalls | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Raises Incompatible with every difference between this layer and the service."""
        number = extract_layer_index(self._prefix)
        reasons = [*self._refusals(layer), *self._wanted(number, params_dtype).differences(self._session.model)]
        if reasons:
            name = self._session.model.name
            raise Incompatible(f"{self._prefix} does not fit the service of {name!r}:", tuple(reasons))
        self.calls = self._session.layer(number)

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> torch.Tensor:
        ticket = torch.ops.vllm.epserve_begin(x, topk_weights, topk_ids, layer.layer_name)
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)  # meanwhile
        return torch.ops.vllm.epserve_end(x, ticket)

    def _refusals(self, layer: Any) -> list[str]:
        moe, text = self.moe, self._config.model_config.hf_text_config
        checks = [
            (moe.hidden_dim == getattr(text, "hidden_size", moe.hidden_dim),
             f"latent experts: they take {moe.hidden_dim} values of the {text.hidden_size} of a token, which no service does"),
            (not layer.apply_router_weight_on_input, "apply_router_weight_on_input: the service weights results, not inputs"),
            (not moe.moe_parallel_config.is_sequence_parallel, "sequence parallel experts: leave expert parallelism off"),
        ]  # fmt: skip
        return [reason for fits, reason in checks if not fits]

    def _wanted(self, number: int, dtype: torch.dtype) -> Wanted:
        moe, model = self.moe, self._config.model_config
        return Wanted(
            name=model.model,
            config=model.hf_text_config.to_dict(),
            layers=(number,),
            hidden=moe.hidden_dim,
            intermediate=moe.intermediate_size,
            num_experts=moe.num_experts,
            dtype=str(dtype).removeprefix("torch."),
            top_k=moe.experts_per_token,
            activation=_activation(moe.activation.value, self._session.model),
            fingerprint=_fingerprint(model.model),
        )


def _activation(name: str, served: Any) -> Activation:
    """vLLM's kind with the rest as served: limits and the like are compared by the model's configuration.

    Raises ConfigError for a kind that epserve does not have.
    """
    kind = name.removesuffix("_no_mul")
    told = served.expert_activation
    return Activation(
        kind=_KINDS.get(kind, kind),
        gated=not name.endswith("_no_mul"),
        limit=told.limit if told.HasField("limit") else None,
        alpha=told.alpha or Activation().alpha,
        output_norm_eps=told.output_norm_eps if told.HasField("output_norm_eps") else None,
    )


operators.register()
