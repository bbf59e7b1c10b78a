"""Requests and replies that are read and written without protobuf's copies: the same messages, and the same refusals."""

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import frames, messages, wire

KINDS = {
    "request": (pb.ForwardRequest, messages.parse_request),
    "reply": (pb.ForwardReply, messages.parse_reply),
}
TENSORS = {"request": list(wire.FIELDS.values()), "reply": ["hidden_states", "hidden_scales"]}
SMALL = 3
"""Stands for WORTH_BYTES, so that short messages take the quick way too."""


@pytest.fixture(autouse=True)
def _small_counts(monkeypatch):
    monkeypatch.setattr(messages, "WORTH_BYTES", SMALL)


def tensors():
    return st.builds(
        pb.Tensor,
        data=st.binary(max_size=200),
        dtype=st.integers(0, 20),
        shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
        region=st.none() | st.builds(pb.RegionSlice, region=st.text(max_size=5), offset=st.integers(0, 2**64 - 1)),
    )


def made(kind):
    """Any message of the kind."""
    optional = {name: st.none() | tensors() for name in TENSORS[kind]}
    if kind == "request":
        return st.builds(
            pb.ForwardRequest,
            request_id=st.text(max_size=8),
            layer=st.integers(-(2**31), 2**31 - 1),
            timeout_ms=st.integers(0, 2**32 - 1),
            priority=st.integers(0, 5),
            **optional,
        )
    timings = st.none() | st.builds(pb.Timings, codec_us=st.integers(0, 2**32 - 1))
    left_out = st.lists(st.integers(0, 300), max_size=3)
    return st.builds(
        pb.ForwardReply, request_id=st.text(max_size=8), timings=timings, left_out_experts=left_out, **optional
    )


def whole(received, kind):
    """As one message again."""
    found = type(received.header)()
    found.CopyFrom(received.header)
    for which, name in wire.FIELDS.items():
        if name in TENSORS[kind] and found.HasField(name):
            getattr(found, name).data = bytes(received.bytes_of(which))
    return found


def meaning(parse, data):
    try:
        return parse(data)
    except DecodeError:
        return "no message"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_what_protobuf_wrote_means_the_same(kind, data):
    message_type, parse = KINDS[kind]
    texts = [data.draw(made(kind)).SerializeToString() for _ in range(2)]
    for text in (texts[0], b"".join(texts)):  # of two in a row the later one's values count
        assert whole(parse(text), kind) == message_type.FromString(text)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=500)
def test_any_bytes_mean_what_they_mean_to_protobuf(kind, data):
    message_type, parse = KINDS[kind]
    text = bytearray(data.draw(made(kind)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        match data.draw(st.sampled_from(["change", "cut", "insert"])):
            case "change" if at < len(text):
                text[at] = data.draw(st.integers(0, 255))
            case "cut":
                del text[at:]
            case _:
                text[at:at] = data.draw(st.binary(max_size=12))
    got = meaning(parse, bytes(text))
    got = got if got == "no message" else whole(got, kind)
    assert got == meaning(message_type.FromString, bytes(text))


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(0, 4), data=st.data(), call=st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_protobufs_to_read(kind, rows, data, call):
    message_type, parse = KINDS[kind]
    header = data.draw(made(kind))
    for name in TENSORS[kind]:
        header.ClearField(name)
    tensors = {
        which: wire.encode(torch.randn(rows, 3), name) for which, name in wire.FIELDS.items() if name in TENSORS[kind]
    }
    outgoing = messages.Outgoing(header, tensors)
    text = messages.serialise(outgoing)
    assert message_type.FromString(text) == outgoing.message() == whole(parse(text), kind)
    frame_type, parse_frame = {
        "request": (pb.RequestFrame, frames.parse_request),
        "reply": (pb.ReplyFrame, frames.parse_reply),
    }[kind]
    text = frames.serialise(frames.BeginFrame(call, outgoing))
    assert frame_type.FromString(text) == frame_type(call=call, begin=outgoing.message())
    frame = parse_frame(text)
    assert (frame.call, frame.WhichOneof("body")) == (call, "begin")
    assert whole(frames.begun(frame), kind) == outgoing.message()


def test_large_tensors_are_views_of_what_came(monkeypatch):
    monkeypatch.undo()
    x = torch.randn(16, 2048)
    text = messages.serialise(messages.Outgoing(pb.ForwardRequest(layer=1), {pb.HIDDEN_STATES: wire.encode(x, "x")}))
    got = messages.parse_request(text)
    view = got.data[pb.HIDDEN_STATES]
    assert view.obj is text
    assert view == x.numpy().data.cast("B")
    assert not got.header.hidden_states.data
    assert got.header.hidden_states.shape == [16, 2048]
