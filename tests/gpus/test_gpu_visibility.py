"""Which GPU each rank takes when the environment says which there are. `pytest -m gpu tests/gpus`, two GPUs.

Every row is a service of its own in a process of its own: what Ray and CUDA read of the environment, they read once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epserve.config import parse_config
from epserve.errors import EpserveError
from epserve.models.demo import write_demo_checkpoint
from epserve.service.run import running

ROOT = Path(__file__).resolve().parent.parent.parent
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


async def started(ranks: int, path: str) -> list[str]:
    engine = {"ranks": ranks, "device": "cuda", "experts": "loop", "all2all": "local" if ranks == 1 else "all_to_all"}
    config = parse_config({"model": {"path": path}, "engine": engine, "server": {"port": 0}})
    async with running(config) as (engine, _):
        return [rank.gpu_uuid for rank in engine.status().ranks]


def main() -> None:
    """In the child: what the ranks report, or why there are none."""
    try:
        found = {"gpus": asyncio.run(started(int(sys.argv[1]), sys.argv[2]))}
    except EpserveError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(found), flush=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("visible") / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.bfloat16, hidden=256, intermediate=128, num_experts=4, top_k=2,
                          num_layers=1, seed=3)  # fmt: skip
    return path


def uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(2)]


def service(path: Path, ranks: int, **env: str) -> dict:
    clean = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", NOSET)}
    words = [sys.executable, "-m", "tests.gpus.test_gpu_visibility", str(ranks), str(path)]
    done = subprocess.run(words, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("why", "visible", "ranks", "want"),
    [
        ("the second one only", "1", 1, (1,)),
        ("in another order", "1,0", 2, (0, 1)),
        ("by their ids", "GPU-{0},GPU-{1}", 2, (0, 1)),
        ("one of them, by its id", "GPU-{1}", 1, (1,)),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_ranks_take_the_gpus_that_are_visible(path, why, visible, ranks, want):
    known = uuids()
    found = service(path, ranks, CUDA_VISIBLE_DEVICES=visible.format(*known))
    assert sorted(found.get("gpus", [])) == sorted(known[index] for index in want), found


@pytest.mark.timeout(200)
def test_ranks_that_would_share_a_gpu_do_not_start(path):
    """With this variable Ray hides no GPU from a rank: all would take the first."""
    found = service(path, 2, **{NOSET: "1"})
    assert NOSET in found.get("error", "") and "both see GPU" in found["error"], found


@pytest.mark.timeout(200)
def test_fewer_gpus_than_ranks_are_named(path):
    found = service(path, 2, CUDA_VISIBLE_DEVICES="1")
    assert "2 ranks need 2 GPU, the cluster has 1" in found.get("error", ""), found


if __name__ == "__main__":
    main()
