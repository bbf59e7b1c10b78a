"""This module is the client's side of a ForwardStream that many asyncio tasks share, and of the streams that follow it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc

from epserve.errors import CallerError, DeadlineExceeded, EpserveError, NotReady
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import status

from .attempts import Attempts
from .exchange import OutgoingRequest, ReplyAssembly
from .options import ClientOptions

CLOSE_S = 1.0
"""The server has this many seconds to answer a half-closed stream."""


class Pipeline:
    """A pipeline sends calls over one stream. A small call costs about a quarter less time than with a gRPC call of its
    own.

    The replies come in any order. When the stream ends, the pipeline sends calls without a reply again on another
    stream, as `AsyncClient.forward` does, until each call's own deadline.
    """

    def __init__(self, open_stream: Callable[[], Any], options: ClientOptions):
        """Keeps `open_stream`, which starts the RPC of a stream and raises EpserveError when no stream can be opened
        any more."""
        self._open_stream, self._options = open_stream, options
        self._stream: _Stream | None = None
        self._closed = False

    async def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "", not_finite_rows: list[int] | None = None,
    ) -> Any:  # fmt: skip
        """Does the same as AsyncClient.forward. Raises EpserveError."""
        request = OutgoingRequest(
            layer, hidden, topk_ids, topk_weights, request_id=request_id, priority=self._options.priority,
            not_finite_rows=not_finite_rows,
        )  # fmt: skip
        return await self._sent(request, timeout)

    async def backward(
        self, layer: int, hidden: Any, gradient: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "", not_finite_rows: list[int] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Does the same as AsyncClient.backward. Raises EpserveError."""
        request = OutgoingRequest(
            layer, hidden, topk_ids, topk_weights, request_id=request_id, priority=self._options.priority,
            not_finite_rows=not_finite_rows, gradient=gradient,
        )  # fmt: skip
        return await self._sent(request, timeout)

    async def _sent(self, request: OutgoingRequest, timeout: float | None) -> Any:
        attempts = Attempts(self._options.retry, self._options.timeout_s if timeout is None else timeout)
        while True:
            try:
                return await self._open().call(request, attempts.remaining())
            except EpserveError as error:
                wait = attempts.wait_after(error)
            await asyncio.sleep(wait)

    async def close(self) -> None:
        """Ends calls that are still running."""
        self._closed = True
        if self._stream is not None:
            await self._stream.close()

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    def _open(self) -> _Stream:
        """Returns the open stream, or opens one. The first of many calls that send again opens it for all."""
        if self._closed:
            raise CallerError("this stream is closed")
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._open_stream())
        return self._stream


class _Stream:
    """A stream is one RPC. It takes no more calls after its end."""

    def __init__(self, rpc: Any):
        self._rpc = rpc
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[ReplyAssembly, asyncio.Future[Any]]] = {}
        self._outgoing: asyncio.Queue[tuple[int | None, Iterable[Any]] | None] = asyncio.Queue()
        self.ended = False
        # NOTE: gRPC cancels the whole stream when a task that reads or writes is cancelled, so callers do neither.
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    async def call(self, request: OutgoingRequest, timeout_s: float) -> Any:
        """Sends the request once. Raises the service's error for this call, DeadlineExceeded, or the error that ended
        the stream."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = ReplyAssembly(request), future
        self._outgoing.put_nowait((number, request.frames(timeout_s, number)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"no reply after {timeout_s:.3g} s") from None
        finally:
            if self._waiting.pop(number, None) is not None:  # given up: the server need not go on
                self._outgoing.put_nowait((None, [pb.RequestFrame(call=number, cancel=pb.Cancel())]))

    async def close(self) -> None:
        """Ends calls that are still running.

        NOTE: gRPC would deliver the remaining events of a cancelled stream to an event loop that may have ended, and
        log a traceback for each. So `close` half-closes a stream without running calls, and the server ends it.
        """
        if not self._waiting and not self.ended:
            self._outgoing.put_nowait(None)
            await asyncio.wait((self._reader, self._writer), timeout=CLOSE_S)
        self._end(partial(CallerError, "this stream was closed before the reply"))
        self._rpc.cancel()
        for task in (self._reader, self._writer):
            task.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                if (outgoing := await self._outgoing.get()) is None:
                    await self._rpc.done_writing()
                    return
                number, frames = outgoing
                for frame in frames:
                    if number is not None and number not in self._waiting:
                        break  # refused, or given up, before all of it was sent
                    await self._rpc.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader learns why

    async def _read(self) -> None:
        why: Callable[[], EpserveError] = partial(NotReady, "the server ended the stream; it may be stopping")
        try:
            async for frame in self._rpc:
                self._take(frame)
        except grpc.RpcError as raised:
            why = partial(_end_of, raised)
        finally:
            self._end(why)
            self._writer.cancel()

    def _take(self, frame: Any) -> None:
        if frame.call not in self._waiting:
            return  # of a call that was given up
        reply, future = self._waiting[frame.call]
        try:
            if not reply.add(frame):
                return
            result, error = reply.result(), None
        except Exception as raised:  # any error is this call's alone
            result, error = None, raised
        del self._waiting[frame.call]
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _end(self, why: Callable[[], EpserveError]) -> None:
        """Ends all calls. why: makes an error for each call, since each adds its own notes."""
        self.ended = True
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(why())
        self._waiting.clear()


def _end_of(error: grpc.RpcError) -> EpserveError:
    mapped = status.error_of_rpc(error)
    if isinstance(mapped, DeadlineExceeded):
        # A stream has no deadline. The server ended it for one call whose reply was not read in time. That call's own
        # timeout says so, and the others have time left.
        return NotReady(f"the server ended the stream: {mapped}")
    return mapped
