"""Peers and clocks that misbehave: connections that go dead without closing, clients that never read, a clock that is set."""

import asyncio
import contextlib
import re
import time
from pathlib import Path

import grpc
import pytest
import torch
from grpc._cython import cygrpc

import epserve
from epserve.client import AsyncClient, ClientOptions, Tls
from epserve.config import ServerConfig
from epserve.errors import DeadlineExceeded
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.server import server as server_module
from epserve.server.server import Server
from epserve.server.watch.history import History
from tests.server.raw_http2 import RawConnection
from tests.support.fake_engine import FakeEngine, echo_after, serving
from tests.support.grpc_calls import Frames, connect, status_of, until


class Wire:
    """A TCP proxy that can be cut as a cable is: nothing passes any more, and nobody is told."""

    def __init__(self, port: int):
        self._target = port
        self._pumps: set[asyncio.Task] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.cut = False

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_) -> None:
        for task in self._pumps:
            task.cancel()
        for writer in self._writers:
            writer.close()
        self._server.close()

    async def _join(self, reader, writer) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, inner_writer]
        for source, sink in ((reader, inner_writer), (inner_reader, writer)):
            self._pumps.add(asyncio.ensure_future(self._pump(source, sink)))

    async def _pump(self, source, sink) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if not self.cut:
                    sink.write(data)
                    await sink.drain()


class TestHalfOpenConnections:
    async def test_what_a_vanished_client_held_is_given_back(self, monkeypatch):
        """Its calls are cancelled, its region is forgotten: by pings, since no packet says that it is gone."""
        options = server_module._options

        def impatient(config):
            # A ping that a starved client answers a second late must not end its connection before the cut.
            own = {"grpc.keepalive_time_ms": 300, "grpc.keepalive_timeout_ms": 3000, "grpc.http2.ping_timeout_ms": 3000}
            return [(key, own.get(key, value)) for key, value in options(config)]

        monkeypatch.setattr(server_module, "_options", impatient)
        engine = FakeEngine(lambda batch: asyncio.sleep(60, batch.hidden))
        async with serving(engine) as server:
            wire = Wire(server.port)
            async with wire as address, AsyncClient(address) as client, client.register_region(1 << 16):
                call = asyncio.ensure_future(client.forward(1, torch.ones(1, 32), timeout=60))
                await until(lambda: engine.running == 1)
                assert len(server._calls.regions) == 1
                wire.cut = True
                await until(lambda: engine.cancelled == 1 and server._calls.in_flight == 0)
                await until(lambda: len(server._calls.regions) == 0)
                assert server._calls.buffered_bytes == 0
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            async with AsyncClient(server.address) as other:
                assert (await other.status(timeout=60)).state == "serving"

    def test_a_server_pings_as_it_should(self):
        options = dict(server_module._options(ServerConfig()))
        assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 90_000
        assert options["grpc.http2.max_pings_without_data"] == 0, "as often as it takes"
        assert options["grpc.keepalive_permit_without_calls"] == 1

    def test_a_client_may_ping_as_often_as_any_grpc_lets_it(self):
        """Every 10 s at the most, for grpc-go and grpc-java; the margin is for pings that come early."""
        assert dict(server_module._options(ServerConfig()))["grpc.http2.min_ping_interval_without_data_ms"] <= 4_000

    def test_grpc_knows_every_option_that_is_set(self):
        """It ignores a name that it does not know, and does not say so."""
        library = Path(cygrpc.__file__).read_bytes()
        options = (
            server_module._options(ServerConfig()) + ClientOptions(tls=Tls(), balance="round_robin").channel_options()
        )
        assert [name for name, _ in options if name.encode() + b"\0" not in library] == []

    @pytest.mark.slow
    async def test_pings_close_no_connection_unless_they_are_a_flood(self):
        """Every 5 s, with a call that is open and with none. Three pings too many were enough, once."""
        watch = "/grpc.health.v1.Health/Watch"
        async with serving(FakeEngine()) as server:
            idle, busy, flood = [await RawConnection(window=65535).connect(server.address) for _ in range(3)]
            await busy.send(watch, b"")
            for _ in range(5):
                await asyncio.sleep(5)
                idle.ping()
                busy.ping()
            for _ in range(20):
                flood.ping()
                await asyncio.sleep(0.05)
            await asyncio.wait_for(flood.closed.wait(), 30)
            assert not idle.closed.is_set()
            assert not busy.closed.is_set()
            assert not busy.ended
            for connection in (idle, busy, flood):
                await connection.close()

    async def test_a_request_of_which_only_the_head_comes_ends_at_its_deadline(self):
        async with serving(FakeEngine()) as server, connect(server) as channel:
            frames = Frames(channel)
            head = pb.ForwardRequest(layer=1, hidden_states=pb.Tensor(dtype=pb.FP32, shape=(500, 32)), timeout_ms=300)
            await frames.call.write(pb.RequestFrame(call=1, begin=head))
            await frames.call.write(pb.RequestFrame(call=1, part=pb.Part(field=pb.HIDDEN_STATES, data=bytes(1000))))
            failure = (await frames.replies(1))[1]
            assert (failure.code, failure.error) == ("DEADLINE_EXCEEDED", DeadlineExceeded.__name__)
            assert server._calls.buffered_bytes == server._calls.in_flight == 0


class TestClientsThatDoNotRead:
    async def test_a_stream_of_the_inference_protocol_is_not_waited_for_either(self):
        x = torch.zeros(16000, 32)
        tensor = kserve.ModelInferRequest.InferInputTensor(name="hidden_states", datatype="FP32", shape=x.shape)
        request = kserve.ModelInferRequest(
            model_name="layer-1", inputs=[tensor], raw_input_contents=[x.numpy().tobytes()]
        )
        server = Server(FakeEngine(), ServerConfig(port=0, max_in_flight_per_stream=8), default_deadline_s=1.0)
        await server.start()
        async with connect(server) as channel:
            call = kserve_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            for _ in range(12):  # more than the transport and the queue of answers hold
                try:
                    await asyncio.wait_for(call.write(request), 5)
                except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
                    break
            await until(lambda: server._calls.in_flight == 0)
            await asyncio.sleep(2.5)  # and reads nothing
            error = await status_of(asyncio.wait_for(drained(call), 60))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "was not read within 1 s" in error.details()
        await server.stop()


async def drained(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


class TestClocks:
    @pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
    async def test_setting_the_clock_ends_no_call_and_prolongs_none(self, monkeypatch, tmp_path, jump_s):
        tokens = tmp_path / "tokens"
        tokens.write_text("t name=t tokens_per_s=100\n")
        gate, real = asyncio.Event(), time.time
        engine = FakeEngine(echo_after(gate))
        async with serving(engine, tokens_file=tokens) as server, AsyncClient(server.address, token="t") as client:
            call = asyncio.ensure_future(client.forward(1, torch.ones(10, 32), timeout=60))
            late = asyncio.ensure_future(client.forward(1, torch.ones(1, 32), timeout=2))
            await until(lambda: engine.running == 2)
            monkeypatch.setattr(time, "time", lambda: real() + jump_s)
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(late, 20)
            assert not call.done()
            gate.set()
            assert (await asyncio.wait_for(call, 20)).shape == (10, 32)
            monkeypatch.undo()  # gRPC's own client makes deadlines of it
            assert (await client.status()).uptime_s < 600

    def test_expert_load_is_sampled_on_after_the_clock_went_back(self):
        history = History()
        for second in range(20):
            at = 1e9 + second if second < 8 else second  # a wrong clock is set right
            history.sample(at, 1.0, queue_tokens=0, load={0: (second, 0)})
        assert len(history._loads) == 1 + 3
        assert history.recent_load().tolist() == [[19, 0]]

    def test_nothing_but_timestamps_reads_the_clock_of_the_wall(self):
        """Waits, deadlines, rates and leases must not know what o'clock it is."""
        allowed = {
            "server/watch/observer.py": 1,  # when a second of the history ended, for the page's axis
            "process/tracing.py": 1,  # spans have Unix times
            "server/watch/layer_counts.py": 1,  # ModelStatistics tells the Unix time of the last inference
            "cluster/supervise.py": 1, "cluster/node.py": 1, "cluster/diagnosis.py": 2,  # nodes compare their clocks
        }  # fmt: skip
        root, found = Path(epserve.__file__).parent, {}
        for path in root.rglob("*.py"):
            if wall := len(re.findall(r"\b(?:time\.time(?:_ns)?|datetime\.now)\(\)", path.read_text())):
                found[str(path.relative_to(root))] = wall
        assert found == allowed
