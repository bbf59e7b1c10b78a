"""`uv run epserve serve`: Ray finds `uv run` among a process's ancestors, and would upload the project that lies above."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from epserve.client import Client
from epserve.models.demo import write_demo_checkpoint

START_S = 200
RUN = f"""
import subprocess, sys
sys.exit(subprocess.run([{sys.executable!r}, "-m", "epserve", *sys.argv[1:]]).returncode)
"""
"""Python runs it as `uv run serve ...`: its first argument is the name of this file."""
LARGE_BYTES = 600 << 20
"""More than the 512 MB that Ray uploads."""


@pytest.mark.slow
def test_a_relative_path_in_a_large_project_below_pyproject_works(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "0"\n')
    with open(tmp_path / "large", "wb") as file:
        file.truncate(LARGE_BYTES)
    folder = tmp_path / "below"
    write_demo_checkpoint("mixtral", folder / "checkpoints" / "mixtral")
    (folder / "run").write_text(RUN)
    (folder / "mixtral.yaml").write_text(
        "model: {path: checkpoints/mixtral}\nengine: {ranks: 2, device: cpu}\nserver: {port: 0}\n"
    )
    ready = tmp_path / "ready.json"
    words = ["uv", "run", "serve", "mixtral.yaml", "--ready-file", str(ready)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen(
        words, executable=sys.executable, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=5)
            time.sleep(0.1)
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"uv\0run\0"), "Ray looks for this"
        told = json.loads(ready.read_text())
        with Client(f"127.0.0.1:{told['port']}") as client:
            model = client.model()
            x = torch.randn(3, model.hidden)
            assert client.forward(model.layers[0], x).shape == x.shape
        os.kill(told["pid"], signal.SIGTERM)
        _, log = process.communicate(timeout=START_S)
        assert process.returncode == 0 and "Traceback" not in log, log
    finally:
        process.kill()
