"""fp8 on the wire, what replies tell of a request's time, and callers that have gone."""

import asyncio
import logging
import math

import grpc
import numpy as np
import pytest
import torch

from epserve.client import AsyncClient, Client
from epserve.client.exchange import OutgoingRequest
from epserve.config import ServerConfig
from epserve.errors import InvalidRequest, NotReady
from epserve.modular_kernel.quantization import dequantise_blocks, quantise_blocks
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import fp8, frames, status, wire
from epserve.server import codec
from epserve.server.stream import StreamSession
from tests.support.fake_engine import FakeEngine, serving, tiny_info
from tests.support.grpc_calls import connect, encoded, message, status_of, tensor_of, until

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
    from epserve.engine.records import StepPart, StepRecord

    async def in_two_steps(batch):
        for started, ended in ((10.5, 11.0), (10.75, 11.5)):
            part = StepPart(request_id=batch.request_id, tokens=1, queued=10.25)
            other = StepPart(request_id="somebody's", tokens=1, queued=0.0)
            record = StepRecord(
                step=1, layer=1, mode="block", tokens_per_rank=(2,), started=started, ended=ended, parts=(other, part)
            )
            engine.tell_step(record)
        return batch.hidden

    engine = FakeEngine(in_two_steps)
    async with serving(engine) as server, connect(server) as channel:
        stub = pb_grpc.ExpertsStub(channel)
        timings = (await stub.Forward(message(torch.ones(1, 32)))).timings
        empty = (await stub.Forward(message(torch.ones(0, 32)))).timings
    assert (timings.queue_us, timings.steps_us) == (250_000, 1_000_000)
    assert (empty.queue_us, empty.steps_us) == (0, 0)


async def test_a_caller_that_has_gone_before_its_status_is_no_error_of_the_service():
    class Gone:
        async def abort(self, code, details, metadata):
            raise grpc.aio.InternalError("Failed to execute batch")

    with pytest.raises(asyncio.CancelledError):
        await status.abort(Gone(), status.failure_of(NotReady("too late")))


@pytest.mark.parametrize("layer", [1, 4], ids=["a reply", "a refusal"])
async def test_a_stream_that_its_client_cancelled_unread_is_no_error_of_the_service(layer, caplog):
    """gRPC sometimes fails the write first and cancels the method afterwards."""

    class Gone:
        frames = [pb.RequestFrame(call=1, begin=message(torch.ones(1, 32), layer=layer))]

        async def read(self):
            return self.frames.pop() if self.frames else await asyncio.Event().wait()

        async def write(self, frame):
            raise grpc.aio.InternalError('Failed "execute_batch": (<...SendMessageOperation object>,)')

        async def send_initial_metadata(self, metadata):
            pass

        def invocation_metadata(self):
            return ()

        def peer(self):
            return "ipv4:127.0.0.1:9"

        def time_remaining(self):
            return 30.0

    caplog.set_level(logging.INFO, "epserve.server")
    async with serving(FakeEngine()) as server:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(StreamSession(server._calls, Gone()).run(), 30)
        await until(lambda: (server._calls.in_flight, server._calls.buffered_bytes) == (0, 0))
    assert "status=CANCELLED ipv4:127.0.0.1:9 ended its stream" in caplog.text
    assert "INTERNAL" not in caplog.text

    with pytest.raises(asyncio.CancelledError):
        await status.write(Gone(), pb.HoldRegionReply())
