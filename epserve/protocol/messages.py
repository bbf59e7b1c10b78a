"""Writes and reads ForwardRequest and ForwardReply without protobuf's copies of tensors, two on either side.

The bytes are protobuf's. To read a message, this module cuts the data of its large tensors out as views of the received bytes,
and protobuf reads the rest, about 100 bytes. To write one, protobuf writes the rest, and the tensors' memory is joined to it.
protobuf reads or refuses a message that is small, unusual or damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import epserve_pb2 as pb
from . import wire

WORTH_BYTES = 32 << 10
"""Up to this size, protobuf's copies cost less than reading the fields in Python."""


def _numbers(message: Any) -> dict[int, pb.Field]:
    """Returns field number -> tensor."""
    known = message.DESCRIPTOR.fields_by_name
    return {known[name].number: which for which, name in wire.FIELDS.items() if name in known}


_REQUEST, _REPLY = _numbers(pb.ForwardRequest), _numbers(pb.ForwardReply)
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_DATA = pb.Tensor.DESCRIPTOR.fields_by_name["data"].number << 3 | _LENGTH


@dataclass(frozen=True, slots=True)
class Received:
    """Holds a received message. `header` lacks the bytes of the tensors in `data`."""

    header: Any
    data: Mapping[pb.Field, memoryview] = field(default_factory=dict)

    def bytes_of(self, which: pb.Field) -> bytes | memoryview:
        found = self.data.get(which)
        return getattr(self.header, wire.FIELDS[which]).data if found is None else found


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Holds a message to send: `header` without tensors, and the tensors with all their bytes."""

    header: Any
    tensors: Mapping[pb.Field, wire.WireTensor]

    def message(self) -> Any:
        """Returns protobuf's own message, with the tensors."""
        whole = type(self.header)()
        whole.CopyFrom(self.header)
        for which, tensor in self.tensors.items():
            getattr(whole, wire.FIELDS[which]).CopyFrom(tensor.message())
        return whole


def parse_request(data: bytes) -> Received:
    """Reads a ForwardRequest. Raises DecodeError."""
    return received(pb.ForwardRequest, data, 0)


def parse_reply(data: bytes) -> Received:
    """Reads a ForwardReply. Raises DecodeError."""
    return received(pb.ForwardReply, data, 0)


def received(kind: Any, data: bytes, start: int) -> Received:
    """Returns the message of type `kind` in the bytes from `start` on. Raises DecodeError."""
    if len(data) - start > WORTH_BYTES:
        try:
            found = _split(data, start, _REQUEST if kind is pb.ForwardRequest else _REPLY)
        except IndexError:  # the message is not whole, and protobuf's error says so
            found = None
        if found is not None:
            rest, views = found
            header = kind.FromString(rest)
            tensors = [getattr(header, wire.FIELDS[which]) for which in views]
            # The last of two equal fields counts.
            if not any(tensor.data or tensor.HasField("region") for tensor in tensors):
                return Received(header, views)
    return Received(kind.FromString(data[start:] if start else data))


def serialise(message: Any) -> bytes:
    """Returns the bytes of an Outgoing, or of protobuf's own message."""
    return b"".join(parts(message)) if isinstance(message, Outgoing) else message.SerializeToString()


def parts(message: Outgoing) -> list[bytes | memoryview]:
    """Returns the message's bytes in pieces. Tensors are views, not copies."""
    numbers = _REQUEST_OF if isinstance(message.header, pb.ForwardRequest) else _REPLY_OF
    found: list[bytes | memoryview] = [message.header.SerializeToString()]
    for which, tensor in message.tensors.items():
        rest = tensor.header().SerializeToString()
        data = b"%c%b" % (_DATA, varint(len(tensor.data))) if len(tensor.data) else b""
        size = len(data) + len(tensor.data) + len(rest)
        found += (b"%c%b%b" % (numbers[which] << 3 | _LENGTH, varint(size), data), tensor.data, rest)
    return found


_REQUEST_OF = {which: number for number, which in _REQUEST.items()}
_REPLY_OF = {which: number for number, which in _REPLY.items()}


def _split(data: bytes, start: int, tensors: Mapping[int, pb.Field]) -> tuple[bytes, dict[pb.Field, memoryview]] | None:
    """Returns the message without the data of its large tensors, and that data.

    Returns None if there is no large tensor. Raises IndexError past the end.
    """
    kept: list[bytes] = []
    views: dict[pb.Field, memoryview] = {}
    whole, end, at, done = memoryview(data), len(data), start, start
    while at < end:
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == _LENGTH:
            size, body = read_varint(data, at)
            stop = body + size
            if size > WORTH_BYTES and tag >> 3 in tensors and stop <= end and data[body] == _DATA:
                size, first = read_varint(data, body + 1)
                after = first + size
                if after <= stop:  # otherwise protobuf refuses the message
                    views[tensors[tag >> 3]] = whole[first:after]
                    kept += (data[done:at], varint(stop - after), data[after:stop])
                    done = stop
            at = stop
        elif kind == _VARINT:
            _, at = read_varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            return None
    if at != end or not views:
        return None
    kept.append(data[done:])
    return b"".join(kept), views


def varint(value: int) -> bytes:
    if value < 0x80:
        return b"%c" % value
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the value and its end. Raises IndexError when it does not end, or is longer than protobuf allows."""
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
