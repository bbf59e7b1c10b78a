"""The Unix socket beside gRPC for clients with a region: the same answers and refusals, and no way in without the key."""

import asyncio
import concurrent.futures
import os
import socket
import struct
import threading
import time

import pytest
import torch
from prometheus_client import generate_latest

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.client.ring import Bell
from epserve.errors import CallerError, DeadlineExceeded, InvalidRequest, NotReady, Unauthenticated, UnknownLayer
from epserve.protocol import epserve_pb2 as pb
from epserve.server import doorbell as doorbell_module
from epserve.server.doorbell import KEY_BYTES, MAX_CONNECTIONS, MAX_FRAME_BYTES, METHODS
from tests.support.fake_engine import FakeEngine, LocalExperts, echo_after, hang, serving
from tests.support.grpc_calls import in_thread, until

LIMIT_S = 50
ONCE = ClientOptions(retry=RetryPolicy(attempts=1))


def rung(server) -> float:
    """Calls that came over the doorbell, whatever became of them."""
    text = generate_latest(server._observer.metrics.registry).decode()
    lines = [
        line for line in text.splitlines() if METHODS[0] in line and not line.startswith("#") and "_created" not in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_the_same_answer_as_over_grpc():
    experts = LocalExperts()

    def calls(address):
        x = torch.randn(5, 32)
        with Client(address) as client, client.register_region(1 << 16) as region:
            inside = region.empty((5, 32), torch.float32).copy_(x)
            return client.forward(1, x), client.forward(1, inside, region=region), client.forward(2, x, region=region)

    async with serving(FakeEngine(experts)) as server:
        over_grpc, *over_the_bell = await in_thread(calls, server.address)
        assert rung(server) == 2
    assert all(torch.equal(over_grpc, other) for other in over_the_bell)


async def test_refusals_are_the_same_errors():
    def calls(address):
        x = torch.zeros(2, 32)
        seen = []
        with Client(address, ONCE) as client, client.register_region(1 << 16) as region:
            for layer, hidden in ((99, x), (1, torch.zeros(2, 31)), (1, torch.full((2, 32), float("nan"))), (1, x)):
                try:
                    seen.append(client.forward(layer, hidden, region=region).shape)
                except CallerError as error:
                    seen.append(error)
        return seen

    async with serving(FakeEngine()) as server:
        unknown, wrong, nan, fine = await in_thread(calls, server.address)
        assert rung(server) == 4
    assert isinstance(unknown, UnknownLayer)
    assert isinstance(wrong, InvalidRequest) and "hidden size 31" in str(wrong) and wrong.field == "hidden_states"
    assert isinstance(nan, InvalidRequest) and "NaN" in str(nan)
    assert fine == (2, 32), "the same connection goes on"


async def test_many_threads_at_once_get_their_own_answers():
    async def slow_echo(batch):
        await asyncio.sleep(0.01)
        return batch.hidden.clone()

    def calls(address):
        with Client(address) as client, client.register_region(1 << 20) as region:
            with concurrent.futures.ThreadPoolExecutor(16) as pool:

                def one(number):
                    return client.forward(1, torch.full((3, 32), float(number)), region=region)

                results = list(pool.map(one, range(64)))
            return all(bool((y == number).all()) for number, y in enumerate(results)), len(region.bell._idle)

    async with serving(FakeEngine(slow_echo)) as server:
        right, connections = await in_thread(calls, server.address)
        assert rung(server) == 64
    assert right and 1 < connections <= 16


async def test_a_deadline_ends_the_call_on_both_sides():
    engine = FakeEngine(hang)

    def call(address):
        with (
            Client(address, ONCE) as client,
            client.register_region(1 << 16) as region,
            pytest.raises(DeadlineExceeded),
        ):
            client.forward(1, torch.zeros(2, 32), region=region, timeout=0.3)

    async with serving(engine) as server:
        await in_thread(call, server.address)
        await until(lambda: engine.cancelled == 1 and not engine.running)
        assert server._calls.in_flight == server._calls.buffered_bytes == 0


async def test_cancelling_a_future_cancels_the_call_and_not_the_next_one():
    engine = FakeEngine(hang)

    def calls(address):
        with Client(address, ONCE) as client, client.register_region(1 << 16) as region:
            future = client.forward_async(1, torch.zeros(2, 32), region=region)
            while not engine.running:
                time.sleep(0.01)
            assert future.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                future.result(LIMIT_S)
            while engine.running:
                time.sleep(0.01)
            engine.compute = echo
            done = client.forward_async(1, torch.ones(2, 32), region=region)
            y = done.result(LIMIT_S)
            done.cancel()
            return y, client.forward(1, torch.ones(2, 32), region=region)

    async def echo(batch):
        return batch.hidden

    async with serving(engine) as server:
        first, second = await in_thread(calls, server.address)
        assert engine.cancelled == 1
        assert rung(server) == 3
    assert first.sum() == second.sum() == 64


async def test_a_service_that_stops_in_the_middle_is_not_ready():
    engine, started = FakeEngine(hang), threading.Event()

    def call(address):
        with Client(address, ONCE) as client, client.register_region(1 << 16) as region:
            started.set()
            with pytest.raises(NotReady):
                client.forward(1, torch.zeros(2, 32), region=region, timeout=30)

    async with serving(engine) as server:
        calling = asyncio.create_task(in_thread(call, server.address))
        await until(lambda: started.is_set() and engine.running == 1)
    await calling


async def test_the_connection_ends_with_the_region():
    async with serving(FakeEngine()) as server:
        calls = server._doorbell
        with Client(server.address) as client:

            def hold(release):
                with client.register_region(1 << 16) as region:
                    assert region.bell.usable
                    release.wait(LIMIT_S)
                return region

            release = threading.Event()
            holding = asyncio.create_task(in_thread(hold, release))
            await until(lambda: [len(each.connections) for each in calls._registrations.values()] == [1])
            release.set()
            region = await holding
            assert not region.bell.usable
            await until(lambda: not calls._registrations)


async def test_a_bell_that_cannot_be_reached_is_left_alone(monkeypatch):
    async with serving(FakeEngine()) as server:
        monkeypatch.setattr(server._doorbell, "name", "epserve-doorbell-elsewhere")

        def call():
            with Client(server.address, ONCE) as client, client.register_region(1 << 16) as region:
                assert not region.bell.usable
                return client.forward(1, torch.ones(2, 32), region=region)

        assert (await in_thread(call)).sum() == 64
        assert rung(server) == 0


async def test_asyncio_has_many_calls_on_one_connection():
    async def slow_echo(batch):
        await asyncio.sleep(0.02 if batch.hidden[0, 0] % 2 else 0.001)
        return batch.hidden.clone()

    engine = FakeEngine(slow_echo)
    async with serving(engine) as server, AsyncClient(server.address, ONCE) as client:
        async with client.register_region(1 << 20) as region:
            inputs = [torch.full((3, 32), float(number)) for number in range(100)]
            results = await asyncio.gather(*(client.forward(1, x, region=region) for x in inputs))
            assert all(torch.equal(x, y) for x, y in zip(inputs, results, strict=True))
            assert rung(server) == 100
            (registration,) = server._doorbell._registrations.values()
            assert len(registration.connections) == 1
            with pytest.raises(UnknownLayer):
                await client.forward(99, inputs[0], region=region)
            engine.compute = hang
            with pytest.raises(DeadlineExceeded):
                await client.forward(1, inputs[0], region=region, timeout=0.1)
            await until(lambda: not engine.running)
            call = asyncio.create_task(client.forward(1, inputs[0], region=region))
            await until(lambda: engine.running == 1)
            call.cancel()
            await until(lambda: engine.cancelled == 2 and not engine.running)
            engine.compute = slow_echo
            assert torch.equal(await client.forward(1, inputs[7], region=region), inputs[7])
        assert not region.async_bell.usable


async def test_asyncio_and_a_service_that_stops_or_cannot_be_reached(monkeypatch):
    engine = FakeEngine(hang)
    async with (
        serving(engine) as server,
        AsyncClient(server.address, ONCE) as client,
        client.register_region(1 << 16) as region,
    ):
        call = asyncio.create_task(client.forward(1, torch.zeros(2, 32), region=region))
        await until(lambda: engine.running == 1)
        await server.stop()
        with pytest.raises(NotReady):
            await asyncio.wait_for(call, LIMIT_S)
    async with serving(FakeEngine()) as server, AsyncClient(server.address, ONCE) as client:
        monkeypatch.setattr(server._doorbell, "name", "epserve-doorbell-elsewhere")
        async with client.register_region(1 << 16) as region:
            assert region.async_bell is None
            assert (await client.forward(1, torch.ones(2, 32), region=region)).sum() == 64
        assert rung(server) == 0


async def test_a_call_counts_as_who_registered_the_region_until_his_token_goes(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("aaa name=alice\nbbb name=bob\n")
    engine = FakeEngine()
    async with serving(engine, tokens_file=tokens) as server, AsyncClient(server.address, ONCE, token="aaa") as client:
        async with client.register_region(1 << 16) as region:
            await client.forward(1, torch.ones(2, 32), region=region)
            assert [batch.client for batch in engine.seen] == ["alice"]
            tokens.write_text("bbb name=bob\n")
            server.reload()
            with pytest.raises(Unauthenticated, match="withdrawn"):
                await client.forward(1, torch.ones(2, 32), region=region)
        assert rung(server) == 2
    assert len(engine.seen) == 1


async def test_without_regions_there_is_no_doorbell():
    async with serving(FakeEngine(), regions=False) as server:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_unix_connection("\0" + server._doorbell.name)


def key_of(server) -> bytes:
    caller = doorbell_module.Caller(peer="unix:", account=server._calls.accounts.identify(()))
    return server._doorbell.register(caller)


def frame(message) -> bytes:
    data = message.SerializeToString()
    return struct.pack("!I", len(data)) + data


PART = pb.RequestFrame(call=1, part=pb.Part(field=pb.HIDDEN_STATES, data=b"x"))


# What a stranger may send, and why it must end there: another key, a short one, frames that are too long, that are no
# protobuf, that have no body, and parts, which have no meaning here.
@pytest.mark.parametrize(
    ("with_key", "sent"),
    [
        (False, bytes(KEY_BYTES)),
        (False, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (True, struct.pack("!I", MAX_FRAME_BYTES + 1)),
        (True, struct.pack("!I", 4) + b"\xff\xff\xff\xff"),
        (True, frame(pb.RequestFrame(call=1))),
        (True, frame(PART)),
    ],
)
async def test_what_is_no_call_ends_the_connection(with_key, sent):
    engine = FakeEngine()
    async with serving(engine) as server:
        key = key_of(server)
        reader, writer = await asyncio.open_unix_connection("\0" + server._doorbell.name)
        writer.write((key if with_key else b"") + sent)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()
        x = torch.ones(2, 32)
        tensor = pb.Tensor(dtype=pb.FP32, shape=x.shape, data=x.numpy().tobytes())
        request = pb.RequestFrame(call=7, begin=pb.ForwardRequest(layer=1, hidden_states=tensor))
        reader, writer = await asyncio.open_unix_connection("\0" + server._doorbell.name)
        for piece in (key[:5], key[5:] + frame(request)[:3], frame(request)[3:]):  # however it is cut
            writer.write(piece)
            await asyncio.sleep(0.02)
        (size,) = struct.unpack("!I", await asyncio.wait_for(reader.readexactly(4), LIMIT_S))
        reply = pb.ReplyFrame.FromString(await reader.readexactly(size))
        assert reply.call == 7 and reply.begin.hidden_states.data == tensor.data
        writer.close()
    assert len(engine.seen) == 1


async def test_who_says_nothing_is_turned_out(monkeypatch):
    monkeypatch.setattr(doorbell_module, "GREETING_S", 0.1)
    async with serving(FakeEngine()) as server:
        reader, writer = await asyncio.open_unix_connection("\0" + server._doorbell.name)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()


async def test_connections_of_a_key_are_counted():
    async with serving(FakeEngine()) as server:
        key, socks = key_of(server), []
        for _ in range(MAX_CONNECTIONS):
            _, writer = await asyncio.open_unix_connection("\0" + server._doorbell.name)
            writer.write(key)
            socks.append(writer)
        await until(lambda: len(server._doorbell._registrations[key].connections) == MAX_CONNECTIONS)
        reader, writer = await asyncio.open_unix_connection("\0" + server._doorbell.name)
        writer.write(key)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        for each in (*socks, writer):
            each.close()
        await until(lambda: not server._doorbell._registrations[key].connections)


async def test_more_calls_than_may_run_wait_their_turn():
    gate = asyncio.Event()
    engine = FakeEngine(echo_after(gate))
    async with serving(engine, max_in_flight_per_stream=2) as server:
        reader, writer = await asyncio.open_unix_connection("\0" + server._doorbell.name)
        tensor = pb.Tensor(dtype=pb.FP32, shape=(1, 32), data=bytes(128))
        frames = [pb.RequestFrame(call=n, begin=pb.ForwardRequest(layer=1, hidden_states=tensor)) for n in range(5)]
        writer.write(key_of(server) + b"".join(map(frame, frames)))
        await until(lambda: engine.running == 2)
        await asyncio.sleep(0.05)
        assert engine.running == 2
        gate.set()
        seen = set()
        for _ in frames:
            (size,) = struct.unpack("!I", await asyncio.wait_for(reader.readexactly(4), LIMIT_S))
            seen.add(pb.ReplyFrame.FromString(await reader.readexactly(size)).call)
        assert seen == set(range(5))
        writer.close()


async def test_a_client_that_reads_no_replies_is_read_no_further():
    engine, calls = FakeEngine(), 400
    tensor = pb.Tensor(dtype=pb.FP32, shape=(64, 32), data=bytes(64 * 32 * 4))
    sent = b"".join(
        frame(pb.RequestFrame(call=n, begin=pb.ForwardRequest(layer=1, hidden_states=tensor))) for n in range(calls)
    )
    async with serving(engine, max_in_flight_per_stream=2) as server:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, "\0" + server._doorbell.name)
        sending = asyncio.ensure_future(loop.sock_sendall(sock, key_of(server) + sent))
        seen = -1
        while seen != len(engine.seen):  # until it stands still
            seen = len(engine.seen)
            await asyncio.sleep(0.3)
        (connection,) = next(iter(server._doorbell._registrations.values())).connections
        waiting = connection._transport.get_write_buffer_size()
        assert 0 < seen < calls and not sending.done()
        assert waiting < 64 * 1024 + 4 * len(sent) // calls, "more than asyncio's mark and what ran at that moment"
        answers = b""
        while len(engine.seen) < calls or connection._transport.get_write_buffer_size():
            answers += await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), LIMIT_S)
        assert sending.done()
        sock.close()


def test_a_bell_whose_service_has_gone():
    bell = Bell(f"epserve-test-nobody-{os.getpid()}", b"x" * KEY_BYTES)
    with pytest.raises(NotReady, match="does not answer"):
        bell.call(pb.RequestFrame(), 1.0, None)
    assert not bell.usable
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        name = f"epserve-test-mute-{os.getpid()}"
        silent.bind("\0" + name)
        silent.listen()
        bell = Bell(name, b"x" * KEY_BYTES)
        with pytest.raises(DeadlineExceeded):
            bell.call(pb.RequestFrame(), 0.1, None)
        assert bell.usable and not bell._idle, "a socket with an answer still to come is not used again"
