"""Ranks that die or hang, on a real Ray cluster: callers get the right answer or a retryable status, then all is as before."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
import pytest_asyncio
import ray
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epserve.config import ServerConfig
from epserve.engine.engine import Batch
from epserve.errors import DeadlineExceeded, RankFailed
from epserve.models.demo import reference_block
from epserve.rank.actor import RankActor
from epserve.rank.groups import hang_up
from epserve.server.server import Server
from tests.support.checkpoints import LAYER, write
from tests.support.recovering import (
    BACK_S,
    HEARTBEAT_S,
    NOTICE_S,
    Load,
    ask,
    back,
    pids,
    reference_gradient,
    running,
    spare,
    until,
)  # fmt: skip

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("recovery"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path):
    return reference_block(path, LAYER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(path):
    async with running(path, ranks=4, spares=1, spare_weights="host") as engine:
        yield engine


async def test_kill_an_idle_rank(engine, reference, record_property):
    await ask(engine, reference)
    await spare(engine)
    before, generation = pids(engine), engine.status().generation
    states = []
    engine.on_state_change(states.append)
    os.kill(before[2], signal.SIGKILL)
    noticed = await until(lambda: engine.state() != "serving", NOTICE_S, "noticing the kill")
    assert not engine.status().ranks[2].alive
    recovered = await back(engine)
    assert states == ["recovering", "serving"]
    await ask(engine, reference)
    after = pids(engine)
    assert [after[rank] == before[rank] for rank in range(4)] == [
        True,
        True,
        False,
        True,
    ]  # survivors kept their weights
    assert engine.status().generation == generation + 1
    assert engine._pool.recoveries[-1].by == "spare"
    record_property("noticed_s", round(noticed, 3))
    record_property("recovered_s", round(recovered, 2))


async def test_health_is_never_green_while_a_rank_is_dead(engine, reference, record_property):
    """T26, and SIGTERM to a rank, which ends it in its own way. Polled over gRPC, as a load balancer does."""
    await spare(engine)
    server = Server(engine, ServerConfig(port=0))
    await server.start()
    names, seen = health_pb2.HealthCheckResponse.ServingStatus, []
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def health():
                return names.Name((await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status)

            assert await health() == "SERVING"
            victim, start = pids(engine)[1], time.monotonic()
            os.kill(victim, signal.SIGTERM)
            while "NOT_SERVING" not in seen or seen[-1] != "SERVING":
                seen.append(await health())
                if seen[-1] == "SERVING" and "NOT_SERVING" in seen:
                    assert victim not in pids(engine)
                if seen[-1] == "NOT_SERVING" and seen.count("NOT_SERVING") == 1:
                    record_property("not_serving_after_s", round(time.monotonic() - start, 3))
                    assert time.monotonic() - start < NOTICE_S
                assert time.monotonic() - start < BACK_S
                await asyncio.sleep(0.002)
            first = seen.index("NOT_SERVING")
            assert "SERVING" not in seen[first:-1]
    finally:
        await server.stop()
    await ask(engine, reference)


@pytest.mark.slow
async def test_kill_as_each_phase_begins(tmp_path):
    """T25: a rank ends itself as it enters dispatch, experts and combine; the caller of that step gets the right answer."""
    out = tmp_path / "recovery.json"
    words = ["--faults", "prepare", "experts", "finalize", "--repeats", "1", "--ranks", "3", "--heartbeat", "10"]
    command = [sys.executable, "-m", "benchmarks.recovery", *words, "--out", str(out)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    each = json.loads(out.read_text())["each"]
    assert [one["fault"] for one in each] == ["prepare", "experts", "finalize"]
    assert all(one["by"] == "spare" and one["answered_s"] < BACK_S for one in each)


@pytest.mark.parametrize("ranks", [[0], [1, 2]], ids=["first", "two at once"])
async def test_kill_during_steps(engine, path, reference, ranks, record_property):
    """Forward and backward steps in one order: both kinds are replayed."""
    await spare(engine)
    load = Load(engine, reference, gradient=reference_gradient(path, LAYER))
    await until(lambda: load.answers > 50, 60, "load")
    before = pids(engine)
    for rank in ranks:
        os.kill(before[rank], signal.SIGKILL)
    await until(lambda: engine.state() != "serving", NOTICE_S, "noticing the kill")
    recovered = await back(engine)
    answers = load.answers
    await until(lambda: load.answers > answers + 50, 60, "answers after recovery")
    await load.stop()
    # Requests in flight were replayed: their callers saw latency, not errors.
    assert load.retryable == 0
    assert load.slowest < BACK_S
    assert {rank for rank in range(4) if pids(engine)[rank] != before[rank]} == set(ranks)
    # With two lost at once the only spare does not suffice.
    assert engine._pool.recoveries[-1].by == ("spare" if len(ranks) == 1 else "process")
    record_property("recovered_s", round(recovered, 2))
    record_property("slowest_answer_s", round(load.slowest, 2))


async def test_a_hung_rank_is_killed_and_replaced(engine, reference, record_property):
    """SIGSTOP: the process is there and answers nothing. Its peers wait in their collectives until it is killed."""
    load = Load(engine, reference)
    await until(lambda: load.answers > 20, 60, "load")
    hung = pids(engine)[1]
    os.kill(hung, signal.SIGSTOP)
    try:
        noticed = await until(lambda: engine.state() != "serving", 2 * HEARTBEAT_S, "noticing the hang")
        recovered = await back(engine)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung, signal.SIGKILL)
    await load.stop()
    assert load.retryable == 0
    assert pids(engine)[1] != hung
    await ask(engine, reference)
    record_property("noticed_s", round(noticed, 2))
    record_property("recovered_s", round(recovered, 2))


async def test_an_idle_hung_rank_is_found_by_the_heartbeat(engine, reference):
    hung = pids(engine)[3]
    os.kill(hung, signal.SIGSTOP)
    try:
        await until(lambda: engine.state() != "serving", 2 * HEARTBEAT_S, "noticing the hang")
        assert re.search(
            rf"no sign of life for 4 s: rank 3 \(node [0-9.]+, process {hung}, cpu",
            engine._pool.supervisor.cause,
        )
        await back(engine)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung, signal.SIGKILL)
    assert pids(engine)[3] != hung
    await ask(engine, reference)


async def test_a_second_kill_during_recovery(engine, reference):
    await back(engine)
    before = pids(engine)
    os.kill(before[0], signal.SIGKILL)
    await until(lambda: engine.state() == "recovering", NOTICE_S, "noticing the kill")
    os.kill(before[1], signal.SIGKILL)
    await back(engine)
    await ask(engine, reference)
    assert engine.state() == "serving"
    after = pids(engine)
    assert [after[rank] == before[rank] for rank in range(4)] == [False, False, True, True]


async def test_short_deadlines_during_recovery_are_retryable(engine, reference):
    os.kill(pids(engine)[1], signal.SIGKILL)
    await until(lambda: engine.state() == "recovering", NOTICE_S, "noticing the kill")
    call = engine.forward(Batch(layer=LAYER, hidden=torch.ones(2, 64), deadline=time.monotonic() + 0.05))
    with pytest.raises(RankFailed, match="send the request again") as info:
        await call
    assert info.value.retryable
    await back(engine)
    await ask(engine, reference)


async def test_a_step_that_raises_on_one_rank_is_named_and_survived(engine, reference):
    """A frame that does not fit its plan, to rank 2 only: what a defect in a step looks like to its peers."""
    before = pids(engine)
    member = engine._pool.members[2]
    submit = member.link.submit
    spoiled = []

    def spoil(header, tensors, out):
        if "layer" in header and not spoiled:  # a heartbeat's frame passes here too
            spoiled.append(header["step"])
            tensors = [tensors[0].double().float()[:-1]]
        return submit(header, tensors, out)

    member.link.submit = spoil
    await ask(engine, reference)  # the first attempt fails, the replay is right
    assert len(spoiled) == 1
    assert pids(engine) == before  # nobody died: all left the broken group and met in the next one
    assert f"rank 2, step {spoiled[0]}, check: InternalError: hidden states" in engine._pool.recoveries[-1].cause
    assert engine._pool.recoveries[-1].replaced == ()


async def test_a_step_whose_operations_were_ended_from_outside_is_no_result(engine, reference):
    """What NCCL aborts ends as if all were well, with whatever is in its buffers: the rank must not answer with it."""
    before, generation = pids(engine), engine._pool.generation
    await engine._pool.members[1].actor.abort.remote(generation - 1, [])  # late: of a group that is no more
    await ask(engine, reference)
    assert engine._pool.generation == generation
    await engine._pool.members[1].actor.abort.remote(generation, [])
    await ask(engine, reference)
    assert pids(engine) == before and engine._pool.generation == generation + 1
    assert "another rank is gone, the operations of this step were ended" in engine._pool.recoveries[-1].cause


async def test_a_rank_that_fails_again_is_replaced(engine, reference):
    """Too little memory, say: a new group does not help it, another process may."""
    await spare(engine)
    before = pids(engine)
    rank = engine._pool.members[1]
    submit = rank.link.submit

    def spoil(header, tensors, out):
        return submit(header, [tensors[0][:-1].contiguous()] if "layer" in header and len(tensors[0]) else tensors, out)

    rank.link.submit = spoil
    await ask(engine, reference)
    after = pids(engine)
    assert [after[each] == before[each] for each in range(4)] == [True, False, True, True]
    assert engine._pool.recoveries[-1].replaced == (1,)


async def test_the_deadline_of_a_stuck_step_is_kept(engine):
    hung = pids(engine)[0]
    os.kill(hung, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises((DeadlineExceeded, RankFailed)):
            await engine.forward(Batch(layer=LAYER, hidden=torch.ones(2, 64), deadline=start + 1))
        assert time.monotonic() - start < 3
        os.kill(hung, signal.SIGCONT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung, signal.SIGCONT)
    await back(engine)


async def test_experts_that_are_missing_are_waited_for_or_refused(engine, reference, monkeypatch):
    """Two are lost at once and there is one spare: until a process has started, some experts are nowhere."""
    await spare(engine)
    monkeypatch.setattr(engine._scheduler, "_wait", False)
    for rank in (0, 3):
        os.kill(pids(engine)[rank], signal.SIGKILL)
    await until(lambda: engine._pool.experts_missing, NOTICE_S, "the second loss")
    with pytest.raises(RankFailed, match="when_experts_missing is refuse"):
        await ask(engine, reference)
    await back(engine)
    await ask(engine, reference)


async def test_a_spare_that_dies_is_replaced(engine, reference):
    await spare(engine)
    (idle,) = engine._pool.spares.members
    ray.kill(idle.actor)
    await until(lambda: idle not in engine._pool.spares.members, BACK_S, "noticing")
    await spare(engine)
    await ask(engine, reference)


async def test_hanging_up_ends_connections_to_one_host_only():
    """What a cut cable does not do: whoever waits for the other side learns at once that it is gone."""
    pairs = []
    for host in ("127.0.0.2", "127.0.0.3"):
        with socket.create_server((host, 0)) as listener:
            near = socket.create_connection(listener.getsockname(), timeout=10)
            pairs.append((near, listener.accept()[0]))
    (near, far), (other, other_far) = pairs
    waiting = threading.Thread(target=near.recv, args=(1,))
    waiting.start()
    assert hang_up(["127.0.0.2"]) == 1
    waiting.join(5)
    assert not waiting.is_alive()
    other_far.sendall(b"x")
    assert other.recv(1) == b"x"
    assert hang_up([]) == 0
    for each in (near, far, other, other_far):
        each.close()


SCRIPT = """
import asyncio, json, os, signal, subprocess, sys, time
from epserve.config import parse_config
from epserve.engine.engine import Engine

def children(*names):
    out = subprocess.run(["ps", "-o", "pid,args", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in out.splitlines() if any(f"/{name}/{name}" in line for name in names)]

async def main(config, what):
    engine = Engine(parse_config(config))
    await engine.start()
    ranks = [rank.pid for rank in engine.status().ranks]
    if what == "raise":
        raise ValueError("of all things")
    for pid in children("raylet") + [int(line) for line in subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "gcs_server"], capture_output=True, text=True).stdout.split()]:
        os.kill(pid, signal.SIGTERM)
    await asyncio.sleep(1)
    start = time.monotonic()
    await engine.close(drain_s=1)
    print(json.dumps([engine.state(), time.monotonic() - start, [os.path.exists(f"/proc/{pid}") for pid in ranks]]))

asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2]))
"""


def run_script(path, what):
    config = {"model": {"path": str(path)}, "engine": {"ranks": 2, "device": "cpu", "experts": "grouped_mm"}}
    command = [sys.executable, "-c", SCRIPT, json.dumps(config), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


async def test_closing_when_ray_is_gone(path):
    """What a signal to the whole process group does: Ray's processes end first. Ray would end ours a minute later."""
    done = await asyncio.to_thread(run_script, path, "close")
    assert done.returncode == 0, done.stderr
    state, seconds, left = json.loads(done.stdout.splitlines()[-1])
    assert state == "stopped"
    assert seconds < 45
    assert left == [False, False]


async def test_an_uncaught_exception_is_seen(path):
    """Ray's own hook would call its control service, not come back, and end the process after a minute, unexplained."""
    start = time.monotonic()
    done = await asyncio.to_thread(run_script, path, "raise")
    assert "ValueError: of all things" in done.stderr
    assert "Failed to connect to GCS" not in done.stderr
    assert done.returncode == 1
    assert time.monotonic() - start < 250


class PoorSpare(RankActor):
    """A spare for whose experts there is no memory when it takes over."""

    def take_over(self, *args):
        if self._checkpoint is None:  # a rank of the start, not a spare
            return super().take_over(*args)
        raise MemoryError("DefaultCPUAllocator: can't allocate memory")


async def test_a_spare_with_too_little_memory_is_passed_over(path, reference, monkeypatch):
    monkeypatch.setattr("epserve.pool.members.RankActor", PoorSpare)
    async with running(path, ranks=2, spares=1) as engine:
        await spare(engine)
        before = pids(engine)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: engine.state() != "serving", NOTICE_S, "noticing the kill")
        await back(engine)
        assert engine._pool.recoveries[-1].by == "process"
        assert [mine == old for mine, old in zip(pids(engine), before, strict=True)] == [True, False]
        await ask(engine, reference)
