"""The plug-in for SGLang against a stand-in of what it uses of 0.5.23: names, arguments and order of calls."""

import enum
import pkgutil
import sys
import types
from collections import namedtuple
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from epserve.errors import ConfigError, Incompatible
from tests.support.clients import serving_in_thread
from tests.support.fake_engine import FakeEngine, LocalExperts

X, IDS, WEIGHTS = torch.randn(11, 32), torch.randint(0, 8, (11, 3)), torch.rand(11, 3)
LAYER, LOADER = "sglang.srt.layers.moe.fused_moe_triton.layer", "sglang.srt.model_loader.loader"
OURS = "epserve.client.engines.sglang"
CombineInput = namedtuple("StandardCombineInput", ["hidden_states"])


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    """Hooks that go around a function, as SGLang's registry applies them when all plug-ins have run."""

    def __init__(self):
        self.hooks = {}

    def register(self, target, hook, hook_type):
        assert hook_type is HookType.AROUND
        self.hooks[target] = hook

    def apply_hooks(self):
        for target, hook in self.hooks.items():
            holder, name = pkgutil.resolve_name(target.rpartition(".")[0]), target.rpartition(".")[2]
            original = getattr(holder, name)
            setattr(holder, name, lambda *args, original=original, hook=hook, **kwargs: hook(original, *args, **kwargs))
        self.hooks = {}


class FusedMoEMethodBase:
    runner = None

    def get_moe_runner_backend(self, layer):
        return self.runner.runner_backend if self.runner is not None else None


def fused_moe():
    """A class of its own for each test, since hooks change it."""

    class FusedMoE(torch.nn.Module):
        ranks = (0, 1, 1)  # of tensor parallelism, its size, the size of expert parallelism
        wrapper = None

        def __init__(
            self, num_experts, hidden_size, intermediate_size, layer_id, top_k=None, num_fused_shared_experts=0,
            params_dtype=None, quant_config=None, activation="silu", apply_router_weight_on_input=False, no_combine=False,
            routed_scaling_factor=None, gemm1_alpha=None, is_gated=True, quant_method=None,
        ):  # fmt: skip
            super().__init__()
            self.moe_tp_rank, self.moe_tp_size, self.moe_ep_size = self.ranks
            self.quant_method = self.wrapper or quant_method
            if self.quant_method is None:
                return
            self.quant_method.create_weights(
                layer=self, num_experts=num_experts, hidden_size=hidden_size, params_dtype=params_dtype, weight_loader=None,
                intermediate_size_per_partition=intermediate_size // self.moe_tp_size, with_bias=False,
            )  # fmt: skip
            self.quant_method.create_moe_runner(self, None)
            assert self.quant_method.get_moe_runner_backend(self) is None, "standard top-k with global ids"
            assert self.quant_method.fuse_routed_scaling_factor_in_topk

        def forward(self, x, ids, weights):
            topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
            return self.quant_method.apply(
                layer=self, dispatch_output=SimpleNamespace(hidden_states=x, topk_output=topk)
            ).hidden_states

    return FusedMoE


class DefaultModelLoader:
    def __init__(self):
        self.load_config = SimpleNamespace(model_loader_extra_config={})

    def _get_weights_iterator(self, source):
        assert self.load_config.model_loader_extra_config == {"enable_multithread_load": False}
        return sys.modules[LOADER].safetensors_weights_iterator(source, disable_mmap=False)


@contextmanager
def installed(checkpoint):
    registry = HookRegistry()
    loader = type("DefaultModelLoader", (DefaultModelLoader,), dict(vars(DefaultModelLoader)))
    contents = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.plugins": {}, "sglang.srt.layers": {}, "sglang.srt.layers.moe": {},
        "sglang.srt.layers.moe.fused_moe_triton": {}, "sglang.srt.layers.quantization": {}, "sglang.srt.model_loader": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": CombineInput},
        "sglang.srt.layers.quantization.base_config": {"FusedMoEMethodBase": FusedMoEMethodBase},
        "sglang.srt.runtime_context": {"get_server_args": lambda: SimpleNamespace(model_path=checkpoint)},
        LAYER: {"FusedMoE": fused_moe()},
        LOADER: {"DefaultModelLoader": loader, "safetensors_weights_iterator": None},
    }  # fmt: skip
    made = {}
    for name, values in contents.items():
        made[name] = types.ModuleType(name)
        vars(made[name]).update(values, __path__=[])
        if name != "sglang":
            setattr(made[name.rpartition(".")[0]], name.rpartition(".")[2], made[name])
    sys.modules.update(made)
    try:
        yield SimpleNamespace(registry=registry, layer=made[LAYER], loader=made[LOADER])
    finally:
        for name in [name for name in sys.modules if name.startswith(("sglang", OURS))]:
            del sys.modules[name]


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "hidden_size": 32}')
    return tmp_path


@pytest.fixture
def sglang(checkpoint):
    with installed(checkpoint) as stand_in:
        yield stand_in


@pytest.fixture
def engine():
    return FakeEngine(LocalExperts())


@pytest.fixture
def started(sglang, engine, monkeypatch):
    """SGLang whose environment asks, with its hooks in place."""
    import epserve.sglang

    with serving_in_thread(engine) as server:
        monkeypatch.setenv("EPSERVE_TARGET", server.address)
        monkeypatch.setenv("EPSERVE_RETRY_FOR_S", "20")
        epserve.sglang.register()
        sglang.registry.apply_hooks()
        yield sglang


def block(sglang, **changes):
    sizes = {"num_experts": 8, "hidden_size": 32, "intermediate_size": 16, "layer_id": 1, "top_k": 3}
    return sglang.layer.FusedMoE(params_dtype=torch.float32, **sizes | changes)


def test_without_a_request_nothing_is_hooked(sglang, monkeypatch):
    import epserve.sglang

    monkeypatch.delenv("EPSERVE_TARGET", raising=False)
    epserve.sglang.register()
    assert not sglang.registry.hooks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_ask_for_shares_that_add_up_to_the_result(started, engine, size):
    total = torch.zeros_like(X)
    for rank in range(size):
        started.layer.FusedMoE.ranks = (rank, size, 1)
        total += block(started)(X, IDS, WEIGHTS)
    torch.testing.assert_close(total, engine.compute.forward(X, IDS, WEIGHTS))
    assert sum(len(batch.hidden) for batch in engine.seen) == len(X)


def test_rows_of_padding_have_no_experts(started, engine):
    ids = IDS.clone()
    ids[7:] = -1
    got = block(started)(X, ids, WEIGHTS)
    torch.testing.assert_close(got[:7], engine.compute.forward(X[:7], IDS[:7], WEIGHTS[:7]))
    assert not got[7:].any()


def test_tensors_of_experts_are_not_read(started, checkpoint):
    kept = {"model.layers.0.mlp.gate.weight": torch.ones(1)}
    save_file(kept | {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(1)}, checkpoint / "model.safetensors")
    read = list(started.loader.DefaultModelLoader()._get_weights_iterator([checkpoint / "model.safetensors"]))
    assert [name for name, _ in read] == list(kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden size: served 32, the model has 16"),
        ({"intermediate_size": 8}, "intermediate size: served 16, the model has 8"),
        ({"layer_id": 5}, r"layers \[5\] are not served"),
        ({"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"no_combine": True}, "no_combine"),
        ({"gemm1_alpha": 1.7}, "served silu, the model has swigluoai"),
        ({"quant_method": FusedMoEMethodBase()}, "the model brings FusedMoEMethodBase"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_with_the_reason(started, changes, message):
    with pytest.raises((Incompatible, ConfigError), match=message):
        block(started, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs SGLang's models leave the factor to the experts")
def test_a_factor_that_would_count_twice_is_refused(started):
    with pytest.raises(Incompatible, match=r"routed_scaling_factor 2.5"):
        block(started, routed_scaling_factor=2.5)


def test_parallel_experts_and_wrappers_are_refused(started):
    started.layer.FusedMoE.ranks = (0, 1, 2)
    with pytest.raises(Incompatible, match="--ep-size"):
        block(started)
    started.layer.FusedMoE.ranks = (0, 1, 1)
    with pytest.raises(Incompatible, match=r"DeepEPMoE: .*--moe-a2a-backend"):
        type("DeepEPMoE", (started.layer.FusedMoE,), {})(
            num_experts=8, hidden_size=32, intermediate_size=16, layer_id=1, top_k=3, params_dtype=torch.float32
        )
    with pytest.raises(ConfigError, match="merge the adapter"):
        block(started).quant_method.get_triton_quant_info(None)


def test_bad_settings_are_an_error_of_the_first_layer(started, monkeypatch):
    monkeypatch.setenv("EPSERVE_RETRY_FOR_S", "-1")
    with pytest.raises(ConfigError, match="EPSERVE_RETRY_FOR_S"):
        block(started)


def test_a_release_without_a_hooked_name_ends_the_process(sglang, monkeypatch):
    """SGLang goes on after other errors of a plug-in, with experts of its own."""
    import epserve.sglang

    monkeypatch.setenv("EPSERVE_TARGET", "127.0.0.1:1")
    del sglang.loader.safetensors_weights_iterator
    with pytest.raises(SystemExit, match=r"no sglang.srt.model_loader.loader.safetensors_weights_iterator"):
        epserve.sglang.register()
