"""vLLM's default loader without the tensors of routed experts, which are not read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from epserve.client.engines.routed_tensors import is_routed


@functools.cache
def loader_class() -> Any:
    """The class of the load format "epserve". Importing this module imports nothing of vLLM."""
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    log = init_logger(__name__)

    class EpserveModelLoader(DefaultModelLoader):  # type: ignore[misc, valid-type]
        def __init__(self, load_config: Any):
            from . import experts

            extra = load_config.model_loader_extra_config
            strategy = load_config.safetensors_load_strategy
            if strategy not in (None, "lazy") or (isinstance(extra, dict) and extra.get("enable_multithread_load")):
                log.warning(
                    "whole files are read, experts too: leave --safetensors-load-strategy and multithread_load out"
                )
            else:
                strategy = "lazy"  # vLLM's own choice may be to read whole files from a network
            super().__init__(replace(load_config, load_format="auto", safetensors_load_strategy=strategy))
            experts.install()

        def _get_weights_iterator(self, source: Any) -> Iterator[Any]:
            for name, tensor in super()._get_weights_iterator(source):
                if not is_routed(name):  # of files in other formats than safetensors
                    yield name, tensor

        def load_weights(self, model: Any, model_config: Any) -> None:
            with _unread():
                super().load_weights(model, model_config)
            if not any(_is_remote(module) for module in model.modules()):
                log.warning("no layer of this model or pipeline stage has its experts in the service")

    return EpserveModelLoader


def _is_remote(module: Any) -> bool:
    from . import experts

    return isinstance(getattr(module, "quant_method", None), experts.RemoteExperts)


@contextmanager
def _unread() -> Iterator[None]:
    """Within the block vLLM's filter of expert tensors, which it asks before it reads one, leaves out all of them."""
    from vllm.model_executor.model_loader import weight_utils

    original = weight_utils.should_skip_weight

    def should_skip_weight(weight_name: str, local_expert_ids: Any) -> bool:
        return is_routed(weight_name) or original(weight_name, local_expert_ids)

    weight_utils.should_skip_weight = should_skip_weight
    try:
        yield
    finally:
        weight_utils.should_skip_weight = original
