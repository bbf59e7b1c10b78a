"""The progress of ranks that read their weights."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch

from epserve.config import parse_config
from epserve.models.demo import write_demo_checkpoint
from epserve.modular_kernel import RankContext
from epserve.pool.loading import progress, told
from epserve.rank.reports import Loading
from epserve.rank.worker import Worker


class Reading:
    """A member that has read one layer more at each ping."""

    def __init__(self):
        self.pulse = None
        self.pings = 0

    async def ping(self, timeout: float) -> bool:
        self.pings += 1
        loading = Loading(layers=self.pings, of_layers=4, nbytes=self.pings * 10**9, seconds=self.pings * 2.0)
        self.pulse = SimpleNamespace(loading=loading)
        return True


def test_the_slowest_rank_says_what_is_left():
    fast = Loading(layers=30, of_layers=60, nbytes=60 * 10**9, seconds=10.0)
    slow = Loading(layers=15, of_layers=60, nbytes=30 * 10**9, seconds=10.0)
    assert progress([fast, slow]) == (
        "loading weights: 15 of 60 layers, 90.0 of about 240.0 GB at 9.00 GB/s, about 30 s left"
    )


def test_nothing_is_said_before_the_first_layer():
    assert progress([]) is None


async def test_progress_is_logged_until_the_ranks_are_loaded(caplog):
    caplog.set_level(logging.INFO)
    member = Reading()
    async with told([member], every_s=0.001):  # type: ignore[list-item]
        async with asyncio.timeout(30):
            while member.pings < 3:
                await asyncio.sleep(0.001)
    pings = member.pings
    await asyncio.sleep(0.01)
    assert member.pings == pings
    lines = [record.message for record in caplog.records if record.message.startswith("loading weights")]
    assert "1 of 4 layers, 1.0 of about 4.0 GB at 0.50 GB/s, about 6 s left" in lines[0]
    assert "2 of 4 layers" in lines[1]


@pytest.mark.parametrize("layers", [1, 3])
def test_a_rank_counts_its_layers_and_bytes(tmp_path, monkeypatch, layers):
    path = tmp_path / "model"
    write_demo_checkpoint("mixtral", path, num_layers=layers)
    config = parse_config({"model": {"path": str(path)}, "engine": {"ranks": 1}})
    worker, seen = Worker(config, RankContext(rank=0, world_size=1, device=torch.device("cpu"))), []
    take = Worker._take

    def counted(self, layer, experts):
        seen.append(self.loading)
        take(self, layer, experts)

    monkeypatch.setattr(Worker, "_take", counted)
    report = worker.load()
    assert seen[0] is None
    assert [(each.layers, each.of_layers) for each in seen[1:]] == [(number, layers) for number in range(1, layers)]
    assert [each.nbytes for each in seen[1:]] == [report.weights_bytes * n // layers for n in range(1, layers)]
    assert worker.loading is None
