"""Models with remote experts: settings that differ from the service's, writes to experts that are not there."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeForCausalLM

import epserve.transformers
from epserve.errors import ConfigError, Incompatible, InvalidRequest
from tests.models.coverage_table import InProcess, write_checkpoint
from tests.support.checkpoints import edit_config

IDS = torch.tensor([[3, 8, 1, 77, 20, 9], [5, 4, 30, 31, 32, 33]])
EXPERTS = r"model\.layers\.0\.mlp\.experts\."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = write_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="module")
def services(checkpoint):
    """One open service for each checkpoint and gate."""
    opened = {}

    def get(family, gate="local"):
        key = family, gate
        if key not in opened:
            opened[key] = epserve.transformers.connect(InProcess(checkpoint(family), max_tokens=32), gate=gate)
        return opened[key]

    yield get
    for service in opened.values():
        service.close()


@pytest.fixture
def remote(checkpoint, services):
    """A qwen3_moe whose experts are remote."""
    return epserve.transformers.from_pretrained(checkpoint("qwen3_moe"), services("qwen3_moe"))


@pytest.fixture
def local(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"))


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def refused(what):
    return pytest.raises(ConfigError, match=rf"{what}.*these weights are in the service.*change the checkpoint")


# Settings that are overridden when the model is loaded.

GATE_SETTINGS = [
    ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok: served 2, the model has 1"),
    ("qwen3_moe", {"norm_topk_prob": True}, "norm_topk_prob: served False, the model has True"),
    (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 8},
        r"shared experts' .*\(shared_expert_.*: served 16, the model has 8",
    ),
    ("mixtral", {"num_experts_per_tok": 3}, "num_experts_per_tok: served 2, the model has 3"),
    ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob: served False, the model has True"),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}, "routed_scaling_factor: served 2.5, the model has 1.0"),
    ("deepseek_v3", {"n_group": 1}, "n_group: served 2, the model has 1"),
    ("deepseek_v3", {"topk_group": 2}, "topk_group: served 1, the model has 2"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob: served True, the model has False"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', only 'sigmoid' is known"),
    ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act: served silu, the model has gelu"),
    ("qwen3_moe", {"output_router_logits": True}, "output_router_logits: the router is in the service"),
]


@pytest.mark.parametrize(("family", "setting", "message"), GATE_SETTINGS)
def test_a_remote_gate_has_the_settings_of_the_service(checkpoint, services, family, setting, message, monkeypatch):
    path, service = checkpoint(family), services(family, "remote")
    epserve.transformers.from_pretrained(path, service)
    config = AutoConfig.from_pretrained(path)
    for name, value in setting.items():
        setattr(config, name, value)
    monkeypatch.setattr("transformers.core_model_loading._materialize_copy", None)  # nothing is read
    with pytest.raises(Incompatible, match=message):
        epserve.transformers.from_pretrained(path, service, config=config)


def test_every_setting_that_differs_is_in_one_message(checkpoint, services):
    settings = {"n_group": 1, "norm_topk_prob": False, "num_experts_per_tok": 3}
    with pytest.raises(Incompatible) as caught:
        epserve.transformers.from_pretrained(checkpoint("deepseek_v3"), services("deepseek_v3", "remote"), **settings)
    assert len(caught.value.reasons) == 3


@pytest.mark.parametrize(
    ("family", "setting", "message"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act: served silu, the model has gelu"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: served 7.0, the model has 5.0"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha: served 1.70.*, the model has 1.5"),
        ("granitemoe", {"hidden_act": "gelu"}, "hidden_act: served silu, the model has gelu"),  # no table of ours
        ("qwen3_moe", {"num_experts_per_tok": 4}, r"num_experts_per_tok\): the model has 4, at most 2 are served"),
        ("granitemoe", {"num_experts_per_tok": 4}, r"num_experts_per_tok\): the model has 4, at most 2 are served"),
    ],
)
def test_experts_compute_what_the_configuration_says(checkpoint, services, family, setting, message):
    with pytest.raises(Incompatible, match=message):
        epserve.transformers.from_pretrained(checkpoint(family), services(family), **setting)


@pytest.mark.parametrize("setting", [{"num_experts_per_tok": 1}, {"norm_topk_prob": True}])
def test_a_local_gate_may_have_settings_of_its_own(checkpoint, services, setting):
    path = checkpoint("qwen3_moe")
    changed = epserve.transformers.from_pretrained(path, services("qwen3_moe"), **setting)
    wanted = logits(AutoModelForCausalLM.from_pretrained(path, **setting))
    torch.testing.assert_close(logits(changed), wanted, rtol=1e-5, atol=1e-5)


def test_router_logits_come_from_a_local_gate_and_are_refused_with_a_remote_one(checkpoint, services, remote, local):
    with torch.no_grad():
        ours, theirs = (model(input_ids=IDS, output_router_logits=True) for model in (remote, local))
    torch.testing.assert_close(ours.router_logits, theirs.router_logits, rtol=1e-5, atol=1e-5)
    gated = epserve.transformers.from_pretrained(checkpoint("qwen3_moe"), services("qwen3_moe", "remote"))
    with (
        torch.no_grad(),
        pytest.raises(InvalidRequest, match="output_router_logits: the router of this model is in the"),
    ):
        gated(input_ids=IDS, output_router_logits=True)
    gated.config.output_router_logits = True
    with torch.no_grad(), pytest.raises(InvalidRequest, match="output_router_logits"):
        gated(input_ids=IDS)


def test_a_gate_that_the_service_cannot_compute_is_the_clients(checkpoint, tmp_path):
    """All 8 experts of a group of 4: transformers fills up with experts of other groups, the service's gate does not."""
    path = write_checkpoint("deepseek_v3", tmp_path / "checkpoint")
    edit_config(path, num_experts_per_tok=8, n_group=2, topk_group=1)
    served = InProcess(path)
    assert "top_k 8 is more than the experts of 1 groups of 4" in served.info.gate.refusal
    local = AutoModelForCausalLM.from_pretrained(path)
    with epserve.transformers.connect(served) as service:
        remote = epserve.transformers.from_pretrained(path, service)
        torch.testing.assert_close(logits(remote), logits(local), rtol=1e-5, atol=1e-5)
    with (
        epserve.transformers.connect(InProcess(path), gate="remote") as service,
        pytest.raises(Incompatible, match="the service does not gate this model: top_k 8 is more than"),
    ):
        epserve.transformers.from_pretrained(path, service)


# Writes to experts that are not there.


def doubled(model):
    return {name: value * 2 if ".experts." in name else value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strict", [False, True])
def test_expert_weights_in_a_state_dict(remote, local, strict):
    before = logits(remote)
    with refused(f"load_state_dict: {EXPERTS}down_proj"):
        remote.load_state_dict(doubled(local), strict=strict)
    assert torch.equal(logits(remote), before)
    remote.load_state_dict({name: value * 2 for name, value in remote.state_dict().items()}, strict=strict)
    assert not torch.equal(logits(remote), before), "the other weights are here"


@pytest.mark.parametrize("base", [False, True], ids=["names of the whole model", "names of the base model"])
def test_expert_weights_in_the_state_dict_of_from_pretrained(checkpoint, services, local, base):
    given = {name.removeprefix("model.") if base else name: value for name, value in doubled(local).items()}
    config = AutoConfig.from_pretrained(checkpoint("qwen3_moe"))
    arguments = {"model_class": Qwen3MoeForCausalLM, "config": config, "state_dict": given}
    with refused("state_dict: .*experts.down_proj"):
        epserve.transformers.from_pretrained(None, services("qwen3_moe"), **arguments)


def test_expert_weights_of_the_hub_in_the_state_dict_of_from_pretrained(checkpoint, services):
    """One tensor an expert and matrix, which transformers merges."""
    path = checkpoint("mixtral")
    given = load_file(path / "model.safetensors")
    assert any(".experts.0.w1." in name for name in given)
    config, cls = AutoConfig.from_pretrained(path), type(AutoModelForCausalLM.from_pretrained(path))
    with refused(r"state_dict: .*experts\.0\.w1"):
        arguments = {"model_class": cls, "config": config, "state_dict": given}
        epserve.transformers.from_pretrained(None, services("mixtral"), **arguments)


def set_data(experts):
    experts.down_proj.data = torch.zeros(3)


def set_parameter(experts):
    experts.down_proj = nn.Parameter(torch.zeros(8, 32, 16))


def set_item(experts):
    experts.down_proj[0] = 1.0


def add(experts):
    experts.down_proj += 1.0


WRITES = {
    "mul_": lambda experts: experts.down_proj.mul_(2),
    "copy_": lambda experts: experts.gate_up_proj.copy_(torch.zeros(8, 32, 32)),
    "data": lambda experts: experts.down_proj.data.mul_(2),
    "set data": set_data,
    "set parameter": set_parameter,
    "register": lambda experts: experts.register_parameter("down_proj", nn.Parameter(torch.zeros(3))),
    "set item": set_item,
    "+=": add,
    "delete": lambda experts: delattr(experts, "down_proj"),
    "init": lambda experts: nn.init.normal_(experts.down_proj),
    "requires_grad_": lambda experts: experts.down_proj.requires_grad_(True),
    "read": lambda experts: experts.down_proj.sum(),
    "argument": lambda experts: torch.ones(3).add_(experts.down_proj),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_in_place(remote, write):
    with torch.no_grad(), refused(EXPERTS):
        write(remote.model.layers[0].mlp.experts)


def test_the_whole_block_of_a_remote_gate_is_guarded(checkpoint, services):
    path = checkpoint("deepseek_v3")
    local = AutoModelForCausalLM.from_pretrained(path)
    gated = epserve.transformers.from_pretrained(path, services("deepseek_v3", "remote"))
    with torch.no_grad(), refused(r"model\.layers\.1\.mlp\.gate\.weight: mul_"):
        gated.model.layers[1].mlp.gate.weight.mul_(2)
    with torch.no_grad(), refused(r"model\.layers\.1\.mlp\.shared_experts\.up_proj\.weight: mul_"):
        gated.model.layers[1].mlp.shared_experts.up_proj.weight.mul_(2)
    with refused(r"load_state_dict: model\.layers\.1\.mlp\.gate"):
        gated.load_state_dict({"model.layers.1.mlp.gate.weight": local.model.layers[1].mlp.gate.weight}, strict=False)


def test_another_experts_implementation_says_why_it_cannot(remote, local):
    before = logits(remote)
    with pytest.raises(
        ConfigError, match="experts_implementation 'eager': the experts of this model are in the service"
    ):
        remote.set_experts_implementation("eager")
    assert torch.equal(logits(remote), before), "as before"
    remote.set_experts_implementation("epserve")
    remote.config._experts_implementation = "eager"
    with pytest.raises(ConfigError, match="experts_implementation 'eager'"):
        logits(remote)
    local.set_experts_implementation("eager")
    assert logits(local).isfinite().all()


# Adapters of PEFT.


def adapter(folder, local, **targets):
    """A LoRA with weights that matter."""
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **targets)
    adapted = peft.get_peft_model(local, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.2)
    adapted.save_pretrained(folder)
    return folder


def one_linear_an_expert(folder, path, modules=("gate_proj", "up_proj", "down_proj")):
    """The layout of adapters that were trained when experts were Linear modules."""
    config = AutoConfig.from_pretrained(path)
    hidden, wide, generator = config.hidden_size, config.moe_intermediate_size, torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_experts):
            for name in modules:
                sizes = (wide, hidden) if name == "down_proj" else (hidden, wide)
                key = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(4, sizes[0], generator=generator) * 0.1
                tensors[f"{key}.lora_B.weight"] = torch.randn(sizes[1], 4, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(lora | {"base_model_name_or_path": str(path)}))
    return folder


def by_peft(model, path, folder):
    return peft.PeftModel.from_pretrained(model(path), folder)


def by_load_adapter(model, path, folder):
    loaded = model(path)
    loaded.load_adapter(str(folder))
    return loaded


def by_folder(model, path, folder):
    return model(folder)


WAYS = pytest.mark.parametrize("way", [by_peft, by_load_adapter, by_folder])


@WAYS
def test_adapters_beside_the_experts_work(checkpoint, services, local, tmp_path, way):
    path, service = checkpoint("qwen3_moe"), services("qwen3_moe")
    folder = adapter(tmp_path, local, target_modules=["q_proj", "v_proj"])
    ours = way(lambda each: epserve.transformers.from_pretrained(each, service), path, folder)
    theirs = way(AutoModelForCausalLM.from_pretrained, path, folder)
    plain = logits(AutoModelForCausalLM.from_pretrained(path))
    assert not torch.allclose(logits(theirs), plain, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
    if way is by_peft:
        torch.testing.assert_close(logits(ours.merge_and_unload()), logits(theirs), rtol=1e-4, atol=1e-4)


@WAYS
@pytest.mark.parametrize("modules", [["q_proj"], []], ids=["and attention", "alone"])
def test_adapters_of_stacked_experts(checkpoint, services, local, tmp_path, way, modules):
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    folder = adapter(tmp_path, local, target_modules=modules, target_parameters=parameters)
    service = services("qwen3_moe")
    with refused(f"adapter: its targets {EXPERTS}"):
        way(lambda each: epserve.transformers.from_pretrained(each, service), checkpoint("qwen3_moe"), folder)


@WAYS
def test_adapters_of_one_linear_an_expert(checkpoint, services, tmp_path, way):
    folder, service = one_linear_an_expert(tmp_path, checkpoint("qwen3_moe")), services("qwen3_moe")
    with refused(f"adapter: its targets {EXPERTS}"):
        way(lambda each: epserve.transformers.from_pretrained(each, service), checkpoint("qwen3_moe"), folder)


@pytest.mark.parametrize(
    "targets",
    [
        {"target_parameters": ["experts.down_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["experts"]},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    ],
    ids=str,
)
def test_new_adapters_of_experts(remote, targets):
    with refused(f"adapter: its targets {EXPERTS[:-2]}"):
        peft.get_peft_model(remote, peft.LoraConfig(r=4, **targets))
    assert logits(remote).isfinite().all()


def test_new_adapters_of_a_block_that_is_remote(checkpoint, services):
    gated = epserve.transformers.from_pretrained(checkpoint("deepseek_v3"), services("deepseek_v3", "remote"))
    for targets in (r".*shared_experts\.(gate|up|down)_proj", "all-linear"):
        with refused(r"adapter: its targets model\.layers\.1\.mlp\."):
            peft.get_peft_model(gated, peft.LoraConfig(r=4, target_modules=targets))
