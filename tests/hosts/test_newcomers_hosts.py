"""A host that has never had the checkpoint becomes one of the service's: its rank takes everything from ranks of other hosts.

The hosts are network namespaces of this machine (tests/hosts); the third one's view of the folder is empty.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.chaos_hosts import ENVIRONMENT, PORT, entering, join
from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.models.demo import reference_block
from tests.hosts import fake_hosts, why_not
from tests.support.checkpoints import LAYER, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs here"),
    pytest.mark.timeout(900),
]
LIMIT_S = 240.0


async def serve(path: str) -> None:
    """On the first host. Says "ready", waits for a line, and goes on with three ranks."""
    config = {
        "model": {"path": path},
        "engine": {"ranks": 2, "device": "cpu", "experts": "loop", "combine_order": "slot", "standbys": 0},
        "cluster": {
            "address": f"10.88.0.10:{PORT}",
            "cpus_per_rank": 3,
            "start_timeout_s": LIMIT_S,
        },  # one fits on a host
    }
    engine = Engine(parse_config(config))
    x = torch.randn((12, 64), generator=torch.Generator().manual_seed(4))

    async def ask() -> torch.Tensor:
        return await engine.forward(Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + LIMIT_S))

    await engine.start()
    try:
        before, nodes = await ask(), [rank.node for rank in engine.status().ranks]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await engine.scale(3)
        after = await ask()
        close = torch.allclose(before, reference_block(path, LAYER)(x), rtol=1e-4, atol=1e-5)
        new = [rank.node for rank in engine.status().ranks]
        print(json.dumps({"same": torch.equal(before, after), "right": close, "nodes": [nodes, new]}), flush=True)
    finally:
        await engine.close()


def test_a_host_that_never_had_the_checkpoint_serves(tmp_path):
    path = write("deepseek_v3", tmp_path / "model", dtype=torch.float32)
    with fake_hosts(3, tmp_path / "hosts") as hosts:
        for number in (0, 1):
            join(hosts, number)
        hide = [*entering(hosts, 2), "mount", "-t", "tmpfs", "none", str(path)]
        subprocess.run(hide, check=True, timeout=30)
        words = [sys.executable, "-m", "tests.hosts.test_newcomers_hosts", str(path)]
        service = subprocess.Popen(
            [*entering(hosts, 0), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        try:
            assert service.stdout is not None and service.stdin is not None
            lines = iter(service.stdout.readline, "")
            assert any(line.strip() == "ready" for line in lines), service.stderr.read()[-3000:]
            join(hosts, 2)  # it has no checkpoint, now or ever
            assert not subprocess.run([*entering(hosts, 2), "ls", str(path)], capture_output=True, check=True).stdout
            service.stdin.write("go\n")
            service.stdin.flush()
            told, said = service.communicate(timeout=LIMIT_S)
        finally:
            service.kill()
            service.wait(30)
        seen = json.loads(told.strip().splitlines()[-1])
        assert "newcomers take weights from the other ranks" in said
        assert seen["same"] and seen["right"]
        before, after = seen["nodes"]
        assert set(before) == set(hosts.addresses[:2]) and set(after) == set(hosts.addresses)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
