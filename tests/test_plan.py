"""`epserve plan`: sizes by hand, the largest cap, and two running ranks whose memory it foretells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epserve.config import parse_config
from epserve.errors import EpserveError
from epserve.models.demo import write_demo_checkpoint
from epserve.plan import plan_memory

MIB = 1 << 20
RANK = """
import json, sys, torch
import torch.distributed as dist
from datetime import timedelta
from epserve.config import parse_config
from epserve.modular_kernel import RankContext
from epserve.worker import Worker

def anonymous():  # what this process wrote: no code, no page cache of the checkpoint
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

torch.set_num_threads(1)
config, rank, store = parse_config(json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
worker = Worker(config, RankContext(rank=rank, world_size=2, group=dist.group.WORLD))
torch.ones(300, 300) @ torch.ones(300, 300)  # the libraries' own first-use memory
before = anonymous()
report = worker.load()
worker.warm_up()
worker.kernels.workspaces.poison()  # reserved memory is not resident until it is written
sizes = {"weights": report.weights_bytes, "workspaces": worker.kernels.workspaces.nbytes}
print(json.dumps({"measured": anonymous() - before, **sizes}))
worker.close()
dist.destroy_process_group()
"""


def config(path: Path, **engine) -> dict:
    return {"model": {"path": str(path)}, "engine": {"device": "cpu", **engine}}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.bfloat16, hidden=64, intermediate=32, num_experts=5, top_k=2,
                          num_layers=3, seed=1)  # fmt: skip
    return path


def test_weights_by_hand(small):
    found = plan_memory(parse_config(config(small, ranks=2)))
    one = 3 * 64 * 32 * 2  # gate, up and down in bfloat16
    assert [rank.experts for rank in found.ranks] == [3, 2]
    assert [rank.weights for rank in found.ranks] == [3 * 3 * one, 3 * 2 * one]
    assert found.worst is found.ranks[0]


def test_the_largest_cap_fits_and_one_more_does_not(small):
    memory = 400 * MIB
    cap = plan_memory(parse_config(config(small, ranks=4)), memory=memory).largest_cap
    assert cap > 1024
    assert plan_memory(parse_config(config(small, ranks=4, max_tokens_per_rank=cap)), memory=memory).fits
    assert not plan_memory(parse_config(config(small, ranks=4, max_tokens_per_rank=cap + 1)), memory=memory).fits


def test_a_gpu_cluster_can_be_planned_without_one(small):
    found = plan_memory(parse_config(config(small, ranks=4, device="cuda")), memory=80 << 30)
    assert found.device == "cuda" and found.fits and found.worst.weights == 3 * 2 * 3 * 64 * 32 * 2


def test_what_serving_would_refuse_is_refused_here(small):
    with pytest.raises(EpserveError):
        plan_memory(parse_config(config(small, ranks=2, experts_per_rank=(3, 3))))


def test_the_command_prints_a_table_and_its_exit_code_says_whether_it_fits(small):
    words = [sys.executable, "-m", "epserve", "plan", str(small), "--ranks", "2", "--device", "cpu"]
    good = subprocess.run([*words, "--memory-gib", "1"], capture_output=True, text=True)
    assert good.returncode == 0 and "fits:" in good.stdout and "in flight" in good.stdout
    bad = subprocess.run([*words, "--memory-gib", "0.01", "--json"], capture_output=True, text=True)
    assert bad.returncode == 1 and json.loads(bad.stdout)["largest_cap"] == 0


def test_two_running_ranks_hold_what_was_planned(tmp_path):
    path = tmp_path / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.float32, hidden=1024, intermediate=512, num_experts=24, top_k=2,
                          num_layers=1, seed=1)  # fmt: skip
    data = config(path, ranks=2, max_tokens_per_rank=2048)
    planned = plan_memory(parse_config(data)).ranks
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps(data), str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    for rank, output in zip(planned, outputs, strict=True):
        found = json.loads(output.splitlines()[-1])
        assert (rank.weights, rank.workspaces) == (found["weights"], found["workspaces"])
        stated = rank.weights + rank.dense + rank.workspaces
        assert abs(found["measured"] - stated) <= 0.05 * stated, (found["measured"], stated)
