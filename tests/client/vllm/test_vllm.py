"""vLLM for real: its own wheel for CPUs, in an environment of its own, generates with its experts in a service."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from epserve.client import Client
from tests.cli.test_generate import served
from tests.client.test_transformers_service import Served, free_port
from tests.client.vllm.checkpoints import FAMILIES, write
from tests.client.vllm.driver import PROMPTS

ENVIRONMENT = Path(sys.prefix) / "vllm-engine"
PYTHON = ENVIRONMENT / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (ENVIRONMENT / "installed").exists(),
        reason=f"vLLM is not installed in {ENVIRONMENT}: make .venv/vllm-engine/.done, where its wheel fits this machine",
    ),
]
NEW_TOKENS, LONG = 8, 48
LOGPROBS = 1e-4
"""Largest difference of log-probabilities in float32: the experts of vLLM and of epserve add up in other orders."""


def environment() -> dict[str, str]:
    """Quiet, offline, and small: two cores may be all there is."""
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CACHE_ROOT": str(ENVIRONMENT / "cache"),
        "PYTHONPATH": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: write(family, folder / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """(family, whether the experts are remote) -> what the driver found; and some that are refused."""
    jobs, keys = [], []
    folder = tmp_path_factory.mktemp("driver")
    with ExitStack() as stack:
        for family, path in checkpoints.items():
            address = stack.enter_context(served(path))
            for epserve in (None, {"target": address, "shared_memory_bytes": 1 << 20}):
                keys.append((family, epserve is not None))
                new_tokens = LONG if keys[-1] == ("qwen3_moe", False) else NEW_TOKENS
                eager = keys[-1] != (
                    "qwen2_moe",
                    True,
                )  # the other one is compiled, shared experts between begin and end
                jobs.append({"path": str(path), "epserve": epserve, "new_tokens": new_tokens, "enforce_eager": eager})
        others = {
            "another model": {"path": str(checkpoints["mixtral"]), "epserve": address},
            "another dtype": {"path": str(checkpoints["gpt_oss"]), "epserve": address, "dtype": "bfloat16"},
            "lora": {"path": str(checkpoints["gpt_oss"]), "epserve": address, "enable_lora": True},
            "nobody there": {"path": str(checkpoints["gpt_oss"]), "epserve": {"target": f"127.0.0.1:{free_port()}",
                                                                              "retry_for_s": 0.5}},
        }  # fmt: skip
        for name, job in others.items():
            keys.append(name)
            jobs.append(job | {"new_tokens": 1})
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [str(PYTHON), str(Path(__file__).parent / "driver.py"), "jobs.json", "results.json"]
        run = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=800, check=False
        )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(zip(keys, json.loads((folder / "results.json").read_text()), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_and_log_probabilities_are_those_of_local_experts(results, family):
    local, remote = results[family, False], results[family, True]
    assert "error" not in local and "error" not in remote, (local, remote)
    assert [tokens[:NEW_TOKENS] for tokens in local["tokens"]] == remote["tokens"]
    for ours, theirs in zip(remote["logprobs"], local["logprobs"], strict=True):
        for one, other in zip(ours, theirs[:NEW_TOKENS], strict=True):
            common = one.keys() & other.keys()
            assert len(common) >= 5
            assert max(abs(one[token] - other[token]) for token in common) < LOGPROBS


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_neither_read_nor_held(results, checkpoints, family):
    from safetensors import safe_open

    with safe_open(checkpoints[family] / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118  # not a dict
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert results[family, False]["expert_parameters"] and not results[family, True]["expert_parameters"]
    assert results[family, False]["read"] == sum(sizes.values())
    assert results[family, True]["read"] == sum(sizes.values()) - experts < results[family, False]["read"] / 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another model", "does not fit the service of"),
        ("another dtype", "dtype: served float32, the model is loaded as bfloat16"),
        ("lora", "merge the adapter into the checkpoint"),
        ("nobody there", "127.0.0.1"),
    ],
)
def test_what_cannot_work_is_an_error_of_the_start(results, name, message):
    assert message in results[name]["error"]


class Server:
    """What `vllm serve` runs, with two workers. (The command itself looks for metadata of the name "vllm", which the wheel
    for CPUs lacks.)"""

    def __init__(self, checkpoint: Path, address: str, folder: Path, parallel: str = "tensor"):
        self.port, self.log = free_port(), folder / f"vllm-{parallel}.log"
        settings = json.dumps({"epserve": {"target": address}})
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--port", str(self.port),
            "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4",
            f"--{parallel}-parallel-size", "2", "--no-enable-prefix-caching", "--served-model-name", "model",
            "--additional-config", settings,
        ]  # fmt: skip
        env = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        if parallel == "pipeline":  # eager vLLM skips its warm-up on CPUs, which makes the buffers between stages
            command.remove("--enforce-eager")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-6000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            time.sleep(0.1)

    def tokens(self, prompt: list[int], count: int, after: int = -1, action=None) -> list[int]:
        """Greedy tokens as they come. `action` is called once, when there are `after` of them."""
        body = {"model": "model", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
                "return_token_ids": True}  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        found: list[int] = []
        with urllib.request.urlopen(request, timeout=400) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                before = len(found)
                assert b'"choices"' in line, line + self.log.read_bytes()[-6000:]
                found += json.loads(line[6:])["choices"][0].get("token_ids") or []
                if before < after <= len(found):
                    action()
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def test_vllm_serve_goes_on_through_a_killed_rank_and_a_restart_of_the_service(checkpoints, results, tmp_path):
    wanted = results["qwen3_moe", False]["tokens"]
    service = Served(checkpoints["qwen3_moe"], tmp_path)
    service.start()
    server = Server(checkpoints["qwen3_moe"], service.address, tmp_path)  # it waits for the service
    try:
        service.wait()
        server.wait(500)
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            assert server.tokens(prompt, NEW_TOKENS) == tokens[:NEW_TOKENS]

        def kill_a_rank():
            with Client(service.address) as client:
                os.kill(client.status().ranks[1].pid, signal.SIGKILL)

        assert server.tokens(PROMPTS[0], LONG, LONG // 4, kill_a_rank) == wanted[0]

        def restart():
            service.stop()
            threading.Timer(0.5, service.start).start()

        assert server.tokens(PROMPTS[1], LONG, LONG // 4, restart) == wanted[1]
    finally:
        server.stop()
        service.stop()


def test_two_instances_share_a_service_one_with_pipeline_and_one_with_data_parallelism(checkpoints, results, tmp_path):
    """Each gives the local tokens while the other one generates too. A data-parallel rank without work makes dummy steps."""
    wanted = results["qwen3_moe", False]["tokens"]
    with ExitStack() as stack:
        address = stack.enter_context(served(checkpoints["qwen3_moe"]))
        servers = []
        for parallel in ("pipeline", "data"):
            servers.append(Server(checkpoints["qwen3_moe"], address, tmp_path, parallel))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.wait(500)
        with ThreadPoolExecutor(4) as pool:
            found = [
                (pool.submit(server.tokens, prompt, NEW_TOKENS), tokens[:NEW_TOKENS])
                for server in servers
                for prompt, tokens in zip(PROMPTS, wanted, strict=True)
            ]
            for future, tokens in found:
                assert future.result() == tokens
        with Client(address) as client:
            assert client.status().ranks
