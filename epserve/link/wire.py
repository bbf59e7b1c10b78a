"""Frames between engine, ranks and joined front ends: a short JSON header, then the raw bytes of tensors. No pickle.

magic "EPS2" | header bytes, uint32 | stream, uint32 | header | payloads of header["tensors"] = [[dtype, shape], ...] in order

A tensor that lies in shared memory is [dtype, shape, byte offset] and has no payload. In a stream other than 0 the payloads
follow in pieces (joining/frames.py). Links to ranks have no streams.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .shm import Window

MAGIC = b"EPS2"
PREFIX = struct.Struct("!4sII")
MAX_HEADER = 1 << 20
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8,
)}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(ConnectionError):
    """The other side closed the connection, or sent bytes that are no frame."""


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def describe(tensor: torch.Tensor) -> list[Any]:
    return [NAMES[tensor.dtype], list(tensor.shape)]


def encode(
    header: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int | None] = (),
    *,
    stream: int = 0,
    default: Callable[[Any], Any] | None = None,
) -> list[bytes | memoryview]:
    """Returns the parts of a frame: prefix and header, then payloads by reference. Tensors must not change until they are sent.

    Args:
        header: any JSON object.
        tensors: contiguous CPU tensors.
        offsets: place of each tensor in shared memory. None: its bytes are part of the frame.
        stream: 0: the payloads are part of the frame. Otherwise the caller sends them in pieces.
        default: turns objects that JSON lacks into objects that it has.
    """
    where = offsets or (None,) * len(tensors)
    described = [
        describe(tensor) if at is None else [*describe(tensor), at] for tensor, at in zip(tensors, where, strict=True)
    ]
    text = json.dumps({**header, "tensors": described}, separators=(",", ":"), default=default).encode()
    sent = [tensor for tensor, at in zip(tensors, where, strict=True) if at is None and tensor.numel()]
    return [PREFIX.pack(MAGIC, len(text), stream) + text, *map(as_bytes, sent)]


def header_size(prefix: bytes | bytearray, most: int = MAX_HEADER) -> int:
    magic, size, stream = PREFIX.unpack(prefix)
    if magic != MAGIC or size > most or stream:
        raise WireError(f"not a frame: starts with {bytes(prefix)!r}")
    return size


def parse(text: bytes | bytearray, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Returns a frame's header. Raises ValueError for text that is no JSON object. hook: gets each object (json.loads)."""
    header = json.loads(text, object_hook=hook)
    if not isinstance(header, dict):
        raise ValueError(f"a frame's header is {type(header).__name__}")
    return header


# Blocking sockets: the rank's side, and the engine's while it connects.


def receive_exactly(sock: socket.socket, view: memoryview, until: float | None = None) -> None:
    """Fills the view. until: deadline for all of it, by time.monotonic(). None: the socket's own timeout holds for each part."""
    while view:
        if until is not None:
            sock.settimeout(max(until - time.monotonic(), 1e-3))
        count = sock.recv_into(view)
        if not count:
            raise WireError("the other side closed the connection")
        view = view[count:]


def receive_header(sock: socket.socket, *, most: int = MAX_HEADER, until: float | None = None) -> dict[str, Any]:
    prefix = bytearray(PREFIX.size)
    receive_exactly(sock, memoryview(prefix), until)
    text = bytearray(header_size(prefix, most))
    receive_exactly(sock, memoryview(text), until)
    return parse(text)


def receive(
    sock: socket.socket, window: Window | None = None, *, pin: bool = False
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Receives a frame. pin: tensors that come over the socket land in pinned memory, which torch keeps for the next time."""
    header = receive_header(sock)
    tensors = []
    for dtype, shape, *at in header["tensors"]:
        if at:
            if window is None:
                raise WireError("a tensor in shared memory, but there is none")
            tensors.append(window.tensor(DTYPES[dtype], tuple(shape), at[0]))
            continue
        tensor = torch.empty(shape, dtype=DTYPES[dtype], pin_memory=pin)
        if tensor.numel():
            receive_exactly(sock, as_bytes(tensor))
        tensors.append(tensor)
    return header, tensors


def send(sock: socket.socket, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
    for part in encode(header, tensors):
        sock.sendall(part)


# File descriptors, over Unix sockets.


MOST_DESCRIPTORS = 4  # of one frame


def send_with_descriptors(sock: socket.socket, header: dict[str, Any], descriptors: Sequence[int]) -> None:
    (frame,) = encode(header, [])
    sent = socket.send_fds(sock, [frame], list(descriptors))
    sock.sendall(memoryview(frame)[sent:])


def receive_with_descriptors(sock: socket.socket, most: int) -> tuple[dict[str, Any], list[int]]:
    """Receives a frame without tensors and the descriptors that came with it. Closes those beyond `most`."""
    if sock.family != socket.AF_UNIX:
        return receive_header(sock), []
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
    prefix, ancillary, _, _ = sock.recvmsg(PREFIX.size, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    for surplus in descriptors[most:]:
        os.close(surplus)
    kept = list(descriptors[:most])
    try:
        rest = bytearray(PREFIX.size - len(prefix))
        if not prefix:
            raise WireError("the other side closed the connection")
        receive_exactly(sock, memoryview(rest))
        text = bytearray(header_size(prefix + rest))
        receive_exactly(sock, memoryview(text))
        return parse(text), kept
    except BaseException:
        for fd in kept:
            os.close(fd)
        raise
