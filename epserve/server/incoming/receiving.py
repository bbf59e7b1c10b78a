"""Receives requests: each message within its time, counted, and with a status of ours if its bytes are not a message.

A method with one request is called once the request is here. gRPC would wait for it for ever, and would answer bytes that are
not a message with UNKNOWN and log a traceback for each. Once a method has returned, the client must read its reply in time.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from epserve.errors import DeadlineExceeded, EpserveError, InvalidRequest
from epserve.protocol import status
from epserve.protocol.dropping import drop

from .intake import Arrival, Intake

_arrival: contextvars.ContextVar[Arrival] = contextvars.ContextVar("arrival")


class Receiving(grpc.aio.ServerInterceptor):
    """Limits the time of messages. limit_s: for a message without a deadline of the client, and for a reply to be read."""

    def __init__(self, intake: Intake, limit_s: float) -> None:
        self._intake, self._limit_s = intake, limit_s
        self._made: dict[str, tuple[Any, Any]] = {}
        """Method -> its handler and our wrapper, made once instead of for each call."""

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        known = self._made.get(handler_call_details.method)
        if known is None or known[0] is not handler:
            known = self._made[handler_call_details.method] = handler, self._around(handler)
        return known[1]

    def _around(self, handler: Any) -> Any:
        name = _KINDS[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, name)
        if handler.request_streaming:
            call = self._streaming(behaviour)
        else:
            call = self._single(behaviour)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        read = _reader(handler.request_deserializer)
        return make(call, request_deserializer=read, response_serializer=handler.response_serializer)

    def _single(self, behaviour: Any) -> Any:
        """Wraps a method with one request as one that reads a stream: gRPC then calls it before the request is here."""

        async def call(_: Any, context: grpc.aio.ServicerContext) -> Any:
            arrival = self._begin(context)
            try:
                request = await self._read(arrival, context)
            except EpserveError as error:
                await status.abort(context, status.failure_of(error))
            try:
                return await behaviour(request, context)
            finally:
                self._limit_sending()

        return call

    def _streaming(self, behaviour: Any) -> Any:
        async def call(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            self._begin(context)
            try:
                if not inspect.isasyncgenfunction(behaviour):
                    return await behaviour(requests, context)
                async for reply in behaviour(requests, context):
                    await context.write(reply)
            except InvalidRequest as error:  # of a method that is not ours, such as reflection's
                await status.abort(context, status.failure_of(error))
            finally:
                self._limit_sending()

        return call

    def _begin(self, context: Any) -> Arrival:
        """Counts the call until gRPC has sent its reply. Bytes that a client sends after its message lie in gRPC as long."""
        arrival = self._intake.begin(context.peer())
        _arrival.set(arrival)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._intake.end(arrival))
        return arrival

    async def _read(self, arrival: Arrival, context: Any) -> Any:
        """The one request. Raises InvalidRequest, DeadlineExceeded, Overloaded."""
        remaining = context.time_remaining()
        limit_s = self._limit_s if remaining is None else remaining
        timer = asyncio.get_running_loop().call_later(limit_s, arrival.fail, _late(limit_s))
        arrival.waits = True
        try:
            request = await context.read()
        except asyncio.CancelledError:
            if arrival.failure is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            raise arrival.failure from None
        finally:
            arrival.waits = False
            timer.cancel()
        if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            raise InvalidRequest("message: the call ended without one", field="message")
        return request

    def _limit_sending(self) -> None:
        """Limits the rest of this task, which only waits until gRPC has sent the reply and the status."""
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._limit_s, drop, task)
        task.add_done_callback(lambda _: timer.cancel())


def _late(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"message: not here in full after {limit_s:.3g} s; send it sooner, or allow more time")


_KINDS = {
    (False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary", (True, True): "stream_stream",
}  # fmt: skip


def _reader(deserialise: Any) -> Any:
    def read(data: bytes) -> Any:
        _arrival.get().delivered(len(data))
        try:
            return deserialise(data)
        except DecodeError as error:
            raise InvalidRequest(f"message: {len(data)} bytes that are not one: {error}", field="message") from None

    return read
