"""What one client can make the server hold: replies that it does not read, messages that it does not finish."""

import asyncio
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
from epserve.server.incoming.intake import MESSAGE_BYTES, SLACK_BYTES, Intake
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


def seen(peer: str, received: int) -> sockets.Connection:
    host, _, port = peer.removeprefix("ipv4:").rpartition(":")
    return sockets.Connection(source=("127.0.0.1", 1), destination=(host, int(port)), uid=0, received=received)


class Waiting:
    """In place of a Read: notes its failure."""

    def __init__(self, name: str, failed: dict):
        self.name, self.failed = name, failed

    def fail(self, error: Exception) -> None:
        self.failed[self.name] = error


class TestCount:
    """Of bytes, by hand: no connection is there."""

    A, B = "ipv4:127.0.0.1:1000", "ipv4:127.0.0.1:2000"

    async def test_whole_messages_and_what_comes_beside_them_do_not_count(self):
        intake, sent = Intake(1 << 30), 0
        with intake.call(self.A) as peer:
            for size in (100, 10_000, 10 << 20, 0, 5) * 50:
                peer.delivered(size)
                sent += size + size // 100 + MESSAGE_BYTES // 2
                intake.take([seen(self.A, sent)])
                assert intake.nbytes == 0

    async def test_a_call_that_was_given_up_counts_no_more(self):
        intake = Intake(1 << 30)
        with intake.call(self.A), intake.call(self.A) as peer:
            with peer.read():
                intake.take([seen(self.A, 10 << 20)])
                assert intake.nbytes == (10 << 20) - SLACK_BYTES
                assert intake.waiting == 1
            assert (intake.nbytes, intake.waiting) == (0, 0)
            intake.take([seen(self.A, 10 << 20)])
            assert intake.nbytes == 0
        intake.take([])
        assert intake._peers == {}

    async def test_a_port_that_is_used_again_starts_anew(self):
        intake = Intake(1 << 30)
        with intake.call(self.A):
            intake.take([seen(self.A, 10 << 20)])
        with intake.call(self.A):
            intake.take([seen(self.A, 1 << 20)])
            assert intake.nbytes <= (1 << 20) - SLACK_BYTES

    async def test_the_largest_goes_first_and_only_as_many_as_must(self):
        intake, failed = Intake(12 << 20), {}
        with intake.call(self.A) as a, intake.call(self.B) as b:
            for name, peer in (("a", a), ("b", b)):
                peer.reads.add(Waiting(name, failed))
            intake.take([seen(self.A, 10 << 20), seen(self.B, 5 << 20)])
            assert list(failed) == ["a"]
            assert isinstance(failed["a"], Overloaded)
            assert failed["a"].retryable
            intake.take([seen(self.A, 10 << 20), seen(self.B, 5 << 20)])
            assert list(failed) == ["a"]
            a.reads.clear()
            b.reads.clear()

    async def test_connections_that_have_gone_are_forgotten_though_nothing_is_awaited(self, monkeypatch):
        monkeypatch.setattr(intake_module, "SAMPLE_S", 0.01)
        monkeypatch.setattr(intake_module, "IDLE_SAMPLES", 2)
        monkeypatch.setattr(sockets, "connections", lambda **_: [seen(self.B, 100)])
        intake = Intake(1)
        for name in (self.A, self.B):
            with intake.call(name):
                pass
        watching = asyncio.create_task(intake.watch())
        await until(lambda: list(intake._peers) == [self.B])
        watching.cancel()

    async def test_without_netlink_the_deadline_is_left(self, monkeypatch, caplog):
        def refused(**_):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(intake_module, "SAMPLE_S", 0.01)
        monkeypatch.setattr(sockets, "connections", refused)
        intake = Intake(1)
        with intake.call(self.A, stream=asyncio.current_task()):
            await asyncio.wait_for(intake.watch(), 20)
        assert "only their time is limited" in caplog.text
        assert intake._peers == {}
