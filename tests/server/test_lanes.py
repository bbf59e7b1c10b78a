"""Lanes: calls through words and rows of shared memory. The same answers and refusals as over gRPC."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from prometheus_client import generate_latest

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.client.lanes import ways
from epserve.client.session import connect
from epserve.errors import (
    CallerError,
    DeadlineExceeded,
    EpserveError,
    InvalidRequest,
    NotFinite,
    NotReady,
    Overloaded,
    RankFailed,
    TooLarge,
    Unauthenticated,
    UnknownLayer,
)
from epserve.process import words
from tests.support.fake_engine import FakeEngine, LocalExperts, echo_after, hang, serving
from tests.support.grpc_calls import in_thread, until

LIMIT_S = 50
ONCE = ClientOptions(retry=RetryPolicy(attempts=1))
HIDDEN, TOP_K = 32, 3

pytestmark = pytest.mark.skipif(bool(words.why_not()), reason=words.why_not() or "-")


def routing(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (tokens, TOP_K), generator=generator).int(), torch.rand(
        (tokens, TOP_K), generator=generator
    )


async def test_the_same_bits_as_over_grpc():
    def calls(address):
        with Client(address) as client, client.open_lane(16, slots=2) as lane:
            for tokens in (1, 5, 16):
                x, (ids, weights) = torch.randn(tokens, HIDDEN), routing(tokens)
                assert torch.equal(lane.forward(1, x), client.forward(1, x))
                assert torch.equal(lane.forward(2, x, ids, weights), client.forward(2, x, ids, weights))
                narrow = ids[:, :2], weights[:, :2]
                assert torch.equal(lane.forward(2, x, *narrow), client.forward(2, x, *narrow))
                lane.x(1)[:tokens] = x
                assert torch.equal(lane.call(7, tokens, slot=1), client.forward(7, x))
            lane.check()
            shown = client.status().lanes
            assert (shown.open, shown.calls, shown.refused) == (1, 12, 0)

    async with serving(FakeEngine(LocalExperts())) as server:
        await in_thread(calls, server.address)
        await until(lambda: not server._lanes.poller.lanes)


async def test_lanes_in_an_event_loop():
    async def held(batch):
        await gate.wait()
        return batch.hidden * 2

    gate, engine = asyncio.Event(), FakeEngine(held)
    async with serving(engine) as server, AsyncClient(server.address, ONCE) as client:
        async with client.open_lane(4, slots=2) as lane:
            x = torch.randn(3, HIDDEN)
            both = [asyncio.ensure_future(lane.forward(1, x)), asyncio.ensure_future(lane.forward(2, x))]
            await until(lambda: engine.running == 2)
            gate.set()
            for each in both:
                assert torch.equal(await asyncio.wait_for(each, LIMIT_S), x * 2)
            lane.lane.x(1)[:2] = 3.0
            assert torch.equal(await lane.call(7, 2, slot=1), torch.full((2, HIDDEN), 6.0))
            assert torch.equal(await lane.retry(slot=1), torch.full((2, HIDDEN), 6.0))
            with pytest.raises(InvalidRequest, match="hidden_states"):
                await lane.forward(1, torch.full((1, HIDDEN), float("nan")))
            lane.check()
        await until(lambda: not server._lanes.poller.lanes)
        with pytest.raises(NotReady, match="closed"):
            lane.lane.call(1, 1)


async def test_an_operator_of_torch_that_compilers_keep_whole():
    def calls(address):
        with Client(address) as client, client.open_lane(4) as lane:
            x = torch.randn(4, HIDDEN)
            layer = lane.operator()
            once = torch.compile(lambda x: layer(1, x) * 2, backend="eager", fullgraph=True)
            assert torch.equal(once(x), client.forward(1, x) * 2)
            torch.library.opcheck(torch.ops.epserve.lane, (lane.name, 1, x, None, None), test_utils="test_faketensor")
            return lane, layer

    async with serving(FakeEngine(LocalExperts())) as server:
        lane, layer = await in_thread(calls, server.address)
    assert layer(1, torch.zeros(4, HIDDEN)).isnan().all()
    with pytest.raises(NotReady, match="closed"):
        lane.check()


async def test_refusals_are_the_same_errors_and_the_lane_goes_on():
    nan = torch.full((2, HIDDEN), float("nan"))
    x, (ids, weights) = torch.randn(2, HIDDEN), routing(2)

    async def overflow(batch):
        return batch.hidden if batch.layer != 7 else batch.hidden * float("inf")

    def calls(address):
        with Client(address, ONCE) as client, client.open_lane(4) as lane:
            for layer, *given in (
                (1, nan),
                (1, x, ids + 100, weights),
                (1, x, ids - 100, weights),
                (1, x, ids.long() + (1 << 40), weights),
                (1, x, ids, weights * float("nan")),
                (7, x),
            ):
                seen = []
                for forward in (client.forward, lane.forward):
                    with pytest.raises((InvalidRequest, NotFinite)) as raised:
                        forward(layer, *given)
                    seen.append((type(raised.value), raised.value.field))
                assert seen[0] == seen[1]
                assert torch.equal(lane.forward(2, x), x), "the lane goes on"
            for bad in ((9, x), (1, x[:, :3]), (1, torch.zeros(5, HIDDEN)), (1, x, ids), (1, x, ids[:1], weights)):
                with pytest.raises(InvalidRequest):
                    lane.forward(*bad)
            with pytest.raises(InvalidRequest, match="gradient"):
                lane.forward(1, x.clone().requires_grad_())

    async with serving(FakeEngine(overflow)) as server:
        await in_thread(calls, server.address)


async def test_rows_of_a_failed_call_are_nan_until_its_error_surfaces_and_it_can_be_sent_again():
    state = {"fail": True}

    async def sometimes(batch):
        if state["fail"]:
            raise RankFailed("rank 3 is gone")
        return batch.hidden + 1

    def calls(address):
        with Client(address) as client, client.open_lane(4, slots=2) as lane:
            lane.x()[:3] = 2.0
            first = lane.call(1, 3)
            assert first.isnan().all()
            state["fail"] = False
            assert torch.equal(lane.call(1, 2, slot=1), lane.x(1)[:2] + 1), "later layers of the step run"
            with pytest.raises(RankFailed, match="rank 3 is gone"):
                lane.check()
            lane.check()
            assert torch.equal(lane.retry(), torch.full((3, HIDDEN), 3.0))
            lane.check()
            state["fail"] = True
            threading.Timer(0.2, lambda: state.update(fail=False)).start()
            assert torch.equal(lane.forward(1, lane.x()[:1]), torch.full((1, HIDDEN), 3.0)), "forward sends it again"

    async with serving(FakeEngine(sometimes)) as server:
        await in_thread(calls, server.address)


async def test_calls_of_slots_run_side_by_side_and_a_slot_has_one():
    gate = asyncio.Event()

    async def held(batch):
        await gate.wait()
        return batch.hidden * 2

    def begin(client):
        lane = client.open_lane(4, slots=2)
        opened = lane.__enter__()
        for slot in range(2):
            opened.x(slot)[:1] = slot + 1.0
            opened.start(1, 1, slot=slot)
        with pytest.raises(CallerError, match="has not been answered"):
            opened.start(1, 1, slot=0)
        with pytest.raises(CallerError, match="has not been answered"):
            opened.retry(slot=0)
        return lane, opened

    engine = FakeEngine(held)
    async with serving(engine) as server:
        with Client(server.address) as client:
            block, lane = await in_thread(begin, client)
            await until(lambda: engine.running == 2)
            gate.set()
            assert [float((await in_thread(lane.finish, slot=slot))[0, 0]) for slot in (1, 0)] == [4.0, 2.0]
            await in_thread(block.__exit__, None, None, None)


async def test_a_limit_of_time_on_either_side():
    def calls(address):
        with Client(address, ONCE) as client, client.open_lane(4, call_timeout=0.3) as lane:
            assert lane.call(1, 1).isnan().all()
            with pytest.raises(DeadlineExceeded, match="limit of the lane"):
                lane.check()
            assert lane.call(1, 1, timeout=0.02).isnan().all()
            with pytest.raises(DeadlineExceeded, match="no answer after"):
                lane.check()
            with pytest.raises(CallerError, match="has not been answered"):
                lane.call(1, 1)
            with pytest.raises(DeadlineExceeded):  # its own attempt, when the slot has been answered
                lane.forward(1, torch.zeros(1, HIDDEN), timeout=LIMIT_S)

    async with serving(FakeEngine(hang)) as server:
        await in_thread(calls, server.address)


async def test_what_a_lane_may_be():
    def calls(address):
        with Client(address, ONCE) as client:
            for error, field, wanted in (
                (InvalidRequest, "max_tokens", {"max_tokens": 0}),
                (TooLarge, "max_tokens", {"max_tokens": 65}),
                (TooLarge, "max_tokens", {"max_tokens": 64, "slots": 8}),
                (InvalidRequest, "slots", {"max_tokens": 1, "slots": 9}),
                (UnknownLayer, "layers", {"max_tokens": 1, "layers": (99,)}),
                (InvalidRequest, "max_tokens", {"max_tokens": "many"}),
                (InvalidRequest, "max_tokens", {"max_tokens": -1}),
            ):
                with pytest.raises(error) as raised, client.open_lane(**wanted):
                    pass
                assert raised.value.field == field
            with client.open_lane(1), client.open_lane(1), pytest.raises(Overloaded), client.open_lane(1):
                pass
            with client.open_lane(1, layers=(2,)) as lane, pytest.raises(InvalidRequest, match="none of the lane's"):
                lane.call(1, 1)

    async with serving(FakeEngine(), max_tokens_per_request=64, max_region_bytes=128 << 10, lanes=2) as server:
        await in_thread(calls, server.address)

    def refused(address):
        with (
            Client(address, ONCE) as client,
            pytest.raises(InvalidRequest, match=r"server\.lanes"),
            client.open_lane(1),
        ):
            pass

    async with serving(FakeEngine(), lanes=0) as server:
        await in_thread(refused, server.address)


CHILD = """
import sys, time
import torch
from epserve.client import Client
with Client(sys.argv[1]) as client, client.open_lane(4, slots=4) as lane:
    for slot in range(4):
        lane.start(1, 1, slot=slot)
    print("rung", flush=True)
    time.sleep(60)
"""


async def test_a_client_that_is_killed_leaves_nothing():
    engine = FakeEngine(hang)
    async with serving(engine) as server:
        child = await in_thread(
            subprocess.Popen, [sys.executable, "-c", CHILD, server.address], stdout=subprocess.PIPE, text=True
        )
        assert await in_thread(child.stdout.readline) == "rung\n"
        await until(lambda: engine.running == 4)
        engine.compute = lambda batch: asyncio.sleep(0, batch.hidden)
        child.send_signal(signal.SIGKILL)
        await in_thread(child.wait)
        await until(lambda: not server._lanes.poller.lanes and engine.running == 0)
        assert engine.cancelled == 4 and server._calls.in_flight == 0

        def another(address):
            x = torch.randn(2, HIDDEN)
            with Client(address) as client, client.open_lane(4) as lane:
                assert torch.equal(lane.forward(1, x), x)

        await in_thread(another, server.address)


async def test_a_lane_that_is_closed_with_calls_under_way():
    engine = FakeEngine(hang)
    async with serving(engine) as server:

        def calls(address):
            with Client(address, ONCE) as client:
                with client.open_lane(4) as lane:
                    lane.start(1, 1)
                    end = time.monotonic() + LIMIT_S
                    while not engine.running and time.monotonic() < end:
                        time.sleep(0.005)
                assert lane.finish().isnan().all()
                with pytest.raises(NotReady, match="closed"):
                    lane.check()
                with pytest.raises(NotReady, match="closed"):
                    lane.forward(1, torch.zeros(1, HIDDEN))

        await in_thread(calls, server.address)
        await until(lambda: engine.running == 0)


async def test_a_service_that_stops_finishes_calls_and_ends_the_lane():
    gate = asyncio.Event()
    engine = FakeEngine(echo_after(gate))
    async with serving(engine) as server:
        with Client(server.address, ONCE) as client:
            block = client.open_lane(4)
            lane = await in_thread(block.__enter__)
            lane.x()[:1] = 5.0
            lane.start(1, 1)
            await until(lambda: engine.running == 1)
            stopping = asyncio.ensure_future(server.stop(grace=LIMIT_S))
            await until(lambda: server._calls.draining.is_set())
            gate.set()
            assert torch.equal(await in_thread(lane.finish), torch.full((1, HIDDEN), 5.0))
            await stopping
            await until(lambda: not lane.usable)
            with pytest.raises(NotReady, match="no longer open"):
                await in_thread(lane.forward, 1, torch.zeros(1, HIDDEN))
            await in_thread(block.__exit__, None, None, None)


async def test_limits_and_a_withdrawn_token(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("good name=good\nslow name=slow tokens_per_s=10\n")

    def calls(address, server):
        x = torch.randn(6, HIDDEN)
        with pytest.raises(Unauthenticated), Client(address, ONCE) as client, client.open_lane(4):
            pass
        with Client(address, ONCE, token="slow") as client, client.open_lane(8) as lane:
            assert torch.equal(lane.forward(1, x), x)
            with pytest.raises(Overloaded, match="tokens_per_s"):
                lane.forward(1, x)
        with Client(address, ONCE, token="good") as client, client.open_lane(8) as lane:
            assert torch.equal(lane.forward(1, x), x)
            path.write_text("other name=other\n")
            server.reload()
            with pytest.raises((Unauthenticated, NotReady)):
                lane.forward(1, x)
            end = time.monotonic() + LIMIT_S
            while lane.usable and time.monotonic() < end:
                time.sleep(0.01)
            assert not lane.usable, "the service has closed it"

    async with serving(FakeEngine(), tokens_file=path) as server:
        await in_thread(calls, server.address, server)


@pytest.mark.parametrize("lanes", [256, 0])
async def test_a_session_uses_a_lane_by_itself_where_there_is_one(lanes):
    def calls(address):
        with connect(address) as session, Client(address) as client:
            layer, x, (ids, weights) = session.layer(1), torch.randn(5, HIDDEN), routing(5)
            assert torch.equal(layer.forward(x), client.forward(1, x))
            assert torch.equal(layer.forward(x, ids, weights), client.forward(1, x, ids, weights))
            for other in (torch.randn(ways.LANE_TOKENS + 1, HIDDEN), x.bfloat16()):
                assert torch.equal(layer.forward(other), client.forward(1, other)), "another way"
            return client.status().lanes.calls

    async with serving(FakeEngine(LocalExperts()), lanes=lanes) as server:
        assert await in_thread(calls, server.address) == (2 if lanes else 0)


async def test_a_lane_that_was_opened_in_inference_mode_is_of_use_outside_of_it():
    def calls(address):
        with connect(address) as session:
            layer, x = session.layer(1), torch.randn(5, HIDDEN)
            for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
                with mode():
                    assert torch.equal(layer.forward(x), x)

    async with serving(FakeEngine()) as server:
        await in_thread(calls, server.address)
        assert server._lanes.shown().calls == 4


async def test_a_session_outlives_its_lane():
    def calls(address, server, loop):
        with connect(address) as session, Client(address) as client:
            layer, x = session.layer(1), torch.randn(5, HIDDEN)
            assert torch.equal(layer.forward(x), x)
            for lane in server._lanes.poller.lanes:
                loop.call_soon_threadsafe(lane.ended.set)
            end = time.monotonic() + LIMIT_S
            while client.status().lanes.open and time.monotonic() < end:
                time.sleep(0.01)
            assert torch.equal(layer.forward(x), x), "another way"
            session._ways._lane._ways[None]._next_try = 0.0  # the time between two attempts has passed
            assert torch.equal(layer.forward(x), x)
            return client.status().lanes

    async with serving(FakeEngine()) as server:
        lanes = await in_thread(calls, server.address, server, asyncio.get_running_loop())
        assert (lanes.open, lanes.calls) == (1, 2)


async def test_metrics_and_status_show_lanes():
    def calls(address):
        with Client(address, ONCE) as client, client.open_lane(4) as lane:
            for _ in range(3):
                lane.forward(1, torch.randn(1, HIDDEN))
            with pytest.raises(EpserveError):
                lane.forward(1, torch.full((1, HIDDEN), float("nan")))
            return client.status().lanes

    async with serving(FakeEngine()) as server:
        shown = await in_thread(calls, server.address)
        assert (shown.open, shown.calls, shown.waited, shown.refused) == (1, 4, 3, 1)
        assert 0 <= shown.polling_share <= 1
        text = generate_latest(server._observer.metrics.registry).decode()
        for line in (
            "epserve_lane_calls_total 4.0",
            "epserve_lane_calls_waited_total 3.0",
            "epserve_lane_calls_refused_total 1.0",
        ):
            assert line in text
        assert 'epserve_requests_total{status="OK"} 3.0' in text
