"""Streams of AsyncClient, and registrations of regions, that outlive the server they began with."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from epserve import errors
from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.server.server import Server
from epserve.server.stream import StreamSession
from tests.support.clients import QUICK
from tests.support.fake_engine import FakeEngine, echo, echo_after, hang, serving
from tests.support.grpc_calls import until

LARGE = 16000  # rows of 32 floats: two frames


@asynccontextmanager
async def stream_of(engine: FakeEngine, options: ClientOptions = QUICK, **config):
    async with (
        serving(engine, **config) as server,
        AsyncClient(server.address, options) as client,
        client.stream() as stream,
    ):
        yield stream, server


async def another(engine: FakeEngine, server: Server) -> Server:
    """On the port of one that has stopped."""
    again = Server(engine, server._config.model_copy(update={"port": server.port}))
    await again.start()
    return again


def rows(number: int, count: int = 1) -> torch.Tensor:
    return torch.full((count, 32), float(number))


class TestOneStream:
    async def test_calls_share_a_stream_and_end_in_any_order(self):
        async def by_value(batch):
            await asyncio.sleep(float(batch.hidden[0, 0]) / 1000)
            return batch.hidden

        sent = [rows(ms, LARGE if ms % 9 == 0 else 1) for ms in range(40, 0, -1)]
        async with stream_of(FakeEngine(by_value)) as (stream, server):
            for x, y in zip(sent, await asyncio.gather(*(stream.forward(1, x) for x in sent)), strict=True):
                assert torch.equal(x, y)
            assert server._calls.in_flight == 0

    async def test_a_failure_is_of_its_call_alone(self):
        requests = [(4 if number % 2 else 1, rows(1, LARGE if number % 3 == 0 else 1)) for number in range(12)]
        async with stream_of(FakeEngine()) as (stream, _):
            replies = await asyncio.gather(*(stream.forward(*request) for request in requests), return_exceptions=True)
        assert [type(reply) for reply in replies] == [torch.Tensor, errors.UnknownLayer] * 6

    async def test_deadlines_and_cancels_end_one_call(self):
        engine = FakeEngine(hang)
        async with stream_of(engine) as (stream, server):
            with pytest.raises(errors.DeadlineExceeded):
                await stream.forward(1, rows(1), timeout=0.1)
            tasks = [asyncio.ensure_future(stream.forward(1, rows(1, LARGE))) for _ in range(3)]
            await until(lambda: engine.running == 3)
            for task in tasks:
                task.cancel()
            await until(lambda: not engine.running and not server._calls.in_flight)
            engine.compute = echo
            assert torch.equal(await stream.forward(1, rows(1, 2)), rows(1, 2))

    async def test_what_may_succeed_later_is_sent_again_on_the_same_stream(self):
        left = [errors.RankFailed("died"), errors.Overloaded("full", retry_after_s=0.2)]

        async def flaky(batch):
            if left and float(batch.hidden[0, 0]):
                raise left.pop()
            return batch.hidden

        async with stream_of(FakeEngine(flaky)) as (stream, _):
            first = stream._open()
            loop, before = asyncio.get_running_loop(), asyncio.get_running_loop().time()
            assert torch.equal(await stream.forward(1, rows(1)), rows(1))
            assert loop.time() - before >= 0.2, "the service says how long to wait"
            assert not left and stream._open() is first

    async def test_what_cannot_is_not_and_neither_is_more_than_the_policy_says(self):
        async def refuse(batch):
            raise errors.RankFailed("died") if batch.layer == 1 else errors.InternalError("defect")

        engine = FakeEngine(refuse)
        retry = RetryPolicy(attempts=3, first_s=0.01)
        async with stream_of(engine, ClientOptions(retry=retry)) as (stream, _):
            with pytest.raises(errors.RankFailed) as raised:
                await stream.forward(1, rows(1))
            assert raised.value.__notes__ == ["after 3 attempts in 60 s at most"] and len(engine.seen) == 3
            with pytest.raises(errors.InternalError):
                await stream.forward(2, rows(1))
            assert len(engine.seen) == 4

    async def test_a_closed_one_says_so_to_calls_that_run_and_to_later_ones(self):
        engine = FakeEngine(hang)
        async with stream_of(engine) as (stream, _):
            running = asyncio.ensure_future(stream.forward(1, rows(1)))
            await until(lambda: engine.running)
        with pytest.raises(errors.CallerError, match="closed before the reply"):
            await running
        with pytest.raises(errors.CallerError, match="stream is closed"):
            await stream.forward(1, rows(1))

    async def test_a_client_that_is_closed_ends_its_streams(self):
        engine = FakeEngine(hang)
        async with serving(engine) as server:
            client = AsyncClient(server.address, QUICK)
            stream = client.stream()
            running = asyncio.ensure_future(stream.forward(1, rows(1)))
            await until(lambda: engine.running)
            await client.close()
            with pytest.raises(errors.CallerError, match="closed"):
                await running
            await stream.close()


class TestAnotherServer:
    async def test_calls_without_a_reply_are_sent_again_and_answered_once(self):
        """Of 60 calls some are answered before the server goes away, some run there, some were not yet read."""
        open_, answered = asyncio.Event(), []

        async def half(batch):
            number = int(batch.hidden[0, 0])
            if number % 2:
                await open_.wait()
            return batch.hidden + 1

        engine = FakeEngine(half)
        async with stream_of(engine, max_in_flight_per_stream=20) as (stream, server):

            async def ask(number: int) -> None:
                x = rows(number, LARGE if number % 7 == 0 else 2)
                assert torch.equal(await stream.forward(1, x), x + 1)
                answered.append(number)

            calls = [asyncio.ensure_future(ask(number)) for number in range(60)]
            await until(lambda: engine.running == 20 and len(answered) == 20)  # of the first 40, which were read
            await server.stop(grace=0)
            await asyncio.sleep(0.3)  # nobody is there: attempts fail
            assert len(answered) == 20
            open_.set()
            again = await another(engine, server)
            try:
                await asyncio.wait_for(asyncio.gather(*calls), 40)
            finally:
                await again.stop()
        assert sorted(answered) == list(range(60))

    async def test_a_server_that_drains_answers_what_it_has_and_the_next_one_the_rest(self):
        open_ = asyncio.Event()
        engine = FakeEngine(echo_after(open_))
        async with stream_of(engine, max_in_flight_per_stream=4) as (stream, server):
            calls = [asyncio.ensure_future(stream.forward(1, rows(number))) for number in range(9)]
            await until(lambda: engine.running == 4)
            stopping = asyncio.ensure_future(server.stop(grace=20))
            await until(server._calls.draining.is_set)
            open_.set()
            await until(lambda: sum(call.done() for call in calls) == 4)  # what ran is answered there
            await stopping
            assert len(engine.seen) == 4
            again = await another(engine, server)
            try:
                for number, y in enumerate(await asyncio.wait_for(asyncio.gather(*calls), 40)):
                    assert torch.equal(y, rows(number))
            finally:
                await again.stop()
        assert len(engine.seen) == 9, "nothing was computed twice"

    async def test_one_stream_is_opened_for_all(self):
        engine = FakeEngine()
        async with stream_of(engine) as (stream, server):
            await stream.forward(1, rows(0))
            opened, open_stream = [], stream._open_stream
            stream._open_stream = lambda: opened.append(open_stream()) or opened[-1]
            await server.stop(grace=0)
            again = await another(engine, server)
            try:
                got = await asyncio.gather(*(stream.forward(1, rows(number)) for number in range(50)))
            finally:
                await again.stop()
        assert [int(y[0, 0]) for y in got] == list(range(50))
        assert len(opened) < 10, "not one for each call"

    async def test_another_front_end_takes_over(self):
        engines = [FakeEngine(hang), FakeEngine(hang)]
        async with serving(engines[0]) as one, serving(engines[1]) as other:
            target = f"ipv4:127.0.0.1:{one.port},127.0.0.1:{other.port}"
            options = replace(QUICK, balance="round_robin")
            async with AsyncClient(target, options) as client, client.stream() as stream:
                calls = [asyncio.ensure_future(stream.forward(1, rows(number))) for number in range(8)]
                await until(lambda: 8 in (engines[0].running, engines[1].running))
                went, stays = (0, 1) if engines[0].running else (1, 0)
                engines[stays].compute = echo
                await (one, other)[went].stop(grace=0)
                for number, y in enumerate(await asyncio.wait_for(asyncio.gather(*calls), 40)):
                    assert torch.equal(y, rows(number))
                assert len(engines[stays].seen) == 8

    async def test_each_call_has_its_own_deadline(self):
        engine = FakeEngine(hang)
        async with stream_of(engine) as (stream, server):
            patient = asyncio.ensure_future(stream.forward(1, rows(1), timeout=40))
            hasty = asyncio.ensure_future(stream.forward(1, rows(2), timeout=2.0))
            await until(lambda: engine.running == 2)
            await server.stop(grace=0)
            before = time.monotonic()
            with pytest.raises((errors.NotReady, errors.DeadlineExceeded)):  # the second where stopping took long
                await hasty
            assert time.monotonic() - before < 20
            assert not patient.done()
            engine.compute = echo
            again = await another(engine, server)
            try:
                assert torch.equal(await patient, rows(1))
            finally:
                await again.stop()

    async def test_a_stream_that_the_server_gave_up_for_one_call_is_opened_again_for_the_others(self, monkeypatch):
        """DEADLINE_EXCEEDED of a stream: a reply was not read in time. It is the others' own time that counts."""
        given_up, write = [], StreamSession._write

        async def give_up_once(session, frame):
            if not given_up:
                given_up.append(frame.call)
                session._break(errors.DeadlineExceeded("the reply was not read before its deadline"))
                await asyncio.sleep(60)
            await write(session, frame)

        monkeypatch.setattr(StreamSession, "_write", give_up_once)
        async with stream_of(FakeEngine()) as (stream, _):
            got = await asyncio.gather(*(stream.forward(1, rows(number)) for number in range(3)))
        assert given_up and [int(y[0, 0]) for y in got] == [0, 1, 2]

    async def test_a_token_that_is_no_longer_one_is_not_tried_again(self, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text("secret\n")
        options = ClientOptions(token="secret", timeout_s=50)
        async with stream_of(FakeEngine(), options, tokens_file=tokens) as (stream, server):
            await stream.forward(1, rows(1))
            tokens.write_text("other\n")
            server.reload()
            with pytest.raises(errors.Unauthenticated):
                await stream.forward(1, rows(1))


class TestRegistration:
    """Of a region: sent again as calls are, until its timeout."""

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_a_server_that_comes_later_is_found(self, blocking):
        engine = FakeEngine()
        async with serving(engine) as server:
            pass

        async def register() -> None:
            async with AsyncClient(server.address, QUICK) as client, client.register_region(4096) as region:
                assert torch.equal(await client.forward(1, rows(1), region=region), rows(1))

        def register_blocking() -> None:
            with Client(server.address, QUICK) as client, client.register_region(4096) as region:
                assert torch.equal(client.forward(1, rows(1), region=region), rows(1))

        pending = asyncio.ensure_future(asyncio.to_thread(register_blocking) if blocking else register())
        await asyncio.sleep(0.2)
        assert not pending.done() and not engine.seen
        again = await another(engine, server)
        try:
            await asyncio.wait_for(pending, 40)
            await until(lambda: not len(again._calls.regions))
        finally:
            await again.stop()

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_one_too_many_waits_until_there_is_room(self, blocking, monkeypatch):
        monkeypatch.setattr("epserve.server.regions.MAX_REGIONS_PER_CLIENT", 1)
        async with serving(FakeEngine()) as server, AsyncClient(server.address, QUICK) as client:

            def register_blocking() -> None:
                with Client(server.address, QUICK) as other, other.register_region(4096):
                    pass

            async def register() -> None:
                async with client.register_region(4096):
                    pass

            async with client.register_region(4096):
                pending = asyncio.ensure_future(asyncio.to_thread(register_blocking) if blocking else register())
                await asyncio.sleep(0.2)
                assert not pending.done()
            await asyncio.wait_for(pending, 40)

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_its_timeout_holds_where_nobody_answers(self, blocking):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"

            def register_blocking() -> None:
                with Client(address, QUICK) as client, client.register_region(4096, timeout=0.4):
                    pass

            async def register() -> None:
                async with AsyncClient(address, QUICK) as client, client.register_region(4096, timeout=0.4):
                    pass

            before = time.monotonic()
            with pytest.raises(errors.DeadlineExceeded, match="did not register the region in time"):
                await (asyncio.to_thread(register_blocking) if blocking else register())
            assert 0.3 < time.monotonic() - before < 20

    async def test_what_cannot_be_registered_is_refused_at_once(self):
        async with serving(FakeEngine(), max_region_bytes=8192) as server, AsyncClient(server.address) as client:
            with pytest.raises(errors.TooLarge, match=r"server\.max_region_bytes"):
                async with client.register_region(16384):
                    pass

    @pytest.mark.parametrize("blocking", [False, True])
    async def test_a_call_that_loses_its_region_says_what_helps(self, blocking):
        """Another server does not know the region, so that sending the call again is of no use."""
        engine = FakeEngine(hang)
        async with serving(engine) as server:

            async def work() -> None:
                async with AsyncClient(server.address, QUICK) as client, client.register_region(4096) as region:
                    await client.forward(1, rows(1), region=region)

            def work_blocking() -> None:
                with Client(server.address, QUICK) as client, client.register_region(4096) as region:
                    client.forward(1, rows(1), region=region)

            pending = asyncio.ensure_future(asyncio.to_thread(work_blocking) if blocking else work())
            await until(lambda: engine.running)
            await server.stop(grace=0)
            with pytest.raises(errors.NotReady, match=r"no longer registered.*register another"):
                await asyncio.wait_for(pending, 20)
