"""Two hosts of two ranks, every choice left to the service: ranks side by side, rows once a host, bytes between hosts counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.chaos_hosts import ENVIRONMENT, PORT, entering, join
from epserve.models.demo import write_demo_checkpoint
from tests.hosts import fake_hosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs here"),
    pytest.mark.timeout(600),
]

SERVE = """
import asyncio, json, sys, time, torch
from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.models.demo import reference_block

path, address = sys.argv[1:3]
TOKENS, STEPS = 64, 5

async def main():
    config = {"model": {"path": path}, "engine": {"ranks": 4, "device": "cpu"},
              "cluster": {"address": address, "cpus_per_rank": 1, "start_timeout_s": 240}}
    engine = Engine(parse_config(config))
    await engine.start()
    x = torch.randn((TOKENS, 1024), generator=torch.Generator().manual_seed(1))
    want = reference_block(path, 0)(x)
    async def ask():
        y = await engine.forward(Batch(layer=0, hidden=x, deadline=time.monotonic() + 120))
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    async def sent():
        await asyncio.sleep(3)  # the ranks are asked several times in a heartbeat
        return sum(rank.network_bytes for rank in engine.status().ranks)
    await ask()
    before = await sent()
    for _ in range(STEPS):
        await ask()
    status = engine.status()
    print(json.dumps({
        "nodes": [rank.node for rank in status.ranks], "backends": status.backends,
        "bytes_a_token": (await sent() - before) / (TOKENS * STEPS),
    }), flush=True)
    await engine.close()

asyncio.run(main())
"""


def test_the_default_configuration_on_two_hosts_of_two_ranks(tmp_path):
    path = tmp_path / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.float32, hidden=1024, intermediate=64, num_experts=8, top_k=4,
                          num_layers=1, seed=3)  # fmt: skip
    with fake_hosts(2, tmp_path / "hosts") as hosts:
        for number in range(2):
            join(hosts, number, cpus=2)  # places for two ranks
        words = [sys.executable, "-c", SERVE, str(path), f"{hosts.addresses[0]}:{PORT}"]
        done = subprocess.run(
            [*entering(hosts, 0), *words],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=420,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    told = json.loads(done.stdout.splitlines()[-1])
    first, second = hosts.addresses
    assert told["nodes"] in ([first] * 2 + [second] * 2, [second] * 2 + [first] * 2)
    assert told["backends"].startswith("all-to-all all_to_all_by_host, experts")
    assert f"2 hosts ({told['nodes'][0]}: ranks 0-1; {told['nodes'][2]}: ranks 2-3)" in told["backends"]
    # With top-4 of 8 nearly every token has an expert on the other host: its row goes there and a row comes back.
    assert 1.5 * 1024 * 4 < told["bytes_a_token"] <= 1.05 * 2 * 1024 * 4
