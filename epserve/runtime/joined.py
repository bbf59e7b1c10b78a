"""What a front end that has joined and the process that orders the steps say to each other. No pickle, no Ray, no gRPC.

    magic "EPF1" | header bytes, uint32 | header, JSON | payloads of header["tensors"] = [[dtype, shape], ...] in order

Who connects proves that it knows the secret and asks the same of the other side, without sending it. Times are relative
(seconds from now, seconds ago): clocks of hosts need not agree. Nothing is encrypted, as between front end and ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch

from epserve import errors
from epserve.errors import ConfigError, EpserveError, InternalError

from .records import StepRecord

log = logging.getLogger(__name__)

MAGIC = b"EPF1"
PREFIX = struct.Struct("!4sI")
MAX_HEADER = 16 << 20
"""The status of a large model names each layer's experts."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float16, torch.bfloat16, torch.int32,
)}  # fmt: skip
MAX_GREETING = 4096
SOCKET_BUFFER = 4 << 20
BEAT_S = 1.0
SILENCE_S = 10.0
"""A side that has not been heard of for so long is taken for gone: a host that vanished closes no connection."""
HANDSHAKE_S = 10.0
VERSION = 1


class JoinError(ConnectionError):
    """The other side closed, is not who it should be, or sent what is no frame."""


Make = Callable[[int], Any]
"""Number of bytes -> a writable buffer of them, at least."""


class Link:
    """One connection. `send` never waits; frames go out in its order, payloads by reference."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._outgoing: asyncio.Queue[list[bytes | memoryview]] = asyncio.Queue()
        self._heard = time.monotonic()
        self._closed = False
        self._max_header = MAX_GREETING  # of strangers

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        if self._closed:
            return
        described = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        text = json.dumps({**header, "tensors": described}, separators=(",", ":"), default=_plain).encode()
        payloads = [_bytes(tensor.contiguous()) for tensor in tensors if tensor.numel()]
        self._outgoing.put_nowait([PREFIX.pack(MAGIC, len(text)) + text, *payloads])

    async def write(self) -> None:
        """Sends what `send` has queued, until cancelled or the connection ends."""
        loop = asyncio.get_running_loop()
        while True:
            for part in await self._outgoing.get():
                await loop.sock_sendall(self._sock, part)
            self._outgoing.task_done()

    async def sent(self) -> None:
        """Until all that is queued is out."""
        await self._outgoing.join()

    async def header(self) -> dict[str, Any]:
        """The next frame's header; its payloads come next. Raises JoinError."""
        prefix = bytearray(PREFIX.size)
        await self.receive(memoryview(prefix))
        magic, size = PREFIX.unpack(prefix)
        if magic != MAGIC or size > self._max_header:
            raise JoinError(f"not a frame: starts with {bytes(prefix)!r}")
        text = bytearray(size)
        await self.receive(memoryview(text))
        try:
            header = json.loads(text, object_hook=_made)
        except ValueError as error:
            raise JoinError(f"not a header: {error}") from None
        if not isinstance(header, dict) or not isinstance(header.get("tensors"), list):
            raise JoinError("a header without tensors")
        self._heard = time.monotonic()
        return header

    async def tensors(self, header: Mapping[str, Any], make: Make = bytearray) -> list[torch.Tensor]:
        """The payloads of a header, over buffers that `make` makes."""
        received = []
        for dtype, shape, nbytes in described(header):
            if not nbytes:
                received.append(torch.empty(shape, dtype=dtype))
                continue
            buffer = make(nbytes)
            await self.receive(memoryview(buffer).cast("B")[:nbytes])
            received.append(torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize).view(shape))
        return received

    async def skip(self, header: Mapping[str, Any]) -> None:
        """Payloads that find no place."""
        left = sum(nbytes for _, _, nbytes in described(header))
        scratch = memoryview(bytearray(min(left, 1 << 20)))
        while left:
            part = scratch[: min(left, len(scratch))]
            await self.receive(part)
            left -= len(part)

    async def receive(self, view: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while view:
            count = await loop.sock_recv_into(self._sock, view)
            if not count:
                raise JoinError("the other side closed the connection")
            self._heard = time.monotonic()
            view = view[count:]

    async def watch(self) -> None:
        """Says that this side lives. Raises JoinError when the other one has been silent for too long."""
        late = 0
        while True:
            silent = time.monotonic() - self._heard
            late = late + 1 if silent > SILENCE_S else 0
            if late > 1:  # the first time it may be this process that did not listen
                raise JoinError(f"nothing was heard for {silent:.1f} s")
            self.send({"kind": "beat"})
            await asyncio.sleep(BEAT_S)

    async def serve(self, read: Callable[[], Any]) -> None:
        """`read` with the writer and the watch beside it, until one of them ends. Raises why; closes the connection."""
        tasks = [asyncio.ensure_future(each) for each in (read(), self.write(), self.watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._closed = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # Who is there: both sides prove that they know the secret, each over the other's fresh random bytes.

    async def greet(self, secret: bytes, *, joining: bool) -> None:
        """Raises JoinError for a stranger. The same call on both sides."""
        async with asyncio.timeout(HANDSHAKE_S):
            mine = os.urandom(32)
            await self._say({"kind": "hello", "version": VERSION, "nonce": mine.hex()})
            hello = await self.header()
            if hello.get("kind") != "hello" or hello.get("version") != VERSION:
                raise JoinError(f"the other side speaks version {hello.get('version')} of this protocol, not {VERSION}")
            theirs = bytes.fromhex(str(hello.get("nonce", "")))
            await self._say({"kind": "proof", "proof": _proof(secret, theirs, mine, joining=joining)})
            proof = str((await self.header()).get("proof", ""))
            if not hmac.compare_digest(proof, _proof(secret, mine, theirs, joining=not joining)):
                raise JoinError("the other side does not know the secret (server.join_secret_file)")
            self._max_header = MAX_HEADER

    async def _say(self, header: Mapping[str, Any]) -> None:
        text = json.dumps({**header, "tensors": []}).encode()
        await asyncio.get_running_loop().sock_sendall(self._sock, PREFIX.pack(MAGIC, len(text)) + text)


def _proof(secret: bytes, challenge: bytes, own: bytes, *, joining: bool) -> str:
    """The side is part of it, so that nobody can be sent his own proof back."""
    message = b"joining" + challenge + own if joining else b"ordering" + challenge + own
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def described(header: Mapping[str, Any]) -> list[tuple[torch.dtype, tuple[int, ...], int]]:
    """dtype, shape and bytes of each payload. Raises JoinError."""
    try:
        found = [(DTYPES[name], tuple(int(size) for size in shape)) for name, shape in header["tensors"]]
    except (KeyError, TypeError, ValueError) as error:
        raise JoinError(f"tensors that are none: {type(error).__name__}: {error}") from None
    if any(size < 0 for _, shape in found for size in shape):
        raise JoinError("tensors with a negative size")
    return [(dtype, shape, math.prod(shape) * dtype.itemsize) for dtype, shape in found]


# Addresses: host:port, or unix:@NAME for an abstract socket of this host.


def connect(address: str) -> socket.socket:
    """Blocks. Raises OSError, or ConfigError for what is no address."""
    if address.startswith("unix:@"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(HANDSHAKE_S)
            sock.connect("\0" + address.removeprefix("unix:@"))
        except BaseException:
            sock.close()
            raise
        return sock
    return socket.create_connection(parse_address(address), timeout=HANDSHAKE_S)


def parse_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"join: {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


# Values.


def error_as_json(error: BaseException) -> dict[str, Any]:
    """Defects lose their text: it is in the log of the process that had them."""
    if not isinstance(error, EpserveError):
        error = InternalError("internal error; the log of the process that orders the steps has the details")
    known = {
        name: getattr(error, name) for name in ("field", "retry_after_s", "layer", "experts") if hasattr(error, name)
    }
    return {"class": type(error).__name__, "message": str(error), **known}


def error_from_json(value: Mapping[str, Any]) -> EpserveError:
    """The same class with the same text, whatever its constructor takes."""
    cls = getattr(errors, str(value.get("class")), None)
    if not (isinstance(cls, type) and issubclass(cls, EpserveError)):
        cls = InternalError
    error = cls.__new__(cls)
    Exception.__init__(error, value.get("message", ""))
    for name in ("field", "retry_after_s", "layer", "experts"):
        if name in value:
            setattr(error, name, tuple(value[name]) if isinstance(value[name], list) else value[name])
    return error


def model_as_json(info: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Of a ModelInfo, what a front end shows and checks requests with."""
    names = "family", "name", "hidden", "intermediate", "num_experts", "top_k", "shared_intermediate", "fingerprint"
    return {
        **{name: getattr(info, name) for name in names},
        "dtype": str(info.dtype).removeprefix("torch."),
        "activation": info.activation.kind,
        "scoring": info.gate.scoring,
        "quantisation": info.quant.scheme,
        "layers": list(layers),
    }


def model_from_json(value: Mapping[str, Any]) -> SimpleNamespace:
    """A ModelInfo to read from."""
    read = dict(value)
    read["dtype"] = DTYPES[read["dtype"]]
    read["layers"] = tuple(read["layers"])
    read["activation"] = SimpleNamespace(kind=read["activation"])
    read["gate"] = SimpleNamespace(scoring=read.pop("scoring"))
    read["quant"] = SimpleNamespace(scheme=read.pop("quantisation"))
    return SimpleNamespace(**read)


def record_as_json(record: StepRecord, now: float) -> dict[str, Any]:
    """Without its parts."""
    return {
        "step": record.step,
        "layer": record.layer,
        "mode": record.mode,
        "tokens_per_rank": list(record.tokens_per_rank),
        "started": now - record.started,
        "ended": now - record.ended,
        "phases": [dict(phases) for phases in record.phases],
    }


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


OBJECT = "@"


def _plain(value: Any) -> Any:
    """Of a dataclass, a namespace or a mapping that is no dict, for JSON; `_made` undoes it."""
    if isinstance(value, Mapping):
        return dict(value)
    names = [each.name for each in fields(value)] if is_dataclass(value) else vars(value)
    return {OBJECT: {name: getattr(value, name) for name in names}}


def _made(value: dict[str, Any]) -> Any:
    """Objects to read from, and dicts whose keys are numbers where they were: JSON has no others than strings."""
    if OBJECT in value:
        return SimpleNamespace(**value[OBJECT])
    return {int(key): each for key, each in value.items()} if value and all(map(str.isdigit, value)) else value
