"""What the configuration says about paths and slices, through the engine on a Ray of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import ConfigError
from epserve.models.demo import reference_block
from tests.support.checkpoints import LAYER, write
from tests.support.grpc_calls import until

pytestmark = pytest.mark.slow
SIZES = (1, 7, 60, 200)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("paths"), dtype=torch.float32)


def config_of(path, **engine):
    return parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"device": "cpu", "ranks": 2, "max_tokens_per_rank": 32, **engine},
            "cluster": {"start_timeout_s": 240},
            "scheduler": {"step_timeout_s": 60},
        }
    )


def tokens(count: int) -> torch.Tensor:
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(count))


async def answers(engine: Engine, path) -> None:
    for count in SIZES:
        y = await engine.forward(Batch(layer=LAYER, hidden=tokens(count), deadline=time.monotonic() + 120))
        torch.testing.assert_close(y, reference_block(path, LAYER)(tokens(count)), rtol=1e-4, atol=1e-5)


async def test_ranks_that_share_experts_serve_and_recover(path):
    engine = Engine(config_of(path, tensor_parallel=2))
    await engine.start()
    try:
        await answers(engine, path)
        ranks = engine.status().ranks
        assert [rank.experts for rank in ranks] == [tuple(range(8))] * 2
        assert ranks[0].weights_bytes == ranks[1].weights_bytes == 8 * 3 * 64 * 16 * 4
        with pytest.raises(ConfigError, match=r"3 ranks do not divide by engine.tensor_parallel 2"):
            await engine.scale(3)
        os.kill(ranks[1].pid, signal.SIGKILL)
        await until(lambda: engine.status().generation > 1 and engine.state() == "serving", 120)
        await answers(engine, path)
    finally:
        await engine.close()


async def test_the_status_says_what_was_measured(path):
    engine = Engine(config_of(path, all2all="measured", batches_in_flight=2, overlap_min_tokens=8))
    await engine.start()
    try:
        await answers(engine, path)
        text = engine.status().backends
        assert text.startswith("all-to-all all_to_all/allgather_reducescatter, experts grouped_mm")
        assert "about 16 tokens on the busiest rank: all" in text
        assert "all_to_all: two batches in flight from 8 tokens a rank" in text
    finally:
        await engine.close()
