"""`epserve generate`: the text is that of the model with local experts, and a service that was started ends with it."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from epserve.cli.commands import app
from epserve.cluster import node
from epserve.errors import ConfigError, Incompatible, NotReady
from tests.cli.test_service import alive
from tests.models.coverage_table import InProcess, write_checkpoint
from tests.support.clients import serving_in_thread, wait_until
from tests.support.fake_engine import FakeEngine
from tests.support.words import write_tokenizer

PROMPT, NEW_TOKENS = "w11 w12 w13 w14", 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = write_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint"))
    write_tokenizer(path, AutoModelForCausalLM.from_pretrained(path).config.vocab_size, chat=True)
    return path


@pytest.fixture(scope="module")
def address(checkpoint):
    with served(checkpoint) as found:
        yield found


@contextmanager
def served(checkpoint):
    """The experts of a checkpoint behind the real door."""
    rank = InProcess(checkpoint, max_tokens=64)

    async def compute(batch):
        return rank.forward(batch.layer, batch.hidden, batch.ids, batch.weights)

    engine = FakeEngine(compute)
    engine.info = rank.info
    with serving_in_thread(engine) as server:
        yield server.address


def local(checkpoint, text, **settings):
    """The words after `text`, of the model with its own experts."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.tensor([[int(word[1:]) for word in text.split()]])
    with torch.no_grad():
        tokens = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, **{"do_sample": False} | settings)
    return [f"w{token}" for token in tokens[0, ids.shape[1] :].tolist() if token > 3]


def run(checkpoint, *arguments, **kwargs):
    command = ["generate", str(checkpoint), *arguments, "--max-new-tokens", str(NEW_TOKENS)]
    return CliRunner().invoke(app, command, **kwargs)


def test_the_text_is_that_of_local_experts(checkpoint, address):
    plain = run(checkpoint, PROMPT, "--target", address, "--no-chat")
    assert plain.exit_code == 0, plain.exception
    assert plain.stdout.split() == local(checkpoint, PROMPT)
    assert f"4 tokens in, {NEW_TOKENS} out" in plain.stderr and "tokens/s" in plain.stderr and address in plain.stderr


def test_a_question_goes_through_the_chat_template_and_may_come_from_standard_input(checkpoint, address):
    asked = run(checkpoint, "-", "--target", address, input=PROMPT)
    assert asked.stdout.split() == local(checkpoint, f"w7 {PROMPT} w8") != local(checkpoint, PROMPT)


def test_sampling_has_a_seed(checkpoint, address):
    sampled = [
        run(checkpoint, PROMPT, "--target", address, "--temperature", "2", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param((PROMPT, "--set", "engine.ranks=2"), ConfigError, "--set is for the service that is started here",
                     id="settings of a service that runs"),
        pytest.param((" ",), ConfigError, "prompt: is empty", id="no prompt"),
        pytest.param((PROMPT, "--gate", "here"), ConfigError, "gate must be 'local' or 'remote'", id="no such gate"),
    ],
)  # fmt: skip
def test_bad_arguments(checkpoint, address, arguments, error, message):
    result = run(checkpoint, *arguments, "--target", address)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)


def test_a_folder_without_a_tokenizer_and_a_service_of_another_model(tmp_path, address):
    other = write_checkpoint("mixtral", tmp_path)
    result = run(other, PROMPT, "--target", address)
    assert isinstance(result.exception, ConfigError) and "has no tokenizer" in str(result.exception)
    write_tokenizer(other, 64)
    result = run(other, PROMPT, "--target", address)
    assert isinstance(result.exception, Incompatible) and "fingerprint" in str(result.exception)


def test_a_service_that_does_not_start_is_told_with_its_log(checkpoint):
    result = run(checkpoint, PROMPT, "--set", "engine.ranks=0")
    assert isinstance(result.exception, ConfigError), "it is found before anything starts"
    result = run(checkpoint, PROMPT, "--set", "engine.all2all=nvlink", "--set", "engine.device=cpu")
    assert isinstance(result.exception, NotReady) and "nvlink" in str(result.exception)


@pytest.mark.slow
class TestOwnService:
    def command(self, checkpoint, *arguments):
        command = [sys.executable, "-m", "epserve", "generate", str(checkpoint), PROMPT, "--no-chat", "--set",
                   "engine.device=cpu", *arguments]  # fmt: skip
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    def test_it_is_started_used_and_ended(self, checkpoint):
        process = self.command(checkpoint, "--max-new-tokens", str(NEW_TOKENS), "--set", "engine.ranks=2")
        out, told = process.communicate(timeout=300)
        assert process.returncode == 0, told
        assert out.split() == local(checkpoint, PROMPT)
        assert "it serves after" in told

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    async def test_it_ends_with_a_command_that_is_ended(self, checkpoint, number):
        process = self.command(checkpoint, "--max-new-tokens", "100000")
        try:
            line = ""
            while "it serves after" not in line:
                line = await asyncio.to_thread(process.stderr.readline)
                assert line, "it has ended"
            started = node.descendants({process.pid})
            assert started
            process.send_signal(number)
            await asyncio.to_thread(process.communicate, timeout=200)
            wait_until(lambda: not any(map(alive, started)), 60)
        finally:
            node.end(node.descendants({process.pid}) | {process.pid}, 0.0)
