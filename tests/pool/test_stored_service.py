"""A service over quantised checkpoints: the same bits before and after moves of experts, and after the loss of a rank."""

import os
import random
import time

import pytest
import torch

from epserve.engine.engine import Batch
from epserve.models import open_checkpoint
from tests.models.stored_layouts import BY_NAME, write_stored
from tests.support.ranks import num_places
from tests.support.recovering import back, running, until

MOVES = 6


async def answers(engine, x, ids, shares):
    """Of every layer, for experts that the client chose."""
    return [
        await engine.forward(Batch(layer=layer, hidden=x, ids=ids, weights=shares, deadline=time.monotonic() + 120))
        for layer in engine.layers
    ]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def alike(one, other):
    """Equal but for the rounding of a few sums in bfloat16."""
    return all((a.float() - b.float()).norm() < 8e-3 * b.float().norm() for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "mixed"), [("compressed int4", True), ("fp8 a tensor, static", False)], ids=str)
async def test_moves_and_a_lost_rank_change_no_bit(tmp_path, name, mixed):
    """mixed: layer 1 stays in bfloat16, so that the ranks have two groups of layers."""
    await moves_and_a_lost_rank(tmp_path, BY_NAME[name], mixed, device="cpu")


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(not torch.cuda.is_available() or num_places() < 2, reason="needs a place for two ranks on GPUs")
@pytest.mark.parametrize(
    "name", ["compressed int4", "compressed mxfp4", "compressed nvfp4", "fp8 blocks", "compressed int8"]
)
async def test_moves_and_a_lost_rank_on_gpus(tmp_path, name):
    await moves_and_a_lost_rank(tmp_path, BY_NAME[name], False, device="cuda")


async def moves_and_a_lost_rank(tmp_path, row, mixed, *, device):
    path, plain = write_stored(row, tmp_path, keep=lambda each: mixed and ".layers.1." in each)
    g = torch.Generator().manual_seed(2)
    x = torch.randn((9, 256), generator=g).bfloat16()
    ids = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(9)]).int()
    shares, chance = torch.rand((9, 2), generator=g), random.Random(1)
    choices = {"ranks": 2, "redundant_experts": 4, "experts": "auto", "combine_order": "slot"}
    equal, on_cpu = same, choices
    if device == "cuda":  # these experts add a rank's slots up themselves, so that sums follow the placement
        choices = {"ranks": 2, "redundant_experts": 4, "device": "cuda", "all2all": "all_to_all", "experts": "triton"}
        equal = alike
    async with running(path, **choices) as engine:
        words = [kind.name for kind in open_checkpoint(path).info.stored]
        assert words == ([row.words, "BF16"] if mixed else [row.words])
        assert all(f"stored as {each}, served as" in engine.status().backends for each in words)
        first = await answers(engine, x, ids, shares)
        for _ in range(MOVES):
            loads = {layer: [chance.random() ** 3 for _ in range(4)] for layer in engine.layers}
            await engine._pool.changes.rebalance(loads=loads)
            assert equal(await answers(engine, x, ids, shares), first)
        pid = engine.status().ranks[1].pid
        os.kill(pid, 9)
        await until(lambda: engine.state() != "serving", 30, "the loss is noticed")
        await back(engine)
        await until(lambda: len(engine.status().ranks) == 2 and engine.state() == "serving", 120, "both ranks")
        assert equal(await answers(engine, x, ids, shares), first)
        assert pid not in [rank.pid for rank in engine.status().ranks]
    async with running(plain, **on_cpu) as engine:
        want = await answers(engine, x.float(), ids, shares)
    for got, true in zip(first, want, strict=True):
        assert (got.float() - true).norm() < 6e-2 * true.norm()
