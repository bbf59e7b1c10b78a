"""Replies say which experts they had to do without, on every path of a client; so does the status."""

import logging

import torch

from epserve.client import AsyncClient
from epserve.engine.planning import Answer
from epserve.errors import ExpertsMissing
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import status
from tests.support.fake_engine import FakeEngine, serving
from tests.support.grpc_calls import connect, message


async def without(batch):
    return Answer(out_MK=batch.hidden, left_out=frozenset({5, 4}))


async def test_replies_name_the_experts_that_are_missing(caplog):
    caplog.set_level(logging.WARNING, "epserve.client")
    x = torch.randn(3, 32)
    async with serving(FakeEngine(without)) as server, connect(server) as channel:
        stub = pb_grpc.ExpertsStub(channel)
        assert list((await stub.Forward(message(x))).left_out_experts) == [4, 5]
        found = await stub.GetStatus(pb.GetStatusRequest())
        assert [(each.layer, list(each.experts)) for each in found.missing_experts] == [(1, [4, 5])]
        async with AsyncClient(server.address) as client:
            assert torch.equal(await client.forward(1, x, request_id="one"), x)
            async with client.stream() as stream:
                assert torch.equal(await stream.forward(1, x, request_id="two"), x)
    assert [record.getMessage() for record in caplog.records] == [
        f"request {name}: answered without experts 4, 5, which are on no rank now" for name in ("one", "two")
    ]


async def test_whole_answers_say_nothing(caplog):
    async with serving(FakeEngine()) as server, connect(server) as channel:
        reply = await pb_grpc.ExpertsStub(channel).Forward(message(torch.randn(3, 32)))
    assert not reply.left_out_experts


async def test_a_refusal_names_them_and_may_be_retried():
    failure = status.failure_of(ExpertsMissing.of(3, {9, 2}))
    error = status.error_of(failure)
    assert failure.code == "UNAVAILABLE" and error.retryable and isinstance(error, ExpertsMissing)
    assert "experts 2, 9 of layer 3" in str(error)
