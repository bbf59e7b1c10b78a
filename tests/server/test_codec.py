"""The door: what it lets in, what it refuses, and that a refusal names the field and both numbers."""

import math

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epserve.config import ServerConfig
from epserve.engine.planning import Batch
from epserve.errors import CallerError, InvalidRequest, TooLarge, UnknownLayer
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import wire
from epserve.protocol.status import error_of_rpc
from epserve.server import codec, replies
from tests.support.fake_engine import FakeEngine, serving, tiny_info
from tests.support.grpc_calls import connect, status_of

FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
"""`--hypothesis-profile=long` tries 10,000 inputs instead of 300."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_door(info=None, **limits) -> codec.Door:
    info = info or tiny_info()
    return codec.Door(info, info.layers, ServerConfig(**limits))


def pass_door(door: codec.Door, request: pb.ForwardRequest) -> Batch:
    checked = door.check(request, "test")
    assembly = wire.Assembly(checked.sizes)
    for which, tensor in checked.headers.items():
        assembly.add(which, tensor.data)
    return door.decode(checked, assembly.finish())


def make_request(hidden, ids=None, weights=None, layer=1) -> pb.ForwardRequest:
    request = pb.ForwardRequest(layer=layer)
    for name, value in (("hidden_states", hidden), ("topk_ids", ids), ("topk_weights", weights)):
        if value is not None:
            getattr(request, name).CopyFrom(wire.encode(value, name).message())
    return request


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_hidden_states_arrive_in_the_models_dtype_and_leave_in_the_callers(dtype, model, tokens):
    door = make_door(tiny_info(dtype=model))
    x = torch.randn(tokens, 32).to(dtype)
    checked = door.check(make_request(x), "test")
    decoded = pass_door(door, make_request(x))
    assert decoded.hidden.dtype == model
    assert torch.equal(decoded.hidden, x.to(model))
    reply = replies.encode_reply(decoded.hidden, checked).tensors[pb.HIDDEN_STATES]
    assert wire.DTYPE_NAMES[reply.dtype] == str(dtype).removeprefix("torch.")
    assert reply.shape == (tokens, 32)


@pytest.mark.parametrize("strided", [
    lambda x: x.t().contiguous().t(),
    lambda x: torch.cat([x, x], dim=1)[:, ::2],
    lambda x: x[:1].expand(4, 32),
    lambda x: x.flip(0),
])  # fmt: skip
def test_strided_tensors_are_sent_as_their_values(strided):
    x = strided(torch.randn(4, 32))
    assert torch.equal(pass_door(make_door(), make_request(x)).hidden, x)
    assert np.array_equal(pass_door(make_door(), make_request(x.numpy())).hidden.numpy(), x.numpy())


@pytest.mark.parametrize("dtype", [">f4", ">i4"])
def test_big_endian_numpy_is_sent_little_endian(dtype):
    value = np.arange(6, dtype=dtype).reshape(2, 3)
    sent = wire.encode(value, "x")
    assert np.array_equal(wire.decode(bytes(sent.data), sent.message(), as_torch=False), value)


def test_decoded_tensors_own_writable_memory():
    request = make_request(torch.zeros(2, 32))
    kept = bytes(request.hidden_states.data)
    pass_door(make_door(), request).hidden.fill_(7)
    assert request.hidden_states.data == kept


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32]
)
def test_every_integer_type_of_ids_gives_the_same_answer(dtype):
    ids = torch.tensor([[0, 7, 3], [1, 1, 2]])
    decoded = pass_door(make_door(), make_request(torch.ones(2, 32), ids.to(dtype), torch.rand(2, 3)))
    assert decoded.ids.dtype == torch.int32
    assert torch.equal(decoded.ids, ids.int())


def test_narrow_routing_is_padded_with_no_expert():
    decoded = pass_door(make_door(), make_request(torch.ones(2, 32), torch.tensor([[4], [5]]), torch.ones(2, 1).half()))
    assert decoded.ids.tolist() == [[4, -1, -1], [5, -1, -1]]
    assert decoded.weights.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert decoded.weights.dtype == torch.float32


X, IDS, WEIGHTS = torch.ones(2, 32), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)


def bad(what: str, **changes) -> pb.ForwardRequest:
    """A good request with one thing wrong: `field__data`, `field__shape` or `field__dtype`."""
    request = make_request(X, IDS, WEIGHTS)
    for key, value in changes.items():
        field, _, part = key.partition("__")
        if part == "shape":
            del getattr(request, field).shape[:]
            getattr(request, field).shape.extend(value)
        else:
            setattr(getattr(request, field), part, value)
    return request


REFUSED = {
    "a layer that is not served": (make_request(X, layer=4), UnknownLayer, r"layer: 4 .*1-3, 7"),
    "a negative layer": (make_request(X, layer=-1), UnknownLayer, r"layer: -1"),
    "no hidden states": (pb.ForwardRequest(layer=1), InvalidRequest, "hidden_states: missing"),
    "a hidden size of another model": (make_request(torch.ones(2, 33)), InvalidRequest, "hidden size 33.*32"),
    "integers as activations": (make_request(torch.ones(2, 32).int()), InvalidRequest, "dtype int32.*bfloat16"),
    "doubles as activations": (make_request(torch.ones(2, 32).double()), InvalidRequest, "dtype float64"),
    "a dtype from a newer client": (bad("", hidden_states__dtype=99), InvalidRequest, "dtype number 99"),
    "no dtype": (bad("", hidden_states__dtype=0), InvalidRequest, "dtype unset"),
    "one dimension": (make_request(torch.ones(32)), InvalidRequest, "1 dimensions, must be 2"),
    "three dimensions": (make_request(torch.ones(1, 2, 32)), InvalidRequest, "3 dimensions, must be 2"),
    "no dimension": (bad("", hidden_states__shape=()), InvalidRequest, "0 dimensions"),
    "a million dimensions": (bad("", hidden_states__shape=[1] * 10**6), InvalidRequest, "1000000 dimensions"),
    "a negative dimension": (bad("", hidden_states__shape=(-2, 32)), InvalidRequest, r"\(-2, 32\).*negative"),
    "two negative ones, whose product is right": (
        bad("", hidden_states__shape=(-2, -32)), InvalidRequest, "negative"),
    "dims whose product wraps in 64 bits": (
        bad("", hidden_states__shape=(2**62, 32)), TooLarge, "4611686018427387904 tokens.*16384"),
    "too few bytes": (bad("", hidden_states__data=b"\0" * 255), InvalidRequest, "255 bytes came.*256"),
    "too many bytes": (bad("", hidden_states__data=b"\0" * 257), InvalidRequest, "257 bytes came.*256"),
    "no bytes": (bad("", hidden_states__data=b""), InvalidRequest, "0 bytes came.*256"),
    "NaN": (make_request(torch.full((2, 32), float("nan"))), InvalidRequest, "NaN or infinite.*row 0, column 0: nan"),
    "minus infinity in one place": (
        make_request(torch.cat([X[:1], X[1:].index_fill(1, torch.tensor([31]), -float("inf"))])), InvalidRequest,
        "row 1, column 31: -inf; send finite ones"),
    "ids without weights": (make_request(X, IDS), InvalidRequest, "topk_weights: missing"),
    "weights without ids": (make_request(X, None, WEIGHTS), InvalidRequest, "topk_ids: missing"),
    "float ids": (make_request(X, IDS.float(), WEIGHTS), InvalidRequest, "topk_ids: dtype float32"),
    "integer weights": (make_request(X, IDS, WEIGHTS.int()), InvalidRequest, "topk_weights: dtype int32"),
    "ids of another batch": (make_request(X, IDS[:1], WEIGHTS), InvalidRequest, "topk_ids: 1 rows.*2 tokens"),
    "weights of another shape": (make_request(X, IDS, WEIGHTS[:, :1]), InvalidRequest, r"\(2, 1\).*\(2, 2\)"),
    "more experts than top-k": (
        make_request(X, torch.zeros(2, 4).int(), torch.ones(2, 4)), InvalidRequest, "4 experts a token.*1 to 3"),
    "no experts": (make_request(X, torch.zeros(2, 0).int(), torch.ones(2, 0)), InvalidRequest, "0 experts a token"),
    "id E": (make_request(X, IDS + 5, WEIGHTS), InvalidRequest, r"id 8 is outside 0\.\.7"),
    "id E+7": (make_request(X, IDS + 15, WEIGHTS), InvalidRequest, "id 15 is outside"),
    "the largest int32": (make_request(X, IDS.fill_diagonal_(2**31 - 1), WEIGHTS), InvalidRequest, "id 2147483647"),
    "an id that is 0 in its low 32 bits": (
        make_request(X, torch.tensor([[2**32, 1], [0, 1]]), WEIGHTS), InvalidRequest, "id 4294967296"),
    "id -2": (make_request(X, torch.tensor([[-2, 1], [0, 1]]), WEIGHTS), InvalidRequest, "id -2"),
    "a weight that is not finite": (
        make_request(X, torch.tensor([[0, 1], [0, 1]]), WEIGHTS * float("inf")), InvalidRequest,
        "topk_weights.*finite.*row 0, column 0: inf; send finite ones, or the id -1"),
    "a weight that is not finite beside one that need not be": (
        make_request(X, torch.tensor([[-1, 1], [0, 1]]), torch.tensor([[math.nan, 1], [1, math.nan]])), InvalidRequest,
        "row 1, column 1: nan"),
    "more tokens than allowed": (
        make_request(torch.ones(16385, 32)), TooLarge, "16385 tokens, at most 16384.*server.max_tokens_per_request"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_request_is_refused_with_the_field_and_both_numbers(what):
    request, error, message = REFUSED[what]
    with pytest.raises(error, match=message) as raised:
        pass_door(make_door(), request)
    assert raised.value.field in {"layer", "hidden_states", "topk_ids", "topk_weights"}


def test_more_bytes_than_allowed_are_refused_before_any_is_looked_at():
    request = bad("", hidden_states__shape=(9, 32), topk_ids__shape=(9, 2), topk_weights__shape=(9, 2))
    with pytest.raises(TooLarge, match=r"9 tokens make 1368 bytes, at most 1024 .*server\.max_message_bytes"):
        make_door(max_message_bytes=1024).check(request, "test")


async def test_a_refusal_says_in_its_metadata_which_field_it_is():
    for request, field in ((make_request(X, layer=4), "layer"), (make_request(torch.ones(9, 32)), "hidden_states")):
        async with serving(FakeEngine(), max_tokens_per_request=8) as server, connect(server) as channel:
            error = await status_of(pb_grpc.ExpertsStub(channel).Forward(request))
        assert dict(error.trailing_metadata())["epserve-field"] == error_of_rpc(error).field == field


def test_overflow_of_the_models_dtype_counts_as_not_finite():
    with pytest.raises(
        InvalidRequest, match=r"as float16, the model's dtype.*row 0, column 0: 1000000\.0, which becomes inf"
    ):
        pass_door(make_door(tiny_info(dtype=torch.float16)), make_request(torch.full((1, 32), 1e6)))


def test_weights_of_no_expert_may_hold_anything():
    weights = torch.tensor([[1.0, float("nan")], [1.0, 1.0]])
    decoded = pass_door(make_door(), make_request(X, torch.tensor([[0, -1], [0, 1]]), weights))
    assert decoded.ids[0].tolist() == [0, -1, -1]


@pytest.mark.parametrize("request_id", ["a b", "line\nbreak", "\x1b[31m", "ü", "x" * 129])
def test_request_ids_that_would_spoil_a_log_are_refused(request_id):
    with pytest.raises(InvalidRequest, match="request_id"):
        codec.checked_request_id(request_id)


@pytest.mark.parametrize("value", [[1.0], 3, "x", None, {"a": 1}])
def test_only_torch_and_numpy_are_sent(value):
    with pytest.raises(InvalidRequest, match="must be a torch tensor or a numpy array"):
        wire.encode(value, "hidden_states")


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=torch.complex64), np.array(["a"]), np.zeros(2, dtype=object)])
def test_dtypes_that_cannot_be_sent_are_refused(value):
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        wire.encode(value, "hidden_states")


class TestAssembly:
    def test_pieces_of_any_size_give_the_whole(self):
        whole = bytes(range(100))
        assembly = wire.Assembly({pb.HIDDEN_STATES: 100, pb.TOPK_IDS: 3})
        for start in (0, 1, 1, 40, 99):
            stop = {0: 1, 1: 40, 40: 99, 99: 100}[start]
            if assembly._filled[pb.HIDDEN_STATES] == start:
                assembly.add(pb.HIDDEN_STATES, whole[start:stop])
        assert not assembly.done
        assembly.add(pb.TOPK_IDS, b"abc")
        assert assembly.done
        assert assembly.finish() == {pb.HIDDEN_STATES: whole, pb.TOPK_IDS: b"abc"}

    def test_surplus_and_missing_bytes_are_refused(self):
        assembly = wire.Assembly({pb.HIDDEN_STATES: 4})
        with pytest.raises(InvalidRequest, match="0 bytes came, its shape and dtype make 4"):
            assembly.finish()
        assembly.add(pb.HIDDEN_STATES, b"abc")
        with pytest.raises(InvalidRequest, match="5 bytes came, its shape and dtype make 4"):
            assembly.add(pb.HIDDEN_STATES, b"de")
        with pytest.raises(InvalidRequest, match="topk_ids: 2 bytes came for a tensor that was not declared"):
            assembly.add(pb.TOPK_IDS, b"de")
        with pytest.raises(InvalidRequest, match="field 77"):
            assembly.add(77, b"")


@pytest.mark.parametrize("tokens", [1, 8191, 8192, 8193, 30000])
def test_frames_are_bounded_and_give_the_request_back(tokens):
    x = torch.randn(tokens, 32)
    frames = list(wire.request_frames(9, {pb.HIDDEN_STATES: wire.encode(x, "x")}, pb.ForwardRequest(layer=2)))
    assert all(frame.ByteSize() <= wire.FRAME_BYTES + wire.OVERHEAD_BYTES for frame in frames)
    assert len(frames) == (1 if x.nbytes <= wire.FRAME_BYTES else 1 + -(-x.nbytes // wire.FRAME_BYTES))
    assembly = wire.Assembly({pb.HIDDEN_STATES: x.nbytes})
    assembly.add(pb.HIDDEN_STATES, frames[0].begin.hidden_states.data)
    for frame in frames[1:]:
        assembly.add(frame.part.field, frame.part.data)
    got = wire.decode(assembly.finish()[pb.HIDDEN_STATES], frames[0].begin.hidden_states, as_torch=True)
    assert torch.equal(got, x)


tensors = st.builds(
    pb.Tensor,
    data=st.binary(max_size=300) | st.integers(0, 40).map(lambda n: bytes(4 * n)),
    dtype=st.integers(0, 14),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 40), max_size=4)
    | st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 3, 32])),
)
requests = st.builds(
    pb.ForwardRequest,
    layer=st.integers(-(2**31), 2**31 - 1) | st.sampled_from([1, 2, 3, 7]),
    hidden_states=st.none() | tensors,
    topk_ids=st.none() | tensors,
    topk_weights=st.none() | tensors,
)


def refused_or_right(request: pb.ForwardRequest) -> None:
    try:
        decoded = pass_door(make_door(), request)
    except CallerError:
        return
    assert decoded.hidden.dtype == torch.float32
    assert decoded.hidden.shape == tuple(request.hidden_states.shape)
    assert bool(torch.isfinite(decoded.hidden).all())
    if decoded.ids is not None:
        assert decoded.ids.shape == decoded.weights.shape == (decoded.hidden.shape[0], 3)
        assert decoded.ids.numel() == 0 or (int(decoded.ids.min()) >= -1 and int(decoded.ids.max()) < 8)


@FUZZ
@given(requests)
def test_whatever_comes_is_either_refused_as_the_callers_fault_or_right(request):
    refused_or_right(request)


@FUZZ
@given(st.binary(max_size=400))
def test_random_bytes_that_are_a_message_are_refused_or_right(data):
    try:
        request = pb.ForwardRequest.FromString(data)
    except DecodeError:
        return  # gRPC refuses what is no message
    refused_or_right(request)
