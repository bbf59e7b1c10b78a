"""Frames that are written and read without protobuf: the same bytes as protobuf's, and the same refusals."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import frames

FIELDS = st.sampled_from([pb.HIDDEN_STATES, pb.TOPK_IDS, pb.TOPK_WEIGHTS, pb.HIDDEN_SCALES])
CALLS = st.integers(0, 2**64 - 1) | st.integers(0, 300)
KINDS = {"request": (pb.RequestFrame, frames.parse_request), "reply": (pb.ReplyFrame, frames.parse_reply)}


@pytest.mark.parametrize("kind", KINDS)
@given(call=CALLS, field=FIELDS, data=st.binary(max_size=300))
@settings(deadline=None)
def test_a_part_is_protobufs_bytes_and_back(kind, call, field, data):
    message, parse = KINDS[kind]
    expected = message(call=call, part=pb.Part(field=field, data=data)).SerializeToString()
    ours = frames.serialise(frames.part_frame(call, field, memoryview(data)))
    assert message.FromString(ours) == message.FromString(expected)
    assert ours == expected or not data, "protobuf leaves an empty value out"
    got = parse(expected)
    assert isinstance(got, frames.PartFrame) or not data
    assert (got.call, got.WhichOneof("body"), got.part.field, bytes(got.part.data)) == (call, "part", field, data)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=60))
@settings(deadline=None, max_examples=500)
def test_any_bytes_mean_what_they_mean_to_protobuf(kind, data):
    message, parse = KINDS[kind]
    for text in (data, b"\x08\x07\x1a" + data, b"\x1a" + bytes([len(data)]) + data):
        try:
            expected = message.FromString(text)
        except DecodeError:
            with pytest.raises(DecodeError):
                parse(text)
            continue
        got = parse(text)
        if isinstance(got, frames.PartFrame):
            got = message(call=got.call, part=pb.Part(field=got.part.field, data=bytes(got.part.data)))
        assert got == expected


# Forms of the same message that others may write: fields the other way round, a value twice, one that is not known.
@pytest.mark.parametrize(
    "text",
    [
        b"\x1a\x06\x12\x02ab\x08\x01\x08\x05",
        b"\x08\x05\x1a\x06\x12\x02ab\x08\x01",
        b"\x08\x05\x1a\x08\x08\x02\x08\x01\x12\x02ab",
        b"\x08\x05\x1a\x06\x08\x01\x12\x02ab\x1a\x00",
        b"\x08\x05\x1a\x09\x08\x01\x12\x02ab\x1a\x01x",
        b"\x08\x85\x00\x1a\x06\x08\x01\x12\x02ab",
    ],
)
def test_unusual_forms_of_a_part(text):
    expected, got = pb.RequestFrame.FromString(text), frames.parse_request(text)
    assert (got.call, got.part.field, bytes(got.part.data)) == (expected.call, expected.part.field, expected.part.data)


def test_other_frames_are_protobufs():
    begin = pb.RequestFrame(call=3, begin=pb.ForwardRequest(layer=2, request_id="a"))
    assert frames.serialise(begin) == begin.SerializeToString()
    assert frames.parse_request(begin.SerializeToString()) == begin
    cancel = pb.RequestFrame(call=3, cancel=pb.Cancel())
    assert frames.parse_request(cancel.SerializeToString()) == cancel
    assert frames.parse_request(b"") == pb.RequestFrame()
