"""Processes that wait without weights: where one may take a lost rank's place, and that it does."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from epserve.config import parse_config
from epserve.errors import NotReady
from epserve.link.failure import Failure
from epserve.pool import reserves
from epserve.pool.ray_cluster import Gang, Place
from epserve.pool.reserves import SPARE, STANDBY, Reserve
from epserve.rank import device
from epserve.rank.actor import RankActor
from epserve.rank.device import lives, start_ticks, wait_for_end
from epserve.rank.reports import Outcome, RankFacts
from tests.support.checkpoints import write
from tests.support.ranks import RANKS_PER_GPU, cluster_section, num_places
from tests.support.recovering import until


def facts(node_id="a", **changes):
    return RankFacts(**{"rank": 0, "pid": 1, "node_id": node_id, "node_ip": "10.0.0.1", "device": "cpu", **changes})


class Process:
    """As much of a Member as a Reserve sees. `fails`: so many starts go wrong."""

    def __init__(self, node_id, fails=()):
        self.node_id, self.fails, self.facts, self.answers, self.dropped = node_id, fails, None, True, False

    async def call(self, method, chosen, timeout):
        assert (method, chosen, timeout) in (
            (RankActor.stand_by, ("backends",), 9),
            (RankActor.warm, "welcome", 9),
        )
        await asyncio.sleep(0)
        if self.fails:
            failure = Failure(rank=-1, phase=method.__name__, step=-1, message=self.fails.pop(), consequence=False)
            return Outcome(failure=failure)
        return Outcome(value=facts(self.node_id))

    async def ping(self, timeout):
        return self.answers


QUICK = replace(STANDBY, delay_s=0.01, retry_s=0.01)
QUICK_SPARE = replace(SPARE, delay_s=0.01, retry_s=0.01)


def make(per_node=1, fails=(), kind=QUICK, argument=("backends",)):
    made = []

    def start(node_id):
        made.append(Process(node_id, fails))
        return made[-1]

    def drop(process):
        process.dropped = True

    return Reserve(kind, start, drop, per_node=per_node, argument=argument, start_timeout_s=9), made


async def ready(all_of_them, count):
    await until(lambda: all_of_them.ready == count, 10, f"{count} standbys")


async def test_each_node_has_its_own_and_a_used_one_is_followed_by_another():
    waiting, made = make(per_node=2)
    waiting.refill(["a", "b"], delay=0)
    await ready(waiting, 4)
    assert sorted(process.node_id for process in made) == ["a", "a", "b", "b"] and set(waiting.nodes) == {"a", "b"}
    assert waiting.take("c") is None
    taken = waiting.take("b")
    assert taken.node_id == "b" and waiting.ready == 3
    waiting.refill(["a", "b"])
    await ready(waiting, 4)
    assert not taken.dropped  # it is the taker's
    waiting.refill(["a"])  # no rank is left on b
    assert waiting.ready == 2 and sum(process.dropped for process in made) == 2
    await asyncio.gather(*waiting.close(), return_exceptions=True)
    assert all(process.dropped for process in made if process is not taken)


async def test_none_are_started_where_none_are_wanted():
    waiting, made = make(per_node=0)
    waiting.refill(["a"], delay=0)
    await asyncio.sleep(0.02)
    assert not made and not waiting.close()


async def test_spares_are_kept_in_one_line_wherever_they_are(caplog):
    """The first that was ready is the first that is used. One that cannot start does not end the filling."""
    waiting, made = make(per_node=2, fails=["no place"], kind=QUICK_SPARE, argument="welcome")
    waiting.refill(delay=0)
    await ready(waiting, 2)
    assert [process.node_id for process in made] == [reserves.ANYWHERE] * 3
    assert "a spare could not start: rank -1, warm: no place" in caplog.text
    assert [waiting.take(), waiting.take(), waiting.take()] == [made[1], made[2], None]
    waiting.refill()
    await ready(waiting, 2)
    assert [process.dropped for process in made[:3]] == [True, False, False]
    await asyncio.gather(*waiting.close(), return_exceptions=True)


async def test_spares_come_first():
    waiting, made = make()
    filling = asyncio.ensure_future(asyncio.sleep(0.1))
    waiting.refill(["a"], delay=0, after=filling)
    await asyncio.sleep(0.02)
    assert not made
    await ready(waiting, 1)
    assert filling.done()


async def test_one_that_cannot_start_or_falls_silent_is_replaced(caplog):
    waiting, made = make(fails=["no module"])
    waiting.refill(["a"], delay=0)
    await ready(waiting, 1)
    assert [process.dropped for process in made] == [True, False]
    assert "a standby could not start: rank -1, stand_by: no module" in caplog.text
    await waiting.check(1)
    assert waiting.ready == 1
    made[1].answers = False
    await waiting.check(1)
    assert made[1].dropped
    await ready(waiting, 1)
    assert len(made) == 3


async def test_behind_a_cut_cable_none_is_asked():
    waiting, made = make()
    waiting.refill(["a", "b"], delay=0)
    await ready(waiting, 2)
    waiting.leave("a")
    assert waiting.take("a") is None and waiting.take("b") is not None
    assert [process.dropped for process in made if process.node_id == "a"] == [True]


@pytest.mark.parametrize(
    ("nodes", "per_node", "wanted"), [("aab", 1, 2), ("aab", 2, 0), ("abc", 0, 0), ("aaaabbbb", 3, 4), ("", 0, 0)]
)
def test_ranks_that_are_lost_together_want_as_many_standbys(nodes, per_node, wanted):
    said = reserves.too_few(nodes, per_node)
    assert (f"engine.standbys is {per_node}: set it to {wanted}," in said) if wanted else not said


def test_places_remember_who_was_there():
    config = parse_config({"model": {"path": "."}})
    gang, group = Gang(config, "cpu"), SimpleNamespace()
    for number in range(3):
        gang.give(Place(group, number), facts("ab"[number]) if number < 2 else None)
    place, last = gang.take_again(["b"])
    assert (place.bundle, last.node_id) == (1, "b") and gang.take_again(["b"]) is None
    first = gang.take()
    assert (first.bundle, first.last.node_id) == (0, "a")
    assert gang.take().last is None


def test_on_a_gpu_host_a_place_counts_only_with_the_gpu_of_its_last_process():
    gang = Gang(parse_config({"model": {"path": "."}}), "cuda")
    for number, visible in enumerate(["", "3"]):
        gang.give(Place(SimpleNamespace(), number), facts("a", visible=visible))
    assert gang.take_again(["a"])[0].bundle == 1 and gang.take_again(["a"]) is None


def test_the_end_of_a_process_is_waited_for(monkeypatch):
    """A killed one is a zombie until its parent asks, and has given everything back by then."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    process.stdout.readline()
    with open(f"/proc/{process.pid}/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    there = facts(pid=process.pid, started=started)
    try:
        assert lives(process.pid, started)
        assert not lives(process.pid, started - 1)  # the number was somebody else's
        monkeypatch.setattr(device, "END_TIMEOUT_S", 0.05)
        with pytest.raises(NotReady, match=rf"process {process.pid}, whose place .* has not ended within 0.05 s"):
            wait_for_end(there)
        monkeypatch.setattr(device, "END_TIMEOUT_S", 20)
        process.kill()
        wait_for_end(there)
        with open(f"/proc/{process.pid}/stat") as file:
            assert file.read().rpartition(")")[2].split()[0] == "Z"
    finally:
        process.kill()
        process.communicate()
    wait_for_end(there)
    assert lives(os.getpid(), start_ticks())


LOSE = """
import asyncio, json, os, signal, sys, time, torch
from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine

async def until(condition):
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)

async def main(config):
    engine = Engine(parse_config(config))
    await engine.start()
    try:
        x = torch.randn((64, engine.info.hidden), generator=torch.Generator().manual_seed(5)).to(engine.info.dtype)
        ask = lambda: engine.forward(Batch(layer=1, hidden=x, deadline=time.monotonic() + 200))
        y, ranks = await ask(), engine.status().ranks
        await until(lambda: engine._pool.standbys.ready)
        (standby,) = engine._pool.standbys.members
        os.kill(ranks[1].pid, signal.SIGKILL)
        await until(lambda: engine.state() != "serving")
        await until(lambda: engine.state() == "serving")
        again, after = await ask(), engine.status().ranks
        await until(lambda: engine._pool.standbys.ready)  # the next one, by when Ray has said what it has to say
        return {
            "by": [each.by for each in engine._pool.recoveries],
            "pids": [[rank.pid for rank in each] for each in (ranks, after)], "standby": standby.facts.pid,
            "gpus": [[rank.gpu_uuid for rank in each] for each in (ranks, after)],
            "error": float((again.double() - y.double()).norm() / y.double().norm()),
        }
    finally:
        await engine.close()

print(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))))
"""


def lose_a_rank(path, device, *, limit):
    """In a process of its own, whose standard output is what a user sees."""
    engine = {"ranks": 2, "device": device, "spares": 0}
    config = {"model": {"path": str(path)}, "engine": engine, "cluster": {"start_timeout_s": 240} | cluster_section()}
    command = [sys.executable, "-c", LOSE, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 1: its process is gone" in done.stderr  # our own line
    assert "(raylet)" not in done.stdout + done.stderr and len(done.stdout.splitlines()) == 1, done.stdout
    return json.loads(done.stdout)


def check(seen):
    before, after = seen["pids"]
    assert seen["by"] == ["standby"] and after == [before[0], seen["standby"]]


@pytest.mark.timeout(600)
def test_a_standby_takes_the_place_of_a_lost_rank(tmp_path):
    seen = lose_a_rank(write("deepseek_v3", tmp_path / "model", dtype=torch.float32), "cpu", limit=500)
    check(seen)
    assert seen["error"] < 1e-5


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(num_places() < 2, reason="needs 2 CUDA GPUs")
def test_a_standby_takes_the_gpu_of_a_lost_rank(tmp_path):
    sizes = {"hidden": 512, "intermediate": 256, "num_experts": 16}
    seen = lose_a_rank(write("deepseek_v3", tmp_path / "model", dtype=torch.bfloat16, **sizes), "cuda", limit=500)
    check(seen)
    before, after = seen["gpus"]
    assert before == after and len(set(after)) == (2 if RANKS_PER_GPU == 1 else 1) and all(after)
    assert seen["error"] < 1e-2
