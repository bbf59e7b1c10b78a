"""Where vLLM learns that its experts are elsewhere: when its configuration is made, and when a process loads plug-ins.

NOTE: plug-ins are called before there is a configuration, and processes that vLLM starts get theirs from it. The process
that makes the configuration therefore marks the environment, and the others register the loader by that mark. The mark
asks for nothing: a model is loaded by this loader only when its configuration says so.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from epserve.client.engines.asked import PREFIX
from epserve.errors import ConfigError, Incompatible

from .settings import LOAD_FORMAT, asked_by

MARK = "EPSERVE_VLLM_LOADER"
GRAPH_OPS = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""vLLM's operators around an MoE block, which no CUDA graph can hold when it calls a service."""


def install() -> None:
    """Makes vLLM look at its configuration. May be called several times in a process."""
    from vllm.config import VllmConfig

    original = VllmConfig.__post_init__
    if not hasattr(original, "_epserve"):

        @functools.wraps(original)
        def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
            wanted = asked_by(self)
            if wanted is not None:
                begin(self)
            original(self, *args, **kwargs)
            if wanted is not None:
                keep_out_of_graphs(self)

        __post_init__._epserve = True  # type: ignore[attr-defined]
        VllmConfig.__post_init__ = __post_init__
    if os.environ.get(MARK) or os.environ.get(f"{PREFIX}TARGET"):
        register_loader()


def begin(config: Any) -> None:
    """Takes a configuration that asks. Raises ConfigError or Incompatible, before vLLM starts a process."""
    from . import contracts

    contracts.check()
    reasons = refusals(config)
    if reasons:
        raise Incompatible("vLLM cannot have its experts in a service of epserve as it is configured:", tuple(reasons))
    load = config.load_config.load_format
    if load not in ("auto", "hf", "safetensors", LOAD_FORMAT):
        raise ConfigError(
            f"--load-format {load}: epserve reads safetensors without their experts; leave the option out"
        )
    config.load_config.load_format = LOAD_FORMAT
    os.environ[MARK] = "1"
    register_loader()


def refusals(config: Any) -> list[str]:
    """Why a configuration cannot have remote experts."""
    parallel = config.parallel_config
    merge = "merge the adapter into the checkpoint, serve that, and leave --enable-lora out"
    checks = [
        (config.lora_config is None, f"--enable-lora: vLLM adapts every MoE layer, and their weights are elsewhere; {merge}"),
        (not parallel.enable_eplb, "--enable-eplb: the service places experts and balances them; leave the option out"),
        (not parallel.enable_expert_parallel, "--enable-expert-parallel: the service has the experts; leave the option out"),
        (getattr(parallel, "prefill_context_parallel_size", 1) == 1,
         "--prefill-context-parallel-size: vLLM adds up the experts of its ranks, and each would be the whole; leave it at 1"),
        (not getattr(parallel, "enable_elastic_ep", False), "--enable-elastic-ep: the service has the experts"),
    ]  # fmt: skip
    return [reason for fits, reason in checks if not fits]


def keep_out_of_graphs(config: Any) -> None:
    """Cuts CUDA graphs at MoE blocks. Does nothing when there are no graphs."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode.name == "NONE":
        return
    from vllm.config import CUDAGraphMode
    from vllm.logger import init_logger

    if compilation.splitting_ops:
        compilation.splitting_ops = [*dict.fromkeys((*compilation.splitting_ops, *GRAPH_OPS))]
        wanted = CUDAGraphMode.PIECEWISE
    else:
        wanted = CUDAGraphMode.NONE
    if mode != wanted:
        init_logger(__name__).warning(
            "CUDA graphs: %s in place of %s, since a graph cannot hold a call to the experts' service", wanted, mode
        )
        compilation.cudagraph_mode = wanted


def register_loader() -> None:
    """Makes the load format known, without vLLM's line in the log."""
    from vllm.model_executor import model_loader

    from .loader import loader_class

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER.setdefault(LOAD_FORMAT, loader_class())
