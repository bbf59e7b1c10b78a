"""Ranks that share a GPU because the configuration says so: what each counts on, and what NCCL and the operator are told."""

import os
from types import SimpleNamespace

import pytest

from benchmarks import sharing
from epserve.config import ClusterConfig, parse_config
from epserve.errors import ConfigError
from epserve.modular_kernel import RankContext
from epserve.pool.host import check_host
from epserve.rank import groups
from epserve.rank.worker import Worker
from tests.support.checkpoints import write

NCCL = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")


@pytest.mark.parametrize(
    ("each", "ranks"), [(1, 1), (2, 1), (0.6, 1), (0.5, 2), (0.3333, 3), (0.3, 3), (0.25, 4), (0.1, 10), (0, 1)]
)
def test_how_many_ranks_may_share_a_gpu(each, ranks):
    assert ClusterConfig(gpus_per_rank=each).ranks_per_gpu == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_benchmarks_ask_for_parts_that_ray_can_add_up(ranks):
    section = sharing.cluster_section(SimpleNamespace(device="cuda", ranks_per_gpu=ranks))
    each = ClusterConfig(**section)
    assert each.ranks_per_gpu == ranks and round(each.gpus_per_rank * sharing.PARTS) * ranks <= sharing.PARTS


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl(monkeypatch):
    for name in NCCL:
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    groups.share_gpu()
    assert [os.environ[name] for name in NCCL] == [f"127.0.0.1-{os.getpid()}", "before", "1"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    groups.share_gpu()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_whole_gpus_are_counted(monkeypatch):
    cluster = {"gpus_per_rank": 0.5}
    config = parse_config({"model": {"path": "x"}, "engine": {"ranks": 2, "spares": 1}, "cluster": cluster})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks and 1 spares need 2 GPUs, this machine has 1"):
        check_host(config, "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_host(config, "cuda")


def test_what_is_free_on_a_shared_gpu_is_divided(tmp_path, monkeypatch):
    path = write("deepseek_v3", tmp_path / "model")
    worker = Worker(parse_config({"model": {"path": str(path)}, "engine": {"device": "cpu"}}), RankContext(sharers=2))
    worker.load()
    worker.warm_up()
    layer = worker.plan.layers[0]
    needed, placement = worker.weights.nbytes // len(worker.plan.layers), worker.plan.placement.with_version(1)
    monkeypatch.setattr("epserve.rank.worker.free_bytes", lambda device: int(needed * 2.4))
    assert not worker.stage(layer, placement)  # 1.2 times what it needs, 1.25 are asked for
    monkeypatch.setattr("epserve.rank.worker.free_bytes", lambda device: int(needed * 2.6))
    assert worker.stage(layer, placement)
