"""A client below gRPC: HTTP/2 frames over a socket, to do what gRPC's own clients never do.

It gives no window for replies, stops in the middle of a message, and opens as many streams as it likes. It understands what
it must of the server's frames: settings, windows, and which streams have ended how.
"""

from __future__ import annotations

import asyncio
import collections
import struct
from typing import Any

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CHUNK = 16384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(text: str) -> bytes:
    """A string of HPACK without Huffman's code, shorter than 127 + 128 bytes."""
    data = text.encode()
    length = bytes((len(data),)) if len(data) < 127 else bytes((127, len(data) - 127))
    return length + data


def headers(path: str, **more: str) -> bytes:
    """HPACK: every field a literal that is not indexed."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers",
              "content-type": "application/grpc", **more}  # fmt: skip
    return b"".join(b"\0" + literal(name) + literal(value) for name, value in fields.items())


def message(body: bytes) -> bytes:
    """With gRPC's prefix of five bytes."""
    return struct.pack(">BI", 0, len(body)) + body


class RawConnection:
    """One connection. `window`: bytes of a reply that the server may send on each stream."""

    def __init__(self, *, window: int = 0):
        self._window = window
        self._next = 1
        self._writer: asyncio.StreamWriter
        self._granted: collections.Counter[int] = collections.Counter()
        self._used: collections.Counter[int] = collections.Counter()
        self._initial = 65535
        self._changed = asyncio.Condition()
        self.received: collections.Counter[int] = collections.Counter()
        """Bytes of replies by stream."""
        self.ended: set[int] = set()
        """Streams that the server has ended: by trailers or by a reset."""
        self.closed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RawConnection:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def connect(self, address: str) -> RawConnection:
        if address.startswith("unix:"):
            reader, self._writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            reader, self._writer = await asyncio.open_connection(host.strip("[]"), int(port))
        settings = struct.pack(">HI", INITIAL_WINDOW, self._window)
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._reading = asyncio.create_task(self._read(reader))
        return self

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()

    async def send(
        self,
        path: str,
        body: bytes,
        *,
        size: int | None = None,
        end: bool = True,
        timeout_s: float = 30.0,
        **metadata: str,
    ) -> int:
        """Opens a stream and sends the first `size` bytes of the message, or all of it. Returns the stream's number.

        end: half-close the stream after a whole message.

        It stops early where the server gives no more room within `timeout_s`, or has ended the stream.
        """
        stream, self._next = self._next, self._next + 2
        whole = message(body)
        data = memoryview(whole)[:size]
        self._writer.write(frame(HEADERS, END_HEADERS, stream, headers(path, **metadata)))
        at = 0
        try:
            async with asyncio.timeout(timeout_s):
                while at < len(data) and stream not in self.ended and not self.closed.is_set():
                    room = min(CHUNK, len(data) - at, self._room(stream), self._room(0))
                    if room <= 0:
                        async with self._changed:
                            await asyncio.wait_for(self._changed.wait(), timeout_s)
                        continue
                    last = end and size is None and at + room == len(data)
                    self._writer.write(frame(DATA, END_STREAM if last else 0, stream, bytes(data[at : at + room])))
                    self._used[stream] += room
                    self._used[0] += room
                    at += room
                    await self._writer.drain()
        except (TimeoutError, ConnectionError):
            pass
        return stream

    def half_close(self, stream: int) -> None:
        self._writer.write(frame(DATA, END_STREAM, stream))

    def grant(self, nbytes: int) -> None:
        """A larger window for each stream from now on."""
        self._writer.write(frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, nbytes)))

    def ping(self) -> None:
        self._writer.write(frame(PING, 0, 0, bytes(8)))

    def _room(self, stream: int) -> int:
        return (self._initial if stream else 65535) + self._granted[stream] - self._used[stream]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, payload)
                async with self._changed:
                    self._changed.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == INITIAL_WINDOW:
                    self._initial = value
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._granted[stream] += int.from_bytes(payload, "big")
        elif kind == DATA:
            self.received[stream] += len(payload)
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)
