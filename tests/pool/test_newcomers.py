"""A rank on a host without the checkpoint: it takes all of its weights from ranks that serve, and answers are the same bits."""

import asyncio
import dataclasses
import logging
import os
import signal
import time

import pytest
import torch

from epserve.config import parse_config
from epserve.engine.engine import Batch
from epserve.errors import CheckpointError, NotReady
from epserve.models import LateCheckpoint, Stamp
from epserve.models.demo import reference_block
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.measured.known_times import KnownTable
from epserve.pool import pool as pools
from epserve.rank.step import StepPlan
from epserve.rank.weights.hand_over import ExpertServer, common_tensors
from epserve.rank.weights.newcomers import RanksSource
from epserve.rank.worker import Worker
from tests.rank.test_hand_over import EXPERTS, SCHEMES, Layers, same
from tests.support.checkpoints import FAMILIES, LAYER, write
from tests.support.recovering import BACK_S, TOLERANCE, back, pids, running, spare, until

CPU = torch.device("cpu")


def tensors_of(layer):
    return {**layer.experts.tensors(), **common_tensors(layer)}


def alike(got, want):
    assert got.keys() == want.keys()
    assert all(same(each, want[name]) for name, each in got.items())


def config_of(path, **engine):
    section = {"device": "cpu", "experts": "loop", "experts_times": None, **engine}
    return parse_config({"model": {"path": str(path)}, "engine": section})


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_shared_experts_and_experts_come_from_ranks(family, tmp_path):
    from_ranks(write(family, tmp_path / "model", dtype=torch.bfloat16), CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_they_come_from_and_to_gpus(family, tmp_path):
    sizes = {"hidden": 512, "intermediate": 256}
    from_ranks(write(family, tmp_path / "model", dtype=torch.bfloat16, **sizes), torch.device("cuda", 0), "triton")


def from_ranks(path, device, experts="loop"):
    config = config_of(path, device=device.type, experts=experts)
    there = Worker(config, RankContext(device=device))
    there.load()
    there.warm_up()
    server = ExpertServer(there.weights.held)
    start, gone = Stamp.take(path).with_digest(), path.with_name("gone")
    path.rename(gone)
    late = LateCheckpoint(path, "auto", start=start, info=there.info)
    holders = {layer: {expert: [server.address] for expert in range(8)} for layer in there.plan.layers}
    peers = RanksSource(there.info, holders, hurry=True)
    with pytest.raises(CheckpointError, match="No such file"):
        Worker(config, RankContext(device=device), checkpoint=late).load()
    here = Worker(config, RankContext(device=device), checkpoint=late, peers=peers)
    report = here.load()
    assert report.experts == tuple(range(8)) and report.weights_bytes == there.weights.nbytes
    for layer in there.plan.layers:
        alike(tensors_of(here.weights.layers[layer]), tensors_of(there.weights.layers[layer]))
    here.warm_up()
    x = torch.randn((9, there.info.hidden), generator=torch.Generator().manual_seed(3)).bfloat16()
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=(9,))
    assert same(here.step(plan, x, None, None), there.step(plan, x, None, None))
    with pytest.raises(CheckpointError, match="No such file"):
        here.load_layer(LAYER, (0,), CPU)
    gone.rename(path)  # the files are back, as they were: from now on they are read
    alike(here.load_layer(LAYER, (3, 1), CPU).experts.tensors(), there.load_layer(LAYER, (3, 1), CPU).experts.tensors())
    server.close()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    sizes = {"hidden": 256, "intermediate": 256, "num_experts": EXPERTS}
    return write("deepseek_v3", tmp_path_factory.mktemp("newcomers"), dtype=torch.bfloat16, **sizes)


@pytest.mark.parametrize(("scheme", "dynamic"), SCHEMES, ids=str)
def test_every_quantisation(stored, scheme, dynamic):
    """Scales of weights and activations, biases: an expert is one unit, and what is the layer's comes once."""
    sides = [Layers(stored, half, scheme=scheme) for half in ((0, 1, 2, 3), (4, 5, 6, 7))]
    servers = [ExpertServer(side) for side in sides]
    holders = {LAYER: {expert: [servers[expert // 4].address] for expert in range(8)}}
    wanted = (6, 0, 3, 5)
    got = RanksSource(sides[0].stored.info, holders, hurry=False).load_layer(LAYER, wanted, CPU)
    whole = sides[0].stored.load_layer(LAYER, wanted)
    alike(tensors_of(got), tensors_of(whole))
    assert got.experts.activation == sides[0].stored.info.activation
    for server in servers:
        server.close()


def test_ranks_that_share_experts_give_their_slices(tmp_path):
    path = write("mixtral", tmp_path / "model", dtype=torch.float32)
    config = config_of(path, ranks=2, tensor_parallel=2)
    there = [Worker(config, RankContext(rank=rank, world_size=2)) for rank in range(2)]
    for worker in there:
        worker.load()
    servers = [ExpertServer(worker.weights.held) for worker in there]
    late = LateCheckpoint(path, "auto", start=Stamp.take(path), info=there[0].info)
    for rank, server in enumerate(servers):
        holders = {layer: {expert: [server.address] for expert in range(8)} for layer in there[0].plan.layers}
        peers = RanksSource(there[0].info, holders, hurry=True)
        here = Worker(config, RankContext(rank=rank, world_size=2), checkpoint=late, peers=peers)
        here.load()
        for layer in here.plan.layers:
            alike(tensors_of(here.weights.layers[layer]), tensors_of(there[rank].weights.layers[layer]))
        server.close()


def test_what_nobody_has_is_named(stored):
    side = Layers(stored, (0, 1, 2, 3))
    server = ExpertServer(side)
    info, address = side.stored.info, server.address
    with pytest.raises(NotReady, match=f"no rank hands over expert 5 of layer {LAYER}"):
        RanksSource(info, {LAYER: {0: [address], 5: [address]}}, hurry=True).load_layer(LAYER, (0, 5), CPU)
    with pytest.raises(NotReady, match=f"gate and shared experts of layer {LAYER}"):
        RanksSource(info, {LAYER: {}}, hurry=True).load_layer(LAYER, (0,), CPU)
    # Any version of the placement will do: an expert is the same in all of them.
    side.placement = side.placement.with_version(9)
    got = RanksSource(info, {LAYER: {2: [address]}}, hurry=True).load_layer(LAYER, (2,), CPU)
    alike(tensors_of(got), tensors_of(side.stored.load_layer(LAYER, (2,))))
    server.close()


def test_a_newcomer_is_told_the_times(tmp_path):
    path = write("mixtral", tmp_path / "model", dtype=torch.float32)
    config = config_of(path, experts="auto", experts_times=None)
    first = Worker(config, RankContext())
    first.load()
    first.warm_up()
    (table,) = first.known.tables
    assert isinstance(table, KnownTable) and set(table.times[1]) == {"grouped_mm", "loop"}
    made_up = {bucket: dict.fromkeys(times, 1.0) | {"loop": 0.5} for bucket, times in table.times.items()}
    second = Worker(config, RankContext(), times=[dataclasses.replace(table, times=made_up)])
    second.load()
    second.warm_up()
    assert {choice.backend for choice in second.experts_choices()} == {"loop"}  # as told, and not as measured
    assert second.kernels.first.first.experts.times == made_up


# Through the engine.

engine_test = pytest.mark.asyncio(loop_scope="module")
long = pytest.mark.timeout(600)
FROM_RANKS = "newcomers take weights from the other ranks"


@pytest.fixture
def path(tmp_path):
    return write("deepseek_v3", tmp_path / "model", dtype=torch.float32)


def rows():
    return torch.randn((12, 64), generator=torch.Generator().manual_seed(12))


async def answer(engine):
    return await engine.forward(Batch(layer=LAYER, hidden=rows(), deadline=time.monotonic() + 120))


async def kill(engine, rank):
    victim = pids(engine)[rank]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: engine.state() != "serving", 5, "noticing the kill")
    await back(engine)
    return victim


@long
@engine_test
async def test_a_lost_rank_comes_back_without_files(path, tmp_path, caplog, monkeypatch):
    """Copies bridge the loss; the rank that comes back, from a standby, finds no checkpoint. Then there is one rank more."""
    monkeypatch.setattr(pools, "FIRST_DELAY_S", 0.0)
    caplog.set_level(logging.INFO, "epserve")
    expected = reference_block(path, LAYER)(rows())
    choices = {"experts": "loop", "combine_order": "slot", "standbys": 1}
    async with running(path, ranks=2, redundant_experts=8, **choices) as engine:
        before, held = await answer(engine), [rank.experts for rank in engine.status().ranks]
        await until(lambda: engine._pool.standbys.ready, BACK_S, "a standby")
        path.rename(tmp_path / "gone")
        victim = await kill(engine, 1)
        assert engine._pool.recoveries[-1].by == "copies"
        torch.testing.assert_close(await answer(engine), before, **TOLERANCE)
        await until(lambda: len(engine.status().ranks) == 2 and engine.state() == "serving", BACK_S, "growing back")
        assert FROM_RANKS in caplog.text and victim not in pids(engine)
        assert [rank.experts for rank in engine.status().ranks] == held
        assert torch.equal(await answer(engine), before)
        caplog.clear()
        assert (await engine.scale(3)).after == 3
        assert FROM_RANKS in caplog.text and len(engine.status().ranks) == 3
        torch.testing.assert_close(await answer(engine), before, **TOLERANCE)
        assert (await engine.scale(2)).after == 2
        torch.testing.assert_close(await answer(engine), before, **TOLERANCE)
        torch.testing.assert_close(before, expected, **TOLERANCE)


@long
@engine_test
async def test_a_spare_takes_over_without_files(path, tmp_path, caplog):
    caplog.set_level(logging.INFO, "epserve")
    async with running(path, ranks=2, redundant_experts=8, spares=1, experts="loop", combine_order="slot") as engine:
        before = await answer(engine)
        await spare(engine)
        path.rename(tmp_path / "gone")
        for number, rank in enumerate((0, 1)):  # the second spare has never seen the files
            caplog.clear()
            victim = await kill(engine, rank)
            assert victim not in pids(engine) and len(pids(engine)) == 2
            assert engine._pool.recoveries[-1].by == "spare" and FROM_RANKS in caplog.text, number
            assert torch.equal(await answer(engine), before)
            await spare(engine)


@long
@engine_test
async def test_without_copies_the_files_are_needed(path, tmp_path, monkeypatch):
    """Nobody holds the lost rank's experts: the reason names the file, and with the files back the service goes on."""
    monkeypatch.setattr("epserve.pool.supervisor.STUCK_RETRY_S", 1.0)
    async with running(path, ranks=2, experts="loop") as engine:
        before = await answer(engine)
        path.rename(tmp_path / "gone")
        os.kill(pids(engine)[1], signal.SIGKILL)
        await until(lambda: engine._pool.stuck, BACK_S, "knowing that it is stuck")
        with pytest.raises(NotReady, match=r"No such file or directory: .*config\.json"):
            await answer(engine)
        (tmp_path / "gone").rename(path)
        await back(engine)
        assert torch.equal(await asyncio.wait_for(answer(engine), 60), before)


@long
@engine_test
async def test_slices_of_experts_move_between_ranks_with_the_same_slice(tmp_path, caplog):
    """Ranks that share experts by slices: moves and other numbers of ranks need no files, either."""
    caplog.set_level(logging.INFO, "epserve")
    path = write("mixtral", tmp_path / "model", dtype=torch.float32)
    async with running(path, ranks=2, tensor_parallel=2, experts="loop") as engine:
        before = await answer(engine)
        path.rename(tmp_path / "gone")
        assert (await engine.scale(4)).after == 4
        assert FROM_RANKS in caplog.text
        torch.testing.assert_close(await answer(engine), before, **TOLERANCE)
        loads = {layer: [8.0, 7.0, 1.0, 1.0, 6.0, 1.0, 1.0, 1.0] for layer in engine.layers}
        done = await engine._pool.changes.rebalance(loads=loads)
        assert done.moved and done.came_from.keys() == {"here", "peer"}
        torch.testing.assert_close(await answer(engine), before, **TOLERANCE)
        assert (await engine.scale(2)).after == 2
        torch.testing.assert_close(await answer(engine), before, **TOLERANCE)
