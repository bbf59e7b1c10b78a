"""What this package uses of vLLM: names, and the arguments that they take. A release that lacks one is refused by name."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from epserve.errors import Incompatible

OLDEST = (0, 24)
NEWEST_SEEN = (0, 33)
MOE = "vllm.model_executor.layers.fused_moe"
LOADER = "vllm.model_executor.model_loader"


@dataclass(frozen=True, slots=True)
class Contract:
    """`name` in `module` is callable with arguments of these names. Without arguments it only has to be there."""

    module: str
    name: str
    arguments: tuple[str, ...] = ()

    def broken(self) -> str | None:
        """Returns what is wrong with this installation's, or None."""
        where = f"{self.module}.{self.name}"
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return f"{where} is not there"
        if not self.arguments:
            return None
        parameters = inspect.signature(found).parameters
        missing = [name for name in self.arguments if name not in parameters]
        return f"{where} takes no {', '.join(missing)}" if missing else None


CONTRACTS = (
    Contract(f"{MOE}.routed_experts", "RoutedExperts._get_quant_method", ("prefix", "quant_config", "moe_config")),
    Contract(f"{MOE}.routed_experts", "RoutedExperts.__init__", ("layer_name", "params_dtype", "moe_config")),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.__init__", ("moe",)),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.apply",
             ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.create_weights",
             ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype")),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.maybe_roundup_sizes",
             ("hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config")),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.supports_internal_mk"),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.mk_can_overlap_shared_experts"),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.is_monolithic"),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.topk_indices_dtype"),
    Contract(f"{MOE}.fused_moe_method_base", "FusedMoEMethodBase.get_fused_moe_quant_config", ("layer",)),
    Contract(f"{MOE}.runner.shared_experts", "SharedExpertsOrder.MK_INTERNAL_OVERLAPPED"),
    Contract(f"{MOE}.runner.shared_experts", "SharedExperts.forward", ("shared_experts_input", "order")),
    Contract(LOADER, "_LOAD_FORMAT_TO_MODEL_LOADER"),
    Contract(f"{LOADER}.default_loader", "DefaultModelLoader._get_weights_iterator", ("source",)),
    Contract(f"{LOADER}.default_loader", "DefaultModelLoader.load_weights", ("model", "model_config")),
    Contract(f"{LOADER}.weight_utils", "should_skip_weight", ("weight_name", "local_expert_ids")),
    Contract("vllm.model_executor.models.utils", "extract_layer_index", ("layer_name",)),
    Contract("vllm.utils.torch_utils", "direct_register_custom_op", ("op_name", "op_func", "fake_impl")),
    Contract("vllm.forward_context", "get_forward_context"),
    Contract("vllm.forward_context", "is_forward_context_available"),
    Contract("vllm.distributed", "get_tensor_model_parallel_rank"),
    Contract("vllm.distributed", "get_tensor_model_parallel_world_size"),
    Contract("vllm.config", "get_current_vllm_config"),
)  # fmt: skip


def check() -> None:
    """Raises Incompatible for a vLLM that is too old, or that has changed what this package uses."""
    import vllm

    seen = f"epserve knows vLLM {_dotted(OLDEST)} to {_dotted(NEWEST_SEEN)}"
    version = _version(vllm.__version__)
    if version and version < OLDEST:
        raise Incompatible(f"vLLM {vllm.__version__} is too old: {seen}; upgrade vLLM")
    broken = tuple(filter(None, (contract.broken() for contract in CONTRACTS)))
    if broken:
        raise Incompatible(f"vLLM {vllm.__version__} does not have what epserve uses ({seen}):", broken)


def _version(text: str) -> tuple[int, ...]:
    """Empty for a build without a number, which the contracts judge alone."""
    parts = text.split(".")[:2]
    return (
        tuple(map(int, parts))
        if len(parts) == 2 and all(part.isdigit() for part in parts) and parts != ["0", "0"]
        else ()
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
