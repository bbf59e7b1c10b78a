"""Ways of using a model with remote experts that give what local experts give: the table in docs/bigger-than-your-gpu.md."""

import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import epserve.transformers
from epserve.errors import ConfigError
from tests.models.coverage_table import InProcess, write_checkpoint

PROMPTS = torch.tensor([[0, 0, 0, 11, 12, 13, 14], [21, 22, 23, 24, 25, 26, 27]])
MASK = (PROMPTS > 0).long()
TOKENS = {"max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """The same model with local and with remote experts."""
    path = write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    local = AutoModelForCausalLM.from_pretrained(path).eval()
    with epserve.transformers.connect(InProcess(path, max_tokens=64)) as service:
        yield local, epserve.transformers.from_pretrained(path, service).eval()


@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": True, "top_k": 20, "temperature": 1.3},
        {"do_sample": False, "num_beams": 4},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "cache_implementation": "static"},
    ],
    ids=["sampling", "beams", "beam sampling", "no cache", "static cache"],
)
def test_generation(models, way):
    made = []
    for model in models:
        torch.manual_seed(3)
        made.append(model.generate(input_ids=PROMPTS, attention_mask=MASK, **TOKENS, **way))
    assert torch.equal(*made)


@pytest.mark.parametrize("draft", ["prompt lookup", "local", "remote"])
def test_assisted_generation(models, draft):
    local, remote = models
    if draft == "prompt lookup":
        way = {"prompt_lookup_num_tokens": 3}
    else:
        way = {"assistant_model": local if draft == "local" else remote}
    wanted = local.generate(input_ids=PROMPTS[1:], do_sample=False, **TOKENS)
    assert torch.equal(remote.generate(input_ids=PROMPTS[1:], do_sample=False, **TOKENS, **way), wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_forward_returns(models, mode):
    with mode():
        ours, theirs = (
            model(PROMPTS, attention_mask=MASK, output_hidden_states=True, output_router_logits=True, labels=PROMPTS)
            for model in reversed(models)
        )
    assert len(ours.hidden_states) == len(theirs.hidden_states) > 2
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.router_logits, theirs.router_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)


def test_a_model_cannot_be_pickled(tmp_path):
    path = write_checkpoint("mixtral", tmp_path / "checkpoint")
    with epserve.transformers.connect(InProcess(path)) as service:
        remote = epserve.transformers.from_pretrained(path, service)
        with pytest.raises(ConfigError, match=r"cannot be pickled .* save its state_dict\(\)"):
            pickle.dumps(remote)
