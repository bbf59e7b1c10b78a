"""Links between the engine and a rank, and reports of what failed there. No Ray."""

import asyncio
import pickle
import socket
import threading

import pytest
import torch

from epserve.errors import RankFailed
from epserve.link import wire
from epserve.link.failure import Failure, RankLost, StepError, from_exception, root_cause
from epserve.link.step_server import StepServer
from epserve.link.transport import SocketLink


def tokens(count, seed=0):
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(1000 * seed + count))


async def test_a_link_answers_in_order_and_reports_the_end_once():
    held = threading.Event()

    def answer(header, parts, out):
        held.wait(60)
        if header["step"] == 2:
            return {"step": 2, "failure": failure(3, "experts", consequence=False).as_json()}, []
        return {"step": header["step"]}, [parts[0] * 2]

    server, lost = StepServer(answer), []
    link = await SocketLink.open(server.address, lambda: lost.append(3))
    inputs = [tokens(count, seed=count) for count in (5, 0, 4000, 7)]
    outs = [torch.empty_like(x) for x in inputs]
    calls = [link.submit({"step": step}, [x], out) for step, (x, out) in enumerate(zip(inputs, outs, strict=True))]
    assert link.num_pending == 4
    held.set()
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert isinstance(answers[2], RankLost)
    assert "rank 3, step 9, experts: broke" in str(answers[2])
    assert [torch.equal(out, x * 2) for x, out in zip(inputs, outs, strict=True)] == [True, True, False, True]
    link.close()
    assert lost == []
    with pytest.raises(RankLost, match="closed"):
        await link.submit({"step": 9}, [inputs[0]], outs[0])
    server.close()


async def test_bytes_of_every_dtype_pass_unchanged():
    server = StepServer(lambda header, parts, out: ({"step": header["step"]}, [parts[-1]]))
    link = await SocketLink.open(server.address, print)
    for step, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16, torch.int32)):
        x = (tokens(33) * 100).to(dtype)
        out = torch.empty_like(x)
        await asyncio.wait_for(link.submit({"step": step}, [tokens(2), x], out), 60)
        assert torch.equal(out, x)
    link.close()
    server.close()


async def test_a_stranger_is_turned_away_and_the_engine_still_gets_in():
    server = StepServer(lambda header, parts, out: ({"step": header["step"]}, [parts[0]]))
    for greeting in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"EPS2\xff\xff\xff\xff\0\0\0\0",
        b"".join(wire.encode({"token": "no"}, [])),
    ):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(60)
            stranger.connect("\0" + server.address.name)
            wire.receive_header(stranger)  # its hello
            stranger.sendall(greeting)
            with pytest.raises(ConnectionError):
                wire.receive_header(stranger)
    link = await SocketLink.open(server.address, print)
    out = torch.empty(3, 64)
    await asyncio.wait_for(link.submit({"step": 0}, [tokens(3)], out), 60)
    assert torch.equal(out, tokens(3))
    link.close()
    server.close()


def failure(rank, phase, *, consequence, step=9):
    return Failure(rank=rank, phase=phase, step=step, message="broke", consequence=consequence)


async def test_a_beat_is_answered_by_the_step_thread_and_counts_as_no_step():
    held = threading.Event()

    def answer(header, parts, out):
        assert header["beat"]
        held.wait(60)
        return {"step": header["step"]}, []

    server = StepServer(answer)
    link = await SocketLink.open(server.address, print)
    beat = link.beat()
    await asyncio.sleep(0.05)
    assert not beat.done() and link.num_pending == 0 and not link.heard
    held.set()
    await asyncio.wait_for(beat, 60)
    assert link.heard > 0
    link.close()
    server.close()


async def test_the_root_cause_is_the_rank_that_no_other_one_explains():
    reports = [
        failure(0, "dispatch", consequence=True),
        failure(2, "experts", consequence=False),
        failure(1, "x", consequence=True),
    ]
    assert root_cause(reports).rank == 2
    assert root_cause(reports[:1]).rank == 0


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), True),
        (RankFailed("combine: rank 0 of 4 got no answer from another rank (deadline 30 s)"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("index out of range"), False),
    ],
)
async def test_an_exception_becomes_a_report(error, consequence):
    outer = StepError(2, 7, "experts", str(error))
    outer.__cause__ = error
    report = pickle.loads(pickle.dumps(from_exception(outer, rank=2, phase="step")))
    assert (report.rank, report.step, report.phase, report.consequence) == (2, 7, "experts", consequence)
    assert str(error) in report.describe()
