"""Models whose experts run in a service of two ranks, over gRPC: one that runs on, and one that is killed and comes back."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

import epserve.transformers
from epserve.client import Client
from epserve.errors import EpserveError, InvalidRequest
from tests.models.coverage_table import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 300
PROMPTS = torch.tensor([[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 26, 27]])
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "remote_experts.py"


def free_port() -> int:
    """Below those that the system gives to connections, which could take it while the service is away."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(lowest // 2, lowest), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Served:
    """`epserve serve` in a process that can be killed and started again on the same port."""

    def __init__(self, checkpoint: Path, folder: Path):
        self.port = free_port()
        self.ready, self.log = folder / "ready.json", folder / "service.log"
        self.config = folder / "service.yaml"
        settings = {
            "model": {"path": str(checkpoint)},
            "engine": {"ranks": 2, "device": "cpu"},
            "server": {"port": self.port, "max_tokens_per_request": 8},
        }
        self.config.write_text(json.dumps(settings))
        self.process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "epserve", "serve", str(self.config), "--ready-file", str(self.ready)]
        with self.log.open("a") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.ready.exists():
            assert self.process is not None
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=150)


@contextmanager
def served(checkpoint: Path, folder: Path):
    service = Served(checkpoint, folder)
    service.start()
    try:
        service.wait()
        yield service
    finally:
        service.stop()


def greedy(model, **kwargs):
    settings = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(input_ids=PROMPTS, **settings, **kwargs)


def gradients(model) -> dict[str, torch.Tensor]:
    """Of all parameters outside the experts."""
    model.zero_grad()
    model(input_ids=PROMPTS, labels=PROMPTS, use_cache=False).loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


class At(LogitsProcessor):
    """Calls `action` once, after `count` tokens."""

    def __init__(self, count: int, action):
        self.count, self.action = count, action

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == PROMPTS.shape[1] + self.count:
            self.action()
        return scores


def test_a_family_without_a_table_and_a_service_that_dies_in_the_middle_of_generate(tmp_path):
    path = write_checkpoint("qwen3_next", tmp_path / "checkpoint")
    local = AutoModelForCausalLM.from_pretrained(path)
    wanted, wanted_gradients = greedy(local), gradients(local)
    with (
        served(path, tmp_path) as service,
        epserve.transformers.connect(service.address) as wire,
        epserve.transformers.connect(service.address, shared_memory_bytes=1 << 20) as memory,
    ):
        over_wire = epserve.transformers.from_pretrained(path, wire)
        over_memory = epserve.transformers.from_pretrained(path, memory)
        assert wire.max_tokens == 8  # the prompts have 14
        assert torch.equal(greedy(over_wire), wanted)
        assert torch.equal(greedy(over_memory), wanted)
        for got in (gradients(over_memory), gradients(over_wire)):
            assert len(got) > 10
            for name, gradient in got.items():
                torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-3, atol=1e-5)

        def die():
            service.kill()
            threading.Timer(1.0, service.start).start()  # some calls find nobody at the port

        assert torch.equal(greedy(over_wire, logits_processor=[At(10, die)]), wanted)
        service.wait()
        assert torch.equal(greedy(over_memory), wanted)  # the new server does not know the old memory

    with pytest.raises(EpserveError):
        epserve.transformers.connect(service.address, retry_for_s=0.5)


def test_a_service_that_stays_away_is_an_error_after_the_deadline(tmp_path):
    path = write_checkpoint("granitemoe", tmp_path / "checkpoint")
    with served(path, tmp_path) as service, epserve.transformers.connect(service.address, retry_for_s=3.0):
        with Client(service.address) as client, pytest.raises(InvalidRequest, match="the client chooses experts"):
            client.forward(0, torch.randn(2, 32))  # without routing: the service has no gate of this family
        remote = AutoModelForCausalLM.from_pretrained(path, experts_implementation="epserve")
        greedy(remote)
        service.kill()
        start = time.monotonic()
        with pytest.raises(EpserveError) as caught:
            greedy(remote)
        assert 1.0 < time.monotonic() - start < 60.0, "RETRY_FOR_S, which is longer, was not waited for"
        assert caught.value.retryable or type(caught.value).__name__ == "DeadlineExceeded"


def test_the_example():
    run = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("the same as with local experts") == 2
