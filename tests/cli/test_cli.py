"""The command line: it teaches, and the user's own mistakes end in one message without a traceback."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console

from epserve.cli import demo, doctor
from epserve.config import load_config, parse_config
from epserve.errors import ConfigError, OperatorError
from epserve.pool.host import check_host
from tests.models.stored_layouts import BY_NAME, write_stored
from tests.support.checkpoints import write
from tests.support.grpc_calls import until


def epserve(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "epserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_names_every_command():
    shown = epserve("--help").stdout
    for command in ("serve", "call", "doctor", "compat", "demo", "cluster", "plan"):
        assert command in shown


@pytest.mark.parametrize(("given", "kept"), [({}, "False"), ({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1"}, "True")])
def test_ray_does_not_upload_the_folder_of_uv_run(given, kept):
    """Its hook moved the ranks into a copy of the project, where relative paths lead nowhere, and refused large ones."""
    code = "import epserve.service.run; from ray._private import ray_constants as c; print(c.RAY_ENABLE_UV_RUN_RUNTIME_ENV)"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_UV_RUN_RUNTIME_ENV"} | given
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert shown.stdout.strip() == kept


def test_import_is_light():
    code = "import epserve, sys; print([m for m in ('torch', 'ray', 'grpc', 'triton') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.strip() == "[]"


def test_doctor_lists_backends_and_a_busy_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = epserve("doctor", "--port", str(port))
    assert result.returncode == 1
    assert "all-to-all local" in result.stdout
    assert "experts loop" in result.stdout
    assert f"port {port}" in result.stdout
    assert "problem" in result.stdout
    assert epserve("doctor", "--port", "0").returncode == 0


def test_doctor_says_how_a_models_layers_are_stored_and_served(tmp_path):
    path, _ = write_stored(BY_NAME["gptq"], tmp_path)
    result = epserve("doctor", str(path), "--port", "0")
    shown = " ".join(result.stdout.split())
    assert result.returncode == 0 and "stored as gptq of 4 bits" in shown
    (finding,) = (each for each in doctor.examine(model=path) if each.what == "model")
    assert finding.detail.startswith("layers 0-1: stored as gptq of 4 bits, groups of 32, served as ")
    (wrong,) = (each for each in doctor.examine(model=tmp_path / "nothing") if each.what == "model")
    assert wrong.verdict is doctor.Verdict.PROBLEM and "does not exist" in wrong.detail


def test_compat_gives_a_reason_for_each_no():
    page = epserve("compat", "--markdown").stdout
    assert "| `local` |" in page
    assert "prepare delivers BatchedExperts, the experts take Standard" in page


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("modle: {path: x}", "did you mean 'model'"),
        ("model: {path: x}\nserver: {prot: 1}", "did you mean 'port'"),
        ("model: {path: x}\nengine: {ranks: 0}", "engine.ranks"),
        ("model: {path: x}\nserver: {host: 0.0.0.0}", "tls_cert"),
        ("[1, 2]", "must hold a mapping"),
        ("model: {path: [", "cannot be read"),
        ("model: {path: /nowhere/at/all}", "/nowhere/at/all"),
    ],
    ids=[
        "unknown section",
        "unknown key",
        "out of range",
        "open without TLS",
        "not a mapping",
        "not YAML",
        "no checkpoint",
    ],
)
def test_a_wrong_configuration_is_one_message(tmp_path, content, expected):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    result = epserve("serve", str(path))
    assert result.returncode == 2
    assert expected in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model: {path: x}\nserver: {port: 1}\nmodel: {path: y}", r"line 3: the key 'model' is in line 1 already"),
        ("model:\n  path: x\n  path: y", r"line 3: the key 'path' is in line 2 already"),
        ("model: {path: x}\nengine: {ranks: true}", r"engine\.ranks: true, false, yes.*got True"),
        ("model: {path: x, layers: [1, yes]}", r"model\.layers: true, false, yes"),
        ("model: {path: x}\nserver: {metrics_port: off}", r"server\.metrics_port: true, false, yes"),
        ("engine: {ranks: 2}", r"model\.path: missing"),
        ("model: {}", r"model\.path: missing"),
        ("model:", r"model\.path: missing"),
        ("model: {path: x}\nserver:", r"server: must hold keys and their values, got None; leave it out"),
        ("model: 5", r"model: must hold keys and their values, got 5"),
        ("model: {path: x}\nserver: {tls_cert: a}", r"server: tls_key is missing.*tls_cert is set"),
        ("model: {path: x}\nserver: {tls_key: a}", r"server: tls_cert is missing.*tls_key is set"),
        ("model: {path: x}\nserver: {join_port: 0}", r"join_secret_file is missing.*join_port is set"),
        ("model: {path: x}\nserver: {join_secret_file: a}", r"join_port is missing.*join_secret_file is set"),
        ("model: {path: x}\nengine: {gpus_per_rank: 0.5}", r"engine\.gpus_per_rank: .*mean 'cluster\.gpus_per_rank'"),
        ("model: {path: x}\ncluster: {gpus_per_rank: 1.5}", r"gpus_per_rank 1\.5: above 1 it must be a whole number"),
        ("model: {path: x}\ncluster: {gpus_per_rank: 0.00001}", r"gpus_per_rank 1e-05: .* parts of 0\.0001"),
    ],
)
def test_a_wrong_configuration_says_which_key(tmp_path, content, expected):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        load_config(path)


def test_switches_and_merged_keys_stay_what_they_are(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {path: x}\nengine: &engine {dispatch_quantised: no, experts_times: null}\nserver: {regions: off}\n"
        "cluster:\n  <<: {cpus_per_rank: 2}\n  cpus_per_rank: 1\n"
    )
    config = load_config(path)
    assert (config.engine.dispatch_quantised, config.server.regions, config.engine.experts_times) == (
        False,
        False,
        None,
    )
    assert config.cluster.cpus_per_rank == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_that_are_not_there_are_missed_before_anything_starts(tmp_path):
    write("mixtral", tmp_path / "m")
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{path: {tmp_path / 'm'}}}\nengine: {{device: cuda, ranks: 2}}\nserver: {{port: 0}}")
    result = epserve("serve", str(path))
    assert result.returncode == 2
    assert "2 ranks need 2 GPUs, this machine has 0" in " ".join(result.stderr.split())
    assert "listening" not in result.stderr and "starting" not in result.stderr


@pytest.mark.parametrize(
    ("gpus", "engine", "each"), [(1, {"ranks": 2}, 1), (2, {"ranks": 2, "spares": 1}, 1), (0, {}, 0)]
)
def test_too_few_gpus_for_the_ranks(monkeypatch, gpus, engine, each):
    config = {"model": {"path": "x"}, "engine": engine, "cluster": {"gpus_per_rank": each}}
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=f"this machine has {gpus}"):
        check_host(parse_config(config), "cuda")
    check_host(parse_config({**config, "cluster": {"address": "10.0.0.1:6379"}}), "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus + 1)
    check_host(parse_config(config), "cuda")


@pytest.mark.parametrize("setting", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_whose_path_is_too_long_for_rays_sockets_is_named(monkeypatch, setting):
    config = parse_config({"model": {"path": "x"}})
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    check_host(config, "cpu")
    monkeypatch.setenv(setting, "/tmp/" + 60 * "x")
    with pytest.raises(ConfigError, match=rf"^{setting} /tmp/x+: 65 characters.*RAY_TMPDIR"):
        check_host(config, "cpu")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    check_host(config, "cpu")


def test_little_shared_memory_is_said(monkeypatch, caplog):
    usage = SimpleNamespace(free=2 << 20, total=2 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    check_host(parse_config({"model": {"path": "x"}}), "cpu")
    assert "2.0 MiB free, Ray's object store takes 100 MiB" in caplog.text and "--shm-size" in caplog.text
    (finding,) = (each for each in doctor.examine() if each.what == "/dev/shm")
    assert finding.detail == "2.0 MiB free of 2.0 MiB"
    caplog.clear()
    usage.free = 1 << 30
    check_host(parse_config({"model": {"path": "x"}}), "cpu")
    assert not caplog.text


async def test_the_demo_says_what_it_does_and_for_how_long(monkeypatch):
    monkeypatch.setattr(demo, "STILL_S", 0.02)
    shown = io.StringIO()
    stage = demo.Stages(Console(file=shown), time.monotonic() - 100)
    async with stage.lasting("Mixtral-like: starting Ray"):
        await until(lambda: "still" in shown.getvalue())
    ended = shown.getvalue()
    await asyncio.sleep(0.1)
    assert shown.getvalue() == ended, "a line after the stage's end"
    lines = [re.fullmatch(r" (1\d\d\.\d) s  Mixtral-like: (still )?starting Ray", line) for line in ended.splitlines()]
    assert len(lines) >= 2 and all(lines)


def test_serve_without_a_file_is_one_message(tmp_path):
    result = epserve("serve", str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert "does not exist" in " ".join(result.stderr.split())


def test_call_without_a_service_is_one_message():
    with socket.socket() as mute:  # bound, so that nobody else gets the port, but it does not listen
        mute.bind(("127.0.0.1", 0))
        port = mute.getsockname()[1]
        result = epserve("call", f"127.0.0.1:{port}", "--timeout", "2")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"127.0.0.1:{port}" in " ".join(result.stderr.split())


def test_overrides_reach_nested_keys(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "x"}}))
    config = load_config(path, {"server.port": 0, "engine.ranks": 3})
    assert (config.server.port, config.engine.ranks) == (0, 3)


def test_overrides_reach_a_section_whose_keys_are_commented_out_and_no_key_of_another_key(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: x}\nserver:\n#  port: 1\n")
    assert load_config(path, {"server.port": 0}).server.port == 0
    with pytest.raises(ConfigError, match=r"model\.path\.x: path is 'x', which is no section"):
        load_config(path, {"model.path.x": 1})


def test_configuration_is_frozen():
    config = parse_config({"model": {"path": "x"}})
    with pytest.raises(Exception, match="frozen"):
        config.server.port = 1
    with pytest.raises(ConfigError, match="tls_cert and tls_key"):
        parse_config({"model": {"path": "x"}, "server": {"tls_cert": "a.pem"}})
    assert json.loads(config.model_dump_json())["server"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(
    "arguments",
    [
        ("call", "--tokens", "-3"),
        ("call", "--repeat", "0"),
        ("scale", "127.0.0.1:1", "2", "--timeout", "0"),
        ("scale", "127.0.0.1:1", "2", "--timeout", "-1"),
        ("call", "--token-file", "/nowhere/token"),
        ("doctor", "--port", "99999"),
        ("serve", "c.yaml", "--set", "model.path=["),
        ("serve", "{config}", "--ready-file", "/nowhere/at/all/ready"),
    ],
    ids=lambda arguments: " ".join(arguments[1:]),
)
def test_wrong_options_are_one_message(tmp_path, arguments):
    config = tmp_path / "c.yaml"
    config.write_text("model: {path: x}")
    result = epserve(*(argument.format(config=config) for argument in arguments))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_a_ready_file_of_a_killed_service_is_removed_at_the_door(tmp_path):
    config, ready = tmp_path / "c.yaml", tmp_path / "ready"
    config.write_text("model: {path: /nowhere/at/all}")
    ready.write_text("old")
    assert epserve("serve", str(config), "--ready-file", str(ready)).returncode == 2
    assert not ready.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"experts": "nosuch"}, "experts backend 'nosuch' is unknown"),
        ({"all2all": "nosuch"}, "all-to-all backend 'nosuch' is unknown"),
        ({"all2all": "all_to_all", "experts": "batched_loop"}, "no pair of backends|Standard"),
        ({"ranks": 0}, r"engine\.ranks"),
        ({"ranks": 1000}, "engine.ranks 1000: rank 0 needs"),
    ],
)
def test_the_demo_refuses_before_it_writes_or_starts_anything(monkeypatch, options, told):
    monkeypatch.setattr(demo, "write_demo_checkpoint", lambda *args, **kwargs: pytest.fail("a checkpoint was written"))
    monkeypatch.setattr("epserve.rank.setup.machine.memory_bytes", lambda: 64 << 30)
    with pytest.raises(OperatorError, match=told):
        demo.run(**{"ranks": 2, "clients": 1, **options})


def test_shells_complete_commands():
    asked = {"_EPSERVE_COMPLETE": "complete_bash", "COMP_WORDS": "epserve fro", "COMP_CWORD": "1"}
    done = subprocess.run(
        [Path(sys.executable).with_name("epserve")],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["front-end"], done.stderr
