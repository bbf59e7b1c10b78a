"""The order of frames between a joined front end and the process that orders the steps. Large messages go in pieces.

    magic "EPSp" | bytes, uint32 | stream, uint32 | so many bytes of the payloads of the message of that stream

A message up to 1 MiB is one frame of stream 0 (link/wire.py). The payloads of a larger one follow its frame in pieces, with small
messages and other streams' pieces between them. A large batch therefore holds up a small one for one piece at most.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from epserve.link.wire import DTYPES, PREFIX, WireError, encode

from .values import plain

PIECE = b"EPSp"
PIECE_BYTES = 1 << 20
"""Size of a piece: 0.8 ms of a network of 10 Gbit/s. A larger message goes in pieces. Smaller pieces would cost the two processes
more than they save, since each piece takes some system calls on both sides."""
SMALL_TURN_BYTES = 4 << 20
"""Most bytes of small messages between two pieces of large ones. A flood of small ones leaves large ones a fifth of the way."""


class JoinError(WireError):
    """The other side closed the connection, does not know the secret, or sent bytes that are no frame."""


Make = Callable[[int], Any]
"""Number of bytes -> a writable buffer of at least as many."""
Part = bytes | memoryview


class Large:
    """A message that goes out in pieces."""

    __slots__ = ("left", "stream")

    def __init__(self, stream: int, payloads: list[memoryview]):
        self.stream, self.left = stream, deque(payloads)

    def cut(self) -> list[Part]:
        """Returns the next piece. `left` is empty after the last one."""
        payload = self.left.popleft()
        if len(payload) > PIECE_BYTES:
            self.left.appendleft(payload[PIECE_BYTES:])
            payload = payload[:PIECE_BYTES]
        return [PREFIX.pack(PIECE, len(payload), self.stream), payload]


class Outbox:
    """Orders outgoing frames: small messages in their order, and between them pieces of large ones in turns."""

    def __init__(self) -> None:
        self._small: deque[tuple[list[Part], Large | None]] = deque()
        self._large: deque[Large] = deque()  # whose headers are out
        self._streams = itertools.cycle(range(1, 1 << 32))  # 0 is none
        self._since_piece = 0

    def add(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Large | None:
        """Returns the message if it is a large one, for `drop`."""
        in_pieces = sum(tensor.nbytes for tensor in tensors) > PIECE_BYTES
        stream = next(self._streams) if in_pieces else 0
        whole = [tensor.contiguous() for tensor in tensors]
        head, *payloads = encode(header, whole, stream=stream, default=plain)
        large = Large(stream, [memoryview(payload) for payload in payloads]) if in_pieces else None
        self._small.append(([head] if in_pieces else [head, *payloads], large))
        return large

    def drop(self, large: Large | None) -> None:
        """Drops the rest of a message that has become useless. Perhaps all of it is out already."""
        if large is not None and large.left:
            large.left.clear()
            with contextlib.suppress(ValueError):
                self._large.remove(large)
            self.add({"kind": "dropped", "stream": large.stream})

    @property
    def in_pieces(self) -> bool:
        """Whether a large message is on its way."""
        return bool(self._large)

    def next(self) -> list[Part] | None:
        """Returns the parts of the next frame, or None when there is none now."""
        if self._small and (not self._large or self._since_piece < SMALL_TURN_BYTES):
            parts, large = self._small.popleft()
            self._since_piece += sum(map(len, parts))
            if large is not None and large.left:
                self._large.append(large)
            return parts
        if not self._large:
            return None
        self._since_piece = 0
        large = self._large.popleft()
        piece = large.cut()
        if large.left:
            self._large.append(large)
        return piece


class Arriving:
    """Receives payloads in pieces. Without `make` it passes them over."""

    def __init__(self, header: dict[str, Any], described: list[Any], make: Make | None):
        self.header, self._described = header, described
        self._sizes = deque(nbytes for _, _, nbytes in described if nbytes)
        self._buffers = [make(size) for size in self._sizes] if make is not None else None
        self._views = deque(_view(buffer, size) for buffer, size in zip(self._buffers or (), self._sizes, strict=False))

    @property
    def wanted(self) -> bool:
        return self._buffers is not None

    def room(self, size: int) -> memoryview:
        """Returns the place of the next `size` bytes. Raises JoinError when they go beyond a payload's end."""
        if not self._sizes or size > self._sizes[0]:
            raise JoinError(
                f"a piece of {size} bytes, {self._sizes[0] if self._sizes else 0} are missing of its payload"
            )
        self._sizes[0] -= size
        whole = not self._sizes[0]
        if whole:
            self._sizes.popleft()
        if not self._views:
            return memoryview(bytearray(size))
        view = self._views.popleft()
        if not whole:
            self._views.appendleft(view[size:])
        return view[:size]

    @property
    def complete(self) -> bool:
        return not self._sizes

    def tensors(self) -> list[torch.Tensor]:
        buffers = iter(self._buffers or ())
        return [_over(next(buffers) if nbytes else None, dtype, shape) for dtype, shape, nbytes in self._described]


def described(header: Mapping[str, Any]) -> list[tuple[torch.dtype, tuple[int, ...], int]]:
    """Returns dtype, shape and bytes of each payload. Raises JoinError."""
    try:
        found = [(DTYPES[name], tuple(int(size) for size in shape)) for name, shape in header["tensors"]]
    except (KeyError, TypeError, ValueError) as error:
        raise JoinError(f"tensors that are none: {type(error).__name__}: {error}") from None
    if any(size < 0 for _, shape in found for size in shape):
        raise JoinError("tensors with a negative size")
    return [(dtype, shape, math.prod(shape) * dtype.itemsize) for dtype, shape in found]


def _view(buffer: Any, nbytes: int) -> memoryview:
    return memoryview(buffer).cast("B")[:nbytes]


def _over(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if buffer is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)
