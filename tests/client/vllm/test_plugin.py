"""The plug-in for vLLM against stand-ins of both ends of its range: silent unless asked, shares, padding, overlap, refusals."""

import functools
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from epserve.errors import ConfigError, Incompatible
from tests.client.vllm.stand_in import LOADER, CUDAGraphMode, SharedExperts, installed
from tests.support.clients import serving_in_thread, wait_until
from tests.support.fake_engine import FakeEngine, LocalExperts

X, IDS, WEIGHTS = torch.randn(11, 32), torch.randint(0, 8, (11, 3)), torch.rand(11, 3)


@pytest.fixture(params=["0.24", "0.33"])
def vllm(request, monkeypatch):
    for name in ("EPSERVE_TARGET", "EPSERVE_VLLM_LOADER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with installed(request.param) as stand_in:
        import epserve.vllm

        epserve.vllm.register()
        epserve.vllm.register()
        yield stand_in


@pytest.fixture(scope="module")
def experts():
    return LocalExperts()


@pytest.fixture
def engine(experts):
    return FakeEngine(experts)


@pytest.fixture
def address(engine):
    with serving_in_thread(engine) as server:
        yield server.address


def configured(vllm, target, **settings):
    asked = {"epserve": {"target": target, "retry_for_s": 20}} if target else {}
    text = {"model_type": "tiny", "hidden_size": 32}
    return vllm.modules["vllm.config"].VllmConfig(model="none", text=text, additional_config=asked, **settings)


def loaded(vllm, target, **changes):
    """A block whose experts are remote."""
    config = configured(vllm, target)
    vllm.loader(config)
    return vllm.block(config, **changes)


def test_without_a_request_nothing_changes(vllm):
    config = configured(vllm, None)
    assert config.load_config.load_format == "auto"
    assert "epserve" not in vllm.modules[LOADER]._LOAD_FORMAT_TO_MODEL_LOADER
    assert vllm.block(config).quant_method == "vLLM's own"
    assert "epserve.client.engines.vllm.experts" not in sys.modules


def test_a_model_beside_one_that_asks_keeps_its_experts(vllm, address):
    assert loaded(vllm, address).quant_method != "vLLM's own"
    assert vllm.block(configured(vllm, None)).quant_method == "vLLM's own"


def test_a_process_that_vllm_starts_knows_the_loader(vllm, address):
    """Its configuration comes by pickle, so that only the environment tells it."""
    config = configured(vllm, address)
    del vllm.modules[LOADER]._LOAD_FORMAT_TO_MODEL_LOADER["epserve"]
    importlib.import_module("epserve.vllm").register()
    vllm.loader(config)
    assert vllm.block(config).quant_method != "vLLM's own"


def test_the_environment_asks_too(vllm, address, monkeypatch):
    monkeypatch.setenv("EPSERVE_TARGET", address)
    config = configured(vllm, None)
    vllm.loader(config)
    assert vllm.block(config).quant_method != "vLLM's own"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 11])
def test_ranks_ask_for_shares_that_add_up_to_the_result(vllm, engine, experts, address, size, tokens):
    block = loaded(vllm, address)
    x, ids, weights = X[:tokens], IDS[:tokens], WEIGHTS[:tokens]
    vllm.size, total = size, torch.zeros_like(x)
    for vllm.rank in range(size):
        total += vllm.run(block, x, ids, weights, actual=tokens)
    torch.testing.assert_close(total, experts.forward(x, ids, weights))
    assert sum(len(batch.hidden) for batch in engine.seen) == tokens, "no row is asked for twice"


def test_rows_of_padding_and_batches_of_no_request_are_not_sent(vllm, engine, experts, address):
    block = loaded(vllm, address)
    assert torch.equal(vllm.run(block, X, IDS, WEIGHTS, actual=None), torch.zeros_like(X))
    assert not engine.seen, "a profile run, a warm-up, an idle data-parallel rank"
    got = vllm.run(block, X, IDS, WEIGHTS, actual=7)
    assert torch.equal(got[:7], experts.forward(X[:7], IDS[:7], WEIGHTS[:7]))
    assert not got[7:].any()
    assert [len(batch.hidden) for batch in engine.seen] == [7]


def test_shared_experts_run_while_the_service_computes(vllm, engine, experts, address):
    block = loaded(vllm, address)

    def work(x):
        wait_until(lambda: engine.seen)  # it has the request already
        return 2 * x

    shared = SharedExperts(work)
    got = vllm.run(block, X, IDS, WEIGHTS, actual=11, shared=shared)
    assert torch.equal(got, experts.forward(X, IDS, WEIGHTS))
    assert torch.equal(shared.output, 2 * X)


def test_a_pass_that_ends_in_the_middle_leaves_nothing_behind(vllm, experts, address):
    block = loaded(vllm, address)

    def fails(x):
        raise ZeroDivisionError

    operators = sys.modules["epserve.client.engines.vllm.operators"]
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            vllm.run(block, X, IDS, WEIGHTS, actual=11, shared=SharedExperts(fails))
    assert len(operators._under_way) == 1
    assert torch.equal(vllm.run(block, X, IDS, WEIGHTS, actual=11), experts.forward(X, IDS, WEIGHTS))
    assert not operators._under_way


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_config": SimpleNamespace()}, "--enable-lora: .*merge the adapter"),
        ({"enable_eplb": True}, "--enable-eplb: the service places experts"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"load_format": "tensorizer"}, "--load-format tensorizer: .*leave the option out"),
    ],
)
def test_what_cannot_have_remote_experts_is_refused_before_anything_starts(vllm, settings, message):
    with pytest.raises((Incompatible, ConfigError), match=message):
        configured(vllm, "127.0.0.1:1", **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dim": 16}, "latent experts: they take 16 values of the 32"),
        ({"num_experts": 9}, "experts: served 8, the model has 9"),
        ({"experts_per_token": 4}, "at most 3 are served"),
        ({"number": 5}, r"layers \[5\] are not served"),
        ({"activation": SimpleNamespace(value="gelu")}, "served silu, the model has gelu"),
        ({"activation": SimpleNamespace(value="silu_no_mul")}, "gated: served True, the model has False"),
        ({"activation": SimpleNamespace(value="situ")}, "situ"),
        ({"moe_parallel_config": SimpleNamespace(is_sequence_parallel=True)}, "sequence parallel"),
    ],
)
def test_a_layer_that_does_not_fit_is_told_with_the_reason(vllm, address, changes, message):
    with pytest.raises((Incompatible, ConfigError), match=message):
        loaded(vllm, address, **changes)


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"epserve": {"targte": "x:1"}}, "epserve.targte: unknown key; did you mean 'target'"),
        ({"epserve": {}}, "epserve.target: missing"),
        ({"epserve": 7}, "must be host:port or an object of settings, got int"),
        ({"epserve": {"target": "x:1", "retry_for_s": 0}}, r"epserve.retry_for_s: .*greater than 0 \(got 0\)"),
        ({"epserve": {"target": "x:1", "token": "secret"}}, "epserve.token: unknown key; did you mean 'token_file'"),
    ],
)
def test_bad_settings_name_the_key(vllm, additional, message):
    with pytest.raises(ConfigError, match=message):
        vllm.modules["vllm.config"].VllmConfig(additional_config=additional)


def test_a_bad_value_of_the_environment_names_the_variable(vllm, monkeypatch):
    monkeypatch.setenv("EPSERVE_SHARED_MEMORY_BYTES", "much")
    with pytest.raises(ConfigError, match=r"EPSERVE_SHARED_MEMORY_BYTES: .*got 'much'"):
        configured(vllm, "127.0.0.1:1")


class TestContracts:
    def test_an_old_release_is_refused(self, vllm):
        vllm.modules["vllm"].__version__ = "0.23.1"
        with pytest.raises(Incompatible, match=r"vLLM 0.23.1 is too old: epserve knows vLLM 0.24 to"):
            configured(vllm, "127.0.0.1:1")

    def test_a_build_without_a_number_is_judged_by_what_it_has(self, vllm):
        vllm.modules["vllm"].__version__ = "0.0.0.dev0"
        configured(vllm, "127.0.0.1:1")

    @pytest.mark.parametrize(
        ("module", "path", "message"),
        [
            ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts", "_get_quant_method is not there"),
            (f"{LOADER}.weight_utils", "should_skip_weight", "should_skip_weight is not there"),
        ],
    )
    def test_a_release_that_lacks_a_name_is_refused_by_name(self, vllm, module, path, message):
        delattr(vllm.modules[module], path)
        with pytest.raises(Incompatible, match=message):
            configured(vllm, "127.0.0.1:1")

    def test_a_release_that_lacks_an_argument_is_refused_by_name(self, vllm):
        vllm.modules[f"{LOADER}.weight_utils"].should_skip_weight = lambda weight_name: False
        with pytest.raises(Incompatible, match="should_skip_weight takes no local_expert_ids"):
            configured(vllm, "127.0.0.1:1")


@pytest.mark.parametrize(
    ("mode", "given", "wanted", "split"),
    [
        ("FULL_AND_PIECEWISE", ["vllm::attention"], "PIECEWISE", True),
        ("PIECEWISE", ["vllm::attention"], "PIECEWISE", True),
        ("FULL_AND_PIECEWISE", [], "NONE", False),
        ("NONE", None, "NONE", False),
    ],
)
def test_graphs_are_cut_at_the_experts(vllm, mode, given, wanted, split):
    config = configured(vllm, "127.0.0.1:1", cudagraph_mode=CUDAGraphMode[mode], splitting_ops=given).compilation_config
    assert config.cudagraph_mode is CUDAGraphMode[wanted]
    assert ("vllm::moe_forward" in (config.splitting_ops or [])) is split


class TestLoading:
    KEPT = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.down_proj.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.experts.e_score_correction_bias",
        "model.layers.0.block_sparse_moe.router.layer.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
    )
    LEFT_OUT = (
        "model.layers.0.mlp.experts.3.gate_proj.weight",
        "model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv",
        "model.layers.0.mlp.experts.3.down_proj.qzeros",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.mlp.experts.down_proj_bias",
        "transformer.blocks.0.ffn.experts.mlp.w1",
        "model.layers.0.block_sparse_moe.input_linear.weight",
    )

    def test_tensors_of_experts_are_not_read(self, vllm, address, caplog):
        config, model = configured(vllm, address), torch.nn.Module()
        loader = vllm.loader(config)
        model.experts = vllm.block(config)
        loader.load_weights(model, self.KEPT + self.LEFT_OUT + ("model.layers.0.mlp.experts.3.up_proj.bin",))
        assert tuple(model.loaded) == self.KEPT
        assert "experts in the service" not in caplog.text
        assert tuple(loader.read) == (*self.KEPT, "model.layers.0.mlp.experts.3.up_proj.bin")
        assert loader.load_config.load_format == "auto"
        assert loader.load_config.safetensors_load_strategy == "lazy", "a network file system is not read ahead"

    def test_a_model_without_experts_is_told(self, vllm, address, caplog):
        vllm.loader(configured(vllm, address)).load_weights(torch.nn.Module(), self.KEPT)
        assert "no layer of this model" in caplog.text

    def test_a_way_of_loading_that_reads_all_is_told(self, vllm, address, caplog):
        config = configured(vllm, address)
        config.load_config.safetensors_load_strategy = "eager"
        assert vllm.loader(config).load_config.safetensors_load_strategy == "eager"
        assert "whole files are read" in caplog.text


def test_the_wheel_names_the_entry_point():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["epserve"].partition(":")
    assert callable(functools.reduce(getattr, [name], importlib.import_module(module)))
