"""This module decides when a client's call is sent again, waited for, or cancelled. It has no gRPC."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from typing import Any

from epserve.errors import DeadlineExceeded, EpserveError

from .checks import bounded
from .exchange import OutgoingRequest
from .options import RetryPolicy


class Attempts:
    """Attempts decides when to send a call again. It raises InvalidRequest for an unusable timeout."""

    def __init__(self, policy: RetryPolicy, timeout_s: float):
        self._policy, self._timeout_s = policy, bounded(timeout_s)
        self._deadline = time.monotonic() + self._timeout_s
        self._made = 0
        self._before: EpserveError | None = None
        """The error of the attempt before. The present attempt began at `_began`."""
        self._began = 0.0

    def remaining(self) -> float:
        """Returns the seconds until the deadline, or a little when it has passed, since zero makes a socket
        non-blocking."""
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def over(self) -> bool:
        """Tells whether the deadline has passed."""
        return time.monotonic() >= self._deadline

    def wait_after(self, error: EpserveError) -> float:
        """Returns the seconds until the next attempt. Raises the error when no attempt is left."""
        self._made += 1
        policy, now = self._policy, time.monotonic()
        left = self._deadline - now
        longest = min(policy.first_s * 2.0 ** min(self._made - 1, 64), policy.longest_s)
        # Near the deadline the waits become short again, so that the last attempt is made just before it.
        wait = min(random.uniform(longest / 2, longest), max(left / 2, policy.first_s / 2))
        wait = max(wait, getattr(error, "retry_after_s", 0.0))
        if not error.retryable or self._made == policy.attempts or wait >= left:
            before = self._before if isinstance(error, DeadlineExceeded) else None
            if before is not None and now - self._began < policy.longest_s:
                error, before = before, None  # the last attempt had little time, so this error says more
            if self._made > 1:
                error.add_note(f"after {self._made} attempts in {self._timeout_s:g} s at most")
            if before is not None:
                error.add_note(f"the attempt before: {type(before).__name__}: {before}")
            raise error
        self._before, self._began = error, now + wait
        return wait


class Cancellation:
    """A cancellation passes a future's cancel on to the RPC that runs for it."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._call: Any = None

    def watch(self, call: Any) -> None:
        """Takes a `call` that has a `cancel`, and cancels it at once when the future is cancelled already."""
        self._call = call
        if self.event.is_set():
            call.cancel()

    def cancel(self) -> None:
        self.event.set()
        if self._call is not None:
            self._call.cancel()

    def check(self) -> None:
        """Raises CancelledError once the future is cancelled."""
        if self.event.is_set():
            raise concurrent.futures.CancelledError


class ForwardFuture(concurrent.futures.Future):
    """The future stays cancellable until its result is there."""

    def __init__(self) -> None:
        super().__init__()
        self._cancellation = Cancellation()

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._cancellation.cancel()
        return cancelled

    def run(self, function: Any, request: OutgoingRequest, attempts: Attempts) -> None:
        """Runs `function(request, attempts, cancellation)` in the thread of the caller."""
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
    """Readiness keeps the last state that `wait_ready` saw of a service, and the time that it has left."""

    def __init__(self, target: str, timeout_s: float):
        self._target, self._timeout_s = target, bounded(timeout_s)
        self._deadline = time.monotonic() + self._timeout_s
        self._last = ""

    def remaining(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def failed(self, error: EpserveError) -> None:
        """Notes a poll's error, unless the poll ran out of the client's own time, which says less than the state before
        it."""
        self.saw(self._last if self._last and isinstance(error, DeadlineExceeded) else str(error))

    def saw(self, what: str) -> None:
        """Raises DeadlineExceeded when the time is up."""
        self._last = what
        if time.monotonic() >= self._deadline:
            raise DeadlineExceeded(
                f"{self._target} is not serving after {self._timeout_s:g} s; last seen: {self._last}"
            )
