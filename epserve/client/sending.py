"""This module has one attempt of a blocking client's call, and calls that are begun now and waited for later.

Everything is done in the caller's thread. An attempt goes over the doorbell of its region, in one message, or as a
stream of frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import grpc

from epserve.errors import CallerError, EpserveError, NotReady
from epserve.process import tracing

from .exchange import OutgoingRequest, ReplyAssembly
from .options import ClientOptions


class Started(Protocol):
    """An attempt that has been sent. `result` is called once, or `drop` in its place."""

    def result(self) -> Any: ...

    def drop(self) -> None: ...


class Sender:
    """A sender makes the attempts of one client."""

    def __init__(self, stub: Any, options: ClientOptions, target: str):
        self._stub, self._options, self._target = stub, options, target

    def once(self, request: OutgoingRequest, timeout_s: float, cancellation: Any) -> Any:
        """Sends the request and returns its result. cancellation: None when no future can cancel the call."""
        if cancellation is None and request.small and not _over_bell(request):
            # In this thread: a future's call goes through another one, 0.2 ms.
            method, message = getattr(self._stub, request.method), request.message()
            return request.result(method(message, timeout=timeout_s, metadata=self._options.metadata))
        return self.start(request, timeout_s, cancellation).result()

    def start(self, request: OutgoingRequest, timeout_s: float, cancellation: Any = None) -> Started:
        """Sends the request."""
        if not request.small:
            frames = request.frames(timeout_s)
            stream = self._stub.ForwardStream(frames, timeout=timeout_s, metadata=self._options.metadata)
            if cancellation is not None:
                cancellation.watch(stream)
            return _Stream(request, stream, self._target)
        if _over_bell(request):
            return _Rung(request, request.bell.begin(request.frame(timeout_s), timeout_s, cancellation))  # type: ignore[union-attr]
        method = getattr(self._stub, request.method)
        call = method.future(request.message(), timeout=timeout_s, metadata=self._options.metadata)
        if cancellation is not None:
            cancellation.watch(call)
        return _Message(request, call)


def _over_bell(request: OutgoingRequest) -> bool:
    return request.bell is not None and not tracing.outgoing(())  # the doorbell takes no trace context


class _Rung:
    def __init__(self, request: OutgoingRequest, ringing: Any):
        self._request, self._ringing = request, ringing

    def result(self) -> Any:
        return self._request.answer(self._ringing.result())

    def drop(self) -> None:
        self._ringing.drop()


class _Message:
    def __init__(self, request: OutgoingRequest, call: Any):
        self._request, self._call = request, call

    def result(self) -> Any:
        try:
            return self._request.result(self._call.result())
        except grpc.FutureCancelledError:
            raise NotReady("the call was cancelled on this side, since its client was closed") from None

    def drop(self) -> None:
        self._call.cancel()


class _Stream:
    def __init__(self, request: OutgoingRequest, call: Any, target: str):
        self._request, self._call, self._target = request, call, target

    def result(self) -> Any:
        assembly = ReplyAssembly(self._request)
        try:
            for frame in self._call:
                if assembly.add(frame):
                    return assembly.result()
        finally:
            self._call.cancel()  # after a refusal this stops the request; after the reply it does nothing
        raise NotReady(f"{self._target} ended the stream before the reply; it may be stopping")

    def drop(self) -> None:
        self._call.cancel()


class _Failed:
    """An attempt that could not be sent. Its error counts where the call is waited for, like that of a lost reply."""

    def __init__(self, error: Exception):
        self._error = error

    def result(self) -> Any:
        raise self._error

    def drop(self) -> None:
        pass


Finish = Callable[[Started], Any]
"""Takes the first attempt to its result, or makes further ones."""


class Pending:
    """A call that is under way, made by `Client.begin`.

    `wait` returns its result, once. `drop`, and leaving a `with` block without a wait, give the call up.
    """

    def __init__(
        self, request: OutgoingRequest, span: tracing.ClientSpan, start: Callable[[], Started], finish: Finish
    ):
        request.check_region()
        self._request, self._span, self._finish = request, span, finish
        try:
            with span.current():
                self._started: Started | None = start()
        except (EpserveError, grpc.RpcError) as error:
            self._started = _Failed(error)

    def wait(self) -> Any:
        """Returns the layer's output. Raises the errors of `Client.forward`."""
        started, self._started = self._started, None
        if started is None:
            raise CallerError("this call has been waited for or given up; begin another one")
        return self._finish(started)

    def drop(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.drop()
            self._request.give_up()
            self._span.end()

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, *_) -> None:
        self.drop()
