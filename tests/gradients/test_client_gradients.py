"""Backward calls: the same gradients by every way to the service, joined to autograd by the blocking client."""

import asyncio

import numpy as np
import pytest
import torch

from epserve.client import AsyncClient, Client
from epserve.client.session import connect
from epserve.errors import CallerError, InternalError, InvalidRequest, NotFinite
from tests.support.clients import client_of, serving_in_thread
from tests.support.fake_engine import FakeEngine, LocalExperts, serving

K = 32


def inputs(tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn((tokens, K), generator=generator) for _ in range(2))
    ids = torch.randint(-1, 8, (tokens, 3), generator=generator)
    return x, g, ids, torch.rand((tokens, 3), generator=generator)


def wanted(experts: LocalExperts, x, g, ids, weights):
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    return torch.autograd.grad(experts.plain(x, ids, weights), (x, weights), g)


def check(got, want):
    for each, other in zip(got, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(each), other, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def experts():
    return LocalExperts()


@pytest.fixture(scope="module")
def client(experts):
    with client_of(FakeEngine(experts)) as client:
        yield client


# One message, frames of rows alone, frames of routing too.
@pytest.mark.parametrize("tokens", [0, 1, 9, 6000, 50000])
def test_gradients_come_back_by_message_and_by_frames(experts, tokens):
    engine = FakeEngine(experts)
    x, g, ids, weights = inputs(tokens)
    with client_of(engine, max_tokens_per_request=1 << 20) as client:
        check(client.backward(1, x, g, ids, weights), wanted(experts, x, g, ids, weights))


def test_the_result_has_the_kind_of_what_was_sent(client, experts):
    x, g, ids, weights = inputs(5)
    dx, dw = client.backward(1, x.numpy(), g.numpy(), ids[:, :2].numpy(), weights[:, :2].double().float().numpy())
    assert isinstance(dx, np.ndarray) and isinstance(dw, np.ndarray) and dw.shape == (5, 2)
    check((dx, dw), wanted(experts, x, g, ids[:, :2], weights[:, :2]))
    half, _ = client.backward(1, x.bfloat16(), g, ids, weights)
    assert half.dtype == torch.bfloat16


def test_regions_of_memory_take_gradients(experts):
    """Small ones and large ones by the doorbell, the largest by frames, for its routing weights have gradients of a message."""
    with client_of(FakeEngine(experts), max_tokens_per_request=1 << 20) as client:  # noqa: SIM117
        with client.register_region(64 << 20) as region:
            for tokens in (3, 7000, 50000):
                x, g, ids, weights = inputs(tokens, seed=tokens)
                inside = region.empty(x.shape, torch.float32)
                inside.copy_(x)
                got = client.backward(1, inside, g, ids, weights, region=region)
                check(got, wanted(experts, x, g, ids, weights))


async def test_asyncio_and_its_stream_take_gradients(experts):
    x, g, ids, weights = inputs(9)
    async with serving(FakeEngine(experts)) as server, AsyncClient(server.address) as client, client.stream() as stream:
        calls = client.backward(1, x, g, ids, weights), stream.backward(1, x, g, ids, weights)
        first, second, forward = await asyncio.gather(*calls, stream.forward(1, x, ids, weights))
        check(first, wanted(experts, x, g, ids, weights))
        check(second, first)
        assert torch.equal(forward, experts.forward(x, ids, weights))


async def test_a_block_has_gradients_of_rows_alone():
    async def twice(batch):
        assert batch.ids is None and batch.gradient is not None
        return 2 * batch.gradient

    x, g, *_ = inputs(4)
    async with serving(FakeEngine(twice)) as server, AsyncClient(server.address) as client:
        dx, dw = await client.backward(1, x, g)
        assert dw is None and torch.equal(dx, 2 * g)


def test_forward_records_its_gradient(client, experts):
    x, g, ids, weights = inputs(7)
    x.requires_grad_()
    weights.requires_grad_()
    y = client.forward(1, 3 * x, ids, weights)
    torch.testing.assert_close(y, experts.plain(3 * x, ids, weights))
    (y * g).sum().backward()
    want = wanted(experts, 3 * x, g, ids, weights)
    check((x.grad, weights.grad), (3 * want[0], want[1]))
    with torch.no_grad():
        assert not client.forward(1, x, ids, weights).requires_grad
    only = client.forward(1, x.detach(), ids, weights)
    check(torch.autograd.grad(only, weights, g), wanted(experts, x, g, ids, weights)[1:])


@pytest.mark.filterwarnings("ignore:Input #")  # of float32, which is what models have
def test_gradients_are_those_of_finite_differences(client):
    x, _, ids, weights = inputs(3)
    x, weights = x.requires_grad_(), weights.requires_grad_()

    def loss(x, weights):
        return client.forward(1, x, ids, weights).double().sin().sum()

    assert torch.autograd.gradcheck(loss, (x, weights), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_second_derivatives_are_refused_where_they_are_used(client):
    x, g, ids, weights = inputs(3)
    x.requires_grad_()
    y = client.forward(1, x, ids, weights)
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(InvalidRequest, match="second derivative"):
        dx.square().sum().backward()


def test_rows_whose_gradient_is_not_finite_get_none_and_others_get_theirs(client, experts):
    """A scaler of the loss overflows on purpose, and looks for values that are not finite."""
    x, g, ids, weights = inputs(5)
    bad = g.clone()
    bad[2, 3], bad[4, 0] = float("inf"), float("nan")
    leaf = x.clone().requires_grad_()
    client.forward(1, leaf, ids, weights).backward(bad)
    want, _ = wanted(experts, x, g, ids, weights)
    rest = [0, 1, 3]
    assert leaf.grad[[2, 4]].isnan().all()
    torch.testing.assert_close(leaf.grad[rest], want[rest], rtol=1e-4, atol=1e-5)


def test_gradients_that_overflow_are_refused_or_named():
    async def overflow(batch):
        out = torch.zeros(batch.num_tokens, batch.columns)
        out[1, 3] = float("inf")  # of a row
        out[2, -1] = float("nan")  # of a routing weight
        return out

    x, g, ids, weights = inputs(4)
    with client_of(FakeEngine(overflow)) as client:
        with pytest.raises(NotFinite, match=r"output_gradients: .*2 of 4 gradients \(rows 1, 2\)") as raised:
            client.backward(1, x, g, ids, weights)
        assert raised.value.field == "output_gradients"
        rows: list[int] = []
        dx, dw = client.backward(1, x, g, ids, weights, not_finite_rows=rows)
        assert rows == [1, 2] and dx[1].isinf().any() and dw[2].isnan().any()
        leaf = x.requires_grad_()
        client.forward(1, leaf, ids, weights, not_finite_rows=[]).backward(g)
        assert leaf.grad[1].isinf().any()


X, G, IDS, WEIGHTS = inputs(2)
REFUSED = {
    "rows of another shape": ({"gradient": G[:1]}, r"output_gradients: shape \(1, 32\), must be \(2, 32\)"),
    "columns of another size": ({"gradient": G[:, :31]}, r"output_gradients: shape \(2, 31\), must be \(2, 32\)"),
    "integers": ({"gradient": G.int()}, "output_gradients: dtype int32 is not allowed"),
    "a gradient that is not finite": ({"gradient": G / 0}, "output_gradients: holds NaN or infinite values"),
    "a layer that is not there": ({"layer": 4}, "layer: 4 is not a served"),
    "weights without ids": ({"topk_ids": None}, "topk_ids: missing"),
    "ids out of range": ({"topk_ids": IDS + 9}, "topk_ids: id"),
    "no tensor": ({"gradient": [1.0]}, "output_gradients: must be a torch tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_gradient_is_refused_by_name(client, what):
    changes, message = REFUSED[what]
    values = {"layer": 1, "hidden": X, "gradient": G, "topk_ids": IDS, "topk_weights": WEIGHTS, **changes}
    with pytest.raises(CallerError, match=message):
        client.backward(**values)


def test_settings_without_a_backward_are_refused_in_the_forward(client):
    leaf = X.clone().requires_grad_()
    with pytest.raises(InvalidRequest, match="wire_format: 'fp8' has no gradient"):
        client.forward(1, leaf, IDS, WEIGHTS, wire_format="fp8")
    with pytest.raises(InvalidRequest, match="hidden_states: a numpy array beside"):
        client.forward(1, X.numpy(), IDS, WEIGHTS.clone().requires_grad_())


def test_a_service_that_knows_no_gradients_is_found_out(monkeypatch):
    """Such a service takes the request for a Forward."""
    from epserve.server import codec

    engine = FakeEngine()
    monkeypatch.setattr(codec.Door, "_check_gradients", lambda *_: None)
    with client_of(engine) as client:
        monkeypatch.setattr("epserve.protocol.epserve_pb2.ForwardReply", _forgetful())
        with pytest.raises(InternalError, match="older version"):
            client.backward(1, X, G)


def _forgetful():
    from epserve.protocol import epserve_pb2 as pb

    original = pb.ForwardReply

    class Forgetful:
        DESCRIPTOR, FromString = original.DESCRIPTOR, original.FromString

        def __new__(cls, gradients=False, **fields):
            return original(**fields)

    return Forgetful


def test_the_client_says_so_before_it_sends():
    with Client("127.0.0.1:1") as nobody, pytest.raises(InvalidRequest, match="output_gradients: dtype complex64"):
        nobody.backward(1, X, G.to(torch.complex64))


def test_sessions_cut_long_batches_and_record(experts):
    """Rows with their gradients take twice the bytes, so that a backward has more pieces than its forward."""
    x, g, ids, weights = inputs(60)
    ids = ids.int()
    row = 32 * 4 + 3 * 8
    with (
        serving_in_thread(FakeEngine(experts), max_message_bytes=32 * row) as server,
        connect(server.address, shared_memory_bytes=1 << 20) as session,
    ):
        assert session.max_tokens > session.max_backward_tokens > 10
        calls, leaf, scale = session.layer(1), x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = calls.forward(leaf, ids, scale)
        torch.testing.assert_close(y, experts.plain(x, ids, weights))
        y.backward(g)
        check((leaf.grad, scale.grad), wanted(experts, x, g, ids, weights))
        assert calls.backward(x[:0], g[:0], ids[:0], weights[:0])[1].shape == (0, 3)
        with pytest.raises(InvalidRequest, match="out: has no gradient"):
            calls.forward(leaf, ids, weights, out=torch.empty(60, K))
        with pytest.raises(InvalidRequest, match="hidden_states: requires a gradient"):
            calls.begin(leaf, ids, weights)
        server_region = session._ways._region
        session._ways._region.lost()  # the service has forgotten it: the call goes over the wire
        check(calls.backward(x, g, ids, weights), wanted(experts, x, g, ids, weights))
        assert session._ways._region is not server_region
