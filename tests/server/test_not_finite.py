"""A result is never NaN with status OK: on every way to a client it is told, with layer and rows, or flagged on demand."""

import asyncio
import time

import pytest
import torch

from epserve.client import AsyncClient, Client
from epserve.config import SchedulerConfig
from epserve.engine.planning import Answer, Batch
from epserve.engine.scheduler import Scheduler
from epserve.errors import InvalidRequest, NotFinite
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.rank.step import RegionRows, StepResult
from tests.engine.fake_ranks import HIDDEN, FakeRanks
from tests.support.fake_engine import FakeEngine, serving
from tests.support.front_ends import joining, ordering
from tests.support.grpc_calls import connect, status_of

TOLD = "layer 1 makes NaN or infinity of 2 of {} tokens (rows 1, 4)"


def rows_of(count: int = 6, dtype: torch.dtype = torch.float32, hidden: int = 128) -> torch.Tensor:
    x = torch.randn((count, hidden), generator=torch.Generator().manual_seed(count)).to(dtype)
    x[1, 3], x[4, :] = 200.0, -300.0
    return x


async def overflow(batch: Batch) -> torch.Tensor:
    """Values from 100 on pass the largest number, as they would inside experts."""
    return torch.where(batch.hidden.abs() >= 100, batch.hidden * float("inf"), 2 * batch.hidden)


async def million(batch: Batch) -> torch.Tensor:
    """Finite in float32 and in bfloat16, not in float16."""
    return torch.where(batch.hidden.abs() >= 100, 1e6, batch.hidden)


def judge(y, rows: list[int], x: torch.Tensor) -> None:
    y = torch.as_tensor(y)
    assert rows == [1, 4] and y.shape == x.shape and y.dtype == x.dtype
    assert y.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [1, 4]


WAYS = {
    "one message": ({}, 6), "frames": ({}, 40_000), "fp8": ({"wire_format": "fp8"}, 6),
    "fp8 request": ({"wire_format": "fp8_request"}, 6), "region": ({"region": 1 << 20}, 6),
    "a region of large tensors": ({"region": 1 << 26}, 40_000),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("numpy", [False, True], ids=["torch", "numpy"])
async def test_both_clients_on_every_way(way, numpy):
    options, count = WAYS[way]
    options, x, told = dict(options), rows_of(count), TOLD.format(count)
    sent = x.numpy() if numpy else x
    size = options.pop("region", 0)
    async with serving(FakeEngine(overflow, hidden=128), max_tokens_per_request=50_000) as server:

        def blocking() -> None:
            with Client(server.address) as client:
                if size:
                    with client.register_region(size) as region:
                        calls(client, {"region": region})
                else:
                    calls(client, options)

        def calls(client: Client, more: dict) -> None:
            with pytest.raises(NotFinite) as error:
                client.forward(1, sent, **more)
            assert told in str(error.value) and error.value.field == "hidden_states"
            rows = [9, 9, 9]
            judge(client.forward(1, sent, not_finite_rows=rows, **more), rows, x)
            judge(client.forward_async(1, sent, not_finite_rows=rows, **more).result(), rows, x)
            client.forward(1, sent[2:4], not_finite_rows=rows, **more)
            assert rows == [], "of this reply"

        await asyncio.to_thread(blocking)
        async with AsyncClient(server.address) as client:
            rows = []
            if size:
                async with client.register_region(size) as region:
                    with pytest.raises(NotFinite):
                        await client.forward(1, sent, region=region)
                    judge(await client.forward(1, sent, region=region, not_finite_rows=rows), rows, x)
            else:
                with pytest.raises(NotFinite) as error:
                    await client.forward(1, sent, **options)
                assert told in str(error.value)
                judge(await client.forward(1, sent, not_finite_rows=rows, **options), rows, x)


async def test_a_stream_goes_on():
    x = rows_of()
    async with serving(FakeEngine(overflow, hidden=128)) as server, AsyncClient(server.address) as client:
        async with client.stream() as stream:
            rows = []
            calls = [stream.forward(1, x), stream.forward(1, x[2:4]), stream.forward(1, x, not_finite_rows=rows)]
            error, good, kept = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(error, NotFinite) and torch.equal(good, 2 * x[2:4])
        judge(kept, rows, x)


@pytest.mark.parametrize("wire_format", ["plain", "fp8"])
async def test_a_result_that_only_the_replys_dtype_cannot_hold(wire_format):
    x = rows_of(dtype=torch.float16)
    async with serving(FakeEngine(million, hidden=128)) as server, AsyncClient(server.address) as client:
        with pytest.raises(NotFinite, match="wider"):
            await client.forward(1, x, wire_format=wire_format)
        assert (await client.forward(1, x.float(), wire_format=wire_format)).isfinite().all()
        rows = []
        y = await client.forward(1, x, wire_format=wire_format, not_finite_rows=rows)
        judge(y, rows, x)


@pytest.mark.parametrize(("computed", "asked", "wider"), [
    (torch.bfloat16, torch.float32, False), (torch.bfloat16, torch.float16, True), (torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.bfloat16, False), (torch.float16, torch.float32, False), (torch.float32, torch.float16, True),
])  # fmt: skip
async def test_a_wider_reply_is_advised_only_where_there_is_one(computed, asked, wider):
    async def infinite(batch: Batch) -> torch.Tensor:
        return torch.full_like(batch.hidden, float("inf"), dtype=computed)

    async with serving(FakeEngine(infinite, hidden=128)) as server, AsyncClient(server.address) as client:
        with pytest.raises(NotFinite) as error:
            await client.forward(1, torch.ones(2, 128, dtype=asked))
    assert ("a wider reply_dtype than" in str(error.value)) == wider


async def test_large_finite_values_are_not_taken_for_infinite_ones():
    """Their sum passes the largest number."""
    x = torch.full((4, 128), 3e38)

    async def echo(batch: Batch) -> torch.Tensor:
        return batch.hidden

    async with serving(FakeEngine(echo, hidden=128)) as server, AsyncClient(server.address) as client:
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(await client.forward(1, x.to(dtype)), x.to(dtype))


async def test_the_status_of_a_plain_grpc_call_and_what_a_region_holds_then():
    x = rows_of()
    tensor = pb.Tensor(data=x.numpy().tobytes(), dtype=pb.FP32, shape=x.shape)
    async with serving(FakeEngine(overflow, hidden=128)) as server, connect(server) as channel:
        stub = pb_grpc.ExpertsStub(channel)
        error = await status_of(stub.Forward(pb.ForwardRequest(layer=1, hidden_states=tensor)))
        assert error.code().name == "OUT_OF_RANGE" and TOLD.format(6) in error.details()
        assert "model.dtype" in error.details() and "keep_not_finite" in error.details()
        assert dict(error.trailing_metadata())["epserve-error"] == "NotFinite"
        reply = await stub.Forward(pb.ForwardRequest(layer=1, hidden_states=tensor, keep_not_finite=True))
        assert list(reply.not_finite_rows) == [1, 4]


async def test_the_open_inference_protocol():
    x = rows_of()
    hidden = kserve.ModelInferRequest.InferInputTensor(name="hidden_states", datatype="FP32", shape=x.shape)
    plain = kserve.ModelInferRequest(model_name="layer-1", inputs=[hidden], raw_input_contents=[x.numpy().tobytes()])
    keeps, wrong = (kserve.ModelInferRequest.FromString(plain.SerializeToString()) for _ in range(2))
    keeps.parameters["keep_not_finite"].bool_param = True
    wrong.parameters["keep_not_finite"].int64_param = 1
    async with serving(FakeEngine(overflow, hidden=128)) as server, connect(server) as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)
        error = await status_of(stub.ModelInfer(plain))
        assert error.code().name == "OUT_OF_RANGE" and TOLD.format(6) in error.details()
        assert "keep_not_finite must be there, as bool_param" in (await status_of(stub.ModelInfer(wrong))).details()
        response = await stub.ModelInfer(keeps)
        assert response.parameters["not_finite_rows"].string_param == "1,4"
        answers = [answer async for answer in stub.ModelStreamInfer(iter([plain, keeps]))]
        assert TOLD.format(6) in answers[0].error_message
        assert answers[1].infer_response.parameters["not_finite_rows"].string_param == "1,4"


async def test_what_is_no_list_is_refused_before_it_is_sent():
    engine = FakeEngine(overflow, hidden=128)
    async with serving(engine) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequest, match="not_finite_rows: must be a list"):
            await client.forward(1, rows_of(), not_finite_rows=True)
    assert not engine.seen


class TestResultsOnGpus:
    """They do not come here: the rank looks at them."""

    def batch(self, count: int, **more) -> Batch:
        where = RegionRows(region=3, offset=0, dtype=torch.float32)
        hidden = torch.empty((count, HIDDEN), device="meta")
        return Batch(layer=1, hidden=hidden, deadline=time.monotonic() + 60, source=where, target=where, **more)

    async def test_rows_of_a_request_that_took_two_steps_are_counted_from_its_first(self):
        ranks = FakeRanks()
        ranks.rank_of = lambda region: 1

        async def step(plans, parts):
            ranks.steps.append(plans[0])
            return StepResult(out_MK=torch.empty((0, HIDDEN)), not_finite={0: [2]})

        ranks.step = step
        scheduler = Scheduler(SchedulerConfig(max_step_tokens=4), ranks)
        answer = await scheduler.submit(self.batch(7))
        assert len(ranks.steps) == 2 and answer.not_finite == {2, 6}
        await scheduler.close()

    async def test_a_front_end_that_has_joined_hears_of_them(self):
        async def mark(batch: Batch) -> Answer:
            return Answer(out_MK=batch.hidden, not_finite=frozenset({4, 1}))

        async with ordering(FakeEngine(mark)) as port, joining(port) as engine:
            batch = Batch(layer=1, hidden=torch.ones(6, 32), deadline=time.monotonic() + 60)
            assert (await engine.answer(batch)).not_finite == {1, 4}
