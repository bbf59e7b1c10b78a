"""Bytes that are no message get INVALID_ARGUMENT, where gRPC would say UNKNOWN and log a traceback for each."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from epserve.errors import InvalidRequest
from epserve.serving import status

_UNARY = {
    False: ("unary_unary", grpc.unary_unary_rpc_method_handler),
    True: ("unary_stream", grpc.unary_stream_rpc_method_handler),
}
_STREAMING = {
    False: ("stream_unary", grpc.stream_unary_rpc_method_handler),
    True: ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class UnreadableMessages(grpc.aio.ServerInterceptor):
    """A method with one request is not called at all; on a stream, reading raises InvalidRequest."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}
        """Method -> its handler and ours around it: made once, not for each call."""

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        known = self._made.get(handler_call_details.method)
        if known is None or known[0] is not handler:
            known = self._made[handler_call_details.method] = handler, self._around(handler)
        return known[1]

    def _around(self, handler: Any) -> Any:
        name, make = (_STREAMING if handler.request_streaming else _UNARY)[handler.response_streaming]
        behaviour, read = getattr(handler, name), _reader(handler.request_deserializer)
        if not handler.request_streaming:
            read, behaviour = _or_error(read), _refusing(behaviour, handler.response_streaming)
        elif inspect.isasyncgenfunction(behaviour):
            behaviour = _ending(behaviour)
        return make(behaviour, request_deserializer=read, response_serializer=handler.response_serializer)


def _ending(behaviour: Any) -> Any:
    """A method that reads a stream and is not ours, such as reflection's: it knows no InvalidRequest."""

    async def stream(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for reply in behaviour(requests, context):
                yield reply
        except InvalidRequest as error:
            await status.abort(context, status.failure_of(error))

    return stream


def _reader(deserialise: Any) -> Any:
    def read(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError as error:
            raise InvalidRequest(f"message: {len(data)} bytes that are not one: {error}", field="message") from None

    return read


def _or_error(read: Any) -> Any:
    def read_or_error(data: bytes) -> Any:
        try:
            return read(data)
        except InvalidRequest as error:  # raised here it would become UNKNOWN
            return error

    return read_or_error


def _refusing(behaviour: Any, streaming: bool) -> Any:
    """The method, for whatever `_or_error` returned."""

    async def refuse(error: InvalidRequest, context: grpc.aio.ServicerContext) -> None:
        await status.abort(context, status.failure_of(error))

    def choose(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return (refuse if isinstance(request, InvalidRequest) else behaviour)(request, context)

    async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await choose(request, context)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> None:
        await choose(request, context)

    return stream if streaming else unary
