"""Failures of ranks as data that crosses processes, and the choice of the root cause among several reports."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from epserve.errors import BackendFailed, EpserveError, InternalError, RankFailed

# The words of gloo, NCCL and sockets for the loss of another process. A rank that reports one of these is not the culprit.
CONSEQUENCES = (
    "got no answer from another rank",
    "closed by peer",
    "connection reset",
    "connection refused",
    "connection was closed",
    "broken pipe",
    "timed out waiting",
    "timed out after",
    "wait timeout",
    "socket timeout",
    "remote process exited",
    "remote process has terminated",
    "communicator was aborted",
    "network error",
    "did not reach step",  # all2all/nvlink
    "another rank is gone",
)

# Errors that a process does not recover from. Every later call on its device fails, too.
SPOILT = (
    "cuda error",
    "device-side assert",
    "illegal memory access",
    "uncorrectable ecc",
    "cublas_status",
    "did not let go of its process group",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's report. `consequence`: the loss of another rank explains it. `error`: an EpserveError to raise unchanged."""

    rank: int
    phase: str
    step: int
    message: str
    consequence: bool
    error: EpserveError | None = None
    trace: str = ""

    def describe(self) -> str:
        step = f", step {self.step}" if self.step >= 0 else ""
        return f"rank {self.rank}{step}, {self.phase}: {self.message}"

    @property
    def spoilt(self) -> bool:
        """Whether this rank's process is of no further use."""
        return not self.consequence and any(word in self.message.lower() for word in SPOILT)

    def as_json(self) -> dict[str, Any]:
        fields = "rank", "phase", "step", "message", "consequence", "trace"
        return {name: getattr(self, name) for name in fields}


class RankLost(RankFailed):
    """A rank reported a failure, or its process is gone. The request itself may be sent again."""

    def __init__(self, failure: Failure):
        super().__init__(failure.describe())
        self.failure = failure


def gone(why: str) -> RankLost:
    """A rank whose process, or whose connection, has ended."""
    return RankLost(Failure(rank=-1, phase="process", step=-1, message=f"gone ({why})", consequence=False))


def from_exception(error: BaseException, *, rank: int, phase: str) -> Failure:
    """Returns the report of an exception on this rank."""
    step = -1
    if isinstance(error, StepError):
        step, phase, error = error.step, error.phase, error.__cause__ or error
    trace = "".join(traceback.format_exception(error))[-4000:]
    error.__traceback__ = error.__cause__ = error.__context__ = None  # their frames would keep the process group alive
    text = f"{type(error).__name__}: {error}"
    lowered = text.lower()
    consequence = any(word in lowered for word in CONSEQUENCES)
    return Failure(
        rank=rank,
        phase=phase,
        step=step,
        message=text if isinstance(error, EpserveError) else text.splitlines()[0],
        consequence=consequence,
        # A backend that could not be built because another rank is gone is not at fault.
        error=error
        if isinstance(error, EpserveError) and not (consequence and isinstance(error, BackendFailed))
        else None,
        trace=trace,
    )


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Returns the first report that is no consequence of another one, or the first of all."""
    ordered = sorted(failures, key=lambda failure: (failure.consequence, failure.rank))
    return ordered[0]


class StepError(InternalError):
    """A step failed on one rank. `__cause__` is the reason."""

    def __init__(self, rank: int, step: int, phase: str, cause: str):
        super().__init__(f"rank {rank}, step {step}, {phase}: {cause}")
        self.rank, self.step, self.phase = rank, step, phase

    def __reduce__(self):
        return _rebuild_step_error, (str(self), self.rank, self.step, self.phase)


def _rebuild_step_error(text: str, rank: int, step: int, phase: str) -> StepError:
    error = StepError.__new__(StepError)
    Exception.__init__(error, text)
    error.rank, error.step, error.phase = rank, step, phase
    return error
