"""Writes and reads frames of a stream with one copy of a tensor's data on each side. protobuf makes three.

The bytes are those of RequestFrame and ReplyFrame, which number their fields alike: any client in any language fits. This
module reads a part whose fields are in the usual order, and messages.py reads a whole request or reply. protobuf reads or
refuses every other frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from . import epserve_pb2 as pb
from . import epserve_pb2_grpc as pb_grpc
from . import messages
from .messages import Outgoing, Received, read_varint, varint

SERVICE = pb.DESCRIPTOR.services_by_name["Experts"].full_name
SINGLE = ("Forward", "Backward")
"""Methods whose request and reply are one message each."""
CALL, BEGIN, PART, FIELD, DATA = 0x08, 0x12, 0x1A, 0x08, 0x12
"""The tags of fields. call = 1 and field = 1 are varints. begin = 2, part = 3 and data = 2 have a length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Stands for a pb.Part. `data` is a view of memory that the piece does not own."""

    field: pb.Field
    data: memoryview


@dataclass(frozen=True, slots=True)
class PartFrame:
    """Stands for a RequestFrame or ReplyFrame with a part."""

    call: int
    part: Piece

    def WhichOneof(self, _: str) -> str:
        return "part"


@dataclass(frozen=True, slots=True)
class BeginFrame:
    """Stands for a RequestFrame or ReplyFrame with a whole request or reply."""

    call: int
    begin: Received | Outgoing

    def WhichOneof(self, _: str) -> str:
        return "begin"


def begin_frame(call: int, header: Any, tensors: Any) -> BeginFrame:
    return BeginFrame(call, Outgoing(header, tensors))


def part_frame(call: int, field: pb.Field, data: memoryview) -> PartFrame:
    return PartFrame(call, Piece(field, data))


def serialise(frame: Any) -> bytes:
    """Returns the bytes of a frame of this module, or of protobuf's own."""
    if isinstance(frame, BeginFrame):
        assert isinstance(frame.begin, Outgoing)
        parts = messages.parts(frame.begin)
        return b"".join((_call(frame), b"%c%b" % (BEGIN, varint(sum(map(len, parts)))), *parts))
    if not isinstance(frame, PartFrame):
        return frame.SerializeToString()
    data = frame.part.data
    inner = b"%c%b%c%b" % (FIELD, varint(frame.part.field), DATA, varint(len(data)))
    return b"".join((_call(frame), b"%c%b" % (PART, varint(len(inner) + len(data))), inner, data))


def _call(frame: PartFrame | BeginFrame) -> bytes:
    return b"%c%b" % (CALL, varint(frame.call)) if frame.call else b""


def parse_request(data: bytes) -> pb.RequestFrame | PartFrame | BeginFrame:
    """Reads a frame of a client. Raises DecodeError."""
    return _frame(data, pb.ForwardRequest) or pb.RequestFrame.FromString(data)


def parse_reply(data: bytes) -> pb.ReplyFrame | PartFrame | BeginFrame:
    """Reads a frame of a server. Raises DecodeError."""
    return _frame(data, pb.ForwardReply) or pb.ReplyFrame.FromString(data)


def begun(frame: Any) -> Received:
    """Returns the request or reply of a frame that has one."""
    if not isinstance(frame, BeginFrame):
        return Received(frame.begin)
    assert isinstance(frame.begin, Received)
    return frame.begin


def experts_stub(channel: Any) -> pb_grpc.ExpertsStub:
    """Returns the generated stub of a channel (asyncio's or not), with other types in some methods.

    Forward and Backward take Outgoing and return Received. ForwardStream has frames of this module.
    """
    made = pb_grpc.ExpertsStub(channel)
    for name in SINGLE:
        method = channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=messages.serialise,
            response_deserializer=messages.parse_reply,
            _registered_method=True,
        )
        setattr(made, name, method)
    made.ForwardStream = channel.stream_stream(
        f"/{SERVICE}/ForwardStream",
        request_serializer=serialise,
        response_deserializer=parse_reply,
        _registered_method=True,
    )
    return made


def add_experts_servicer(servicer: Any, server: grpc.aio.Server) -> None:
    """Adds a servicer like the generated function. Forward and Backward get Received and return Outgoing, and the stream has our
    frames."""
    pb_grpc.add_ExpertsServicer_to_server(servicer, server)
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, name),
            request_deserializer=messages.parse_request,
            response_serializer=messages.serialise,
        )
        for name in SINGLE
    } | {
        "ForwardStream": grpc.stream_stream_rpc_method_handler(
            servicer.ForwardStream, request_deserializer=parse_request, response_serializer=serialise
        ),
    }
    # NOTE: registered handlers precede generic ones, and the later of two with one name counts.
    server.add_registered_method_handlers(SERVICE, methods)  # type: ignore[attr-defined]  # the stubs lack it


def _frame(data: bytes, kind: Any) -> PartFrame | BeginFrame | None:
    """Reads a part or a whole request. None: its fields are in another order, or it is not whole. Raises DecodeError."""
    try:
        call, at = 0, 0
        if data[0] == CALL:
            call, at = read_varint(data, 1)
        if data[at] == BEGIN and len(data) > messages.WORTH_BYTES:
            size, at = read_varint(data, at + 1)
            return BeginFrame(call, messages.received(kind, data, at)) if at + size == len(data) else None
        if data[at] != PART:
            return None
        size, at = read_varint(data, at + 1)
        if at + size != len(data) or data[at] != FIELD:
            return None
        field, at = read_varint(data, at + 1)
        if field not in _FIELDS or data[at] != DATA:
            return None
        size, at = read_varint(data, at + 1)
    except IndexError:
        return None
    return PartFrame(call, Piece(field, memoryview(data)[at:])) if at + size == len(data) else None  # type: ignore[arg-type]


_FIELDS = frozenset(pb.Field.values())
