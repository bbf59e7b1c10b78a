"""The door and the method Backward: what they take, what they refuse by name, and in which metrics it counts."""

import pytest
import torch
from prometheus_client import generate_latest

from epserve.config import ServerConfig
from epserve.errors import InvalidRequest
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import wire
from epserve.rank.step import gradient_columns, joined_gradients
from epserve.server import codec, replies
from tests.support.fake_engine import FakeEngine, serving, tiny_info
from tests.support.grpc_calls import Frames, connect, encoded, message, status_of

X, G, IDS, WEIGHTS = torch.ones(2, 32), torch.full((2, 32), 0.5), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2)


def request(gradient=G, x=X, ids=IDS, weights=WEIGHTS, **header) -> pb.ForwardRequest:
    made = message(x, ids, weights, **header)
    if gradient is not None:
        made.output_gradients.CopyFrom(wire.encode(gradient, "output_gradients").message())
    return made


def door(dtype=torch.float32) -> codec.Door:
    info = tiny_info(dtype=dtype)
    return codec.Door(info, info.layers, ServerConfig())


async def halves(batch):
    """Columns of the result are numbered, those of routing weights after those of rows."""
    assert batch.gradient is not None
    weights = torch.arange(100.0, 100.0 + batch.ids.shape[1]).expand(batch.num_tokens, -1)
    return joined_gradients(batch.gradient / 2, weights)


async def test_a_call_gives_both_gradients():
    engine = FakeEngine(halves)
    async with serving(engine) as server, connect(server) as channel:
        reply = await pb_grpc.ExpertsStub(channel).Backward(request())
    assert reply.gradients
    dx = wire.decode(reply.hidden_states.data, reply.hidden_states, as_torch=True)
    dw = wire.decode(reply.topk_weights.data, reply.topk_weights, as_torch=True)
    assert torch.equal(dx, G / 2) and dw.tolist() == [[100, 101]] * 2, "without the columns that were padded"
    assert engine.seen[0].ids.shape == (2, 3) and torch.equal(engine.seen[0].gradient, G)


async def test_a_stream_mixes_both_kinds():
    async def compute(batch):
        return batch.hidden if batch.gradient is None else 3 * batch.gradient

    async with serving(FakeEngine(compute)) as server, connect(server) as channel:
        frames = Frames(channel)
        tensors = {**encoded(X), pb.OUTPUT_GRADIENTS: wire.encode(G, "g")}
        for frame in wire.request_frames(1, tensors, pb.ForwardRequest(layer=1)):
            await frames.call.write(frame)
        await frames.send(2, X)
        done = await frames.replies(2)
    assert torch.equal(done[1], 3 * G) and torch.equal(done[2], X)


@pytest.mark.parametrize(
    ("method", "gradient", "text"),
    [("Backward", None, "output_gradients: missing"), ("Forward", G, "output_gradients: Forward takes none")],
)
async def test_a_method_has_its_own_requests(method, gradient, text):
    async with serving(FakeEngine()) as server, connect(server) as channel:
        error = await status_of(getattr(pb_grpc.ExpertsStub(channel), method)(request(gradient)))
    assert (
        error.code().name == "INVALID_ARGUMENT"
        and f"output_gradients: {'Forward ' * (method == 'Forward')}" in error.details()
    )
    assert text in error.details()


async def test_metrics_name_the_method():
    async with serving(FakeEngine(halves)) as server, connect(server) as channel:
        await pb_grpc.ExpertsStub(channel).Backward(request())
        text = generate_latest(server._observer.metrics.registry).decode()
    assert 'method="epserve.v1.Experts/Backward"' in text


REFUSED = {
    "fp8": ({"gradient": G.to(torch.float8_e4m3fn)}, "output_gradients: dtype float8_e4m3fn is not allowed"),
    "a result in fp8": ({"reply_dtype": pb.FP8_E4M3}, "reply_dtype: float8_e4m3fn is too coarse for gradients"),
    "one dimension": ({"gradient": G[0]}, r"output_gradients: shape \(32,\), must be \(2, 32\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_headers_are_refused_by_name(what):
    changes, text = REFUSED[what]
    with pytest.raises(InvalidRequest, match=text):
        door().check(request(**changes), "test")


def test_a_gradient_that_is_too_large_for_the_model_is_named_by_its_place():
    checked = door(torch.float16).check(request(gradient=G.index_fill(1, torch.tensor([7]), 1e6)), "test")
    buffers = {which: tensor.data for which, tensor in checked.headers.items()}
    with pytest.raises(InvalidRequest, match=r"output_gradients: .*row 0, column 7: 1000000\.0, which becomes inf"):
        door(torch.float16).decode(checked, buffers)


def test_a_reply_counts_the_gradients_of_weights():
    asked = door().check(request(), "test")
    assert asked.reply_bytes == X.nbytes + WEIGHTS.nbytes and asked.nbytes == 2 * X.nbytes + IDS.nbytes + WEIGHTS.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_weights_stay_float32_for_every_model(dtype):
    dw = torch.tensor([[1 / 3, -2e-20, 7.0], [1e30, 0.0, -1.0]])
    joined = joined_gradients(G.to(dtype), dw)
    assert joined.shape == (2, gradient_columns(32, 3, dtype))
    made = replies.encode_reply(joined, door(dtype).check(request(), "test")).tensors
    got = wire.decode(bytes(made[pb.TOPK_WEIGHTS].data), made[pb.TOPK_WEIGHTS].header(), as_torch=True)
    assert torch.equal(got, dw[:, :2])
