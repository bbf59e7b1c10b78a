"""Lanes that the only rank serves itself: the bits of gRPC, one order of steps, typed answers to all that it cannot compute, and
right answers while it dies, hangs, is replaced and gets others beside it."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import pytest_asyncio
import torch
from prometheus_client import generate_latest

from epserve.client import Client, ClientOptions, RetryPolicy
from epserve.config import ServerConfig
from epserve.errors import CallerError, NotReady, Unauthenticated
from epserve.models.demo import reference_block
from epserve.process import words
from epserve.protocol import lane_words as lw
from epserve.server.server import Server
from tests.support.checkpoints import LAYER, write
from tests.support.lanes import LIMIT_S, Clients, Raw, tokens
from tests.support.recovering import TOLERANCE, back, pids, running, spare, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(words.why_not()), reason=words.why_not() or "-"),
]
ONCE = ClientOptions(retry=RetryPolicy(attempts=1))
HIDDEN, TOP_K, EXPERTS = 64, 2, 8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("direct"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path):
    return reference_block(path, LAYER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(path):
    async with running(path, ranks=1, spares=1, spare_weights="host") as engine:
        server = Server(engine, ServerConfig(port=0))
        await server.start()
        yield engine, server
        await server.stop()


async def in_thread(function, *arguments):
    return await asyncio.wait_for(asyncio.to_thread(function, *arguments), LIMIT_S)


def direct(server):
    """The number of lanes that the rank serves."""
    return len(server._lanes.direct.lanes)


def through_thread(server):
    """The number of calls that the front end's thread has taken."""
    return server._lanes.poller.counts.calls


async def served_directly(server, number=1):
    await until(lambda: direct(server) == number, LIMIT_S, f"{number} lanes at the rank")


async def test_the_bits_of_grpc_without_the_front_end(service):
    engine, server = service
    ids = torch.randint(0, EXPERTS, (37, TOP_K), generator=torch.Generator().manual_seed(1)).int()
    weights = torch.rand((37, TOP_K), generator=torch.Generator().manual_seed(2))

    def calls():
        with Client(server.address) as client, client.open_lane(37, slots=2) as lane:
            assert direct(server) == 1, "from the first call on"
            for count in (1, 2, 3, 16, 37):
                x = tokens(count)
                assert torch.equal(lane.forward(LAYER, x), client.forward(LAYER, x))
                routing = ids[:count], weights[:count]
                assert torch.equal(lane.forward(LAYER, x, *routing), client.forward(LAYER, x, *routing))
                narrow = ids[:count, :1], weights[:count, :1]
                assert torch.equal(lane.forward(LAYER, x, *narrow), client.forward(LAYER, x, *narrow))

    before, steps, taken = engine.status().ranks[0].tokens_done, engine.status().steps, through_thread(server)
    await in_thread(calls)
    assert through_thread(server) == taken, "the rank has answered all"
    await until(lambda: engine.status().steps == steps + 30, LIMIT_S, "the steps are counted")
    assert engine.status().ranks[0].tokens_done == before + 6 * 59
    await until(
        lambda: server._lanes.shown().calls == 15, LIMIT_S, "the calls are counted, also the last ones of the lane"
    )
    await until(lambda: direct(server) == 0, LIMIT_S, "the lane is closed at the rank")
    text = generate_latest(server._observer.metrics.registry).decode()
    assert "epserve_lane_calls_total 15.0" in text and 'epserve_requests_total{status="OK"} 30.0' in text


async def test_calls_of_several_lanes_share_steps(service, reference):
    engine, server = service
    records = []
    engine.on_step(records.append)

    def calls():
        with Client(server.address) as client:
            blocks = [client.open_lane(4) for _ in range(6)]
            lanes = [block.__enter__() for block in blocks]
            for number, lane in enumerate(lanes):
                lane.x()[:2] = tokens(2, number)
                lane.start(LAYER, 2)
            for _ in range(40):
                for number, lane in enumerate(lanes):
                    torch.testing.assert_close(lane.finish(), reference(tokens(2, number)), **TOLERANCE)
                    lane.start(LAYER, 2)
            for lane in lanes:
                lane.finish()
                lane.check()
            for block in blocks:
                block.__exit__(None, None, None)

    await in_thread(calls)
    await until(lambda: sum(len(record.parts) for record in records) == 246, LIMIT_S, "all calls are told of")
    assert max(len(record.parts) for record in records) > 1 and len(records) < 246
    assert server._lanes.shown().joined > 0


async def test_calls_that_are_longer_than_a_step_are_cut_by_the_queue(service, reference):
    engine, _ = service
    most, steps = engine.config.scheduler.max_step_tokens, []
    engine.on_step(steps.append)
    server = Server(engine, ServerConfig(port=0, max_tokens_per_request=most + 1))
    await server.start()

    def calls():
        x = tokens(most + 1)
        with Client(server.address) as client, client.open_lane(most + 1) as lane:
            torch.testing.assert_close(lane.forward(LAYER, x, timeout=LIMIT_S)[-9:], reference(x[-9:]), **TOLERANCE)
            assert direct(server) == 0

    try:
        await in_thread(calls)
    finally:
        await server.stop()
    assert max(record.tokens for record in steps) <= most


async def test_what_the_rank_cannot_answer_gets_its_typed_status_and_the_lane_goes_back(service, reference):
    _, server = service
    good = lw.header(mode=lw.BLOCK, layer=LAYER, tokens=1)

    def calls():
        with Client(server.address, ONCE) as client, client.open_lane(4, layers=(LAYER,)) as lane:
            raw, number = Raw(lane), 0
            lane.x()[:4] = tokens(4)

            def refused(header, status):
                nonlocal number
                end = time.monotonic() + LIMIT_S
                while not direct(server):
                    assert time.monotonic() < end, "the lane is not given to the rank again"
                    time.sleep(0.01)
                number += 1
                raw.ring(number, header)
                assert raw.answer(number) == status
                number += 1
                raw.ring(number, good)
                assert raw.answer(number) == lw.OK, "the lane goes on"

            for header in (
                lw.header(mode=2, layer=LAYER, tokens=1),
                lw.header(mode=3, layer=LAYER, tokens=1),
                lw.header(mode=0, layer=LAYER + 1, tokens=1),
                lw.header(mode=0, layer=lw.MAX_LAYER, tokens=1),
                lw.header(mode=0, layer=LAYER, tokens=0),
                lw.header(mode=0, layer=LAYER, tokens=5),
                lw.header(mode=0, layer=LAYER, tokens=lw.MAX_TOKENS),
            ):
                refused(header, lw.BAD_HEADER)
            number -= 2  # a replayed word
            refused(good, lw.BAD_HEADER)
            lane.x()[1, 3] = float("inf")
            refused(lw.header(mode=lw.BLOCK, layer=LAYER, tokens=2), lw.NOT_FINITE)
            assert lane.y()[1].isnan().all()
            lane.x()[1] = torch.finfo(torch.float32).max
            refused(lw.header(mode=lw.BLOCK, layer=LAYER, tokens=2), lw.FAILED)  # NotFinite: the layer makes infinity
            lane.x()[1] = 1.0
            for bad in (EXPERTS, -2, 2**31 - 1):
                lane.ids()[0], lane.weights()[0] = bad, 1.0
                refused(lw.header(mode=lw.ROUTED, layer=LAYER, tokens=1), lw.BAD_IDS)
            lane.ids()[0], lane.weights()[0] = 1, float("nan")
            refused(lw.header(mode=lw.ROUTED, layer=LAYER, tokens=1), lw.NOT_FINITE)
            torch.testing.assert_close(lane.y()[:1], reference(tokens(4)[:1]), **TOLERANCE)

    await in_thread(calls)


async def test_random_words_harm_no_other_lane(service, reference):
    _, server = service

    def calls():
        chosen, expected = random.Random(1), reference(tokens(3))
        with Client(server.address) as client, client.open_lane(4, slots=2) as bad, client.open_lane(4) as fine:
            deadline, right = time.monotonic() + 3.0, 0
            while time.monotonic() < deadline:
                for _ in range(20):
                    at = 8 * chosen.randrange(lw.ROWS_AT // 8)
                    bad._words.store(at, chosen.getrandbits(32), chosen.getrandbits(32))
                    bad._words.store(lw.bell_at(chosen.randrange(2)), chosen.getrandbits(32), chosen.getrandbits(32))
                os.eventfd_write(bad._bell, 1)
                torch.testing.assert_close(fine.forward(LAYER, tokens(3)), expected, **TOLERANCE)
                right += 1
            assert right > 10
            bad._map.madvise(9)  # MADV_REMOVE: a hole in the memory is zeros
            torch.testing.assert_close(fine.forward(LAYER, tokens(3)), expected, **TOLERANCE)

    await in_thread(calls)


CHILD = """
import sys, time
import torch
from epserve.client import Client
with Client(sys.argv[1]) as client, client.open_lane(16, slots=4) as lane:
    print("open", flush=True)
    while True:
        for slot in range(4):
            lane.start(int(sys.argv[2]), 16, slot=slot)
        for slot in range(4):
            lane.finish(slot=slot)
"""


async def test_a_client_that_is_killed_leaves_nothing_and_disturbs_nobody(service, reference):
    _, server = service
    clients = Clients(server.address, reference, lanes=1, messages=0)
    child = await in_thread(
        lambda: subprocess.Popen(
            [sys.executable, "-c", CHILD, server.address, str(LAYER)], stdout=subprocess.PIPE, text=True
        )
    )
    assert await in_thread(child.stdout.readline) == "open\n"
    await served_directly(server, 2)
    await clients.more(20)
    child.send_signal(signal.SIGKILL)
    await in_thread(child.wait)
    await served_directly(server, 1)
    await clients.more(20)
    await clients.end()
    await until(lambda: server._lanes.shown().open == 0, LIMIT_S, "all lanes are closed")


async def test_a_lane_that_is_closed_with_calls_under_way(service):
    _, server = service

    def calls():
        with Client(server.address, ONCE) as client:
            for _ in range(20):
                with client.open_lane(16, slots=2) as lane:
                    lane.start(LAYER, 16)
                    lane.start(LAYER, 16, slot=1)
                assert lane.finish().isnan().all() or not lane._errors
                with pytest.raises(NotReady, match="closed"):
                    lane.call(LAYER, 1, slot=0)

    await in_thread(calls)
    await until(lambda: server._lanes.shown().open == 0 and direct(server) == 0, LIMIT_S, "all lanes are closed")


async def test_lanes_and_messages_share_the_rank(service, reference):
    engine, server = service
    refused = server._lanes.shown().refused
    clients = Clients(server.address, reference, lanes=3, messages=2)
    await served_directly(server, 3)
    await clients.more(20)
    await clients.end()
    assert server._lanes.shown().refused == refused and engine.status().recoveries == 0


async def test_a_rank_that_is_killed_under_its_lanes(service, reference):
    engine, server = service
    await spare(engine)
    refused, recoveries = server._lanes.shown().refused, engine.status().recoveries
    clients = Clients(server.address, reference)
    await served_directly(server, 2)
    await clients.more()
    os.kill(pids(engine)[0], signal.SIGKILL)
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)
    await clients.more()
    await served_directly(server, 2)
    await clients.more()
    await clients.end()
    assert server._lanes.shown().refused == refused, "each call under way was computed again"


async def test_a_rank_that_stands_still_under_its_lanes_alone(service, reference):
    """No other request notices it, the heartbeat does. The lane comes back when the process has been ended, not before."""
    engine, server = service
    await spare(engine)
    recoveries = engine.status().recoveries
    clients = Clients(server.address, reference, lanes=1, messages=0)
    await served_directly(server)
    await clients.more()
    os.kill(pids(engine)[0], signal.SIGSTOP)
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)
    await clients.more()
    await served_directly(server)
    await clients.end()


async def test_another_number_of_ranks_under_lanes(service, reference):
    """With two ranks the front end orders the steps. With one the rank serves its lanes again."""
    engine, server = service
    refused = server._lanes.shown().refused
    clients = Clients(server.address, reference)
    await served_directly(server, 2)
    await clients.more()
    await engine.scale(2)
    await clients.more()
    assert direct(server) == 0
    await engine.scale(1)
    await served_directly(server, 2)
    await clients.more()
    await clients.end()
    assert server._lanes.shown().refused == refused


async def test_clients_with_limits_and_withdrawn_tokens(service, reference, tmp_path):
    """Limits are counted by the front end, so its thread serves such a client. A withdrawn token ends a lane at the rank."""
    engine, _ = service
    path = tmp_path / "tokens"
    path.write_text("good name=good\nslow name=slow tokens_per_s=1000000\n")
    server = Server(engine, ServerConfig(port=0, tokens_file=path))
    await server.start()

    def calls():
        x = tokens(3)
        with Client(server.address, ONCE, token="slow") as client, client.open_lane(8) as lane:
            torch.testing.assert_close(lane.forward(LAYER, x), reference(x), **TOLERANCE)
            assert direct(server) == 0 and through_thread(server) == 1
        with Client(server.address, ONCE, token="good") as client, client.open_lane(8) as lane:
            torch.testing.assert_close(lane.forward(LAYER, x), reference(x), **TOLERANCE)
            assert direct(server) == 1 and through_thread(server) == 1
            path.write_text("other name=other\n")
            server.reload()
            end = time.monotonic() + LIMIT_S
            ended = None
            while ended is None and time.monotonic() < end:
                try:
                    lane.forward(LAYER, x)
                except (Unauthenticated, NotReady) as error:
                    ended = error
            assert ended is not None, "calls of a withdrawn token go on"
            while lane.usable and time.monotonic() < end:
                time.sleep(0.01)
            assert not lane.usable, "the service has closed it"

    try:
        await in_thread(calls)
    finally:
        await server.stop()


async def test_a_service_that_stops_finishes_calls_at_the_rank(service, reference):
    engine, _ = service
    server = Server(engine, ServerConfig(port=0))
    await server.start()

    def calls(client):
        wrong, right = [], 0
        with client.open_lane(16) as lane:
            while lane.usable:
                try:
                    torch.testing.assert_close(lane.forward(LAYER, tokens(16)), reference(tokens(16)), **TOLERANCE)
                    right += 1
                except (NotReady, CallerError) as error:
                    wrong.append(error)
                    time.sleep(0.005)
        return right, wrong

    with Client(server.address, ONCE) as client:
        asking = asyncio.ensure_future(in_thread(calls, client))
        await served_directly(server)
        await asyncio.sleep(0.1)
        await server.stop(grace=LIMIT_S)
        right, wrong = await asking
    assert right and all(isinstance(each, NotReady) for each in wrong)
