"""Steps whose answers come later, as a GPU's do: the next one begins meanwhile, order and failures stay as they were."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from epserve.link import step_server
from epserve.link.failure import RankLost
from epserve.link.step_server import MOST_LATER, StepServer, Watched
from epserve.link.transport import SocketLink
from epserve.rank import steps
from epserve.rank.groups import GroupAddress
from epserve.rank.step import StepPlan
from tests.rank.test_rank_actor import GENERATION, LAYER, NOWHERE, rank
from tests.support.grpc_calls import until

__all__ = ["rank"]  # a fixture
LIMIT_S = 30.0


class Device:
    """Answers come when `ended` is set; `begun` has the steps in the order in which they began."""

    def __init__(self):
        self.begun: list[int] = []
        self.ended = threading.Event()

    def answer(self, header, tensors, out):
        self.begun.append(header["step"])
        if header["step"] < 0:
            return {"step": header["step"]}, []

        def later():
            self.ended.wait(LIMIT_S)
            return {"step": header["step"]}, [tensors[0] * 2]

        return later


async def test_the_next_step_begins_before_the_first_ends_and_answers_keep_their_order():
    device = Device()
    server = StepServer(device.answer)
    link = await SocketLink.open(server.address, lambda: None)
    order: list[int] = []
    outs = [torch.empty(3) for _ in range(2)]
    for number, out in enumerate(outs):
        call = link.submit({"step": number}, [torch.full((3,), float(number))], out)
        call.add_done_callback(lambda _, number=number: order.append(number))
    beat = link.beat()
    beat.add_done_callback(lambda _: order.append(-1))
    await until(lambda: device.begun == [0, 1, -1])
    await asyncio.sleep(0.05)
    assert not order, "a beat says that all steps before it have ended"
    device.ended.set()
    await asyncio.wait_for(beat, LIMIT_S)
    assert order == [0, 1, -1]
    assert [out[0].item() for out in outs] == [0.0, 2.0]
    link.close()
    server.close()


async def test_so_many_answers_are_waited_for_and_no_more():
    device = Device()
    server = StepServer(device.answer)
    link = await SocketLink.open(server.address, lambda: None)
    calls = [link.submit({"step": number}, [torch.ones(3)], torch.empty(3)) for number in range(20)]
    await until(lambda: len(device.begun) >= MOST_LATER)
    await asyncio.sleep(0.05)
    assert len(device.begun) <= MOST_LATER + 2  # one is being waited for, one wants room
    device.ended.set()
    await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
    assert device.begun == list(range(20))
    link.close()
    server.close()


async def test_a_result_is_answered_by_the_step_thread_unless_a_frame_comes_or_it_takes_long(monkeypatch):
    """Another thread wakes up for it only where the step thread has something else to do."""
    monkeypatch.setattr(step_server, "WATCHED_S", LIMIT_S)
    device, looked = Device(), threading.Event()
    by: dict[int, str] = {}

    def answer(header, tensors, out):
        later = device.answer(header, tensors, out)

        def ready() -> bool:
            looked.set()
            return device.ended.is_set()

        def named():
            by[header["step"]] = threading.current_thread().name
            return later()

        return Watched(named, ready) if callable(later) else later

    server = StepServer(answer)
    link = await SocketLink.open(server.address, lambda: None)
    out = torch.empty(3)
    alone = link.submit({"step": 0}, [torch.ones(3)], out)
    await asyncio.to_thread(looked.wait, LIMIT_S)
    device.ended.set()
    await asyncio.wait_for(alone, LIMIT_S)
    device.ended.clear()
    looked.clear()
    first = link.submit({"step": 1}, [torch.ones(3)], torch.empty(3))
    await asyncio.to_thread(looked.wait, LIMIT_S)
    second = link.submit({"step": 2}, [torch.ones(3)], torch.empty(3))
    await until(lambda: device.begun == [0, 1, 2])
    device.ended.set()
    await asyncio.wait_for(asyncio.gather(first, second), LIMIT_S)
    assert by == {0: "steps", 1: "answers", 2: "answers"} and torch.equal(out, torch.full((3,), 2.0))
    device.ended.clear()
    monkeypatch.setattr(step_server, "WATCHED_S", 0.0)
    late = link.submit({"step": 3}, [torch.ones(3)], torch.empty(3))
    await until(lambda: 3 in by)
    assert by[3] == "answers" and not late.done()
    device.ended.set()
    await asyncio.wait_for(late, LIMIT_S)
    link.close()
    server.close()


def test_a_device_that_failed_is_told_by_the_wait_and_not_by_the_look_before_it():
    class Broken:
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert steps._ended(Broken()) and steps._ended(None)


async def test_a_connection_that_ends_waits_for_what_has_begun_and_the_next_one_is_served():
    device = Device()
    server = StepServer(device.answer)
    link = await SocketLink.open(server.address, lambda: None)
    call = link.submit({"step": 1}, [torch.ones(3)], torch.empty(3))
    await until(lambda: device.begun == [1])
    link.close()
    with pytest.raises(RankLost, match="closed here"):
        await call
    opening = asyncio.ensure_future(SocketLink.open(server.address, lambda: None))
    await asyncio.sleep(0.05)
    assert not opening.done(), "the device may still be at the first one's memory"
    device.ended.set()
    again = await asyncio.wait_for(opening, LIMIT_S)
    out = torch.empty(3)
    await asyncio.wait_for(again.submit({"step": 2}, [torch.ones(3)], out), LIMIT_S)
    assert torch.equal(out, torch.full((3,), 2.0))
    again.close()
    server.close()


def begin(actor, step, generation=GENERATION, tokens=9):
    x = torch.randn((tokens, 64), generator=torch.Generator().manual_seed(step))
    plan = StepPlan(step=step, layer=LAYER, mode="block", tokens_per_rank=(9,), generation=generation)
    return actor._answer(plan.as_json(), [x], None)


@pytest.fixture
def ahead(rank, monkeypatch):
    """The rank, as one on a GPU."""
    actor, _ = rank
    monkeypatch.setattr(type(actor), "_overlaps", property(lambda self: True))
    return actor


def test_whoever_wants_the_rank_waits_for_what_has_begun(ahead):
    first, second = begin(ahead, 1), begin(ahead, 2)
    joining = threading.Thread(target=ahead.call, args=("join", GroupAddress(store=NOWHERE, generation=4)))
    joining.start()
    joining.join(0.2)
    assert joining.is_alive()
    assert "failure" not in first()[0]
    joining.join(0.2)
    assert joining.is_alive(), "one more has begun"
    told, (y,) = second()
    assert told["step"] == 2
    assert set(told["phases"]) >= {"gate", "experts"}
    assert y.shape == (9, 64)
    joining.join(LIMIT_S)
    assert not joining.is_alive()
    assert "generation 3 has ended" in begin(ahead, 3)[0]["failure"]["message"]
    assert "failure" not in begin(ahead, 4, generation=4)()[0]


def test_a_step_that_fails_takes_those_behind_it_along(ahead, monkeypatch):
    """Its group goes at once: what the others leave behind is no result."""
    first, second = begin(ahead, 1), begin(ahead, 2)

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(ahead._worker, "check", broken)
        told, tensors = first()
    assert not tensors
    assert told["step"] == 1
    assert not told["failure"]["consequence"]
    told, tensors = second()
    assert not tensors
    assert told["failure"]["consequence"]
    told, tensors = begin(ahead, 3)
    assert told["failure"]["consequence"]
    assert ahead.call("join", GroupAddress(store=NOWHERE, generation=5)).failure is None
    assert "failure" not in begin(ahead, 4, generation=5)()[0]


def test_a_step_that_cannot_begin_takes_those_before_it_along(ahead):
    first = begin(ahead, 1)
    told, tensors = begin(ahead, 2, tokens=8)  # planned: 9
    assert not tensors
    assert "planned (9, 64)" in told["failure"]["message"]
    assert first()[0]["failure"]["consequence"]
