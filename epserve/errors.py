"""All errors that epserve raises on purpose: the party at fault, and the gRPC status that a caller sees.

    EpserveError
    ├── CallerError (also ValueError)      the request is wrong, and sending it again does not help
    │   ├── InvalidRequest                 INVALID_ARGUMENT    a field's dtype, shape, ids or values
    │   ├── UnknownLayer                   NOT_FOUND           no such MoE layer in the served model
    │   ├── TooLarge                       OUT_OF_RANGE        above a configured limit, named in the message
    │   ├── NotFinite                      OUT_OF_RANGE        the result of finite values passed the largest number
    │   ├── Unauthenticated                UNAUTHENTICATED     missing or wrong token
    │   └── PermissionDenied               PERMISSION_DENIED   a known client that may not do this
    ├── OperatorError                      the set-up is wrong. Raised before anything is served
    │   ├── ConfigError                    FAILED_PRECONDITION unknown key, impossible combination, missing package
    │   │   └── BackendFailed              FAILED_PRECONDITION an all-to-all that cannot be built on these ranks
    │   ├── CheckpointError                FAILED_PRECONDITION missing, surplus, misshapen or truncated tensors
    │   ├── Incompatible                   FAILED_PRECONDITION two parts that do not fit, with every reason
    │   └── ClusterError                   FAILED_PRECONDITION a node that cannot be reached, joined or used, and why
    ├── ServiceError                       the service failed. `retryable` says whether the request may succeed later
    │   ├── Overloaded                     RESOURCE_EXHAUSTED  retryable: the queue is full
    │   ├── RankFailed                     UNAVAILABLE         retryable: a rank died or hung and is being replaced
    │   │   └── ExpertsMissing             UNAVAILABLE         retryable: tokens need experts that no rank holds now
    │   ├── NotReady                       UNAVAILABLE         retryable: starting, recovering or draining
    │   ├── DeadlineExceeded               DEADLINE_EXCEEDED   the caller's deadline passed
    │   └── InternalError                  INTERNAL            a defect
    └── HandleError                        INTERNAL            a dispatch handle or receiver used twice, never, or late

`grpc_status` is the status's name, so that this module needs no gRPC.
"""

from __future__ import annotations

from collections.abc import Collection


class EpserveError(Exception):
    """Base of all errors of this project."""

    grpc_status = "INTERNAL"
    retryable = False


class CallerError(EpserveError, ValueError):
    """The request is at fault. `field` names the wrong field. It is empty when no single field is wrong."""

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, field: str = ""):
        super().__init__(message)
        self.field = field


class InvalidRequest(CallerError):
    """A field of the request cannot be served. The message names the field, its value and the allowed values."""


class UnknownLayer(CallerError):
    grpc_status = "NOT_FOUND"


class TooLarge(CallerError):
    grpc_status = "OUT_OF_RANGE"


class NotFinite(CallerError):
    """The request's values are finite, its result is not. The message names layer and rows. Other requests are unaffected."""

    grpc_status = "OUT_OF_RANGE"


class Unauthenticated(CallerError):
    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(CallerError):
    grpc_status = "PERMISSION_DENIED"


class OperatorError(EpserveError):
    """The configuration, the machine or the checkpoint is at fault."""

    grpc_status = "FAILED_PRECONDITION"


class ConfigError(OperatorError):
    pass


class CheckpointError(OperatorError):
    pass


class Incompatible(OperatorError):
    """Two or more parts do not fit together. `reasons` lists every reason."""

    def __init__(self, message: str, reasons: tuple[str, ...] = ()):
        super().__init__(message + "".join(f"\n  - {reason}" for reason in reasons))
        self.reasons = reasons


class BackendFailed(ConfigError):
    """An all-to-all backend that fits cannot be built on these ranks. `backend` is its name, `reason` the library's."""

    def __init__(self, backend: str, reason: str):
        super().__init__(backend, reason)
        self.backend, self.reason = backend, reason

    def __str__(self) -> str:
        return f"all-to-all {self.backend} cannot be built on these ranks: {self.reason}"


class ClusterError(OperatorError):
    """`epserve cluster` finds nodes that cannot be reached, do not join or do not suffice. The message names them and why."""


class ServiceError(EpserveError):
    """The service is at fault."""


class Overloaded(ServiceError):
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RankFailed(ServiceError):
    grpc_status = "UNAVAILABLE"
    retryable = True


class ExpertsMissing(RankFailed):
    """Tokens of the request chose experts that are on no rank until a new process has started.

    `experts` holds their logical ids. A client reads them from the message.
    """

    def __init__(self, message: str, *, layer: int = -1, experts: Collection[int] = ()):
        super().__init__(message)
        self.layer, self.experts = layer, tuple(sorted(experts))

    @classmethod
    def of(cls, layer: int, experts: Collection[int]) -> ExpertsMissing:
        shown = ", ".join(map(str, sorted(experts)))
        text = (
            f"experts {shown} of layer {layer} are on no rank until a lost one is replaced"
            " (engine.when_experts_missing is refuse); send the request again later"
        )
        return cls(text, layer=layer, experts=experts)


class NotReady(ServiceError):
    grpc_status = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(ServiceError):
    grpc_status = "DEADLINE_EXCEEDED"


class InternalError(ServiceError):
    pass


class HandleError(EpserveError):
    """A single-use dispatch handle or receiver was used twice, never, or after close."""
