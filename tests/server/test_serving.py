"""The service as any gRPC client sees it: statuses, streams, limits, deadlines, cancellation."""

import asyncio
import gc
import logging
import time

import grpc
import pytest
import torch

from epserve.errors import Overloaded, RankFailed
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import wire
from tests.support.fake_engine import FakeEngine, LocalExperts, echo, echo_after, hang, serving
from tests.support.grpc_calls import Frames, connect, encoded, message, status_of, tensor_of, until


async def read_all(call) -> None:
    async for _ in call:
        pass


class TestForward:
    async def test_answers_are_those_of_the_experts(self):
        experts = LocalExperts()
        x = torch.randn(9, 32)
        ids, weights = torch.randint(0, 8, (9, 3)), torch.rand(9, 3)
        async with serving(FakeEngine(experts)) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            gated = await stub.Forward(message(x, request_id="mine"))
            routed = await stub.Forward(message(x, ids, weights))
        assert gated.request_id == "mine"
        assert routed.request_id
        assert gated.timings.engine_us > 0
        assert torch.equal(tensor_of(gated), experts.forward(x))
        assert torch.equal(tensor_of(routed), experts.forward(x, ids, weights))

    async def test_duplicate_experts_in_a_row_count_twice(self):
        x = torch.randn(1, 32)
        async with serving(FakeEngine(LocalExperts())) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            twice = await stub.Forward(message(x, torch.tensor([[5, 5]]), torch.tensor([[0.3, 0.7]])))
            once = await stub.Forward(message(x, torch.tensor([[5, -1]]), torch.tensor([[1.0, 0.0]])))
        torch.testing.assert_close(tensor_of(twice), tensor_of(once))

    async def test_no_tokens_are_answered_without_the_engine(self):
        engine = FakeEngine()
        async with serving(engine) as server, connect(server) as channel:
            reply = await pb_grpc.ExpertsStub(channel).Forward(message(torch.empty(0, 32)))
        assert tensor_of(reply).shape == (0, 32)
        assert not engine.seen

    async def test_a_bad_request_among_good_ones_fails_alone(self):
        x = torch.randn(4, 32)
        good = message(x, torch.zeros(4, 2).int(), torch.ones(4, 2))
        wrong = message(x, torch.full((4, 2), 8), torch.ones(4, 2))
        async with serving(FakeEngine()) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            calls = [stub.Forward(wrong if number % 3 == 0 else good) for number in range(12)]
            for number, call in enumerate(calls):
                if number % 3:
                    assert torch.equal(tensor_of(await call), x)
                else:
                    error = await status_of(call)
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert "id 8 is outside 0..7" in error.details()
                    trailing = dict(error.trailing_metadata())
                    assert trailing["epserve-error"] == "InvalidRequest"
                    assert trailing["epserve-retryable"] == "false"
                    assert trailing["epserve-field"] == "topk_ids"

    @pytest.mark.parametrize(
        ("error", "code", "retryable"),
        [
            (Overloaded("full", retry_after_s=0.25), grpc.StatusCode.RESOURCE_EXHAUSTED, "true"),
            (RankFailed("rank 3 died"), grpc.StatusCode.UNAVAILABLE, "true"),
        ],
    )
    async def test_errors_of_the_engine_become_their_status(self, error, code, retryable):
        async def fail(batch):
            raise error

        async with serving(FakeEngine(fail)) as server, connect(server) as channel:
            got = await status_of(pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32))))
        trailing = dict(got.trailing_metadata())
        assert (got.code(), got.details(), trailing["epserve-retryable"]) == (code, str(error), retryable)
        assert trailing.get("retry-after-ms") == ("250" if isinstance(error, Overloaded) else None)

    async def test_a_defect_is_logged_and_not_shown(self, caplog):
        async def fail(batch):
            raise ZeroDivisionError("the secret is 42")

        async with serving(FakeEngine(fail)) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            got = await status_of(stub.Forward(message(torch.ones(1, 32), request_id="req-7")))
            frames = Frames(channel)
            await frames.send(1, torch.ones(1, 32), request_id="req-8")
            failure = (await frames.replies(1))[1]
        assert got.code() is grpc.StatusCode.INTERNAL
        assert failure.code == "INTERNAL"
        for text in (got.details(), failure.message):
            assert "42" not in text and "ZeroDivision" not in text and "req-" in text
        assert "req-7" in caplog.text and "the secret is 42" in caplog.text

    @pytest.mark.parametrize("tokens", [292, 293, 4096])
    async def test_sizes_around_grpcs_default_limit(self, tokens):
        x = torch.randn(tokens, 7168).bfloat16()
        async with serving(FakeEngine(hidden=7168, dtype=torch.bfloat16)) as server, connect(server) as channel:
            reply = await pb_grpc.ExpertsStub(channel).Forward(message(x))
            assert torch.equal(tensor_of(reply), x)
            frames = Frames(channel)
            await frames.send(5, x)
            assert torch.equal((await frames.replies(1))[5], x)

    async def test_above_the_limits_a_status_names_the_limit_and_the_setting(self):
        info = {"hidden": 7168, "dtype": torch.bfloat16}
        header = pb.Tensor(dtype=pb.BF16, shape=(40000, 7168))  # 573 MB, of which not a byte has to come
        async with serving(FakeEngine(**info)) as server, connect(server) as channel:
            frames = Frames(channel)
            await frames.call.write(pb.RequestFrame(call=1, begin=pb.ForwardRequest(layer=1, hidden_states=header)))
            failure = (await frames.replies(1))[1]
        assert failure.code == "OUT_OF_RANGE"
        assert "40000 tokens, at most 16384 are allowed (server.max_tokens_per_request)" in failure.message
        limits = {"max_message_bytes": 4 << 20, "max_tokens_per_request": 50000}
        async with serving(FakeEngine(**info), **limits) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            typed = await status_of(stub.Forward(message(torch.zeros(293, 7168).bfloat16())))
            frames = Frames(channel)
            await frames.call.write(pb.RequestFrame(call=1, begin=pb.ForwardRequest(layer=1, hidden_states=header)))
            failure = (await frames.replies(1))[1]
            by_grpc = await status_of(stub.Forward(message(torch.zeros(400, 7168).bfloat16())))
            assert (await stub.Forward(message(torch.zeros(292, 7168).bfloat16()))).hidden_states.shape == [292, 7168]
        assert typed.code() is grpc.StatusCode.OUT_OF_RANGE
        assert "293 tokens make 4200448 bytes, at most 4194304" in typed.details()
        assert "40000 tokens make 573440000 bytes, at most 4194304 are allowed (server.max_message_bytes)" in (
            failure.message
        )
        assert by_grpc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_memory_for_requests_is_bounded(self):
        release = asyncio.Event()
        x = torch.ones(16, 32)  # 2048 bytes, and as many of the reply
        async with (
            serving(FakeEngine(echo_after(release)), max_buffered_bytes=10_000) as server,
            connect(server) as channel,
        ):
            stub = pb_grpc.ExpertsStub(channel)
            kept = [asyncio.ensure_future(stub.Forward(message(x))) for _ in range(2)]
            await until(lambda: server._calls.admitted == 2)
            error = await status_of(stub.Forward(message(x)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "server.max_buffered_bytes" in error.details()
            release.set()
            await asyncio.gather(*kept)
            await stub.Forward(message(x))
            await until(lambda: (server._calls.in_flight, server._calls.buffered_bytes) == (0, 0))

    async def test_sixty_four_callers_at_once(self):
        async def slow(batch):
            await asyncio.sleep(0.01)
            return batch.hidden * 2

        async with serving(FakeEngine(slow)) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)

            async def caller(number):
                x = torch.full((3, 32), float(number))
                frames = Frames(channel)
                await frames.send(1, x)
                unary, streamed = await asyncio.gather(stub.Forward(message(x)), frames.replies(1))
                return torch.equal(tensor_of(unary), x * 2) and torch.equal(streamed[1], x * 2)

            assert all(await asyncio.gather(*(caller(number) for number in range(64))))


class TestStream:
    async def test_replies_come_as_they_are_ready(self):
        release = {number: asyncio.Event() for number in (1, 2, 3)}

        async def by_value(batch):
            await release[int(batch.hidden[0, 0])].wait()
            return batch.hidden

        async with serving(FakeEngine(by_value)) as server, connect(server) as channel:
            frames = Frames(channel)
            for number in release:
                await frames.send(number, torch.full((1, 32), float(number)))
            for number in (3, 1, 2):
                release[number].set()
                (reply,) = (await frames.replies(1)).items()
                assert (reply[0], float(reply[1][0, 0])) == (number, number)

    async def test_small_replies_pass_large_ones(self):
        async with serving(FakeEngine()) as server, connect(server) as channel:
            frames = Frames(channel)
            large, small = torch.randn(16384, 32 * 1), torch.ones(1, 32)
            for number in range(4):
                await frames.send(number, large)
            await frames.send(9, small)
            replies = await frames.replies(5)
        assert all(torch.equal(replies[number], large) for number in range(4))
        assert torch.equal(replies[9], small)

    async def test_invalid_requests_get_one_tagged_reply_and_the_others_go_on(self):
        x, large = torch.randn(2, 32), torch.randn(16000, 32)
        async with serving(FakeEngine()) as server, connect(server) as channel:
            frames = Frames(channel)
            await frames.send(1, x)
            await frames.send(2, x, layer=4)
            await frames.send(3, torch.full((2, 32), float("nan")))
            await frames.send(4, large, layer=5)  # its parts follow the refusal and are dropped
            await frames.send(5, large)
            await frames.call.write(pb.RequestFrame(call=6, part=pb.Part(field=pb.HIDDEN_STATES, data=b"x")))
            await frames.send(7, x)
            replies = await frames.replies(7)
            await frames.call.done_writing()
            assert await frames.call.read() is grpc.aio.EOF
        assert torch.equal(replies[1], x) and torch.equal(replies[5], large) and torch.equal(replies[7], x)
        codes = {number: replies[number].code for number in (2, 3, 4, 6)}
        assert codes == {2: "NOT_FOUND", 3: "INVALID_ARGUMENT", 4: "NOT_FOUND", 6: "INVALID_ARGUMENT"}
        assert not any(replies[number].retryable for number in codes)

    async def test_incomplete_requests_are_told_so(self):
        header = pb.Tensor(dtype=pb.FP32, shape=(2, 32), data=b"\0" * 100)
        begin = pb.ForwardRequest(layer=1, hidden_states=header)
        async with serving(FakeEngine()) as server, connect(server) as channel:
            frames = Frames(channel)
            await frames.call.write(pb.RequestFrame(call=1, begin=begin))
            await frames.send(2, torch.ones(1, 32))  # begins before the first has all its parts
            slow = pb.ForwardRequest(layer=1, hidden_states=header, timeout_ms=50)
            await frames.call.write(pb.RequestFrame(call=3, begin=slow))
            replies = await frames.replies(3)
            await frames.call.write(pb.RequestFrame(call=4, begin=begin))
            await frames.call.write(pb.RequestFrame(call=4, part=pb.Part(field=pb.HIDDEN_STATES, data=b"\0" * 157)))
            replies |= await frames.replies(1)
            await frames.call.write(pb.RequestFrame(call=5, begin=begin))
            await frames.call.done_writing()
            replies |= await frames.replies(1)
            assert server._calls.buffered_bytes == 0
        assert torch.equal(replies[2], torch.ones(1, 32))
        assert "next request began" in replies[1].message
        assert replies[3].code == "DEADLINE_EXCEEDED"
        assert "257 bytes came, its shape and dtype make 256" in replies[4].message
        assert "stream ended" in replies[5].message

    @pytest.mark.parametrize("frame", [pb.RequestFrame(call=1), None])
    async def test_a_client_that_breaks_the_protocol_loses_its_stream_only(self, frame):
        gate = asyncio.Event()
        async with serving(FakeEngine(echo_after(gate))) as server, connect(server) as channel:
            frames, other = Frames(channel), Frames(channel)
            await frames.send(1, torch.ones(1, 32))
            await other.send(1, torch.ones(1, 32))
            await frames.call.write(
                frame or next(wire.request_frames(1, encoded(torch.ones(1, 32)), pb.ForwardRequest()))
            )
            error = await status_of(frames.call.read())
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until(lambda: server._calls.in_flight == 1)
            gate.set()
            assert torch.equal((await other.replies(1))[1], torch.ones(1, 32))

    async def test_a_stream_that_breaks_while_a_reply_is_under_way_still_gets_its_status(self):
        """grpc.aio cannot send a status while the first reply is on its way with the initial metadata."""
        frames = [pb.RequestFrame(call=1, begin=message(torch.ones(1, 32), layer=99)), pb.RequestFrame(call=2)]
        payloads = [frame.SerializeToString() for frame in frames]
        async with serving(FakeEngine()) as server, connect(server) as channel:
            for _ in range(200):
                call = channel.stream_stream("/epserve.v1.Experts/ForwardStream")(iter(payloads))
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await asyncio.wait_for(read_all(call), 30)
                assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_no_more_than_the_allowed_calls_run_at_once(self):
        gate = asyncio.Event()
        engine = FakeEngine(echo_after(gate))
        async with serving(engine, max_in_flight_per_stream=3) as server, connect(server) as channel:
            frames = Frames(channel)
            for number in range(10):
                await frames.send(number, torch.full((1, 32), float(number)))
            await until(lambda: engine.running == 3)
            await asyncio.sleep(0.1)
            assert engine.running == 3
            gate.set()
            replies = await frames.replies(10)
        assert sorted(replies) == list(range(10))
        assert all(float(replies[number][0, 0]) == number for number in range(10))

    async def test_a_client_that_does_not_read_is_not_waited_for(self):
        x = torch.zeros(16000, 32)
        async with serving(FakeEngine(), max_in_flight_per_stream=8) as server, connect(server) as channel:
            frames = Frames(channel)
            for number in range(8):
                await frames.send(number, x, timeout_ms=1500)  # 16 MB of replies: more than the transport buffers
            await until(lambda: server._calls.in_flight == 0)
            await status_of(drained(frames.call))


async def drained(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


class TestDeadlinesAndCancellation:
    async def test_deadlines_reach_the_engine(self):
        engine = FakeEngine()
        async with serving(engine) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            for header, call, seconds in (
                ({}, {"timeout": 70}, 70),
                ({"timeout_ms": 30_000}, {"timeout": 70}, 30),
                ({}, {}, 60),
            ):
                before = time.monotonic()
                await stub.Forward(message(torch.ones(1, 32), **header), **call)
                left = engine.seen[-1].deadline - seconds
                assert before - 0.1 <= left <= time.monotonic() + 0.1  # what is left travels in coarse units

    async def test_an_engine_that_forgets_the_deadline_is_cut_off(self):
        engine = FakeEngine(hang)
        async with serving(engine) as server, connect(server) as channel:
            error = await status_of(
                pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32), timeout_ms=50, request_id="r1"))
            )
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "request r1" in error.details()
            frames = Frames(channel)
            await frames.send(1, torch.ones(1, 32), timeout_ms=50)
            assert (await frames.replies(1))[1].code == "DEADLINE_EXCEEDED"
        assert engine.cancelled == 2

    async def test_a_deadline_of_a_millisecond(self):
        async def slow(batch):
            await asyncio.sleep(0.2)
            return batch.hidden

        engine = FakeEngine(slow)
        async with serving(engine) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            for _ in range(20):
                error = await status_of(stub.Forward(message(torch.ones(1, 32)), timeout=0.001))
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            engine.compute = echo
            assert torch.equal(tensor_of(await stub.Forward(message(torch.ones(1, 32)))), torch.ones(1, 32))
            await until(lambda: engine.running == 0 and server._calls.in_flight == 0)

    async def test_a_thousand_cancels_leave_nothing_behind(self):
        engine = FakeEngine(hang)
        async with serving(engine) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            for _ in range(10):
                calls = [stub.Forward(message(torch.ones(8, 32))) for _ in range(100)]
                await until(lambda: engine.running > 50)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: engine.running == 0 and server._calls.in_flight == 0)
            assert server._calls.buffered_bytes == 0
            engine.compute = echo
            assert torch.equal(tensor_of(await stub.Forward(message(torch.ones(8, 32)))), torch.ones(8, 32))
            engine.seen.clear()
            gc.collect()
            # gRPC's own task of the last call may end a moment after its reply.
            await until(lambda: not any("Forward" in repr(task) for task in asyncio.all_tasks()))

    async def test_a_cancelled_stream_cancels_its_calls(self):
        engine = FakeEngine(hang)
        async with serving(engine) as server, connect(server) as channel:
            frames, other = Frames(channel), Frames(channel)
            for number in range(3):
                await frames.send(number, torch.ones(1, 32))
            incomplete = pb.Tensor(dtype=pb.FP32, shape=(2, 32))
            begin = pb.ForwardRequest(layer=1, hidden_states=incomplete)
            await frames.call.write(pb.RequestFrame(call=7, begin=begin))
            await until(lambda: server._calls.in_flight == 4)
            frames.call.cancel()
            await until(lambda: server._calls.in_flight == 0)
            assert (engine.cancelled, server._calls.buffered_bytes) == (3, 0)
            engine.compute = echo
            await other.send(1, torch.ones(1, 32))
            assert torch.equal((await other.replies(1))[1], torch.ones(1, 32))

    async def test_one_call_of_a_stream_is_cancelled(self):
        async def hang_if_one(batch):
            if float(batch.hidden[0, 0]) == 1:
                await asyncio.sleep(60)
            return batch.hidden

        engine = FakeEngine(hang_if_one)
        async with serving(engine) as server, connect(server) as channel:
            frames = Frames(channel)
            await frames.send(1, torch.ones(1, 32))
            await until(lambda: engine.running == 1)
            await frames.call.write(pb.RequestFrame(call=1, cancel=pb.Cancel()))
            await until(lambda: engine.cancelled == 1)
            begin = pb.ForwardRequest(layer=1, hidden_states=pb.Tensor(dtype=pb.FP32, shape=(2, 32)))
            await frames.call.write(pb.RequestFrame(call=2, begin=begin))
            await frames.call.write(pb.RequestFrame(call=2, cancel=pb.Cancel()))
            await frames.call.write(pb.RequestFrame(call=2, part=pb.Part(field=pb.HIDDEN_STATES, data=b"late")))
            await frames.send(3, torch.zeros(1, 32))
            replies = await frames.replies(1)
            await until(lambda: server._calls.in_flight == 0)
        assert list(replies) == [3]


class TestLogs:
    async def test_each_call_leaves_its_id_layer_tokens_status_and_time(self, caplog):
        caplog.set_level(logging.DEBUG, logger="epserve.server")
        async with serving(FakeEngine()) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            await stub.Forward(message(torch.ones(3, 32), request_id="good", layer=2))
            await status_of(stub.Forward(message(torch.ones(3, 32), request_id="bad", layer=4)))
        lines = [record.getMessage() for record in caplog.records]
        assert any(line.startswith("request=good layer=2 tokens=3 status=OK ms=") for line in lines)
        assert any(line.startswith("request=bad status=NOT_FOUND layer: 4") for line in lines)
