"""Frames of a stream as bytes, with one copy of a part's data on each side where protobuf makes three.

The bytes are those of RequestFrame and ReplyFrame, which number their fields alike: any client in any language fits. A part
that is written in the order of its fields, as everybody writes it, is taken apart here; whatever looks otherwise is
protobuf's to read or to refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from epserve.serving import epserve_pb2 as pb
from epserve.serving import epserve_pb2_grpc as pb_grpc

METHOD = f"/{pb.DESCRIPTOR.services_by_name['Experts'].full_name}/ForwardStream"
CALL, PART, FIELD, DATA = 0x08, 0x1A, 0x08, 0x12
"""Tags: call = 1 and field = 1 are varints; part = 3 and data = 2 have a length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """As pb.Part. `data` is a view of somebody's memory."""

    field: pb.Field
    data: memoryview


@dataclass(frozen=True, slots=True)
class PartFrame:
    """As a RequestFrame or ReplyFrame with a part."""

    call: int
    part: Piece

    def WhichOneof(self, _: str) -> str:
        return "part"


def part_frame(call: int, field: pb.Field, data: memoryview) -> PartFrame:
    return PartFrame(call, Piece(field, data))


def serialise(frame: Any) -> bytes:
    if not isinstance(frame, PartFrame):
        return frame.SerializeToString()
    data = frame.part.data
    inner = b"%c%b%c%b" % (FIELD, _varint(frame.part.field), DATA, _varint(len(data)))
    call = b"%c%b" % (CALL, _varint(frame.call)) if frame.call else b""
    return b"".join((call, b"%c%b" % (PART, _varint(len(inner) + len(data))), inner, data))


def parse_request(data: bytes) -> pb.RequestFrame | PartFrame:
    """Raises DecodeError."""
    return _part(data) or pb.RequestFrame.FromString(data)


def parse_reply(data: bytes) -> pb.ReplyFrame | PartFrame:
    """Raises DecodeError."""
    return _part(data) or pb.ReplyFrame.FromString(data)


def experts_stub(channel: Any) -> pb_grpc.ExpertsStub:
    """Of a channel, asyncio's or not: the generated one but for the stream's frames."""
    made = pb_grpc.ExpertsStub(channel)
    made.ForwardStream = channel.stream_stream(
        METHOD, request_serializer=serialise, response_deserializer=parse_reply, _registered_method=True
    )
    return made


def add_experts_servicer(servicer: Any, server: grpc.aio.Server) -> None:
    """As the generated function, but for the stream's frames."""
    pb_grpc.add_ExpertsServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ForwardStream, request_deserializer=parse_request, response_serializer=serialise
    )
    service, name = METHOD.strip("/").split("/")
    # NOTE: registered handlers count before generic ones, and of two with one name the later one.
    server.add_registered_method_handlers(service, {name: method})  # type: ignore[attr-defined]  # the stubs lack it


def _part(data: bytes) -> PartFrame | None:
    """None: not a part in the usual order, or not whole."""
    try:
        call, at = 0, 0
        if data[0] == CALL:
            call, at = _read_varint(data, 1)
        if data[at] != PART:
            return None
        size, at = _read_varint(data, at + 1)
        if at + size != len(data) or data[at] != FIELD:
            return None
        field, at = _read_varint(data, at + 1)
        if field not in _FIELDS or data[at] != DATA:
            return None
        size, at = _read_varint(data, at + 1)
    except IndexError:
        return None
    return PartFrame(call, Piece(field, memoryview(data)[at:])) if at + size == len(data) else None  # type: ignore[arg-type]


_FIELDS = frozenset(pb.Field.values())


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The value and where it ends. Raises IndexError where it does not, or is longer than a protobuf's may be."""
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                raise IndexError
            return value, at
        shift += 7
    raise IndexError
