"""Frames between the engine and a rank: a short JSON header, then the raw bytes of tensors. No pickle.

magic "EPS1" | header bytes, uint32 | header | payloads of header["tensors"] = [[dtype, shape], ...] in order
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch

MAGIC = b"EPS1"
PREFIX = struct.Struct("!4sI")
MAX_HEADER = 1 << 20
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8,
)}  # fmt: skip


class WireError(ConnectionError):
    """The other side closed, or what it sent is no frame."""


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def encode(header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> list[bytes | memoryview]:
    """The parts of a frame, payloads by reference: the tensors must stay as they are until they are sent."""
    described = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps({**header, "tensors": described}, separators=(",", ":")).encode()
    return [PREFIX.pack(MAGIC, len(text)) + text, *(as_bytes(tensor) for tensor in tensors if tensor.numel())]


def header_size(prefix: bytes | bytearray) -> int:
    magic, size = PREFIX.unpack(prefix)
    if magic != MAGIC or size > MAX_HEADER:
        raise WireError(f"not a frame: starts with {bytes(prefix)!r}")
    return size


def empty_tensors(header: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=DTYPES[dtype]) for dtype, shape in header["tensors"]]


# Blocking sockets: the rank's side.


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise WireError("the other side closed the connection")
        view = view[count:]


def receive_header(sock: socket.socket) -> dict[str, Any]:
    prefix = bytearray(PREFIX.size)
    receive_exactly(sock, memoryview(prefix))
    text = bytearray(header_size(prefix))
    receive_exactly(sock, memoryview(text))
    return json.loads(text)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[torch.Tensor]]:
    header = receive_header(sock)
    tensors = empty_tensors(header)
    for tensor in tensors:
        if tensor.numel():
            receive_exactly(sock, as_bytes(tensor))
    return header, tensors


def send(sock: socket.socket, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
    for part in encode(header, tensors):
        sock.sendall(part)


# Asyncio on non-blocking sockets: the engine's side. Payloads go from and to tensors without a copy of our own.


async def receive_exactly_async(sock: socket.socket, view: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while view:
        count = await loop.sock_recv_into(sock, view)
        if not count:
            raise WireError("the other side closed the connection")
        view = view[count:]


async def receive_header_async(sock: socket.socket) -> dict[str, Any]:
    prefix = bytearray(PREFIX.size)
    await receive_exactly_async(sock, memoryview(prefix))
    text = bytearray(header_size(prefix))
    await receive_exactly_async(sock, memoryview(text))
    return json.loads(text)
