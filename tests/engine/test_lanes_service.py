"""Lanes on real ranks: the bits of gRPC, one order of steps with all other requests, and right answers while ranks die, hang,
and change."""

import asyncio
import os
import signal
import threading

import pytest
import pytest_asyncio
import torch

from epserve.client import Client
from epserve.config import ServerConfig
from epserve.models.demo import reference_block
from epserve.process import words
from epserve.server.server import Server
from tests.support.checkpoints import LAYER, write
from tests.support.recovering import BACK_S, TOLERANCE, back, pids, running, spare, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(words.why_not()), reason=words.why_not() or "-"),
]
LIMIT_S = 200
CALL_S = BACK_S + 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("lanes"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path):
    return reference_block(path, LAYER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(path):
    async with running(path, ranks=2, spares=1, spare_weights="host", redundant_experts=2) as engine:
        server = Server(engine, ServerConfig(port=0))
        await server.start()
        yield engine, server
        await server.stop()


def tokens(count, seed=0):
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(1000 * seed + count))


class Clients:
    """Threads that call one layer without pause, over lanes and over gRPC. Every answer is compared."""

    def __init__(self, address, reference, *, lanes=2, messages=1):
        self._address, self._reference = address, reference
        self.over_lanes, self.over_grpc = [0] * lanes, [0] * messages
        self.errors = []
        self._stop = threading.Event()
        work = [(self._lane, number) for number in range(lanes)] + [(self._grpc, number) for number in range(messages)]
        self._threads = [threading.Thread(target=self._watched, args=each) for each in work]
        for thread in self._threads:
            thread.start()

    def _watched(self, function, number):
        try:
            function(number)
        except BaseException as error:
            self.errors.append(error)

    def _lane(self, number):
        with Client(self._address) as client, client.open_lane(16, slots=2, call_timeout=CALL_S) as lane:
            x = tokens(1 + 5 * number, number)
            expected = self._reference(x)
            while not self._stop.is_set():
                lane.x()[: len(x)] = x
                torch.testing.assert_close(lane.call(LAYER, len(x)).clone(), expected, **TOLERANCE)
                lane.check()
                torch.testing.assert_close(lane.forward(LAYER, x), expected, **TOLERANCE)
                self.over_lanes[number] += 2

    def _grpc(self, number):
        with Client(self._address) as client:
            x = tokens(3 + number, 50 + number)
            expected = self._reference(x)
            while not self._stop.is_set():
                torch.testing.assert_close(client.forward(LAYER, x, timeout=CALL_S), expected, **TOLERANCE)
                self.over_grpc[number] += 1

    async def more(self, count=5):
        """Returns when each client has had so many answers more."""
        want = [done + count for done in (*self.over_lanes, *self.over_grpc)]
        await until(
            lambda: self.errors or all(has >= each for has, each in zip((*self.over_lanes, *self.over_grpc), want, strict=True)),
            LIMIT_S, "answers",
        )  # fmt: skip
        assert not self.errors, self.errors

    async def end(self):
        self._stop.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, LIMIT_S)
        assert not self.errors, self.errors


async def test_the_bits_of_grpc_and_no_queue_while_the_ranks_are_idle(service):
    engine, server = service
    ids = torch.randint(0, 8, (37, 2), generator=torch.Generator().manual_seed(1)).int()
    weights = torch.rand((37, 2), generator=torch.Generator().manual_seed(2))

    def calls():
        with Client(server.address) as client, client.open_lane(37) as lane:
            for count in (1, 2, 3, 16, 37):
                x = tokens(count)
                assert torch.equal(lane.forward(LAYER, x), client.forward(LAYER, x))
                routing = ids[:count], weights[:count]
                assert torch.equal(lane.forward(LAYER, x, *routing), client.forward(LAYER, x, *routing))
            return client.status().lanes

    before = engine.status().steps
    lanes = await asyncio.wait_for(asyncio.to_thread(calls), LIMIT_S)
    assert (lanes.calls, lanes.refused) == (10, 0)
    assert lanes.waited == 0, "they go to the ranks at once"
    await until(lambda: engine.status().steps == before + 20, LIMIT_S, "the steps are counted")
    assert engine.status().queue_tokens == 0


@pytest.mark.parametrize("in_place", [True, False], ids=["rows in place", "no room in the ranks' memory"])
async def test_calls_of_a_kind_have_the_rows_and_the_routing_of_each(service, monkeypatch, in_place):
    """The step of a kind is written down once. What differs from call to call must not be."""
    engine, server = service
    if not in_place:
        monkeypatch.setattr(type(engine.now), "memory", lambda self, nbytes: None)
    written = []
    real = type(engine.now).ready
    monkeypatch.setattr(type(engine.now), "ready", lambda self, batches: written.append(1) or real(self, batches))

    def calls():
        with Client(server.address) as client, client.open_lane(5) as lane:
            for seed in range(6):
                x = tokens(5, seed)
                ids = torch.randint(0, 8, (5, 2), generator=torch.Generator().manual_seed(seed)).int()
                weights = torch.rand((5, 2), generator=torch.Generator().manual_seed(seed))
                assert torch.equal(lane.forward(LAYER, x), client.forward(LAYER, x))
                assert torch.equal(lane.forward(LAYER, x, ids, weights), client.forward(LAYER, x, ids, weights))

    await asyncio.wait_for(asyncio.to_thread(calls), LIMIT_S)
    assert len(written) == (2 if in_place else 12)


async def test_lanes_and_messages_share_the_ranks(service, reference):
    engine, server = service
    clients = Clients(server.address, reference, lanes=3, messages=2)
    await clients.more(20)
    rebalanced = await engine.rebalance()
    await clients.more(20)
    await clients.end()
    assert rebalanced is not None
    lanes = server._lanes.shown()
    assert lanes.refused == 0 and lanes.waited > 0 and engine.status().recoveries == 0


async def test_a_rank_that_is_killed_under_lanes(service, reference):
    engine, server = service
    await spare(engine)
    clients = Clients(server.address, reference)
    await clients.more()
    recoveries = engine.status().recoveries
    os.kill(pids(engine)[1], signal.SIGKILL)
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)
    await clients.more()
    await clients.end()
    assert server._lanes.shown().refused == 0, "each call under way was computed again"


async def test_a_rank_that_stands_still_under_a_lane_alone(service, reference):
    """No other request notices it: the lane's own step does, at the ranks' heartbeat."""
    engine, server = service
    await spare(engine)
    clients = Clients(server.address, reference, lanes=1, messages=0)
    await clients.more()
    recoveries = engine.status().recoveries
    os.kill(pids(engine)[0], signal.SIGSTOP)
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)
    await clients.more()
    await clients.end()


async def test_another_number_of_ranks_under_lanes(service, reference):
    engine, server = service
    clients = Clients(server.address, reference)
    await clients.more()
    await engine.scale(1)
    await clients.more()
    await engine.scale(2)
    await clients.more()
    await clients.end()
    assert server._lanes.shown().refused == 0
