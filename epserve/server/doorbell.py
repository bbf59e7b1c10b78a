"""This module serves a Unix socket beside gRPC to clients that have registered a region. The tensors lie in shared
memory, so a call sends some 100 bytes each way. gRPC in Python takes half a millisecond for them, and a socket a tenth
of that.

HoldRegion's reply names the socket and a key. A connection starts with the key. It then acts for the client that
registered the region, and ends with the registration. The client then sends frames: a uint32 (big-endian) length and a
RequestFrame with a whole request. The server answers with frames of a ReplyFrame with a whole reply or a failure. The
code that serves ForwardStream's calls serves these too.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from epserve.errors import InvalidRequest
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import frames, status, wire
from epserve.protocol.messages import Received

from .calls import Caller, Calls

log = logging.getLogger("epserve.server")

LENGTH = struct.Struct("!I")
KEY_BYTES = 32
MAX_FRAME_BYTES = wire.FRAME_BYTES + wire.OVERHEAD_BYTES
MAX_CONNECTIONS = 64
"""One region has at most this many connections, one for each of a client's threads that call at once. Further threads
are told to use gRPC."""
GREETING_S = 5.0
METHODS = ("epserve.v1.Experts/Forward (doorbell)", "epserve.v1.Experts/Backward (doorbell)")
"""The names of the methods in metrics and traces."""


@dataclass(slots=True, kw_only=True)
class _Registration:
    caller: Caller
    connections: set[Connection] = field(default_factory=set)


class Doorbell:
    """The doorbell starts with `start()` in the server's loop. It has one key for each region."""

    def __init__(self, calls: Calls):
        self.calls = calls
        self.name = f"epserve-doorbell-{secrets.token_hex(8)}"
        self._server: asyncio.Server | None = None
        self._registrations: dict[bytes, _Registration] = {}
        self._strangers: set[Connection] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        # The name is abstract: it leaves no file behind, and only processes of this host reach it.
        self._server = await loop.create_unix_server(lambda: Connection(self), "\0" + self.name)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for key in list(self._registrations):
            self.forget(key)
        for stranger in list(self._strangers):
            stranger.end()

    def register(self, caller: Caller) -> bytes:
        """Returns the key for connections that act for `caller`, or an empty one while there is no socket."""
        if self._server is None:
            return b""
        key = secrets.token_bytes(KEY_BYTES)
        self._registrations[key] = _Registration(caller=caller)
        return key

    def forget(self, key: bytes) -> None:
        """Ends the key's connections and the calls that run on them."""
        registration = self._registrations.pop(key, None)
        for connection in list(registration.connections) if registration is not None else ():
            connection.end()

    def admit(self, key: bytes, connection: Connection) -> _Registration | None:
        found = None
        for known, registration in self._registrations.items():
            if hmac.compare_digest(known, key):
                found = registration
        if found is None or len(found.connections) >= MAX_CONNECTIONS:
            return None
        self._strangers.discard(connection)
        found.connections.add(connection)
        return found

    def arrived(self, connection: Connection) -> None:
        self._strangers.add(connection)

    def left(self, connection: Connection) -> None:
        self._strangers.discard(connection)


class Connection(asyncio.Protocol):
    """A connection is bounded: it runs as many calls at once as a stream, then reads nothing more. It also reads
    nothing while unread replies pile up."""

    def __init__(self, doorbell: Doorbell):
        self._doorbell, self._calls = doorbell, doorbell.calls
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._registration: _Registration | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._unread = False
        """Replies pile up, since the client does not read them."""
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._doorbell.arrived(self)
        self._greeting = self._loop.call_later(GREETING_S, self.end)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        if self._greeting is not None:
            self._greeting.cancel()
        self._doorbell.left(self)
        if self._registration is not None:
            self._registration.connections.discard(self)
        for task in list(self._running.values()):
            task.cancel()

    def pause_writing(self) -> None:
        self._unread = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._unread = False
        self._go_on()

    def end(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            self._parse()
        except (DecodeError, InvalidRequest) as error:
            log.info("doorbell: connection ended: %s", error)
            self._received.clear()
            self.end()

    def _parse(self) -> None:
        """Starts the calls of complete frames. Raises DecodeError or InvalidRequest for bytes that end the connection."""
        if self._registration is None and not self._greeted():
            return
        limit = self._calls.limits.max_in_flight_per_stream
        start, received = 0, self._received
        while self._takes_more(limit) and len(received) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(received, start)
            if size > MAX_FRAME_BYTES:
                raise InvalidRequest(f"frame: {size} bytes, at most {MAX_FRAME_BYTES}", field="frame")
            stop = start + LENGTH.size + size
            if stop > len(received):
                break
            self._take(frames.parse_request(bytes(received[start + LENGTH.size : stop])))
            start = stop
        del received[:start]
        if self._transport is not None and not self._takes_more(limit):
            self._transport.pause_reading()

    def _takes_more(self, limit: int) -> bool:
        return self._transport is not None and not self._unread and len(self._running) < limit

    def _greeted(self) -> bool:
        if len(self._received) < KEY_BYTES:
            return False
        self._registration = self._doorbell.admit(bytes(self._received[:KEY_BYTES]), self)
        if self._registration is None:
            raise InvalidRequest("an unknown key, or too many connections with it", field="key")
        del self._received[:KEY_BYTES]
        if self._greeting is not None:
            self._greeting.cancel()
        return True

    def _take(self, frame: Any) -> None:
        kind, number = frame.WhichOneof("body"), frame.call
        if kind == "cancel":
            if (task := self._running.get(number)) is not None:
                task.cancel()
        elif kind == "begin" and number not in self._running:
            self._running[number] = task = self._loop.create_task(self._serve(number, frames.begun(frame)))
            task.add_done_callback(lambda _: self._finished(number))
        else:
            raise InvalidRequest(f"frame of call {number}: {kind or 'nothing'} is not expected here", field="body")

    def _finished(self, number: int) -> None:
        del self._running[number]
        self._go_on()

    def _go_on(self) -> None:
        if self._transport is not None and not self._unread:
            self._transport.resume_reading()  # does nothing unless it was paused
            if self._received:
                self.data_received(b"")

    async def _serve(self, number: int, request: Received) -> None:
        assert self._registration is not None
        observer, caller = self._calls.observer, self._registration.caller
        method = METHODS[request.header.HasField("output_gradients")]
        reply: Any = None
        code = "CANCELLED"
        try:
            with observer.tracing.call(method, ()):
                try:
                    with ExitStack() as held:
                        answer = await self._calls.answer(request, None, caller, held)
                    reply, code = frames.BeginFrame(number, answer), "OK"
                except Exception as error:
                    failure = status.failure_of(error, request.header.request_id)
                    reply, code = pb.ReplyFrame(call=number, failure=failure), failure.code
                    observer.error(code)
        finally:
            observer.metrics.rpc(method, code)
        if self._transport is not None:
            data = frames.serialise(reply)
            self._transport.write(LENGTH.pack(len(data)) + data)
