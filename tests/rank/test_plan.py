"""`epserve plan`: sizes by hand, the largest cap, and two running ranks whose memory it foretells."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epserve.config import parse_config
from epserve.errors import ConfigError, EpserveError
from epserve.models import open_checkpoint
from epserve.models.demo import write_demo_checkpoint
from epserve.modular_kernel.steps.graphs import GRAPH_BYTES, SEGMENT_BYTES
from epserve.rank.setup import machine
from epserve.rank.setup.memory import check_machine, plan_memory
from epserve.rank.setup.plan import plan_ranks
from epserve.service.run import running

MIB = 1 << 20
PARTS = ("weights", "dense", "workspaces", "buffers", "in_flight", "graphs", "runtime")
RANK = """
import gc, json, sys, torch
import torch.distributed as dist
from datetime import timedelta
from epserve.config import parse_config
from epserve.modular_kernel import RankContext
from epserve.rank.worker import Worker

def held():  # by tensors: what a process holds beside them depends on the machine and its libraries
    gc.collect()
    stores = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
              for each in gc.get_objects() if isinstance(each, torch.Tensor)}
    return sum(stores.values())

torch.set_num_threads(1)
config, rank, store = parse_config(json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
worker = Worker(config, RankContext(rank=rank, world_size=2, group=dist.group.WORLD))
before = held()
worker.load()
worker.warm_up()
sizes = {"weights": worker.weights.nbytes, "workspaces": worker.kernels.first.workspaces.nbytes}
print(json.dumps({"measured": held() - before, **sizes}))
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


def test_graphs_are_planned_where_the_backends_can_be_captured(small):
    """Whatever the ranks keep later: five sizes of three layers in two modes are tried on a GPU, and none on a CPU."""
    for engine, planned in (
        ({"ranks": 1, "device": "cuda"}, True),
        ({"ranks": 1, "device": "cuda", "cuda_graph_tokens": [1, 8]}, True),
        ({"ranks": 1, "device": "cuda", "cuda_graph_tokens": []}, False),
        ({"ranks": 2, "device": "cuda", "all2all": "all_to_all"}, False),  # it waits on the host
        ({"ranks": 1}, False),
    ):
        found = plan_memory(parse_config(config(small, **engine)), memory=80 << 30)
        rows = sum(engine.get("cuda_graph_tokens", (1, 8, 32, 128, 512)))
        graphs = 3 * 2 * (2 if "cuda_graph_tokens" in engine else 5) * GRAPH_BYTES
        expected = rows * (2 * 64 * 2 + 8 * 2) + SEGMENT_BYTES + graphs
        assert found.worst.graphs == (expected if planned else 0), engine
        assert found.worst.total == sum(getattr(found.worst, name) for name in PARTS)


def test_what_serving_would_refuse_is_refused_here(small):
    with pytest.raises(EpserveError):
        plan_memory(parse_config(config(small, ranks=2, experts_per_rank=(3, 3))))


def test_the_command_prints_a_table_and_its_exit_code_says_whether_it_fits(small):
    words = [sys.executable, "-m", "epserve", "plan", str(small), "--ranks", "2", "--device", "cpu"]
    good = subprocess.run([*words, "--memory-gib", "1"], capture_output=True, text=True)
    assert good.returncode == 0 and "fits:" in good.stdout and "in flight" in good.stdout
    bad = subprocess.run([*words, "--memory-gib", "0.01", "--json"], capture_output=True, text=True)
    assert bad.returncode == 1 and json.loads(bad.stdout)["largest_cap"] == 0


class Started(Exception):
    pass


@pytest.fixture
def no_ray(monkeypatch):
    def connect(config):
        raise Started

    monkeypatch.setattr("epserve.engine.engine.Cluster.connect", connect)


@pytest.mark.parametrize(
    ("memory", "threads", "told"),
    [
        (
            8 << 30,
            1 << 30,
            r"^engine\.ranks 24: rank 0 needs \d+ MiB, its share of this machine's memory is 341 MiB; lower",
        ),
        (
            64 << 20,
            1 << 30,
            r"its share of this machine's memory is 3 MiB; lower engine\.ranks, or join a larger cluster",
        ),
        (1 << 40, 500, r"^engine\.ranks 24, with .* 25 processes, have some 1000 threads, .* may have 500 \(ulimit -u"),
    ],
)
async def test_serving_refuses_what_the_machine_cannot_hold_before_ray_starts(
    small, monkeypatch, no_ray, memory, threads, told
):
    """The CPUs of a Ray of our own are as many as the ranks need, so Ray refuses nothing: it started process after process."""
    monkeypatch.setattr("epserve.rank.setup.machine.memory_bytes", lambda: memory)
    monkeypatch.setattr("epserve.rank.setup.machine.most_threads", lambda: threads)
    served = parse_config({**config(small, ranks=24, max_tokens_per_rank=16384), "server": {"port": 0}})
    with pytest.raises(ConfigError, match=told):
        async with running(served):
            pass
    monkeypatch.setattr("epserve.rank.setup.machine.memory_bytes", lambda: 1 << 50)
    monkeypatch.setattr("epserve.rank.setup.machine.most_threads", lambda: 1 << 50)
    with pytest.raises(Started):
        async with running(served):
            pass


def test_the_cap_that_is_offered_fits(small, monkeypatch):
    monkeypatch.setattr("epserve.rank.setup.machine.memory_bytes", lambda: 8 << 30)
    asked = config(small, ranks=4, max_tokens_per_rank=1 << 20)
    with pytest.raises(ConfigError, match=r"lower engine\.max_tokens_per_rank to at most \d+") as error:
        check(asked)
    cap = int(str(error.value).split("at most ")[1].split()[0])
    check(config(small, ranks=4, max_tokens_per_rank=cap))


def check(data: dict) -> None:
    asked = parse_config(data)
    info = open_checkpoint(asked.model.path).info
    check_machine(asked, info, plan_ranks(asked, info, device="cpu"))


@pytest.mark.parametrize(
    ("groups", "files", "memory", "threads"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "max", "a/b/pids.max": "50"}, 1000, 50),
        ("0::/not/seen/from/here\n", {"memory.max": "2000", "pids.max": "60"}, 2000, 60),
        ("5:pids:/x\n4:cpu,memory:/y\n", {"memory/y/memory.limit_in_bytes": "3000", "pids/x/pids.max": "70"}, 3000, 70),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None, None),
        ("", {}, None, None),
    ],
)
def test_a_containers_limits_count(tmp_path, monkeypatch, groups, files, memory, threads):
    own = tmp_path / "own"
    own.write_text(groups)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_CGROUP", own)
    monkeypatch.setattr("resource.getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_bytes() == (memory or physical)
    assert machine.most_threads() == (threads or machine.NO_LIMIT)


@pytest.mark.parametrize(("dtype", "hidden", "intermediate"), [
    pytest.param(torch.float32, 1024, 512, id="float32"),
    pytest.param(torch.bfloat16, 1000, 528, id="rows with zeros behind them"),
])  # fmt: skip
def test_two_running_ranks_hold_what_was_planned(tmp_path, dtype, hidden, intermediate):
    path = tmp_path / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=dtype, hidden=hidden, intermediate=intermediate, num_experts=24, top_k=2,
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
        assert abs(found["measured"] - stated) <= 0.01 * stated, (found["measured"], stated)
