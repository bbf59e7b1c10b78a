"""What stands in the place of SGLang's experts: a method without weights that asks the service."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_server_args

from epserve.client.engines.asked import Asked, asked
from epserve.client.engines.comparison import Wanted, fingerprint_of
from epserve.client.session import LayerCalls, Session
from epserve.errors import ConfigError, Incompatible
from epserve.models.tensors import read_json
from epserve.modular_kernel import Activation


@functools.cache
def session(wanted: Asked) -> Session:
    """The connection of this process, made with its first layer."""
    return wanted.connect()


def build(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """FusedMoE.__init__ with the method of this module. Raises ConfigError or Incompatible."""
    bound = inspect.signature(original).bind(layer, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.get("quant_method") is not None:
        own = type(given["quant_method"]).__name__
        raise ConfigError(
            f"layer {given['layer_id']}: the model brings {own} for its experts, which no service stands for"
        )
    told = asked(None, "the environment")
    assert told is not None
    method = RemoteExperts(session(told), given)
    kwargs["quant_method"] = method
    result = original(layer, *args, **kwargs)
    if layer.quant_method is not method:
        name = type(layer.quant_method).__name__
        raise ConfigError(f"layer {given['layer_id']}: {name} takes the place of remote experts; leave its option out")
    return result


class RemoteExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """The experts of one layer. `create_weights` makes none, and `apply` asks the service."""

    fuse_routed_scaling_factor_in_topk = True
    """SGLang multiplies the weights of the experts by the factor, since nothing does so with their results."""

    def __init__(self, session: Session, given: dict[str, Any]):
        self._session, self._given = session, given
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
        number = self._given["layer_id"]
        reasons = [*self._refusals(layer), *self._wanted(number, params_dtype).differences(self._session.model)]
        if reasons:
            name = self._session.model.name
            raise Incompatible(f"layer {number} does not fit the service of {name!r}:", tuple(reasons))
        self.calls = self._session.layer(number)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.runner = None

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def get_triton_quant_info(self, layer: Any) -> Any:
        """Raises ConfigError: SGLang asks for this to adapt experts."""
        raise ConfigError("LoRA on experts: their weights are in the service; merge the adapter into the checkpoint")

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """The share of this tensor-parallel rank, zeros elsewhere: the block adds up what its ranks return."""
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a CUDA graph cannot hold a call to the experts' service: start SGLang with --disable-cuda-graph"
            )
        assert self.calls is not None
        tokens, size, rank = len(x), layer.moe_tp_size, layer.moe_tp_rank
        first, last = tokens * rank // size, tokens * (rank + 1) // size
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        ids, weights = topk.topk_ids[first:last].int(), topk.topk_weights[first:last].float()
        self.calls.forward(x[first:last], ids, weights, out=out[first:last])
        return StandardCombineInput(hidden_states=out)

    def _refusals(self, layer: Any) -> list[str]:
        factor = self._given.get("routed_scaling_factor")
        checks = [
            (layer.moe_ep_size == 1, "--ep-size: the service has the experts; leave the option out"),
            (type(layer).__name__ == "FusedMoE",
             f"{type(layer).__name__}: the service has the all-to-all; leave --moe-a2a-backend out"),
            (not self._given["num_fused_shared_experts"],
             "fused shared experts: start SGLang with --disable-shared-experts-fusion"),
            (not self._given["apply_router_weight_on_input"],
             "apply_router_weight_on_input: the service weights results, not inputs"),
            (not self._given["no_combine"], "no_combine: the service returns one row a token"),
            (factor in (None, 1.0) or torch.cuda.is_available(),
             f"routed_scaling_factor {factor}: SGLang's models multiply results by it on this platform, and weights too"),
        ]  # fmt: skip
        return [reason for fits, reason in checks if not fits]

    def _wanted(self, number: int, dtype: torch.dtype) -> Wanted:
        given, path = self._given, str(get_server_args().model_path)
        return Wanted(
            name=path,
            config=_config(path),
            layers=(number,),
            hidden=given["hidden_size"],
            intermediate=given["intermediate_size"],
            num_experts=given["num_experts"],
            dtype=str(dtype).removeprefix("torch."),
            top_k=given["top_k"],
            activation=_activation(given, self._session.model),
            fingerprint=_fingerprint(path),
        )


@functools.cache
def _found(name: str) -> str | None:
    return transformers.utils.cached_file(name, "config.json", local_files_only=True)


@functools.cache
def _fingerprint(name: str) -> str | None:
    return fingerprint_of(name, _found)


@functools.cache
def _config(name: str) -> dict[str, Any]:
    config = read_json(Path(str(_found(name))))
    return config.get("text_config", config)


def _activation(given: dict[str, Any], served: Any) -> Activation:
    """SGLang's kind with the rest as served: limits and the like are compared by the model's configuration."""
    told = served.expert_activation
    return Activation(
        kind="swigluoai" if given["gemm1_alpha"] is not None else given["activation"],
        gated=given["is_gated"],
        limit=told.limit if told.HasField("limit") else None,
        alpha=told.alpha or Activation().alpha,
        output_norm_eps=told.output_norm_eps if told.HasField("output_norm_eps") else None,
    )
