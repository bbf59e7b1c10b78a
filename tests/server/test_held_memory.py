"""What one client can make the server hold: replies that it does not read, messages that it does not finish."""

import asyncio
import gc
import logging
import time

import pytest
import torch

from epserve.client import AsyncClient
from epserve.config import ServerConfig
from epserve.errors import Overloaded
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import inference_pb2 as kserve
from epserve.server.incoming import intake as intake_module
from epserve.server.incoming import sockets
from epserve.server.incoming.intake import CALL_BYTES, MESSAGE_BYTES, SLACK_BYTES, Intake
from epserve.server.server import Server
from tests.server.raw_http2 import RawConnection
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_calls import Frames, connect, message, until

FORWARD, INFER = "/epserve.v1.Experts/Forward", "/inference.GRPCInferenceService/ModelInfer"
ROWS = torch.ones(2048, 32)
REPLY_BYTES = ROWS.nbytes


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("epserve.protocol.status.ABORT_S", 0.5)


class Held:
    """A server whose default deadline is short."""

    def __init__(self, deadline_s: float = 2.0, **config):
        self.server = Server(FakeEngine(), ServerConfig(port=0, **config), default_deadline_s=deadline_s)

    async def __aenter__(self) -> Server:
        await self.server.start()
        return self.server

    async def __aexit__(self, *_) -> None:
        await self.server.stop()


async def ended(raw: RawConnection, streams, server: Server) -> None:
    """grpc.aio's loop refers to the newest call until the next one comes, and a call that was dropped is reset then."""
    async with AsyncClient(server.address) as other, asyncio.timeout(30):
        while raw.ended != set(streams):
            await asyncio.sleep(0.1)
            await other.status()


def inference(x: torch.Tensor) -> kserve.ModelInferRequest:
    tensor = kserve.ModelInferRequest.InferInputTensor(name="hidden_states", datatype="FP32", shape=x.shape)
    return kserve.ModelInferRequest(model_name="layer-1", inputs=[tensor], raw_input_contents=[x.numpy().tobytes()])


class TestUnreadReplies:
    @pytest.fixture(autouse=True)
    def without_the_collector(self):
        """It frees what refers to itself, but only some time."""
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize(("method", "request_of"), [(FORWARD, message), (INFER, inference)])
    async def test_they_are_counted_until_the_deadline_and_then_given_back(self, method, request_of):
        body = request_of(ROWS).SerializeToString()
        async with Held() as server, await RawConnection(window=0).connect(server.address) as raw:
            calls = server._calls
            streams = [await raw.send(method, body) for _ in range(5)]
            await until(lambda: calls.admitted == 5)
            assert calls.in_flight == 5
            assert calls.buffered_bytes >= 5 * (ROWS.nbytes + REPLY_BYTES)
            assert not raw.ended
            await ended(raw, streams, server)
            await until(lambda: (calls.in_flight, calls.buffered_bytes) == (0, 0))
            assert not [task for task in asyncio.all_tasks() if method.rpartition("/")[2] in repr(task.get_name())]
            async with AsyncClient(server.address) as other:
                assert torch.equal(await other.forward(1, ROWS[:3]), ROWS[:3])

    async def test_grpc_frees_what_it_held_of_them(self):
        """A reply that was reset is never sent, however large the window becomes."""
        async with Held() as server, await RawConnection(window=0).connect(server.address) as raw:
            stream = await raw.send(FORWARD, message(ROWS).SerializeToString())
            await ended(raw, [stream], server)
            raw.grant(1 << 20)
            await asyncio.sleep(0.3)
            assert raw.received[stream] == 0

    async def test_they_count_against_the_limit(self):
        limit = 3 * (ROWS.nbytes + REPLY_BYTES)
        body = message(ROWS).SerializeToString()
        async with (
            Held(max_buffered_bytes=limit, deadline_s=20) as server,
            await RawConnection(window=0).connect(server.address) as raw,
        ):
            for _ in range(8):
                await raw.send(FORWARD, body)
            await until(lambda: len(raw.ended) == 5)  # refused at once: a status needs no window
            assert (server._calls.admitted, server._calls.buffered_bytes) == (3, limit)

    async def test_a_client_that_goes_away_leaves_no_traceback(self, caplog):
        body = message(ROWS).SerializeToString()
        with caplog.at_level(logging.INFO):
            async with Held(deadline_s=20) as server:
                for _ in range(5):
                    async with await RawConnection(window=0).connect(server.address) as raw:
                        for _ in range(10):
                            await raw.send(FORWARD, body)
                        await until(lambda: server._calls.admitted == 10)
                    await until(lambda: server._calls.admitted == 0)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]

    async def test_a_stream_whose_reader_never_comes_back_is_dropped(self):
        async with Held(deadline_s=1) as server, await RawConnection(window=0).connect(server.address) as raw:
            frame = pb.RequestFrame(call=1, begin=message(ROWS))
            stream = await raw.send("/epserve.v1.Experts/ForwardStream", frame.SerializeToString(), end=False)
            await ended(raw, [stream], server)
            await until(lambda: (server._calls.in_flight, server._calls.buffered_bytes) == (0, 0))


class TestHalfMessages:
    @pytest.mark.parametrize(
        "method", [FORWARD, INFER, "/epserve.v1.Experts/GetStatus", "/grpc.health.v1.Health/Watch"]
    )
    async def test_they_end_at_the_deadline(self, method):
        async with Held(deadline_s=1.5) as server, await RawConnection(window=65535).connect(server.address) as raw:
            streams = [await raw.send(method, bytes(100_000), size=50_000) for _ in range(4)]
            await until(lambda: server._calls.in_flight == 4)
            await ended(raw, streams, server)
            await until(lambda: server._calls.in_flight == 0)

    async def test_a_clients_own_deadline_counts(self):
        async with Held(deadline_s=60) as server, await RawConnection(window=65535).connect(server.address) as raw:
            stream = await raw.send(FORWARD, bytes(1000), size=500, **{"grpc-timeout": "700m"})
            await ended(raw, [stream], server)

    async def test_a_call_without_a_message_is_refused(self):
        async with Held() as server, await RawConnection(window=65535).connect(server.address) as raw:
            stream = await raw.send(FORWARD, b"", size=0)
            raw.half_close(stream)
            await ended(raw, [stream], server)

    async def test_what_came_of_them_is_counted(self, monkeypatch):
        monkeypatch.setattr(intake_module, "SAMPLE_S", 0.1)
        async with Held(deadline_s=60) as server, await RawConnection(window=65535).connect(server.address) as raw:
            half = 3 << 20
            await raw.send(FORWARD, bytes(2 * half), size=half)
            await until(lambda: server._calls.buffered_bytes > half - (1 << 20))
            assert server._calls.buffered_bytes <= half + SLACK_BYTES
        await until(lambda: server._calls.buffered_bytes == 0)

    @pytest.mark.parametrize("method", [FORWARD, "/epserve.v1.Experts/ForwardStream"])
    async def test_above_the_limit_the_connection_that_holds_most_loses_its_calls(self, monkeypatch, method):
        monkeypatch.setattr(intake_module, "SAMPLE_S", 0.1)
        async with (
            Held(deadline_s=60, max_buffered_bytes=4 << 20) as server,
            connect(server) as channel,
            await RawConnection(window=65535).connect(server.address) as raw,
        ):
            honest = Frames(channel)  # a stream that waits, of another connection
            await honest.send(1, ROWS[:3])
            await honest.replies(1)
            started = time.monotonic()
            streams = [await raw.send(method, bytes(8 << 20), size=3 << 20, timeout_s=5) for _ in range(3)]
            await ended(raw, streams, server)
            assert time.monotonic() - started < 50, "long before the deadline"
            await honest.send(2, ROWS[:3])
            assert torch.equal((await honest.replies(1))[2], ROWS[:3])


class TestManyConnections:
    async def test_half_messages_below_each_ones_slack_are_bounded_together(self, monkeypatch):
        """80 connections with 200 KiB each: 16 MB where 4 MiB may be held."""
        monkeypatch.setattr(intake_module, "SAMPLE_S", 0.1)
        limit, half = 4 << 20, 200 << 10
        async with Held(deadline_s=60, max_buffered_bytes=limit) as server:
            raws = [await RawConnection(window=65535).connect(server.address) for _ in range(80)]
            try:
                await asyncio.gather(*[raw.send(FORWARD, bytes(1 << 20), size=half, timeout_s=3) for raw in raws])
                async with asyncio.timeout(30):
                    while sum(not raw.ended for raw in raws) * half > limit + limit // 4:
                        await asyncio.sleep(0.1)
                assert server._calls.buffered_bytes <= limit
                async with AsyncClient(server.address) as other:
                    assert torch.equal(await other.forward(1, ROWS[:3]), ROWS[:3])
            finally:
                await asyncio.gather(*[raw.close() for raw in raws])


def seen(peer: str, received: int, inode: int = 0) -> sockets.Connection:
    host, _, port = peer.removeprefix("ipv4:").rpartition(":")
    destination = (host, int(port))
    return sockets.Connection(source=("127.0.0.1", 1), destination=destination, uid=0, received=received, inode=inode)


class Wire:
    """One connection by hand: what it sends is counted at once, and whole messages are delivered at once."""

    def __init__(self, intake: Intake, port: int = 1000):
        self.intake, self.name = intake, f"ipv4:127.0.0.1:{port}"
        self.sent = 0

    def call(self):
        return self.intake.begin(self.name)

    def message(self, call, size: int, beside: int = 40, already: int = 0) -> None:
        """`already`: bytes of it that came before."""
        self.sent += size + beside - already
        call.delivered(size)

    def unary(self, size: int, beside: int = 40) -> None:
        call = self.call()
        self.message(call, size, beside)
        self.intake.end(call)

    @property
    def end(self) -> sockets.Connection:
        return seen(self.name, self.sent)


def look(intake: Intake, *wires: Wire) -> int:
    """What counts after one look."""
    intake.mark()
    intake.take([wire.end for wire in wires])
    return intake.nbytes


HALF = 8 << 20


class TestCount:
    """Of bytes, by hand: no connection is there."""

    A, B = "ipv4:127.0.0.1:1000", "ipv4:127.0.0.1:2000"

    async def test_whole_messages_and_what_comes_beside_them_do_not_count(self):
        wire = Wire(Intake(1 << 30))
        call = wire.call()
        for size in (100, 10_000, 10 << 20, 0, 5) * 50:
            wire.message(call, size, beside=size // 100 + MESSAGE_BYTES // 2)
            assert look(wire.intake, wire) == 0

    @pytest.mark.parametrize("per_look", [1, 1000])
    async def test_small_messages_do_not_hide_a_part_of_a_large_one(self, per_look):
        """Neither those that came before it, nor those beside it."""
        wire = Wire(Intake(1 << 30))
        stream = wire.call()
        for _ in range(20_000 // per_look):
            for _ in range(per_look):
                wire.message(stream, 10, beside=14)
            look(wire.intake, wire)
        large = wire.call()
        wire.sent += HALF
        assert look(wire.intake, wire) >= HALF - SLACK_BYTES - per_look * MESSAGE_BYTES - CALL_BYTES
        for _ in range(20_000 // per_look):
            for _ in range(per_look):
                wire.message(stream, 10, beside=14)
            look(wire.intake, wire)
        held = wire.intake.nbytes
        assert held >= HALF - SLACK_BYTES - per_look * MESSAGE_BYTES - CALL_BYTES
        wire.message(large, 2 * HALF, already=HALF)
        assert look(wire.intake, wire) == 0

    @pytest.mark.parametrize("idle_stream", [False, True])
    async def test_a_busy_connection_is_not_counted_up_by_what_comes_beside_its_messages(self, idle_stream):
        wire = Wire(Intake(1 << 30))
        if idle_stream:
            wire.call()
        last = wire.call()
        for _ in range(100):
            for _ in range(300):
                wire.unary(50, beside=400)
            wire.intake.end(last)  # never without a call
            last = wire.call()
            assert look(wire.intake, wire) == 0

    async def test_whole_messages_since_the_last_look_are_remembered_when_a_call_is_given_up(self):
        wire = Wire(Intake(1 << 30))
        honest = wire.call()
        assert look(wire.intake, wire) == 0
        wire.message(honest, 64 << 20)
        given_up = wire.call()
        wire.intake.end(given_up)
        wire.intake.end(honest)
        wire.call()
        assert look(wire.intake, wire) == 0

    async def test_a_call_that_was_given_up_counts_no_more(self):
        wire = Wire(Intake(1 << 30))
        call = wire.call()
        call.waits = True
        wire.sent += HALF
        assert look(wire.intake, wire) == HALF - SLACK_BYTES - CALL_BYTES
        assert wire.intake.waiting == 1
        wire.intake.end(call)
        assert (wire.intake.nbytes, wire.intake.waiting) == (0, 0)
        look(wire.intake, wire)
        wire.call()
        assert look(wire.intake, wire) == 0
        wire.intake.take([])
        assert wire.intake.nbytes == 0

    async def test_calls_that_were_given_up_count_no_more_on_a_connection_that_is_never_idle(self):
        """A proxy has all its clients' calls on one connection."""
        wire = Wire(Intake(1 << 30))
        calls = [wire.call()]
        for _ in range(40):
            calls.append(wire.call())
            wire.sent += HALF
            look(wire.intake, wire)
            wire.intake.end(calls.pop(0))
        assert wire.intake.nbytes <= 4 * HALF

    async def test_a_stream_inside_a_message_hides_nothing_by_calls_that_are_given_up(self):
        wire = Wire(Intake(1 << 30))
        wire.call()
        wire.sent += HALF
        for _ in range(5):
            wire.intake.end(wire.call())
            look(wire.intake, wire)
        assert wire.intake.nbytes >= HALF - SLACK_BYTES - 5 * CALL_BYTES

    async def test_what_comes_behind_a_whole_message_counts_while_its_call_lasts(self):
        wire = Wire(Intake(1 << 30))
        call = wire.call()
        wire.message(call, 100)
        wire.sent += HALF
        assert look(wire.intake, wire) >= HALF - SLACK_BYTES - CALL_BYTES - MESSAGE_BYTES
        wire.intake.end(call)
        assert wire.intake.nbytes == 0

    async def test_a_stream_that_idles_keeps_few_looks(self):
        wire = Wire(Intake(1 << 30))
        wire.call()
        for _ in range(1000):
            wire.unary(1000)
            assert look(wire.intake, wire) == 0
        assert len(wire.intake._peers[wire.name]._looks) < 6

    @pytest.mark.parametrize(("received", "inode"), [(1 << 20, 0), (12 << 20, 8)])
    async def test_a_port_that_is_used_again_starts_anew(self, received, inode):
        intake = Intake(1 << 30)
        first = intake.begin(self.A)
        intake.mark()
        intake.take([seen(self.A, 10 << 20, inode=7)])
        intake.end(first)
        intake.begin(self.A)
        intake.mark()
        intake.take([seen(self.A, received, inode=inode or 7)])
        assert received - SLACK_BYTES - 2 * CALL_BYTES <= intake.nbytes <= received

    async def test_the_largest_goes_first_and_only_as_many_as_must(self):
        intake = Intake(12 << 20)
        a, b = Wire(intake, 1000), Wire(intake, 2000)
        calls = {}

        async def waits(name: str, wire: Wire) -> None:
            calls[name] = wire.call()
            calls[name].waits = True
            await asyncio.Event().wait()

        tasks = [asyncio.create_task(waits(name, wire)) for name, wire in (("a", a), ("b", b))]
        await until(lambda: len(calls) == 2)
        a.sent, b.sent = 10 << 20, 5 << 20
        for _ in range(2):
            look(intake, a, b)
            assert isinstance(calls["a"].failure, Overloaded)
            assert calls["a"].failure.retryable
            assert calls["b"].failure is None
        await until(tasks[0].cancelled)
        tasks[1].cancel()

    async def test_many_connections_that_hold_little_each_are_counted_together(self):
        """256 KiB of each connection would be 375 MiB."""
        limit = 100 << 20
        intake = Intake(limit)
        wires = [Wire(intake, 1000 + number) for number in range(1500)]
        for wire in wires:
            wire.call()
            wire.sent += 200 << 10
        intake.mark()
        slack = limit // 4 // len(wires)
        shed = []
        for peer in intake._peers.values():
            peer.shed = lambda error, peer=peer: shed.append((peer, peer.held))
        intake.take([wire.end for wire in wires])
        assert {held for _, held in shed} == {(200 << 10) - slack - CALL_BYTES}
        left = (len(wires) - len(shed)) * (200 << 10)
        assert left <= limit + limit // 4

    async def test_connections_that_have_gone_are_forgotten_though_nothing_is_awaited(self, monkeypatch):
        monkeypatch.setattr(intake_module, "SAMPLE_S", 0.01)
        monkeypatch.setattr(intake_module, "IDLE_SAMPLES", 2)
        monkeypatch.setattr(sockets, "connections", lambda **_: [seen(self.B, 100)])
        intake = Intake(1)
        for name in (self.A, self.B):
            intake.end(intake.begin(name))
        watching = asyncio.create_task(intake.watch())
        await until(lambda: list(intake._peers) == [self.B])
        watching.cancel()

    async def test_without_netlink_the_deadline_is_left(self, monkeypatch, caplog):
        def refused(**_):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(intake_module, "SAMPLE_S", 0.01)
        monkeypatch.setattr(sockets, "connections", refused)
        intake = Intake(1)
        call = intake.begin(self.A)
        await asyncio.wait_for(intake.watch(), 20)
        intake.end(call)
        assert "only their time is limited" in caplog.text
        assert intake._peers == {}
