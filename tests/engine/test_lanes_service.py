"""Lanes on real ranks: the bits of gRPC, one order of steps with all other requests, and right answers while ranks die, hang,
and change."""

import asyncio
import os
import signal
import time

import pytest
import pytest_asyncio
import torch

from epserve.client import Client
from epserve.config import ServerConfig
from epserve.models.demo import reference_block
from epserve.process import words
from epserve.server.server import Server
from tests.support.checkpoints import LAYER, write
from tests.support.lanes import LIMIT_S, Clients, tokens
from tests.support.recovering import back, pids, running, spare, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(words.why_not()), reason=words.why_not() or "-"),
]


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


async def test_a_call_of_a_kind_has_its_own_time_in_the_queue(service):
    engine, server = service
    records = []
    engine.on_step(records.append)

    def calls():
        with Client(server.address) as client, client.open_lane(5) as lane:
            for _ in range(2):
                lane.forward(LAYER, tokens(5))
                time.sleep(0.3)

    await asyncio.wait_for(asyncio.to_thread(calls), LIMIT_S)
    await until(lambda: len(records) >= 2, LIMIT_S, "records")
    assert all(record.started == part.queued for record in records for part in record.parts)


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
