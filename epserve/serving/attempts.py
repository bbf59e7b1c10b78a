"""When a client's call is sent again, waited for, or cancelled. No gRPC."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from typing import Any

from epserve.errors import DeadlineExceeded, EpserveError, InvalidRequest
from epserve.serving.exchange import OutgoingRequest
from epserve.serving.options import RetryPolicy

LONGEST_S = 1e6  # eleven days; above some 1e9 s gRPC's clock overflows and the call ends at once


def bounded(timeout_s: float) -> float:
    """`inf` becomes the longest wait that gRPC can express. Raises InvalidRequest for NaN and for what has passed."""
    if not timeout_s > 0:
        raise InvalidRequest(f"timeout: {timeout_s} is not a positive number of seconds", field="timeout")
    return min(timeout_s, LONGEST_S)


class Attempts:
    """When to send a call again."""

    def __init__(self, policy: RetryPolicy, timeout_s: float):
        self._policy, self._timeout_s = policy, bounded(timeout_s)
        self._deadline = time.monotonic() + self._timeout_s
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


class Cancellation:
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


class ForwardFuture(concurrent.futures.Future):
    """Stays cancellable until its result is there."""

    def __init__(self) -> None:
        super().__init__()
        self._cancellation = Cancellation()

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._cancellation.cancel()
        return cancelled

    def run(self, function: Any, request: OutgoingRequest, attempts: Attempts) -> None:
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


class Readiness:
    def __init__(self, target: str, timeout_s: float):
        self._target, self._timeout_s = target, bounded(timeout_s)
        self._deadline = time.monotonic() + self._timeout_s
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
