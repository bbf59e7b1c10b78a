"""The hooks by which SGLang builds its experts and reads its weights, where the environment asks for a service."""

from __future__ import annotations

import os
import pkgutil
from typing import Any

from epserve.client.engines.asked import PREFIX

LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"
LOADER = "sglang.srt.model_loader.loader"


def install() -> None:
    """Registers hooks where EPSERVE_TARGET is set.

    Raises SystemExit for a release without the names that are hooked: SGLang logs other errors of plug-ins and goes on, with
    experts of its own.
    """
    if not os.environ.get(f"{PREFIX}TARGET"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {
        LAYER: _build,
        f"{LOADER}.DefaultModelLoader._get_weights_iterator": _weights,
        f"{LOADER}.safetensors_weights_iterator": _safetensors,
    }
    for target, hook in hooks.items():
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            raise SystemExit(f"epserve: this SGLang has no {target}, it was written against 0.5.23: {error}") from None
        HookRegistry.register(target, hook, HookType.AROUND)


def _build(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from . import experts

    return experts.build(original, self, *args, **kwargs)


def _weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang reads whole files with several threads by default. One thread asks for each tensor."""
    from epserve.client.engines.routed_tensors import is_routed

    extra = self.load_config.model_loader_extra_config or {}
    self.load_config.model_loader_extra_config = {**extra, "enable_multithread_load": False}
    return (pair for pair in original(self, *args, **kwargs) if not is_routed(pair[0]))


def _safetensors(original: Any, hf_weights_files: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensors of these files without those of routed experts, which are not read."""
    from safetensors import safe_open

    from epserve.client.engines.routed_tensors import is_routed

    for path in hf_weights_files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                if not is_routed(name):
                    yield name, file.get_tensor(name)
