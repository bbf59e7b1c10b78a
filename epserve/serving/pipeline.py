"""The client's side of one ForwardStream that many asyncio tasks share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import grpc

from epserve.errors import DeadlineExceeded, EpserveError, NotReady
from epserve.serving import epserve_pb2 as pb
from epserve.serving import status
from epserve.serving.client_checks import bounded
from epserve.serving.exchange import OutgoingRequest, ReplyAssembly
from epserve.serving.options import ClientOptions

CLOSE_S = 1.0
"""For the server's answer to a half-closed stream."""


class Pipeline:
    """Calls over one stream: a small one costs about a quarter less time than with a gRPC call of its own.

    The replies come in any order. Nothing is sent again: after NotReady the stream is over, open another one.
    """

    def __init__(self, call: Any, options: ClientOptions):
        self._call, self._options = call, options
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[ReplyAssembly, asyncio.Future[Any]]] = {}
        self._outgoing: asyncio.Queue[tuple[int | None, Iterable[Any]] | None] = asyncio.Queue()
        self._ended: EpserveError | None = None
        # NOTE: gRPC cancels the whole stream when a task that reads or writes is cancelled, so callers do neither.
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    async def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
    ) -> Any:  # fmt: skip
        """As AsyncClient.forward, without retries. Raises EpserveError."""
        request = OutgoingRequest(
            layer, hidden, topk_ids, topk_weights, request_id=request_id, priority=self._options.priority
        )
        timeout_s = bounded(self._options.timeout_s if timeout is None else timeout)
        if self._ended is not None:
            raise self._ended
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = ReplyAssembly(request), future
        self._outgoing.put_nowait((number, request.frames(timeout_s, number)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"no reply after {timeout_s:g} s") from None
        finally:
            if self._waiting.pop(number, None) is not None:  # given up: the server need not go on
                self._outgoing.put_nowait((None, [pb.RequestFrame(call=number, cancel=pb.Cancel())]))

    async def close(self) -> None:
        """Ends calls that are still running.

        NOTE: a stream that is cancelled has events to come, which gRPC would deliver to an event loop that may have ended,
        and log a traceback for each. So one without running calls is half-closed, and the server ends it.
        """
        if not self._waiting and self._ended is None:
            self._outgoing.put_nowait(None)
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(NotReady("this stream was closed"))

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def _write(self) -> None:
        try:
            while True:
                if (outgoing := await self._outgoing.get()) is None:
                    await self._call.done_writing()
                    return
                number, frames = outgoing
                for frame in frames:
                    if number is not None and number not in self._waiting:
                        break  # refused, or given up, before all of it was sent
                    await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader learns why

    async def _read(self) -> None:
        error: EpserveError = NotReady("the server ended the stream; it may be stopping")
        try:
            async for frame in self._call:
                self._take(frame)
        except grpc.RpcError as raised:
            error = status.error_of_rpc(raised)
        finally:
            self._end(error)

    def _take(self, frame: Any) -> None:
        if frame.call not in self._waiting:
            return  # of a call that was given up
        reply, future = self._waiting[frame.call]
        try:
            if not reply.add(frame):
                return
            result, error = reply.result(), None
        except EpserveError as raised:
            result, error = None, raised
        del self._waiting[frame.call]
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def _end(self, error: EpserveError) -> None:
        self._ended = self._ended or error
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
