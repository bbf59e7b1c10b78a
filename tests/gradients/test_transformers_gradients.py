"""Training with remote experts gives the gradients and the losses of local ones."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

import epserve.transformers
from epserve.errors import ConfigError, InvalidRequest
from tests.models.coverage_table import InProcess, write_checkpoint
from tests.support.checkpoints import edit_config

IDS = torch.tensor([[3, 8, 1, 77, 20, 9], [5, 4, 30, 31, 32, 33]])
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = write_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="module")
def services(paths):
    """One open service for each checkpoint and gate. A batch of 12 tokens is two requests."""
    opened = {}

    def get(family, gate="local", dtype="auto"):
        key = family, gate, dtype
        if key not in opened:
            served = InProcess(paths(family), max_tokens=8, dtype=dtype)
            opened[key] = epserve.transformers.connect(served, gate=gate)
        return opened[key]

    yield get
    for service in opened.values():
        service.close()


def pair(paths, services, family, gate="local", **kwargs):
    """The same model with remote and with local experts, whose weights are frozen."""
    remote = epserve.transformers.from_pretrained(paths(family), services(family, gate), **kwargs)
    local = AutoModelForCausalLM.from_pretrained(paths(family), **kwargs)
    for name, parameter in local.named_parameters():
        parameter.requires_grad_(name in dict(remote.named_parameters()))
    return remote.train(), local.train()


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, **inputs).loss
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def check(got, want, bound):
    assert got.keys() == want.keys() and len(got) > 10
    for name, gradient in got.items():
        error = (gradient.double() - want[name].double()).norm() / want[name].double().norm().clamp(min=1e-12)
        assert error < bound, f"{name}: {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_gets_the_gradient_of_a_local_model(paths, services, family):
    """Attention, embeddings, norms, routers with their biases, shared experts: all but the routed experts."""
    remote, local = pair(paths, services, family)
    got, want = gradients(remote), gradients(local)
    assert any("gate" in name or "router" in name for name in got)
    check(got, want, 1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_remote_block_passes_gradients_on(paths, services, family):
    remote, local = pair(paths, services, family, gate="remote")
    check(gradients(remote), gradients(local), 1e-5)


def test_bfloat16(paths, services):
    remote = epserve.transformers.from_pretrained(
        paths("mixtral"), services("mixtral", dtype="bfloat16"), dtype=torch.bfloat16
    )
    local = AutoModelForCausalLM.from_pretrained(paths("mixtral"), dtype=torch.bfloat16)
    for name, parameter in local.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    wide = AutoModelForCausalLM.from_pretrained(paths("mixtral"), dtype=torch.float32)
    want = gradients(wide)
    errors = []
    for model in (remote, local):
        got = gradients(model)
        together, true = (torch.cat([each[name].double().flatten() for name in got]) for each in (got, want))
        errors.append(((together - true).norm() / true.norm()).item())
    assert errors[0] < max(2e-2, 1.5 * errors[1]), errors


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_layers_again(paths, services, reentrant):
    remote, local = pair(paths, services, "qwen3_moe")
    remote.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    called = services("qwen3_moe").session.transport.calls
    got = gradients(remote, use_cache=False)
    assert services("qwen3_moe").session.transport.calls - called >= 2 * 2 * 3, "forward, forward again, backward"
    check(got, gradients(local, use_cache=False), 1e-5)


def test_gradients_accumulate(paths, services):
    remote, local = pair(paths, services, "mixtral")
    for model in (remote, local):
        model.zero_grad()
        for ids in (IDS, IDS.flip(1)):
            model(input_ids=ids, labels=ids).loss.backward()
    got, want = ({name: each.grad for name, each in model.named_parameters() if each.grad is not None}
                 for model in (remote, local))  # fmt: skip
    check(got, want, 1e-5)


def test_autocast(paths, services):
    """Around the experts torch chooses bfloat16 in both models. The service computes in its own dtype."""
    remote, local = pair(paths, services, "qwen3_moe")
    with torch.autocast("cpu", torch.bfloat16):
        got, want = gradients(remote), gradients(local)
    check(got, want, 0.2)
    together, true = (torch.cat([each[name].flatten() for name in got]) for each in (got, want))
    assert (together - true).norm() / true.norm() < 3e-2


def test_a_model_that_is_only_called_needs_no_gradient(paths, services):
    """Nothing is lost by a forgotten no_grad: a graph is recorded, and no gradient is computed."""
    remote, local = pair(paths, services, "qwen3_moe")
    torch.testing.assert_close(remote(input_ids=IDS).logits, local(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_refused(paths, services):
    remote, _ = pair(paths, services, "qwen3_moe", attn_implementation="eager")
    embeddings = remote.get_input_embeddings()(IDS).detach().requires_grad_()
    loss = remote(inputs_embeds=embeddings).logits.square().mean()
    (first,) = torch.autograd.grad(loss, embeddings, create_graph=True)
    with pytest.raises(InvalidRequest, match="second derivative"):
        first.square().sum().backward()


def test_a_scaler_of_the_loss_sees_what_overflows(paths, services):
    remote, local = pair(paths, services, "qwen3_moe")
    for model in (remote, local):
        model.zero_grad()
        (model(input_ids=IDS, labels=IDS).loss * float("inf")).backward()
    assert all(not each.grad.isfinite().all() for each in remote.parameters() if each.grad is not None)


def test_noise_for_a_router_in_the_service(paths, tmp_path):
    """The noise belongs to training alone, and a router that is here adds its own."""
    path = edit_config(write_checkpoint("mixtral", tmp_path), router_jitter_noise=0.1)
    with epserve.transformers.connect(InProcess(path), gate="remote") as service:
        model = epserve.transformers.from_pretrained(path, service)
        assert model.eval()(input_ids=IDS).logits.isfinite().all()
        with pytest.raises(ConfigError, match=r"jitter_noise: 0\.1 .*router_jitter_noise to 0, call eval"):
            model.train()(input_ids=IDS)
    with epserve.transformers.connect(InProcess(path)) as service:
        local = AutoModelForCausalLM.from_pretrained(path).train()
        model = epserve.transformers.from_pretrained(path, service).train()
        found = []
        for each in (model, local):
            torch.manual_seed(5)
            with torch.no_grad():
                found.append(each(input_ids=IDS).logits)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_warning_free_backward(paths, services):
    remote, _ = pair(paths, services, "mixtral")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(remote)
