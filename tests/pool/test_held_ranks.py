"""Ranks that wait on their device for one that is gone, in kernels that nothing ends: they are put down, and not the cause."""

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.recovery import MortalRank
from epserve import all2all
from epserve.models.demo import reference_block
from epserve.pool import members
from epserve.pool import pool as pools
from epserve.pool.supervisor import SETTLE_HELD_S, Supervisor
from tests.support.checkpoints import LAYER, write
from tests.support.recovering import BACK_S, ask, back, pids, running, until


def test_which_backends_hold_a_rank():
    held = {name for name in all2all.REGISTRY.names()
            if not all2all.REGISTRY.get(name).prepare_finalize.capability.interruptible}  # fmt: skip
    assert held == {"deepep_ht", "deepep_ll", "deepep_v2"}


class HeldRank(MortalRank):
    """A rank that can be told to wait for ever, as in a kernel, when it enters a phase of its next step."""

    def hang_in(self, phase: str) -> None:
        for path in self._worker.kernels.first.paths.values():
            path.kernel.on_phase = lambda name: time.sleep(600) if name == phase else None


@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_a_held_rank_is_put_down_at_once_and_is_not_the_cause(tmp_path, monkeypatch):
    """Rank 1 dies as it enters the experts; rank 0 hangs there and would have 5 s to leave if its all-to-all could be ended."""
    path = write("deepseek_v3", tmp_path / "model", dtype=torch.float32)
    reference = reference_block(path, LAYER)
    monkeypatch.setattr(members, "RankActor", HeldRank)
    monkeypatch.setattr(pools, "FIRST_DELAY_S", 0.0)
    backend = all2all.REGISTRY.get("all_to_all").prepare_finalize
    monkeypatch.setattr(backend, "capability", dataclasses.replace(backend.capability, interruptible=False))
    async with running(path, ranks=2, standbys=2, all2all="all_to_all") as engine:
        pool = engine._pool
        assert not pool.interruptible
        await ask(engine, reference)
        await until(lambda: pool.standbys.ready == 2, BACK_S, "two standbys")
        before = pids(engine)
        assert (await pool.members[0].call(HeldRank.hang_in, "experts", timeout=20)).failure is None
        assert (
            await pool.members[1].call(HeldRank.die_in, "experts", str(tmp_path / "note"), timeout=20)
        ).failure is None
        await ask(engine, reference)  # the step that it takes along is run again
        await back(engine)
        await asyncio.sleep(0)
        (done,) = pool.recoveries
        assert done.replaced == (0, 1) and done.by == "standby" and not set(before) & set(pids(engine))
        assert "rank 1, process: gone" in done.cause
        assert SETTLE_HELD_S <= done.stages["fence"] < 4  # 10 s with one that can be ended


@pytest.mark.asyncio
@pytest.mark.parametrize(("seconds", "why"), [(0.0, "is gone"), (0.2, "did not answer for 0.1 s")])
async def test_nobody_is_said_to_have_waited_who_has_not(seconds, why):
    ended = []

    async def ping(limit):
        await asyncio.sleep(seconds)
        return False

    async def end(member, why):
        ended.append(why)

    config = SimpleNamespace(scheduler=SimpleNamespace(heartbeat_s=0.1))
    supervisor = SimpleNamespace(_ranks=SimpleNamespace(config=config), _end=end)
    await Supervisor._end_if_silent(supervisor, SimpleNamespace(ping=ping))
    assert ended == [why]
