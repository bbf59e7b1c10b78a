"""Fine-tuning with PEFT and transformers' Trainer: a remote model learns what a local one learns."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import epserve.transformers
from tests.models.coverage_table import InProcess, write_checkpoint

IDS = torch.randint(1, 90, (16, 10), generator=torch.Generator().manual_seed(1))
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def service(path):
    with epserve.transformers.connect(InProcess(path, max_tokens=64)) as service:
        yield service


def models(path, service):
    yield epserve.transformers.from_pretrained(path, service)
    yield AutoModelForCausalLM.from_pretrained(path)


def adapted(model, config=LORA):
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


def losses(model, steps, rate=3e-3):
    optimiser = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    found = []
    for step in range(steps):
        ids = IDS[4 * (step % 4) : 4 * (step % 4) + 4]
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def test_a_hundred_steps_of_lora_have_the_losses_of_a_local_run(path, service):
    remote, local = (losses(adapted(model), 100) for model in models(path, service))
    assert local[-4:].mean() < local[:4].mean() - 0.05, "it learns"
    torch.testing.assert_close(remote, local, rtol=0, atol=1e-4)


def test_prompts_are_tuned(path, service):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    remote, local = (losses(adapted(model, config), 6, rate=0.1) for model in models(path, service))
    assert local[5] != local[1]
    torch.testing.assert_close(remote, local, rtol=0, atol=1e-4)


def test_a_router_is_trained(path, service):
    """Without PEFT: the auxiliary loss and the routing weights' own gradient."""
    found = []
    for model in models(path, service):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp.gate." in name)
        model.config.output_router_logits = True
        found.append(losses(model, 8))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_of_transformers(path, service, tmp_path, checkpointing):
    """With accumulation, clipping, a schedule, and an adapter that is saved and loaded again."""
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    logged, saved = [], None
    for number, model in enumerate(models(path, service)):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(number)), max_steps=4, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, seed=5, gradient_checkpointing=checkpointing, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=adapted(model), args=arguments, train_dataset=rows)
        trainer.train()
        logged.append([(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each])
        if number == 0:
            saved = tmp_path / "adapter"
            trainer.save_model(str(saved))
            wanted = model(input_ids=IDS[:2]).logits
    assert len(logged[0]) == 4 and logged[0][0][1] > 0
    torch.testing.assert_close(*map(torch.tensor, logged), rtol=1e-3, atol=1e-4)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), saved)
    torch.testing.assert_close(again(input_ids=IDS[:2]).logits, wanted, rtol=1e-4, atol=1e-4)
