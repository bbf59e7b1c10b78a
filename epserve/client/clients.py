"""This module has the client of the service for threads. `AsyncClient` is the same for asyncio.

    with Client("127.0.0.1:50051") as client:
        y = client.forward(layer=3, hidden=x)                                  # the layer's gate chooses experts
        y = client.forward(3, x, topk_ids=ids, topk_weights=weights, timeout=2.0)
        with client.register_region(64 << 20) as region:                       # a server on this host: no bytes are sent
            y = client.forward(3, x, region=region)

Tensors are torch or numpy. The result has the same kind and dtype as `hidden`. Errors are those of `epserve.errors`. A
call is a pure function of its request, so the client sends a call that may succeed later again until the deadline.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from epserve.errors import DeadlineExceeded, EpserveError, NotReady
from epserve.process import tracing
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import status
from epserve.protocol.frames import experts_stub

from .attempts import Attempts, Cancellation, ForwardFuture, Readiness
from .checks import bounded, requires_gradient
from .cuda_region import CudaClientRegion
from .endpoint import Endpoint
from .exchange import OutgoingRequest, WireFormat
from .lanes import Lane
from .lanes import request as lane_request
from .options import ClientOptions, RetryPolicy, Tls
from .region import ClientRegion
from .sending import Pending, Sender, Started

__all__ = [
    "Client", "ClientOptions", "ClientRegion", "CudaClientRegion", "Lane", "Pending", "RetryPolicy", "Tls",
    "WireFormat",
]  # fmt: skip

AnyRegion = TypeVar("AnyRegion", ClientRegion, CudaClientRegion)
POLL_S = 0.1  # seconds between two looks at a service that is not ready


class Client(Endpoint):
    """A client makes blocking calls over one channel. Threads may share it.

    Args:
        target: "host:port" or "unix:/path/of/socket".
        options: all options.
        token: the bearer token, in place of the one in `options`.
        tls_ca: the file of the authority of the server's certificate, in place of the one in `options`.
    """

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
            self._channel = grpc.insecure_channel(target, options=self._channel_options())
        else:
            credentials = self.options.tls.credentials()
            self._channel = grpc.secure_channel(target, credentials, options=self._channel_options())
        self._stub = experts_stub(self._channel)
        self._sender = Sender(self._stub, self.options, target)
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=64, thread_name_prefix="epserve-client")

    def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
        region: ClientRegion | CudaClientRegion | None = None, wire_format: WireFormat = "plain",
        not_finite_rows: list[int] | None = None,
    ) -> Any:  # fmt: skip
        """Returns the layer's output for `hidden`, with the same shape, kind, dtype and device.

        Args:
            layer: the number of a served layer.
            hidden: (tokens, hidden size) bf16, fp16 or fp32. When it or `topk_weights` requires a gradient and torch records
                gradients, the result has one too, and its backward pass is a call of `backward`.
            topk_ids: (tokens, 1 to top_k) integers, logical experts, -1 for none. Without ids and weights the layer's
                gate chooses, and the service adds shared experts.
            topk_weights: floats of the shape of `topk_ids`.
            timeout: seconds, `ClientOptions.timeout_s` by default.
            request_id: the id for logs on both sides.
            region: a region of `register_region` or `register_cuda_region`, for large tensors on one host.
            wire_format: fp8 for half the bytes.
            not_finite_rows: a list that the call fills with the numbers of rows that hold NaN or infinity.

        Raises:
            NotFinite: the result holds NaN or infinity, and the call has no `not_finite_rows`.
            CallerError: the request cannot succeed; it is raised at once.
            ServiceError: no attempt succeeded in time.
        """
        if requires_gradient(hidden, topk_weights):
            from .autograd import recorded_forward  # imports torch

            kept: dict[str, Any] = {"timeout": timeout, "region": region, "not_finite_rows": not_finite_rows}
            return recorded_forward(
                self, layer, hidden, topk_ids, topk_weights, request_id=request_id, wire_format=wire_format, **kept
            )
        request = self._request(layer, hidden, topk_ids, topk_weights, request_id, region, wire_format, not_finite_rows)
        return self._forward(request, self._attempts(timeout), None)

    def backward(
        self, layer: int, hidden: Any, gradient: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "", region: ClientRegion | CudaClientRegion | None = None,
        not_finite_rows: list[int] | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Returns the gradients of `hidden` and of `topk_weights`. The latter is float32, or None without weights.

        The service computes the forward again, from the arguments of this call. It cannot tell whether they are those of an
        earlier `forward`.

        Args:
            gradient: the gradient of the result of `forward`, (tokens, hidden size) bf16, fp16 or fp32.
            region: a region of `register_region`. Those of `register_cuda_region` are refused.
            not_finite_rows: a list that the call fills with the numbers of rows whose gradients hold NaN or infinity.

        The other arguments are those of `forward`, and so are the errors.
        """
        request = self._request(
            layer, hidden, topk_ids, topk_weights, request_id, region, "plain", not_finite_rows, gradient
        )
        return self._forward(request, self._attempts(timeout), None)

    def forward_async(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
        region: ClientRegion | CudaClientRegion | None = None, wire_format: WireFormat = "plain",
        not_finite_rows: list[int] | None = None,
    ) -> concurrent.futures.Future[Any]:  # fmt: skip
        """Runs `forward` in a thread. Cancelling the future at any time cancels the call on the server."""
        request = self._request(layer, hidden, topk_ids, topk_weights, request_id, region, wire_format, not_finite_rows)
        future = ForwardFuture()
        self._check_open()
        context = contextvars.copy_context()  # the caller's span is the parent there too
        self._pool.submit(context.run, future.run, self._forward, request, self._attempts(timeout))
        return future

    def begin(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
        region: ClientRegion | CudaClientRegion | None = None, wire_format: WireFormat = "plain",
        not_finite_rows: list[int] | None = None,
    ) -> Pending:  # fmt: skip
        """Sends `forward` from this thread and returns at once: `client.begin(...).wait()` is `client.forward(...)`.

        No other thread works on the call, so that a program's own work comes between the two without a hand-over.
        """
        request = self._request(layer, hidden, topk_ids, topk_weights, request_id, region, wire_format, not_finite_rows)
        self._check_open()
        attempts, span = self._attempts(timeout), self._span(request)
        start = lambda: self._sender.start(request, attempts.remaining())  # noqa: E731
        return Pending(request, span, start, lambda started: self._forward(request, attempts, None, span, started))

    @contextmanager
    def register_region(self, size: int, *, timeout: float | None = None) -> Iterator[ClientRegion]:
        """Shares `size` bytes of memory with a server on this host. Leaving the block unregisters them.

        Args:
            timeout: seconds for the registration.

        Raises:
            EpserveError: the errors of `forward`.
        """
        self._check_open()
        with self._registered(ClientRegion(size), timeout) as region:
            yield region

    @contextmanager
    def register_cuda_region(
        self, size: int, *, device: Any = None, timeout: float | None = None
    ) -> Iterator[CudaClientRegion]:
        """Shares `size` bytes of a GPU with the rank there. `device` defaults to torch's current one.

        It needs a server on this host, a rank on that GPU, and torch in this process. Hidden states and results then
        stay on the GPU.
        """
        self._check_open()
        with self._registered(CudaClientRegion(size, device), timeout) as region:
            yield region

    @contextmanager
    def open_lane(
        self, max_tokens: int, *, slots: int = 1, layers: Iterable[int] = (), device: Any = None,
        call_timeout: float | None = None, timeout: float | None = None,
    ) -> Iterator[Lane]:  # fmt: skip
        """Opens a lane to a service on this host: layer calls through shared memory, without messages. Leaving the block
        closes it.

        Args:
            max_tokens: most tokens of one call.
            slots: calls that may be under way at once.
            layers: layers that will be called. Empty: all.
            device: a GPU on which a rank of the service computes, such as "cuda:0". The rows then lie there, calls are work of
                its current stream, and the lane is a `GpuLane`. The service must allow it (`server.gpu_lanes`).
            call_timeout: seconds that the service takes for a call at most, `ClientOptions.timeout_s` by default.
            timeout: seconds for the opening.

        Raises:
            EpserveError: the errors of `forward`.
        """
        self._check_open()
        attempts = self._attempts(timeout)
        wanted = lane_request(
            max_tokens=max_tokens, slots=slots, layers=layers,
            timeout_s=bounded(self.options.timeout_s if call_timeout is None else call_timeout),
            priority=self.options.priority,
        )  # fmt: skip
        rows = None
        if device is not None:
            from .lanes.on_gpu import GpuLane, Rows  # imports torch

            rows = Rows(self.model(timeout=timeout), wanted.max_tokens, wanted.slots, device)
            wanted = rows.add_to(wanted)
        call, reply = self._hold(self._stub.OpenLane, wanted, attempts, "open the lane")
        try:
            lane = Lane(reply, self.options.retry) if rows is None else GpuLane(reply, self.options.retry, rows)
            try:
                if not call.add_callback(lane.lost):  # it has ended already
                    lane.lost()
                yield lane
            finally:
                lane.close()
        finally:
            call.cancel()

    @contextmanager
    def _registered(self, region: AnyRegion, timeout: float | None) -> Iterator[AnyRegion]:
        """Registers the region, and closes it at the end."""
        try:
            attempts = self._attempts(timeout)
            call, reply = self._hold(self._stub.HoldRegion, region.request(), attempts, "register the region")
            region.registered(reply)
            region.bell.connect()
            if not call.add_callback(region.lost):  # it has ended already
                region.lost()
            try:
                yield region
            finally:
                call.cancel()
        finally:
            region.close()

    def model(self, *, timeout: float | None = None) -> pb.GetModelReply:
        """Returns the description of the served model, and the limits of a request."""
        return self._simple(self._stub.GetModel, pb.GetModelRequest(), timeout)

    def status(self, *, timeout: float | None = None) -> pb.GetStatusReply:
        """Returns the state of the service and of each of its ranks."""
        return self._simple(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    def wait_ready(self, timeout: float = 60.0) -> pb.GetStatusReply:
        """Waits at most `timeout` seconds for the state "serving". Raises DeadlineExceeded with the state that it saw
        last."""
        waiting = Readiness(self.target, timeout)
        while True:
            try:
                reply = self.status(timeout=waiting.remaining())
                if reply.state == "serving":
                    return reply
                waiting.saw(f"state {reply.state}")
            except (NotReady, DeadlineExceeded) as error:
                waiting.failed(error)
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ends calls that are still running."""
        self._closed = True
        self._channel.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _hold(self, method: Any, request: Any, attempts: Attempts, what: str) -> tuple[Any, Any]:
        """Starts an RPC that keeps something for as long as it runs. Returns the RPC and its only reply."""
        while True:
            self._check_open()
            call = method(request, metadata=self.options.metadata)
            timer = threading.Timer(attempts.remaining(), call.cancel)  # a deadline would end the registration later
            timer.start()
            try:
                return call, next(call)
            except (grpc.RpcError, StopIteration) as error:
                wait = attempts.wait_after(self._not_held(error, attempts, what))
            except BaseException:
                call.cancel()
                raise
            finally:
                timer.cancel()
            time.sleep(wait)

    def _simple(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            self._check_open()
            try:
                return method(request, timeout=attempts.remaining(), metadata=self.options.metadata)
            except grpc.RpcError as error:
                wait = attempts.wait_after(status.error_of_rpc(error))
            time.sleep(wait)

    def _forward(
        self,
        request: OutgoingRequest,
        attempts: Attempts,
        cancellation: Cancellation | None,
        span: tracing.ClientSpan | None = None,
        started: Started | None = None,
    ) -> Any:
        """Sends the request until an attempt succeeds.

        Args:
            cancellation: None when no future can cancel the call.
            span: the span of a call that was begun before.
            started: its first attempt.
        """
        span = span or self._span(request)
        try:
            with request, span.current():
                while True:
                    self._check_open()
                    if started is None:
                        request.check_region()
                    try:
                        if started is not None:
                            return started.result()
                        return self._sender.once(request, attempts.remaining(), cancellation)
                    except (EpserveError, grpc.RpcError) as error:
                        mapped = request.failed(
                            error if isinstance(error, EpserveError) else status.error_of_rpc(error)
                        )
                    started = None
                    if cancellation is not None:
                        cancellation.check()
                    wait = attempts.wait_after(mapped)
                    if cancellation is None:
                        time.sleep(wait)
                    elif cancellation.event.wait(wait):
                        cancellation.check()
        finally:
            span.end()

    def _span(self, request: OutgoingRequest) -> tracing.ClientSpan:
        return tracing.ClientSpan(request.span, {"epserve.layer": request.header.layer})
