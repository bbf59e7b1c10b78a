"""What limits do to calls: rates, bytes, priorities, admin calls, withdrawn tokens, on calls and on open streams."""

import asyncio
import os
import time
from pathlib import Path

import grpc
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from epserve.client import AsyncClient, ClientOptions
from epserve.client.exchange import OutgoingRequest
from epserve.engine.planning import Priority
from epserve.errors import InvalidRequest, NotReady, Overloaded, PermissionDenied, Unauthenticated
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from tests.support.fake_engine import FakeEngine, echo_after, serving
from tests.support.grpc_calls import Frames, connect, message, status_of, tensor_of, until
from tests.support.limited import ONCE, bearer, impatient


class TestService:
    @pytest.fixture
    def tokens(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text(
            "slow name=slow tokens_per_s=100\nsmall name=small bytes_in_flight=1KiB\nops name=ops admin\nfree name=free\n"
        )
        return path

    async def test_a_client_above_its_rate_is_told_when_to_come_again_and_others_are_not(self, tokens):
        x = torch.randn(80, 32)
        async with serving(FakeEngine(), tokens_file=tokens) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            await stub.Forward(message(x), metadata=bearer("slow"))
            error = await status_of(stub.Forward(message(x), metadata=bearer("slow")))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 0 < int(dict(error.trailing_metadata())["retry-after-ms"]) <= 600
            for _ in range(5):
                await stub.Forward(message(x), metadata=bearer("free"))
            started = time.monotonic()
            async with AsyncClient(server.address, token="slow") as client:  # waits as long as it is told
                assert torch.equal(await client.forward(1, x), x)
            assert time.monotonic() - started > 0.2

    async def test_a_call_on_a_stream_counts_as_any_other(self, tokens):
        x = torch.randn(80, 32)
        async with serving(FakeEngine(), tokens_file=tokens) as server, connect(server) as channel:
            frames = Frames(channel, metadata=bearer("slow"))
            await frames.send(1, x)
            await frames.send(2, x)
            replies = await frames.replies(2)
        assert torch.equal(replies[1], x)
        assert (replies[2].code, replies[2].error) == ("RESOURCE_EXHAUSTED", "Overloaded")
        assert replies[2].retry_after_ms > 0

    async def test_refused_work_costs_nothing(self, tokens):
        async def refuse(batch):
            raise NotReady("recovering")

        engine, x = FakeEngine(refuse), torch.randn(100, 32)
        async with serving(engine, tokens_file=tokens) as server, impatient(server.address, "slow") as client:
            for _ in range(3):
                with pytest.raises(NotReady):
                    await client.forward(1, x)

    async def test_bytes_in_flight_of_one_client(self, tokens):
        release = asyncio.Event()
        engine, x = FakeEngine(echo_after(release)), torch.randn(8, 32)  # 1 KiB
        async with serving(engine, tokens_file=tokens) as server, impatient(server.address, "small") as client:
            first = asyncio.ensure_future(client.forward(1, x))
            await until(lambda: engine.running == 1)
            with pytest.raises(Overloaded, match=r"'small'.*bytes_in_flight"):
                await client.forward(1, x[:1])
            async with impatient(server.address, "free") as other:
                second = asyncio.ensure_future(other.forward(1, x))
                await until(lambda: engine.running == 2)
                release.set()
                assert torch.equal(await first, x)
                assert torch.equal(await second, x)

    @pytest.mark.parametrize(
        ("token", "asked", "got"),
        [
            ("any", "", Priority.NORMAL),
            ("any", "low", Priority.LOW),
            ("any", "high", None),
            ("boss", "high", Priority.HIGH),
            ("boss", "", Priority.NORMAL),
            ("batch", "", Priority.LOW),
            ("batch", "normal", None),
        ],
    )
    async def test_who_may_use_which_priority(self, tmp_path, token, asked, got):
        path = tmp_path / "priorities"
        path.write_text("any name=any\nboss name=boss priority=high\nbatch name=batch priority=low\n")
        engine, x = FakeEngine(), torch.ones(1, 32)
        options = ClientOptions(token=token, retry=ONCE, priority=asked)
        async with serving(engine, tokens_file=path) as server, AsyncClient(server.address, options) as client:
            async with client.stream() as stream:
                for forward in (client.forward, stream.forward):
                    if got is None:
                        with pytest.raises(PermissionDenied, match=rf"priority: {asked.upper()} is above"):
                            await forward(1, x)
                    else:
                        assert torch.equal(await forward(1, x), x)
            assert [batch.priority for batch in engine.seen] == ([] if got is None else [got, got])

    async def test_without_tokens_the_configuration_says_it(self):
        options = ClientOptions(retry=ONCE, priority="high")
        for highest, allowed in (("normal", False), ("high", True)):
            engine = FakeEngine()
            async with serving(engine, max_priority=highest) as server, AsyncClient(server.address, options) as client:
                if allowed:
                    await client.forward(1, torch.ones(1, 32))
                    assert engine.seen[0].priority is Priority.HIGH
                else:
                    with pytest.raises(PermissionDenied, match=r"server\.max_priority"):
                        await client.forward(1, torch.ones(1, 32))

    async def test_what_is_no_priority_is_refused_on_both_sides(self):
        async with serving(FakeEngine()) as server, connect(server) as channel:
            error = await status_of(pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32), priority=9)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "number 9 is none (known: LOW, NORMAL, HIGH)" in error.details()
        with pytest.raises(InvalidRequest, match="'urgent' is none of low, normal, high"):
            OutgoingRequest(1, torch.ones(1, 32), None, None, request_id="", priority="urgent")

    async def test_batches_carry_the_clients_name(self, tokens):
        engine = FakeEngine()
        async with serving(engine, tokens_file=tokens) as server, impatient(server.address, "free") as client:
            await client.forward(1, torch.ones(1, 32))
        assert engine.seen[0].client == "free"

    async def test_the_file_is_read_again_when_it_changes_also_for_open_streams(self, tokens, monkeypatch):
        x = torch.ones(1, 32)
        async with serving(FakeEngine(), tokens_file=tokens) as server, connect(server) as channel:
            frames = Frames(channel, metadata=bearer("free"))
            await frames.send(1, x)
            assert torch.equal((await frames.replies(1))[1], x)
            tokens.write_text("new name=new\n")
            await until(lambda: not server._calls.accounts.changed())
            await frames.send(2, x)
            assert (await frames.replies(1))[2].code == "UNAUTHENTICATED"
            async with impatient(server.address, "free") as client:
                with pytest.raises(Unauthenticated):
                    await client.forward(1, x)
            async with impatient(server.address, "new") as client:
                assert torch.equal(await client.forward(1, x), x)
            os.utime(tokens, ns=(1, 1))
            tokens.write_text("newer name=new\n")
            server.reload()  # as SIGHUP does
            async with impatient(server.address, "newer") as client:
                assert torch.equal(await client.forward(1, x), x)

    @pytest.mark.parametrize(("token", "allowed"), [("ops", True), ("free", False)])
    async def test_reflection_is_for_admins(self, tokens, token, allowed):
        async with serving(FakeEngine(), tokens_file=tokens) as server, connect(server) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
            call = stub.ServerReflectionInfo(iter(ask), metadata=bearer(token))
            if allowed:
                assert (await call.read()).list_services_response.service
            else:
                error = await status_of(call.read())
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                assert dict(error.trailing_metadata())["epserve-error"] == PermissionDenied.__name__

    async def test_compressed_messages_are_refused(self):
        async with serving(FakeEngine()) as server, connect(server) as channel:
            call = pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(100, 32)), compression=grpc.Compression.Gzip)
            error = await status_of(call)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
async def test_a_jump_of_the_wall_clock_changes_no_deadline_rate_or_lease(tmp_path, monkeypatch, jump_s):
    """As when a machine's clock is set: all that the service waits for goes by time.monotonic.

    Calls carry their deadline in the message: gRPC's own is turned into a wall-clock time by the client's Python code.
    """
    tokens = tmp_path / "tokens"
    tokens.write_text("t name=t tokens_per_s=100\n")
    wall_clock = time.time

    async def jump(batch):
        monkeypatch.setattr(time, "time", lambda: wall_clock() + jump_s)
        await asyncio.sleep(0.05)
        return batch.hidden

    memory = Path("/dev/shm") / f"test-{os.getpid()}-jump"
    memory.write_bytes(bytes(64))
    x = torch.randn(100, 32)
    async with serving(FakeEngine(jump), tokens_file=tokens) as server, connect(server) as channel:
        regions = server._calls.regions
        regions.register_leased("t", uid=0, name="r", key=memory.name, offset=0, size=64)
        stub = pb_grpc.ExpertsStub(channel)
        reply = await stub.Forward(message(x, timeout_ms=5000), metadata=bearer("t"))
        assert torch.equal(tensor_of(reply), x)
        error = await status_of(stub.Forward(message(x, timeout_ms=5000), metadata=bearer("t")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        regions.reclaim()
        assert [each.name for each in regions.of("t")] == ["r"]
        memory.unlink()
