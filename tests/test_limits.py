"""Clients with names and limits: the tokens file, its reload, rates, bytes, admin calls; and fp8 on the wire."""

import asyncio
import logging
import math
import os
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.config import ServerConfig
from epserve.errors import ConfigError, InvalidRequest, NotReady, Overloaded, PermissionDenied, Unauthenticated
from epserve.modular_kernel.quantization import dequantise_blocks, quantise_blocks
from epserve.runtime.planning import Priority
from epserve.serving import clients, codec, fp8, frames, status, wire
from epserve.serving import epserve_pb2 as pb
from epserve.serving import epserve_pb2_grpc as pb_grpc
from epserve.serving.clients import Account, Accounts, ClientPolicy
from epserve.serving.exchange import OutgoingRequest
from tests.fake_engine import FakeEngine, serving, tiny_info
from tests.grpc_calls import Frames, connect, encoded, message, status_of, tensor_of, until

ONCE = RetryPolicy(attempts=1)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def impatient(address: str, token: str) -> AsyncClient:
    return AsyncClient(address, ClientOptions(token=token, retry=ONCE))


class TestTokensFile:
    def read(self, tmp_path, text: str) -> list[ClientPolicy]:
        path = tmp_path / "tokens"
        path.write_text(text)
        return list(clients.read_policies(path).values())

    def test_lines_carry_names_and_limits(self, tmp_path):
        first, second, third = self.read(
            tmp_path,
            "# who may\n\nt1 name=search tokens_per_s=5e3 bytes_in_flight=1.5MiB\n t2   name=ops admin \nt3\n",
        )
        assert first == ClientPolicy(name="search", tokens_per_s=5000, bytes_in_flight=1.5 * 2**20)
        assert second == ClientPolicy(name="ops", admin=True)
        assert (third.tokens_per_s, third.bytes_in_flight, third.admin) == (math.inf, math.inf, False)
        assert third.name.startswith("client-")
        assert "t3" not in third.name

    def test_a_plain_list_of_tokens_lets_all_do_everything(self, tmp_path):
        assert all(policy.admin for policy in self.read(tmp_path, "t1\nt2 tokens_per_s=5\n"))

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("t1 admn\n", "line 1: .*not KEY=VALUE"),
            ("t1 rate=5\n", "unknown or repeated key 'rate'"),
            ("ok\nt1 name=a name=b\n", "line 2: unknown or repeated key 'name'"),
            ("t1 tokens_per_s=0\n", "tokens_per_s: must be a number above 0"),
            ("t1 tokens_per_s=fast\n", "got 'fast'"),
            ("t1 tokens_per_s=nan\n", "got 'nan'"),
            ("t1 bytes_in_flight=5parsecs\n", "KiB, MiB or GiB"),
            ("t1 bytes_in_flight=-1\n", "got '-1'"),
            ("t1 priority=urgent\n", "priority: must be one of low, normal, high, got 'urgent'"),
            ("t1\nt1 name=b\n", "line 2: this token is listed already"),
            ("t1 name=a\nt2 name=a tokens_per_s=5\n", "'a' has lines with different limits"),
            ("tök\n", "non-ASCII"),
        ],
    )
    def test_mistakes_are_named_without_the_token(self, tmp_path, text, why):
        with pytest.raises(ConfigError, match=why) as raised:
            self.read(tmp_path, text)
        assert "t1" not in str(raised.value).replace(str(tmp_path), "")

    @given(text=st.text(alphabet=st.sampled_from("ab #=\n\t0.5Miadnme_"), max_size=80))
    @settings(max_examples=300, deadline=None)
    def test_any_text_is_read_or_refused(self, tmp_path_factory, text):
        path = tmp_path_factory.getbasetemp() / "fuzzed-tokens"
        path.write_text(text)
        try:
            policies = clients.read_policies(path)
        except ConfigError:
            return
        assert all(
            policy.name and policy.tokens_per_s > 0 and policy.bytes_in_flight > 0 for policy in policies.values()
        )


class TestAccount:
    def clock(self, monkeypatch) -> list[float]:
        now = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        return now

    def test_a_bucket_holds_one_second_and_says_when_to_come_again(self, monkeypatch):
        now = self.clock(monkeypatch)
        account = Account(ClientPolicy(name="a", tokens_per_s=100))
        account.spend(80)
        with pytest.raises(Overloaded, match="limit of 100 a second") as raised:
            account.spend(50)
        assert raised.value.retry_after_s == pytest.approx(0.3)
        now[0] += 0.3
        account.spend(50)
        now[0] += 3600
        account.spend(100)
        with pytest.raises(Overloaded):
            account.spend(1)

    def test_a_request_above_one_second_passes_and_leaves_a_debt(self, monkeypatch):
        now = self.clock(monkeypatch)
        account = Account(ClientPolicy(name="a", tokens_per_s=100))
        account.spend(500)
        with pytest.raises(Overloaded) as raised:
            account.spend(100)
        assert raised.value.retry_after_s == pytest.approx(5)
        now[0] += 5
        account.spend(100)

    def test_what_is_given_back_makes_no_more_than_a_full_bucket(self, monkeypatch):
        now = self.clock(monkeypatch)
        account = Account(ClientPolicy(name="a", tokens_per_s=100))
        account.spend(100)
        account.give_back(1000)
        now[0] += 0.5
        account.spend(100)
        with pytest.raises(Overloaded):
            account.spend(1)

    @given(
        steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 300)), min_size=1, max_size=60),
        rate=st.sampled_from([1.0, 50.0, 1e4]),
    )
    @settings(max_examples=200, deadline=None)
    def test_the_rate_is_never_passed_by_more_than_the_burst(self, steps, rate):
        with pytest.MonkeyPatch.context() as patch:
            now = self.clock(patch)
            account, passed, largest = Account(ClientPolicy(name="a", tokens_per_s=rate)), 0, 0
            for wait, tokens in steps:
                now[0] += wait
                try:
                    account.spend(tokens)
                except Overloaded as error:
                    now[0] += error.retry_after_s + 1e-6
                    account.spend(tokens)  # the promise holds
                passed, largest = passed + tokens, max(largest, tokens)
                assert passed <= rate * (now[0] - 1000.0) + rate + largest + 1

    def test_bytes_in_flight_are_bounded_but_one_request_always_passes(self):
        account = Account(ClientPolicy(name="a", bytes_in_flight=100))
        with account.holding(1000), pytest.raises(Overloaded, match="bytes_in_flight"), account.holding(1):
            pass
        with account.holding(60), account.holding(40):
            pass
        assert account.bytes_in_flight == 0


class TestReload:
    def test_accounts_keep_their_use_and_lost_tokens_lose_access_at_once(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("t1 name=a tokens_per_s=10\nt2 name=b\n")
        accounts = Accounts(path)
        a, b = accounts.identify(bearer("t1")), accounts.identify(bearer("t2"))
        a.spend(10)
        path.write_text("t1 name=a tokens_per_s=20\nt9 name=a tokens_per_s=20\n")
        assert accounts.changed()
        accounts.reload()
        assert not accounts.changed()
        assert accounts.identify(bearer("t9")) is a, "a second token of the same client, to replace the first"
        assert a.current().tokens_per_s == 20
        with pytest.raises(Overloaded):
            a.spend(10)
        with pytest.raises(Unauthenticated):
            accounts.identify(bearer("t2"))
        with pytest.raises(Unauthenticated, match="withdrawn"):
            b.current()

    def test_an_unusable_file_changes_nothing_and_is_logged_once(self, tmp_path, caplog):
        path = tmp_path / "tokens"
        path.write_text("t1 name=a\n")
        accounts = Accounts(path)
        for broken in (lambda: path.write_text("t1 what\n"), path.unlink):
            broken()
            assert accounts.changed()
            with caplog.at_level(logging.ERROR):
                accounts.reload()
            assert not accounts.changed()
            assert accounts.identify(bearer("t1")).name == "a"
        assert len(caplog.records) == 2
        assert "t1" not in caplog.text.replace(str(tmp_path), "")
        path.write_text("t2 name=b\n")
        accounts.reload()
        assert accounts.identify(bearer("t2")).name == "b"


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

        async def wait(batch):
            await release.wait()
            return batch.hidden

        engine, x = FakeEngine(wait), torch.randn(8, 32)  # 1 KiB
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


INFO = {"hidden": 256, "dtype": torch.bfloat16}


class TestFp8:
    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, np.float32])
    @pytest.mark.parametrize("wire_format", ["fp8", "fp8_request"])
    async def test_answers_are_right_to_the_precision_of_e4m3(self, kind, wire_format):
        async def double(batch):
            return 2 * batch.hidden

        engine = FakeEngine(double, **INFO)
        x = torch.randn(5, 256) * torch.logspace(-3, 3, 5)[:, None]
        sent = x.numpy() if kind is np.float32 else x.to(kind)
        async with serving(engine) as server, AsyncClient(server.address) as client:
            got = await client.forward(1, sent, wire_format=wire_format)
            assert got.dtype == sent.dtype
            expected = dequantise_blocks(*quantise_blocks(torch.as_tensor(sent)))
            assert torch.equal(engine.seen[0].hidden, expected.to(torch.bfloat16))
            got = torch.as_tensor(got).float()
            amax = (2 * x).unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True)
            error = (got - 2 * x).unflatten(-1, (-1, 128)).abs()
            assert (error <= 0.15 * (2 * x).unflatten(-1, (-1, 128)).abs() + 0.004 * amax).all()
            assert (await client.forward(1, sent[:0], wire_format=wire_format)).shape == (0, 256)

    @pytest.mark.parametrize("rows", [0, 1, 511, 512, 513])
    def test_pieces_give_the_same_bits_as_the_whole(self, rows):
        x = torch.randn(rows, 256).bfloat16()
        quantised, scales = fp8.quantise(x)
        assert torch.equal(quantised.view(torch.uint8), quantise_blocks(x)[0].view(torch.uint8))
        assert torch.equal(scales, quantise_blocks(x)[1])
        whole = dequantise_blocks(quantised, scales).bfloat16()
        assert torch.equal(fp8.dequantise(quantised, scales, torch.bfloat16), whole)

    async def test_it_halves_the_bytes_both_ways_also_in_frames(self):
        engine, x = FakeEngine(**INFO), torch.randn(6000, 256).bfloat16()
        plain, fp8 = (
            OutgoingRequest(1, x, None, None, request_id="", wire_format=wire_format)
            for wire_format in ("plain", "fp8")
        )
        sizes = [sum(len(frames.serialise(frame)) for frame in request.frames(1.0)) for request in (plain, fp8)]
        assert sizes[1] / sizes[0] == pytest.approx(0.5 + 4 / 256, abs=0.001)
        async with serving(engine) as server:

            def work():
                with Client(server.address) as client:
                    return client.forward(1, x, wire_format="fp8")

            got = await asyncio.to_thread(work)
        torch.testing.assert_close(got.float(), x.float(), rtol=0.14, atol=0.02)

    def request(self, x, scales, **more) -> pb.ForwardRequest:
        request = message(x, **more)
        if scales is not None:
            request.hidden_scales.CopyFrom(wire.encode(scales, "x").message())
        return request

    @pytest.mark.parametrize(
        ("rows", "scales", "more", "field"),
        [
            (torch.zeros(2, 256).to(torch.float8_e4m3fn), None, {}, "hidden_scales"),
            (torch.zeros(2, 256), torch.zeros(2, 2), {}, "hidden_scales"),
            (torch.zeros(2, 256).to(torch.float8_e4m3fn), torch.ones(2, 3), {}, "hidden_scales"),
            (torch.zeros(2, 256).to(torch.float8_e4m3fn), torch.ones(2, 2).half(), {}, "hidden_scales"),
            (torch.zeros(2, 256), None, {"reply_dtype": pb.INT8}, "reply_dtype"),
            (torch.zeros(2, 256), None, {"reply_dtype": 77}, "reply_dtype"),
            (
                torch.zeros(2, 256),
                None,
                {"reply_dtype": pb.FP8_E4M3, "output": pb.RegionSlice(region="r", byte_size=512)},
                "reply_dtype",
            ),
        ],
    )
    def test_what_does_not_fit_together_is_refused_at_the_header(self, rows, scales, more, field):
        door = codec.Door(tiny_info(**INFO), (1,), ServerConfig())
        with pytest.raises(InvalidRequest) as raised:
            door.check(self.request(rows, scales, **more), "id")
        assert raised.value.field == field

    @pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
    async def test_values_that_are_not_finite_after_all_are_refused(self, bad):
        rows, scales = torch.full((1, 256), 448.0).to(torch.float8_e4m3fn), torch.tensor([[1.0, bad]])
        async with serving(FakeEngine(**INFO)) as server, connect(server) as channel:
            error = await status_of(pb_grpc.ExpertsStub(channel).Forward(self.request(rows, scales)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "NaN or infinite" in error.details()

    async def test_models_without_whole_blocks_do_not_take_it(self):
        with pytest.raises(InvalidRequest, match="multiple of 128"):
            OutgoingRequest(1, torch.zeros(2, 200), None, None, request_id="", wire_format="fp8")
        request = pb.ForwardRequest(layer=1, reply_dtype=pb.FP8_E4M3)
        request.hidden_states.CopyFrom(encoded(torch.zeros(2, 200))[pb.HIDDEN_STATES].message())
        with pytest.raises(InvalidRequest, match="needs whole blocks"):
            codec.Door(tiny_info(hidden=200), (1,), ServerConfig()).check(request, "id")

    async def test_any_other_reply_dtype(self):
        x = torch.randn(3, 256)
        async with serving(FakeEngine(hidden=256)) as server, connect(server) as channel:
            reply = await pb_grpc.ExpertsStub(channel).Forward(message(x, reply_dtype=pb.BF16))
        assert torch.equal(tensor_of(reply), x.bfloat16())

    def test_with_a_region_it_makes_no_sense(self):
        with pytest.raises(InvalidRequest, match="a region sends none"):
            OutgoingRequest(1, torch.zeros(2, 256), None, None, request_id="", region=object(), wire_format="fp8")


async def test_replies_tell_what_waiting_and_steps_took():
    """The engine's records arrive before its results; a long request runs in several steps."""
    from epserve.runtime.records import StepPart, StepRecord

    async def in_two_steps(batch):
        for started, ended in ((10.5, 11.0), (10.75, 11.5)):
            part = StepPart(request_id=batch.request_id, tokens=1, queued=10.25)
            other = StepPart(request_id="somebody's", tokens=1, queued=0.0)
            record = StepRecord(
                step=1, layer=1, mode="block", tokens_per_rank=(2,), started=started, ended=ended, parts=(other, part)
            )
            for callback in engine.step_callbacks:
                callback(record)
        return batch.hidden

    engine = FakeEngine(in_two_steps)
    async with serving(engine) as server, connect(server) as channel:
        stub = pb_grpc.ExpertsStub(channel)
        timings = (await stub.Forward(message(torch.ones(1, 32)))).timings
        empty = (await stub.Forward(message(torch.ones(0, 32)))).timings
    assert (timings.queue_us, timings.steps_us) == (250_000, 1_000_000)
    assert (empty.queue_us, empty.steps_us) == (0, 0)


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
        regions.register_leased("t", name="r", key=memory.name, offset=0, size=64)
        stub = pb_grpc.ExpertsStub(channel)
        reply = await stub.Forward(message(x, timeout_ms=5000), metadata=bearer("t"))
        assert torch.equal(tensor_of(reply), x)
        error = await status_of(stub.Forward(message(x, timeout_ms=5000), metadata=bearer("t")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        regions.reclaim()
        assert [each.name for each in regions.of("t")] == ["r"]
        memory.unlink()


async def test_a_caller_that_has_gone_before_its_status_is_no_error_of_the_service():
    class Gone:
        async def abort(self, code, details, metadata):
            raise grpc.aio.InternalError("Failed to execute batch")

    with pytest.raises(asyncio.CancelledError):
        await status.abort(Gone(), status.failure_of(NotReady("too late")))
