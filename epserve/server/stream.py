"""This module serves one ForwardStream: it reads requests in frames, runs several at once, and writes replies as they
come.

It is bounded in every direction. It assembles at most one request. It runs `max_in_flight_per_stream` calls, and then
reads nothing more from this client. Their bytes count against the server's memory limit, and every wait ends at the
call's deadline.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass

import grpc

from epserve.errors import DeadlineExceeded, EpserveError, InternalError, InvalidRequest, NotReady
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import status, wire
from epserve.protocol.frames import begin_frame, begun, part_frame
from epserve.protocol.messages import Received

from . import codec
from .calls import Calls

log = logging.getLogger("epserve.server")

FAILURE_WRITE_S = 5.0
"""A call's failure may take this long past its deadline to reach a client that is slow to read."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call is a request whose header passed. `held`: its slot and bytes, which it gives back at its end."""

    number: int
    checked: codec.CheckedRequest
    assembly: wire.Assembly
    deadline: float
    held: ExitStack
    timer: asyncio.TimerHandle | None = None
    replying: bool = False
    """A cancel comes too late once this is set: a frame may be half written."""

    def release(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.held.close()


class StreamSession:
    def __init__(self, calls: Calls, context: grpc.aio.ServicerContext):
        self._calls, self._context = calls, context
        self._caller = calls.caller(context)
        self._slots = asyncio.Semaphore(calls.limits.max_in_flight_per_stream)
        self._writing = asyncio.Lock()
        self._broken = asyncio.get_running_loop().create_future()
        self._running: dict[int, tuple[_Call, asyncio.Task[None]]] = {}
        self._failing: set[asyncio.Task[None]] = set()
        self._assembling: _Call | None = None
        self._ended = -1
        """The call whose remaining parts are dropped: it was refused, cancelled or too slow while they came."""

    async def run(self) -> None:
        """Serves until the client half-closes or the server drains, and every accepted call has its reply."""
        # NOTE: the metadata goes out now, and not with the first write. An abort during that write would send it too,
        # which fails, and the client would wait for a status that never comes.
        await self._context.send_initial_metadata(())
        reader = asyncio.create_task(self._read())
        draining = asyncio.create_task(self._calls.draining.wait())
        try:
            await asyncio.wait({reader, draining, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            if draining.done():
                self._drop_assembling(NotReady("the server is stopping; the request was not complete; send it again"))
            while unfinished := self._unfinished():
                await asyncio.wait({*unfinished, self._broken}, return_when=asyncio.FIRST_COMPLETED)
                if self._broken.done():
                    self._broken.result()
            if self._broken.done():
                self._broken.result()
        except EpserveError as error:
            # NOTE: `_broken` has it, and its frames refer to this object: a dropped call would stay until the collector runs
            error.__traceback__ = None
            await status.abort(self._context, status.failure_of(error))
        finally:
            if self._assembling is not None:
                self._assembling.release()
            self._broken.cancel()
            tasks = [reader, draining, *self._unfinished()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _unfinished(self) -> set[asyncio.Task[None]]:
        return {*(task for _, task in self._running.values()), *self._failing}

    async def _read(self) -> None:
        while (frame := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            while len(self._failing) >= self._calls.limits.max_in_flight_per_stream:  # a client that does not read
                await asyncio.wait(self._failing, return_when=asyncio.FIRST_COMPLETED)
            match frame.WhichOneof("body"):
                case "begin":
                    await self._begin(frame.call, begun(frame))
                case "part":
                    self._part(frame.call, frame.part)
                case "cancel":
                    self._cancel(frame.call)
                case _:
                    raise InvalidRequest(
                        f"frame of call {frame.call}: none of begin, part and cancel is set", field="body"
                    )
        self._drop_assembling(InvalidRequest("the stream ended before all parts of the request came"))

    async def _begin(self, number: int, message: Received) -> None:
        request = message.header
        if number in self._running or (self._assembling is not None and self._assembling.number == number):
            raise InvalidRequest(
                f"call: {number} is already in use on this stream; number calls uniquely", field="call"
            )
        self._drop_assembling(InvalidRequest("the next request began before all parts of this one came"))
        await self._slots.acquire()  # backpressure: the stream reads nothing more until a running call ends
        held = ExitStack()
        held.callback(self._slots.release)
        request_id = ""
        try:
            request_id = self._calls.request_id(request.request_id)
            own_limit = request.timeout_ms / 1000 if request.timeout_ms else None
            deadline = self._calls.deadline(self._context.time_remaining(), own_limit)
            checked = self._calls.check(request, request_id, self._caller)
            held.enter_context(self._calls.admitting(checked, self._caller))
            assembly = self._calls.door.assembly(checked)
            for which in checked.sizes:
                assembly.add(which, message.bytes_of(which))
        except Exception as error:
            held.close()
            self._ended = number
            self._fail(number, error, request_id)
            return
        call = _Call(number=number, checked=checked, assembly=assembly, deadline=deadline, held=held)
        if assembly.done:
            self._start(call)
        else:
            self._assembling = call
            call.timer = asyncio.get_running_loop().call_at(deadline, self._assembly_expired, call)

    def _part(self, number: int, part: pb.Part) -> None:
        call = self._assembling
        if call is None or call.number != number:
            if number != self._ended:
                self._ended = number
                self._fail(number, InvalidRequest(f"call: {number} has no bytes to come", field="call"))
            return
        try:
            call.assembly.add(part.field, part.data)
        except InvalidRequest as error:
            self._drop_assembling(error)
            return
        if call.assembly.done:
            self._assembling = None
            self._start(call)

    def _cancel(self, number: int) -> None:
        if self._assembling is not None and self._assembling.number == number:
            self._assembling.release()
            self._assembling, self._ended = None, number
        elif number in self._running:
            call, task = self._running[number]
            if not call.replying:
                task.cancel()

    def _assembly_expired(self, call: _Call) -> None:
        if self._assembling is call:
            self._drop_assembling(DeadlineExceeded("the deadline passed before all parts of the request came"))

    def _drop_assembling(self, error: EpserveError) -> None:
        call = self._assembling
        if call is not None:
            call.release()
            self._assembling, self._ended = None, call.number
            self._fail(call.number, error, call.checked.request_id)

    def _start(self, call: _Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        task = asyncio.create_task(self._serve(call))
        self._running[call.number] = call, task
        task.add_done_callback(lambda task: self._finished(call, task))

    def _finished(self, call: _Call, task: asyncio.Task[None]) -> None:
        del self._running[call.number]
        call.release()
        if not task.cancelled() and (error := task.exception()):
            self._break(InternalError(f"request {call.checked.request_id}: the reply could not be written: {error}"))

    async def _serve(self, call: _Call) -> None:
        checked, deadline = call.checked, call.deadline
        try:
            tensors, reply = await self._calls.run(checked, call.assembly.finish(), deadline, self._caller)
            frames = wire.reply_frames(call.number, tensors, reply, part_frame, begin_frame)
        except Exception as error:
            failure = status.failure_of(error, checked.request_id)
            self._calls.observer.error(failure.code)
            frames = iter([pb.ReplyFrame(call=call.number, failure=failure)])
            deadline += FAILURE_WRITE_S
        call.replying = True
        try:
            async with asyncio.timeout_at(deadline):
                for frame in frames:
                    await self._write(frame)
        except TimeoutError:
            self._break(DeadlineExceeded(f"request {checked.request_id}: the reply was not read before its deadline"))

    def _fail(self, number: int, error: Exception, request_id: str = "") -> None:
        """Replies to a call that never started."""
        failure = status.failure_of(error, request_id)
        self._calls.observer.error(failure.code)
        task = asyncio.create_task(self._write(pb.ReplyFrame(call=number, failure=failure)))
        self._failing.add(task)
        task.add_done_callback(self._failing.discard)

    async def _write(self, frame: pb.ReplyFrame) -> None:
        async with self._writing:  # one frame at a time: waiters are served in turn, so small replies pass large ones
            try:
                await self._context.write(frame)
            except grpc.aio.InternalError:  # the client has cancelled the stream, or has gone
                if self._broken.cancel():
                    log.info("status=CANCELLED %s ended its stream before it had read all replies", self._caller.name)
                raise asyncio.CancelledError from None

    def _break(self, error: EpserveError) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
