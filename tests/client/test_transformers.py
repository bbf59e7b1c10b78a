"""Models with remote experts, against one rank of the service in the same process."""

import copy
import json
import logging
import pickle
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import epserve.transformers
from epserve.client.engines.transformers.remote_modules import RemoteModule
from epserve.errors import CheckpointError, ConfigError, Incompatible, InvalidRequest, NotReady
from tests.models.coverage_table import InProcess, quantise_experts, write_checkpoint

PROMPTS = torch.tensor([[0, 0, 0, 11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]])
MASK = (PROMPTS > 0).long()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def qwen(folder):
    return write_checkpoint("qwen3_moe", folder / "qwen3_moe")


@pytest.fixture(scope="module")
def deepseek(folder):
    return write_checkpoint("deepseek_v3", folder / "deepseek_v3")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def greedy(model, **kwargs):
    settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    return model.generate(input_ids=PROMPTS, attention_mask=MASK, **settings, **kwargs)


def experts_of(model):
    return [name for name, _ in model.named_parameters() if ".experts." in name]


def told(served, **changes):
    """A service that says something else about its model."""
    reply = served.model()
    for name, value in changes.items():
        if isinstance(value, list):
            del getattr(reply, name)[:]
            getattr(reply, name).extend(value)
        else:
            setattr(reply, name, value)
    served.model = lambda: reply
    return served


def load(path, service, **kwargs):
    return epserve.transformers.from_pretrained(path, service, **kwargs)


def test_plain_from_pretrained_generates_the_same_tokens_in_a_padded_batch_with_prefill_above_the_cap(qwen):
    local = AutoModelForCausalLM.from_pretrained(qwen)
    served = InProcess(qwen, max_tokens=6)  # prefill is 20 tokens: four requests, the last of two
    with epserve.transformers.connect(served):
        remote = AutoModelForCausalLM.from_pretrained(qwen, experts_implementation="epserve")
        assert torch.equal(greedy(remote), greedy(local))
    assert served.calls > 2 * 12


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_kind_of_cache(qwen, cache):
    local = AutoModelForCausalLM.from_pretrained(qwen)
    with epserve.transformers.connect(InProcess(qwen)) as service:
        assert torch.equal(greedy(load(qwen, service), cache_implementation=cache), greedy(local))


def test_expert_weights_are_neither_allocated_nor_read(qwen, monkeypatch):
    """Every tensor that transformers reads goes through one function: its bytes are those of the other weights."""
    from transformers import core_model_loading

    read = []
    original = core_model_loading._materialize_copy
    monkeypatch.setattr(
        core_model_loading,
        "_materialize_copy",
        lambda tensor, *args, **kwargs: read.append(original(tensor, *args, **kwargs)) or read[-1],
    )
    local = AutoModelForCausalLM.from_pretrained(qwen)
    everything = sum(tensor.nbytes for tensor in read)
    read.clear()
    with epserve.transformers.connect(InProcess(qwen)) as service:
        remote, report = load(qwen, service, output_loading_info=True)
    experts = sum(parameter.nbytes for name, parameter in local.named_parameters() if ".experts." in name)
    assert experts > 0.3 * everything
    assert sum(tensor.nbytes for tensor in read) == everything - experts
    held = sum(parameter.nbytes for parameter in remote.parameters())
    assert held <= 1.02 * (everything - experts)
    assert not experts_of(remote)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(parameter.device.type == "cpu" for parameter in remote.parameters())


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_map_and_dtype(qwen, device_map):
    with epserve.transformers.connect(InProcess(qwen, dtype="bfloat16")) as service:
        remote = load(qwen, service, device_map=device_map, dtype=torch.bfloat16)
        assert remote.dtype == torch.bfloat16
        assert greedy(remote).shape == (2, PROMPTS.shape[1] + 12)


def test_gate_and_shared_experts_in_the_service(deepseek):
    local = AutoModelForCausalLM.from_pretrained(deepseek)
    with epserve.transformers.connect(InProcess(deepseek, max_tokens=32), gate="remote") as service:
        remote = load(deepseek, service)
        assert torch.equal(greedy(remote), greedy(local))
    names = [name for name, _ in remote.named_parameters()]
    assert not any(part in name for name in names for part in ("experts", "mlp.gate.weight"))


def test_remote_gate_is_refused_where_a_block_returns_more_than_hidden_states(folder):
    path = write_checkpoint("gpt_oss", folder / "gpt_oss")
    with (
        epserve.transformers.connect(InProcess(path), gate="remote") as service,
        pytest.raises(Incompatible, match="gate 'remote' is for deepseek_v3, mixtral"),
    ):
        load(path, service)


def test_experts_that_the_service_does_not_hold_stay_local_with_their_weights(folder):
    """Ernie 4.5 VL has text experts and smaller vision experts in each layer."""
    from transformers import AutoModelForImageTextToText

    path = write_checkpoint("ernie4_5_vl_moe", folder / "ernie")
    with epserve.transformers.connect(InProcess(path)) as service:
        remote = load(path, service, model_class=AutoModelForImageTextToText)
    assert {name.split(".")[-3] for name in experts_of(remote)} == {"vision_moe"}


def test_logits_agree_and_the_hidden_states_of_the_wire_are_2d(qwen):
    local = AutoModelForCausalLM.from_pretrained(qwen)
    served = InProcess(qwen, max_tokens=64)
    with epserve.transformers.connect(served) as service:
        got = load(qwen, service)(input_ids=PROMPTS).logits
    torch.testing.assert_close(got, local(input_ids=PROMPTS).logits, rtol=1e-5, atol=1e-5)


def test_without_a_connection_and_after_it(qwen):
    with pytest.raises(ConfigError, match=r"call epserve\.transformers\.connect"):
        AutoModelForCausalLM.from_pretrained(qwen, experts_implementation="epserve")
    with epserve.transformers.connect(InProcess(qwen)):
        remote = AutoModelForCausalLM.from_pretrained(qwen, experts_implementation="epserve")
    with pytest.raises(ConfigError, match="the connection of this model is closed"):
        remote(input_ids=PROMPTS)
    built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(qwen), experts_implementation="epserve")
    with pytest.raises(ConfigError, match="was not loaded with remote experts"):
        built(input_ids=PROMPTS)


def test_two_services_at_once(qwen, deepseek):
    with (
        epserve.transformers.connect(InProcess(qwen)) as one,
        epserve.transformers.connect(InProcess(deepseek)),
    ):
        first = load(qwen, one)
        second = AutoModelForCausalLM.from_pretrained(deepseek, experts_implementation="epserve")
        assert greedy(first).shape == greedy(second).shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [0]}, r"layers \[1\] are not served \(served: \[0\]\)"),
        ({"hidden": 64}, "hidden size: served 64, the model has 32"),
        ({"intermediate": 24}, "intermediate size: served 24, the model has 16"),
        ({"num_experts": 4}, "experts: served 4, the model has 8"),
        ({"dtype": 1}, "dtype: served bfloat16, the model is loaded as float32; pass dtype='bfloat16'"),
        ({"fingerprint": "0123456789abcdef"}, "fingerprint: served 0123456789ab, .* another revision"),
    ],
)
def test_a_service_of_another_model_is_refused_before_anything_is_read(qwen, changes, message):
    served = told(InProcess(qwen), **changes)
    with epserve.transformers.connect(served) as service, pytest.raises(Incompatible, match=message):
        load(qwen, service)


def test_every_difference_is_in_one_message(qwen):
    served = told(InProcess(qwen), hidden=64, num_experts=4)
    with epserve.transformers.connect(served) as service, pytest.raises(Incompatible) as caught:
        load(qwen, service)
    assert len(caught.value.reasons) == 2


def test_another_revision_has_another_fingerprint(qwen, tmp_path):
    """The same shapes with another configuration."""
    model = AutoModelForCausalLM.from_pretrained(qwen)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 123.0}
    model.save_pretrained(tmp_path)
    with epserve.transformers.connect(InProcess(qwen)) as service, pytest.raises(Incompatible, match="fingerprint"):
        load(tmp_path, service)


def test_weights_that_lie_in_no_folder_are_compared_by_shapes_only(qwen, caplog):
    model = Qwen3MoeForCausalLM.from_pretrained(qwen)
    others = {name: value for name, value in model.state_dict().items() if ".experts." not in name}
    given = {"config": model.config, "state_dict": others, "model_class": Qwen3MoeForCausalLM}
    with epserve.transformers.connect(InProcess(qwen)) as service, caplog.at_level(logging.WARNING, "epserve"):
        remote = load(None, service, **given)
        assert torch.equal(greedy(remote), greedy(model))
    assert "only shapes are" in caplog.text


def test_a_model_without_experts_is_refused(folder, qwen):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **small)).save_pretrained(folder / "dense")
    with (
        epserve.transformers.connect(InProcess(qwen)) as service,
        pytest.raises(CheckpointError, match="LlamaForCausalLM has no experts module"),
    ):
        load(folder / "dense", service)


def test_experts_that_no_kernel_computes_are_refused(qwen):
    config = AutoConfig.from_pretrained(qwen, hidden_act="relu6")
    with (
        epserve.transformers.connect(InProcess(qwen)) as service,
        pytest.raises(CheckpointError, match="the non-linearity of Qwen3MoeExperts is none of silu, gelu"),
    ):
        load(qwen, service, config=config)


def test_missing_experts_are_named(qwen, tmp_path):
    tensors = load_file(qwen / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    with pytest.raises(CheckpointError, match=name):
        InProcess(tmp_path)


def test_ids_that_mean_no_expert(qwen):
    """transformers pads routing with the number of experts; the wire says -1."""
    seen = []
    served = InProcess(qwen)
    original = served.forward
    served.forward = lambda layer, hidden, ids, weights: seen.append(ids) or original(layer, hidden, ids, weights)
    with epserve.transformers.connect(served) as service:
        experts = load(qwen, service).model.layers[0].mlp.experts
        x, ids = torch.randn(3, 32), torch.tensor([[1, 8], [8, 8], [0, 7]])
        y = experts(x, ids, torch.ones(3, 2))
    assert seen[-1].tolist() == [[1, -1], [-1, -1], [0, 7]]
    assert y[1].abs().max() == 0


def test_a_copy_of_a_model_uses_the_same_service(qwen):
    with epserve.transformers.connect(InProcess(qwen)) as service:
        remote = load(qwen, service)
        twin = copy.deepcopy(remote)
        assert torch.equal(greedy(twin), greedy(remote))


def test_saving_is_refused_rather_than_done_without_the_experts(qwen, tmp_path):
    with epserve.transformers.connect(InProcess(qwen)) as service:
        remote = load(qwen, service)
        with pytest.raises(ConfigError, match="a model with remote experts cannot be saved"):
            remote.save_pretrained(tmp_path)


@pytest.mark.parametrize("gate", ["local", "remote"])
def test_pickling_is_refused_in_words_and_copies_and_state_go_on(qwen, tmp_path, gate):
    with epserve.transformers.connect(InProcess(qwen), gate=gate) as service:
        remote = load(qwen, service)
        for save in (lambda: torch.save(remote, tmp_path / "model.pt"), lambda: pickle.dumps(remote.model.layers[0])):
            with pytest.raises(ConfigError, match="a model with remote experts cannot be pickled"):
                save()
        torch.save(remote.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert state.keys() == remote.state_dict().keys() and not [
            name for name in state if "experts.down_proj" in name
        ]
        twin = copy.deepcopy(remote)
        assert torch.equal(greedy(twin), greedy(remote))
        block = next(module for module in remote.modules() if isinstance(module, RemoteModule))
        assert vars(copy.copy(block)) == vars(block)


def test_wrong_gate_word():
    with pytest.raises(ConfigError, match="gate must be 'local' or 'remote', got 'here'"):
        epserve.transformers.connect("127.0.0.1:1", gate="here")


def test_other_models_are_loaded_as_before(qwen):
    with epserve.transformers.connect(InProcess(qwen)):
        local = AutoModelForCausalLM.from_pretrained(qwen)
    assert isinstance(local.config, Qwen3MoeConfig)
    assert experts_of(local)
    assert greedy(local).shape == (2, PROMPTS.shape[1] + 12)


def test_gpt_oss_in_mxfp4_generates_as_with_local_experts(folder, tmp_path):
    """The published form. transformers multiplies it out where it has no kernel for it; so does the service."""
    tensors = load_file(write_checkpoint("gpt_oss", folder / "gpt_oss_packed") / "model.safetensors")
    generator, intermediate = torch.Generator().manual_seed(0), 64
    for layer in (0, 1):
        key = f"model.layers.{layer}.mlp.experts."
        for name, rows, groups in (("gate_up_proj", 2 * intermediate, 1), ("down_proj", 32, 2)):
            del tensors[key + name]
            shape = (8, rows, groups)
            tensors[f"{key}{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            tensors[f"{key}{name}_scales"] = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
        tensors[key + "gate_up_proj_bias"] = torch.randn(8, 2 * intermediate, generator=generator)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "gpt_oss_packed" / "config.json").read_text())
    config |= {"intermediate_size": intermediate, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    local = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with epserve.transformers.connect(InProcess(tmp_path, dtype="float32")) as service:
        remote = load(tmp_path, service, dtype=torch.float32)
        assert not experts_of(remote)
        assert torch.equal(greedy(remote), greedy(local))


def test_fp8_checkpoint(folder, tmp_path):
    """Experts in fp8 blocks: transformers replaces their modules by its own, which are remote all the same."""
    path, _ = quantise_experts(write_checkpoint("qwen3_next", folder / "qwen3_next"), tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "attn", "gate", "shared_expert"]
    (path / "config.json").write_text(json.dumps(config))
    local = AutoModelForCausalLM.from_pretrained(path)
    with epserve.transformers.connect(InProcess(path)) as service:
        remote = load(path, service)
        assert not experts_of(remote)
        assert torch.equal(greedy(remote), greedy(local))


class WithRegions(InProcess):
    """A service that knows regions until it restarts, and finds the second request of each region too large for it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.known, self.registered, self.over_region, self.away = set(), 0, 0, False
        self.timeouts = []

    @contextmanager
    def register_region(self, size, *, timeout):
        self.timeouts.append(timeout)
        if self.away:
            raise NotReady("away")
        self.registered += 1
        self.known.add(self.registered)
        yield self.registered

    def forward(self, *args, region=None, timeout=None):
        if region is not None:
            self.over_region += 1
            if region not in self.known:
                raise InvalidRequest("hidden_states: no region of this client is registered", field="hidden_states")
            if self.over_region == 2:
                raise InvalidRequest("region: 4096 bytes are wanted, 0 are free", field="region")
        return super().forward(*args)


def test_shared_memory_that_is_full_or_forgotten_is_passed_over(qwen):
    local = AutoModelForCausalLM.from_pretrained(qwen)
    served = WithRegions(qwen)
    with epserve.transformers.connect(served, shared_memory_bytes=1 << 20) as service:
        remote = load(qwen, service)
        wanted = greedy(local)
        assert torch.equal(greedy(remote), wanted)
        assert (served.registered, served.over_region > 20) == (1, True)  # full once, kept nevertheless
        served.known.clear()  # as after a restart
        assert torch.equal(greedy(remote), wanted)
        assert served.registered == 2
        served.known.clear()
        served.away = True
        assert torch.equal(greedy(remote), wanted)
        assert served.registered == 2
        first, *again = served.timeouts
        assert first == epserve.transformers.RETRY_FOR_S and max(again) <= 1.0, (
            "a request waits for a service that is away, its region does not"
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_client_on_a_gpu(qwen):
    """The rank is on the CPU: tensors go there and come back."""
    local = AutoModelForCausalLM.from_pretrained(qwen, device_map="cuda")
    with epserve.transformers.connect(InProcess(qwen)) as service:
        remote = load(qwen, service, device_map="cuda")
        got = remote(input_ids=PROMPTS.cuda()).logits
    assert got.is_cuda
    torch.testing.assert_close(got, local(input_ids=PROMPTS.cuda()).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_peak_memory_of_a_client(tmp_path):
    """In a process of its own, whose peak may grow by the weights that are not experts', and 2 % of them."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    added, others, experts = (float(value) for value in run.stdout.split()[-3:])
    assert experts > others
    assert added <= 1.02 * others


PEAK = """
import sys
from pathlib import Path
from contextlib import contextmanager
from types import SimpleNamespace
import transformers
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
import epserve.transformers
from epserve.models import open_checkpoint
from epserve.protocol.served_model import model_reply

def write(folder, vocab_size, hidden_size):
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": 2, "num_attention_heads": 8}
    moe = {"moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    with transformers.initialization.no_init_weights():
        whole = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **moe, head_dim=32))
    whole.save_pretrained(folder)
    experts = sum(value.nbytes for name, value in whole.named_parameters() if ".experts." in name)
    return sum(value.nbytes for value in whole.parameters()) - experts, experts

def load(folder):
    info = open_checkpoint(folder).info
    limits = SimpleNamespace(max_tokens_per_request=64, max_message_bytes=1 << 20)
    reply = model_reply(info, info.layers, limits)
    with epserve.transformers.connect(SimpleNamespace(model=lambda: reply, close=lambda: None)):
        remote = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="epserve")
    return sum(float(value.sum()) for value in remote.parameters()), remote  # touches every page that is mapped only

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

folder = Path(sys.argv[1])
write(folder / "small", 64, 32)
load(folder / "small")  # what is imported on the way is not the model's
others, experts = write(folder / "large", 16384, 512)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
before = peak()
kept = load(folder / "large")
print(peak() - before, others, experts)
"""
