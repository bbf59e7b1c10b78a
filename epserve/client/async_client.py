"""`AsyncClient`: the calls of `Client` for programs that run in an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from epserve.errors import DeadlineExceeded, EpserveError, NotReady
from epserve.process import tracing
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import status
from epserve.protocol.frames import experts_stub

from .attempts import Attempts, Readiness
from .checks import bounded
from .clients import POLL_S, AnyRegion
from .cuda_region import CudaClientRegion
from .endpoint import Endpoint
from .exchange import OutgoingRequest, ReplyAssembly, WireFormat
from .lanes import AsyncLane, Lane
from .lanes import request as lane_request
from .options import ClientOptions
from .pipeline import Pipeline
from .region import ClientRegion


class AsyncClient(Endpoint):
    """This client is `Client` for asyncio. Make it and use it in one event loop. Cancelling a task cancels its call on
    the server."""

    def __init__(
        self,
        target: str,
        options: ClientOptions | None = None,
        *,
        token: str | None = None,
        tls_ca: Path | str | None = None,
    ):
        super().__init__(target, options, token, tls_ca)
        if self.options.tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=self._channel_options())
        else:
            credentials = self.options.tls.credentials()
            self._channel = grpc.aio.secure_channel(target, credentials, options=self._channel_options())
        self._stub = experts_stub(self._channel)

    async def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
        region: ClientRegion | CudaClientRegion | None = None, wire_format: WireFormat = "plain",
        not_finite_rows: list[int] | None = None,
    ) -> Any:  # fmt: skip
        """Does the same as Client.forward. Tensors that require a gradient are refused."""
        request = self._request(layer, hidden, topk_ids, topk_weights, request_id, region, wire_format, not_finite_rows)
        return await self._sent(request, self._attempts(timeout))

    async def backward(
        self, layer: int, hidden: Any, gradient: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "", region: ClientRegion | CudaClientRegion | None = None,
        not_finite_rows: list[int] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Does the same as Client.backward."""
        request = self._request(
            layer, hidden, topk_ids, topk_weights, request_id, region, "plain", not_finite_rows, gradient
        )
        return await self._sent(request, self._attempts(timeout))

    async def _sent(self, request: OutgoingRequest, attempts: Attempts) -> Any:
        """Sends the request until an attempt succeeds."""
        with request, tracing.client_call(request.span, {"epserve.layer": request.header.layer}):
            while True:
                self._check_open()
                request.check_region()
                try:
                    return await self._once(request, attempts.remaining())
                except EpserveError as error:
                    wait = attempts.wait_after(request.failed(error))
                except grpc.RpcError as error:
                    wait = attempts.wait_after(request.failed(status.error_of_rpc(error)))
                await asyncio.sleep(wait)

    def stream(self) -> Pipeline:
        """Returns a pipeline for many small calls: `async with client.stream() as stream: await stream.forward(...)`."""
        self._check_open()
        return Pipeline(partial(self._open_stream, self.options.metadata), self.options)

    @asynccontextmanager
    async def register_region(self, size: int, *, timeout: float | None = None) -> AsyncIterator[ClientRegion]:
        """Does the same as Client.register_region."""
        self._check_open()
        async with self._registered(ClientRegion(size), timeout) as region:
            yield region

    @asynccontextmanager
    async def register_cuda_region(
        self, size: int, *, device: Any = None, timeout: float | None = None
    ) -> AsyncIterator[CudaClientRegion]:
        """Does the same as Client.register_cuda_region."""
        self._check_open()
        async with self._registered(CudaClientRegion(size, device), timeout) as region:
            yield region

    @asynccontextmanager
    async def open_lane(
        self, max_tokens: int, *, slots: int = 1, layers: Iterable[int] = (), call_timeout: float | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[AsyncLane]:  # fmt: skip
        """Does the same as Client.open_lane, for tensors in the host's memory."""
        attempts = self._attempts(timeout)
        wanted = lane_request(
            max_tokens=max_tokens, slots=slots, layers=layers,
            timeout_s=bounded(self.options.timeout_s if call_timeout is None else call_timeout),
            priority=self.options.priority,
        )  # fmt: skip
        call, reply = await self._hold(self._stub.OpenLane, wanted, attempts, "open the lane")
        try:
            lane = AsyncLane(await asyncio.to_thread(Lane, reply, self.options.retry))
            try:
                call.add_done_callback(lambda _: lane.lane.lost())
                yield lane
            finally:
                lane.close()
        finally:
            call.cancel()

    @asynccontextmanager
    async def _registered(self, region: AnyRegion, timeout: float | None) -> AsyncIterator[AnyRegion]:
        try:
            attempts = self._attempts(timeout)
            call, reply = await self._hold(self._stub.HoldRegion, region.request(), attempts, "register the region")
            region.registered(reply)
            call.add_done_callback(lambda _: region.lost())
            region.async_bell = await region.bell.for_asyncio()
            try:
                yield region
            finally:
                call.cancel()
                if region.async_bell is not None:
                    region.async_bell.close()
        finally:
            region.close()

    async def model(self, *, timeout: float | None = None) -> pb.GetModelReply:
        """Does the same as Client.model."""
        return await self._simple(self._stub.GetModel, pb.GetModelRequest(), timeout)

    async def status(self, *, timeout: float | None = None) -> pb.GetStatusReply:
        """Does the same as Client.status."""
        return await self._simple(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    async def wait_ready(self, timeout: float = 60.0) -> pb.GetStatusReply:
        """Does the same as Client.wait_ready."""
        waiting = Readiness(self.target, timeout)
        while True:
            try:
                reply = await self.status(timeout=waiting.remaining())
                if reply.state == "serving":
                    return reply
                waiting.saw(f"state {reply.state}")
            except (NotReady, DeadlineExceeded) as error:
                waiting.failed(error)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Ends calls that are still running."""
        self._closed = True
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    def _open_stream(self, metadata: Any) -> Any:
        """Opens a stream with the trace of the task that made the Pipeline, even when another task's call opens it
        again."""
        self._check_open()
        return self._stub.ForwardStream(metadata=metadata)

    async def _hold(self, method: Any, request: Any, attempts: Attempts, what: str) -> tuple[Any, Any]:
        """Starts an RPC that keeps something for as long as it runs. Returns the RPC and its only reply."""
        while True:
            self._check_open()
            call = method(request, metadata=self.options.metadata)
            try:
                async with asyncio.timeout(attempts.remaining()):
                    return call, await anext(aiter(call))
            except (grpc.RpcError, StopAsyncIteration, TimeoutError) as error:
                call.cancel()
                wait = attempts.wait_after(self._not_held(error, attempts, what))
            await asyncio.sleep(wait)

    async def _simple(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            self._check_open()
            try:
                return await method(request, timeout=attempts.remaining(), metadata=self.options.metadata)
            except grpc.RpcError as error:
                wait = attempts.wait_after(status.error_of_rpc(error))
            await asyncio.sleep(wait)

    async def _once(self, request: OutgoingRequest, timeout_s: float) -> Any:
        if not request.small:
            return await self._framed(request, timeout_s)
        if request.async_bell is not None and not tracing.outgoing(()):  # the doorbell takes no trace context
            frame = await request.async_bell.call(partial(request.frame, timeout_s), timeout_s)
            return request.answer(frame)
        method, message = getattr(self._stub, request.method), request.message()
        return request.result(await method(message, timeout=timeout_s, metadata=self.options.metadata))

    async def _framed(self, request: OutgoingRequest, timeout_s: float) -> Any:
        frames = request.frames(timeout_s)
        call = self._stub.ForwardStream(frames, timeout=timeout_s, metadata=self.options.metadata)
        assembly = ReplyAssembly(request)
        try:
            async for frame in call:
                if assembly.add(frame):
                    return assembly.result()
        finally:
            call.cancel()
        raise NotReady(f"{self.target} ended the stream before the reply; it may be stopping")
