"""What epserve uses of vLLM, as the releases 0.24 and 0.33 have it: the same names, arguments and order of calls, without models.

`installed(version)` puts it into `sys.modules`. A block is built, loaded and run in the order in which vLLM does it.
"""

import enum
import logging
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

MOE = "vllm.model_executor.layers.fused_moe"
LOADER = "vllm.model_executor.model_loader"
OURS = "epserve.client.engines.vllm"


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL_AND_PIECEWISE = 2


class SharedExpertsOrder(enum.IntEnum):
    NO_OVERLAP = 1
    MK_INTERNAL_OVERLAPPED = 2


@dataclass
class LoadConfig:
    load_format: str = "auto"
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: dict = field(default_factory=dict)


class VllmConfig:
    """`settings` are those of the parallel, compilation and LoRA configuration that epserve looks at."""

    def __init__(self, model: str = "", text: dict | None = None, additional_config: dict | None = None, **settings):
        self.additional_config = additional_config or {}
        self.load_config = LoadConfig(settings.pop("load_format", "auto"))
        self.lora_config = settings.pop("lora_config", None)
        graphs = settings.pop("cudagraph_mode", CUDAGraphMode.NONE), settings.pop("splitting_ops", None)
        self.compilation_config = SimpleNamespace(cudagraph_mode=graphs[0], splitting_ops=graphs[1])
        self.parallel_config = SimpleNamespace(enable_eplb=False, enable_expert_parallel=False)
        vars(self.parallel_config).update(settings)
        self.model_config = SimpleNamespace(
            model=model, hf_text_config=SimpleNamespace(**(text or {}), to_dict=lambda: text)
        )
        self.__post_init__()

    def __post_init__(self):
        assert self.load_config.load_format  # checked here: what epserve chooses comes before


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe, self.moe_kernel = moe, None

    supports_internal_mk = mk_can_overlap_shared_experts = is_monolithic = topk_indices_dtype = property(
        lambda self: None
    )

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **_):
        raise NotImplementedError

    def maybe_roundup_sizes(self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config):
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer):
        raise NotImplementedError

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        raise NotImplementedError


class Experts24(torch.nn.Module):
    """RoutedExperts of 0.24."""

    def __init__(self, layer_name, params_dtype, moe_config, quant_config, expert_map_manager, expert_mapping=None,
                 apply_router_weight_on_input=False):  # fmt: skip
        super().__init__()
        self.layer_name, self.apply_router_weight_on_input = layer_name, apply_router_weight_on_input
        self.quant_method = method = self._get_quant_method(layer_name, quant_config, moe_config)
        if method == "vLLM's own":
            return
        moe = moe_config
        sizes = method.maybe_roundup_sizes(moe.hidden_dim, moe.intermediate_size, params_dtype, moe.moe_parallel_config)
        assert sizes == (moe.hidden_dim, moe.intermediate_size)
        method.create_weights(
            layer=self, num_experts=moe.num_experts, hidden_size=sizes[0], unpadded_hidden_size=sizes[0],
            intermediate_size_per_partition=sizes[1], params_dtype=params_dtype, weight_loader=None, global_num_experts=0,
        )  # fmt: skip

    def _get_quant_method(self, prefix, quant_config, moe_config):
        return "vLLM's own"


class Experts33(Experts24):
    """RoutedExperts of 0.33, where models have classes of their own below it."""

    def __init__(self, layer_name, params_dtype, moe_config, quant_config, expert_map_manager,
                 ckpt_gate_proj_name="gate_proj", is_fused_checkpoint_transposed=False, **given):  # fmt: skip
        super().__init__(layer_name, params_dtype, moe_config, quant_config, expert_map_manager, **given)


class SharedExperts:
    """Runs `work` when it is called in the order that vLLM has chosen for a method that overlaps."""

    def __init__(self, work):
        self.work, self.output = work, None

    def forward(self, shared_experts_input, order):
        assert order is SharedExpertsOrder.MK_INTERNAL_OVERLAPPED
        self.output = self.work(shared_experts_input)

    __call__ = forward


class DefaultModelLoader:
    def __init__(self, load_config):
        self.load_config, self.read = load_config, []

    def _get_weights_iterator(self, source):
        """source: names of tensors; those ending in .bin are of a file that is read whole."""
        from vllm.model_executor.model_loader import weight_utils

        for name in source:
            if name.endswith(".bin") or not weight_utils.should_skip_weight(name, None):
                self.read.append(name)
                yield name, None

    def load_weights(self, model, model_config):
        model.loaded = [name for name, _ in self._get_weights_iterator(model_config)]


def moe_config(**changes):
    """As FusedMoEConfig, of tiny_info's sizes."""
    values = {
        "hidden_dim": 32, "intermediate_size": 16, "num_experts": 8, "experts_per_token": 3,
        "activation": SimpleNamespace(value="silu"), "moe_parallel_config": SimpleNamespace(is_sequence_parallel=False),
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


class StandIn:
    """One installation, and the state that vLLM would have in a worker."""

    def __init__(self, version: str):
        self.experts_class = {"0.24": Experts24, "0.33": Experts33}[version]
        self.experts_class._get_quant_method = Experts24.__dict__["_get_quant_method"]
        self.rank, self.size = 0, 1
        self.config = None
        self.context = None
        self.library = torch.library.Library("vllm", "FRAGMENT")
        self.modules = self._modules(version)

    def block(self, config, number=1, **changes):
        """The experts of one layer, as the model's constructor makes them in the worker."""
        self.config = config
        name = f"model.layers.{number}.mlp.experts"
        experts = self.experts_class(name, torch.float32, moe_config(**changes), None, None)
        self.context = SimpleNamespace(
            no_compile_layers={name: SimpleNamespace(routed_experts=experts)}, attn_metadata=None
        )
        return experts

    def run(self, experts, x, ids, weights, *, actual=None, shared=None):
        """A forward pass of one rank. actual: tokens of requests among the rows; None: no request at all."""
        self.context.attn_metadata = None if actual is None else {"attn": SimpleNamespace(num_actual_tokens=actual)}
        return experts.quant_method.apply(
            layer=experts, x=x, topk_weights=weights, topk_ids=ids, shared_experts=shared, shared_experts_input=x
        )

    def loader(self, config):
        loaders = self.modules[LOADER]._LOAD_FORMAT_TO_MODEL_LOADER
        return loaders[config.load_config.load_format](config.load_config)

    def _register(self, op_name, op_func, mutates_args=None, fake_impl=None):
        self.library.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args or []))
        self.library.impl(op_name, op_func, "CompositeExplicitAutograd")
        self.library._register_fake(op_name, fake_impl)

    def _modules(self, version):
        contents = {
            "vllm": {"__version__": f"{version}.0"},
            "vllm.config": {"VllmConfig": type("VllmConfig", (VllmConfig,), {}), "CUDAGraphMode": CUDAGraphMode,
                            "get_current_vllm_config": lambda: self.config},
            "vllm.logger": {"init_logger": logging.getLogger},
            "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: self.rank,
                                 "get_tensor_model_parallel_world_size": lambda: self.size},
            "vllm.forward_context": {"get_forward_context": lambda: self.context, "is_forward_context_available": bool},
            "vllm.utils": {},
            "vllm.utils.torch_utils": {"direct_register_custom_op": self._register},
            "vllm.model_executor": {},
            "vllm.model_executor.layers": {},
            "vllm.model_executor.models": {},
            "vllm.model_executor.models.utils": {"extract_layer_index": lambda layer_name: int(layer_name.split(".")[2])},
            MOE: {},
            f"{MOE}.routed_experts": {"RoutedExperts": self.experts_class},
            f"{MOE}.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
            f"{MOE}.runner": {},
            f"{MOE}.runner.shared_experts": {"SharedExperts": SharedExperts, "SharedExpertsOrder": SharedExpertsOrder},
            LOADER: {"_LOAD_FORMAT_TO_MODEL_LOADER": {"auto": DefaultModelLoader}},
            f"{LOADER}.default_loader": {"DefaultModelLoader": DefaultModelLoader},
            f"{LOADER}.weight_utils": {"should_skip_weight": lambda weight_name, local_expert_ids: False},
        }  # fmt: skip
        made = {}
        for name, values in contents.items():
            made[name] = types.ModuleType(name)
            vars(made[name]).update(values, __path__=[])
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(made[parent], last, made[name])
        return made


@contextmanager
def installed(version: str):
    before = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith((OURS, "vllm.")) or name == "vllm"
    }
    stand_in = StandIn(version)
    sys.modules.update(stand_in.modules)
    try:
        yield stand_in
    finally:
        stand_in.library._destroy()
        for name in list(sys.modules):
            if name.startswith((OURS, "vllm.")) or name == "vllm":
                del sys.modules[name]
        sys.modules.update(before)
