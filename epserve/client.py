"""Clients of the service: `Client` for threads, `AsyncClient` for asyncio.

    with Client("127.0.0.1:50051") as client:
        y = client.forward(layer=3, hidden=x)                                  # the layer's gate chooses experts
        y = client.forward(3, x, topk_ids=ids, topk_weights=weights, timeout=2.0)

Tensors are torch or numpy; the result is of the same kind and dtype as `hidden`. Errors are those of `epserve.errors`.
A call is a pure function of its request, so those that may succeed later are sent again until the deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from epserve.errors import CallerError, ConfigError, DeadlineExceeded, EpserveError, NotReady
from epserve.serving import epserve_pb2 as pb
from epserve.serving import epserve_pb2_grpc as pb_grpc
from epserve.serving import status, wire
from epserve.serving.exchange import OutgoingRequest, ReplyAssembly
from epserve.serving.pipeline import Pipeline

POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """`ca`: authority of the server's certificate (None: the system's); `cert` and `key`: the client's own, for mutual TLS.

    `server_name` stands in for the target's host name where the certificate has another one.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: cert and key come together")
        ca, key, cert = (None if path is None else _read(path) for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Waits grow twofold from `first_s` to `longest_s`, with jitter, and never pass the call's deadline."""

    attempts: int = 10
    first_s: float = 0.05
    longest_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    token: str = field(default="", repr=False)
    tls: Tls | None = None
    timeout_s: float = 60.0
    """Of calls that name none."""
    retry: RetryPolicy = RetryPolicy()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel_options(self) -> list[tuple[str, Any]]:
        message = wire.FRAME_BYTES + wire.OVERHEAD_BYTES  # larger tensors come in frames
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", message),
            ("grpc.max_send_message_length", message),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.initial_reconnect_backoff_ms", 100),  # a restarted server is found again soon
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


class _Attempts:
    """When to send a call again."""

    def __init__(self, policy: RetryPolicy, timeout_s: float):
        self._policy, self._timeout_s = policy, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._made = 0

    def remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def wait_after(self, error: EpserveError) -> float:
        """Seconds until the next attempt; raises `error` when there is none."""
        self._made += 1
        longest = min(self._policy.first_s * 2 ** (self._made - 1), self._policy.longest_s)
        wait = max(random.uniform(longest / 2, longest), getattr(error, "retry_after_s", 0.0))
        if not error.retryable or self._made >= self._policy.attempts or wait >= self._deadline - time.monotonic():
            if self._made > 1:
                error.add_note(f"after {self._made} attempts in {self._timeout_s:g} s at most")
            raise error
        return wait


class _Endpoint:
    """What both clients know."""

    def __init__(self, target: str, options: ClientOptions | None, token: str | None, tls_ca: Path | None):
        options = options or ClientOptions()
        if token is not None:
            options = replace(options, token=token)
        if tls_ca is not None:
            options = replace(options, tls=replace(options.tls or Tls(), ca=tls_ca))
        self.target, self.options = target, options
        self._closed = False

    def _attempts(self, timeout: float | None) -> _Attempts:
        return _Attempts(self.options.retry, self.options.timeout_s if timeout is None else timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise CallerError(f"this client of {self.target} is closed")


class Client(_Endpoint):
    """Blocking calls over one channel; safe to share between threads.

    `target`: "host:port". `token` and `tls_ca` stand for the options that most set-ups need.
    """

    def __init__(
        self, target: str, options: ClientOptions | None = None, *, token: str | None = None, tls_ca: Path | None = None
    ):
        super().__init__(target, options, token, tls_ca)
        if self.options.tls is None:
            self._channel = grpc.insecure_channel(target, options=self.options.channel_options())
        else:
            credentials = self.options.tls.credentials()
            self._channel = grpc.secure_channel(target, credentials, options=self.options.channel_options())
        self._stub = pb_grpc.ExpertsStub(self._channel)
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=64, thread_name_prefix="epserve-client")

    def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
    ) -> Any:  # fmt: skip
        """The layer's output for `hidden` (tokens, hidden size): same kind, dtype and device. Raises EpserveError."""
        request = OutgoingRequest(layer, hidden, topk_ids, topk_weights, request_id=request_id)
        return self._forward(request, self._attempts(timeout), _Cancellation())

    def forward_async(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
    ) -> concurrent.futures.Future[Any]:  # fmt: skip
        """As `forward`, in a thread. Cancelling the future at any time cancels the call on the server."""
        request = OutgoingRequest(layer, hidden, topk_ids, topk_weights, request_id=request_id)
        future = _ForwardFuture()
        self._check_open()
        self._pool.submit(future.run, self._forward, request, self._attempts(timeout))
        return future

    def model(self, *, timeout: float | None = None) -> pb.GetModelReply:
        """What is served, and the limits of a request."""
        return self._simple(self._stub.GetModel, pb.GetModelRequest(), timeout)

    def status(self, *, timeout: float | None = None) -> pb.GetStatusReply:
        return self._simple(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    def wait_ready(self, timeout: float = 60.0) -> pb.GetStatusReply:
        """Until the service is in the state "serving". Raises DeadlineExceeded that says what it saw last."""
        waiting = _Readiness(self.target, timeout)
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

    def _simple(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            self._check_open()
            try:
                return method(request, timeout=attempts.remaining(), metadata=self.options.metadata)
            except grpc.RpcError as error:
                wait = attempts.wait_after(status.error_of_rpc(error))
            time.sleep(wait)

    def _forward(self, request: OutgoingRequest, attempts: _Attempts, cancellation: _Cancellation) -> Any:
        once = self._unary if request.small else self._framed
        while True:
            self._check_open()
            try:
                return once(request, attempts.remaining(), cancellation)
            except EpserveError as error:
                wait = attempts.wait_after(error)
            except grpc.RpcError as error:
                cancellation.check()
                wait = attempts.wait_after(status.error_of_rpc(error))
            if cancellation.event.wait(wait):
                cancellation.check()

    def _unary(self, request: OutgoingRequest, timeout_s: float, cancellation: _Cancellation) -> Any:
        call = self._stub.Forward.future(request.message(), timeout=timeout_s, metadata=self.options.metadata)
        cancellation.watch(call)
        return request.result(call.result())

    def _framed(self, request: OutgoingRequest, timeout_s: float, cancellation: _Cancellation) -> Any:
        frames = request.frames(timeout_s)
        call = self._stub.ForwardStream(frames, timeout=timeout_s, metadata=self.options.metadata)
        cancellation.watch(call)
        assembly = ReplyAssembly(request)
        try:
            for frame in call:
                if assembly.add(frame):
                    return assembly.result()
        finally:
            call.cancel()  # after a refusal the rest of the request need not be sent; after the reply it does nothing
        raise NotReady(f"{self.target} ended the stream before the reply; it may be stopping")


class AsyncClient(_Endpoint):
    """The same for asyncio; make it and use it in one event loop. Cancelling a task cancels its call on the server."""

    def __init__(
        self, target: str, options: ClientOptions | None = None, *, token: str | None = None, tls_ca: Path | None = None
    ):
        super().__init__(target, options, token, tls_ca)
        if self.options.tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=self.options.channel_options())
        else:
            credentials = self.options.tls.credentials()
            self._channel = grpc.aio.secure_channel(target, credentials, options=self.options.channel_options())
        self._stub = pb_grpc.ExpertsStub(self._channel)

    async def forward(
        self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        timeout: float | None = None, request_id: str = "",
    ) -> Any:  # fmt: skip
        request = OutgoingRequest(layer, hidden, topk_ids, topk_weights, request_id=request_id)
        attempts = self._attempts(timeout)
        once = self._unary if request.small else self._framed
        while True:
            self._check_open()
            try:
                return await once(request, attempts.remaining())
            except EpserveError as error:
                wait = attempts.wait_after(error)
            except grpc.RpcError as error:
                wait = attempts.wait_after(status.error_of_rpc(error))
            await asyncio.sleep(wait)

    def stream(self) -> Pipeline:
        """For many small calls: `async with client.stream() as stream: await stream.forward(...)`."""
        self._check_open()
        return Pipeline(self._stub.ForwardStream(metadata=self.options.metadata), self.options.timeout_s)

    async def model(self, *, timeout: float | None = None) -> pb.GetModelReply:
        return await self._simple(self._stub.GetModel, pb.GetModelRequest(), timeout)

    async def status(self, *, timeout: float | None = None) -> pb.GetStatusReply:
        return await self._simple(self._stub.GetStatus, pb.GetStatusRequest(), timeout)

    async def wait_ready(self, timeout: float = 60.0) -> pb.GetStatusReply:
        waiting = _Readiness(self.target, timeout)
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
        self._closed = True
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def _simple(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = self._attempts(timeout)
        while True:
            self._check_open()
            try:
                return await method(request, timeout=attempts.remaining(), metadata=self.options.metadata)
            except grpc.RpcError as error:
                wait = attempts.wait_after(status.error_of_rpc(error))
            await asyncio.sleep(wait)

    async def _unary(self, request: OutgoingRequest, timeout_s: float) -> Any:
        message = request.message()
        return request.result(await self._stub.Forward(message, timeout=timeout_s, metadata=self.options.metadata))

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


class _Cancellation:
    """Passes a future's cancel on to whatever RPC is running for it."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._call: Any = None

    def watch(self, call: Any) -> None:
        self._call = call
        if self.event.is_set():
            call.cancel()

    def cancel(self) -> None:
        self.event.set()
        if self._call is not None:
            self._call.cancel()

    def check(self) -> None:
        if self.event.is_set():
            raise concurrent.futures.CancelledError


class _ForwardFuture(concurrent.futures.Future):
    """Stays cancellable until its result is there."""

    def __init__(self) -> None:
        super().__init__()
        self._cancellation = _Cancellation()

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._cancellation.cancel()
        return cancelled

    def run(self, function: Any, request: OutgoingRequest, attempts: _Attempts) -> None:
        if self.cancelled():
            return
        result, error = None, None
        try:
            result = function(request, attempts, self._cancellation)
        except BaseException as raised:
            error = raised
        if not self.set_running_or_notify_cancel():
            return
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)


class _Readiness:
    def __init__(self, target: str, timeout_s: float):
        self._target, self._timeout_s = target, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._last = ""

    def remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def failed(self, error: EpserveError) -> None:
        """A poll that ran out of our own time says less than what was seen before it."""
        self.saw(self._last if self._last and isinstance(error, DeadlineExceeded) else str(error))

    def saw(self, what: str) -> None:
        """Raises DeadlineExceeded when the time is up."""
        self._last = what
        if time.monotonic() >= self._deadline:
            raise DeadlineExceeded(
                f"{self._target} is not serving after {self._timeout_s:g} s; last seen: {self._last}"
            )


def _read(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: cannot read {path}: {error.strerror}") from None
