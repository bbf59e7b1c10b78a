"""Maps errors to gRPC statuses and back. No other module maps them.

A status carries its message, and as trailing metadata `epserve-error` (the class in epserve.errors), `epserve-retryable`
(true or false), `epserve-field` and `retry-after-ms`. On a stream the same values are a `Failure` message.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

import grpc

from epserve import errors
from epserve.errors import EpserveError
from epserve.process import proxies

from . import epserve_pb2 as pb
from .dropping import drop

log = logging.getLogger("epserve.server")

MAX_MESSAGE_CHARS = 2000
"""gRPC sends a status's text as a header, and peers refuse headers above 8 KiB by default."""

ABORT_S = 5.0
"""The seconds in which a status must be sent."""

_BY_CODE: dict[str, type[EpserveError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "NOT_FOUND": errors.UnknownLayer,
    "OUT_OF_RANGE": errors.TooLarge,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "FAILED_PRECONDITION": errors.ConfigError,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "UNAVAILABLE": errors.NotReady,
    "CANCELLED": errors.NotReady,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
}
"""The classes of statuses that gRPC itself or a proxy made. CANCELLED: a server that stops ends its last calls with it."""


def failure_of(error: BaseException, request_id: str = "") -> pb.Failure:
    """Returns the part of an error that a caller may see, and logs the error. The log of a defect has its traceback."""
    if isinstance(error, EpserveError):
        log.info("request=%s status=%s %s", request_id or "-", error.grpc_status, error)
    else:
        log.error("request=%s status=INTERNAL unexpected %s", request_id or "-", type(error).__name__, exc_info=error)
        text = f"internal error; the server's log has the details of request {request_id or 'without id'}"
        error = errors.InternalError(text)
    return pb.Failure(
        code=error.grpc_status,
        error=type(error).__name__,
        message=str(error)[:MAX_MESSAGE_CHARS],
        field=getattr(error, "field", ""),
        retryable=error.retryable,
        retry_after_ms=round(getattr(error, "retry_after_s", 0.0) * 1000),
    )


async def abort(context: grpc.aio.ServicerContext, failure: pb.Failure) -> NoReturn:
    """Ends a call with the failure's status."""
    metadata = [("epserve-error", failure.error), ("epserve-retryable", "true" if failure.retryable else "false")]
    if failure.field:
        metadata.append(("epserve-field", failure.field))
    if failure.retry_after_ms:
        metadata.append(("retry-after-ms", str(failure.retry_after_ms)))
    try:
        async with asyncio.timeout(ABORT_S):
            await context.abort(grpc.StatusCode[failure.code], failure.message, tuple(metadata))
    except TimeoutError:  # the client has not read the earlier messages, and the status waits behind them
        task = asyncio.current_task()
        assert task is not None
        drop(task)
        raise asyncio.CancelledError from None
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # the caller has gone, and gRPC would log a traceback for each
    raise AssertionError("abort raises")


async def write(context: grpc.aio.ServicerContext, message: Any) -> None:
    """Writes one message of a stream. Raises CancelledError when the client has given the call up, which is no fault."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:  # its text is 'Failed "execute_batch"' and tells no more
        raise asyncio.CancelledError from None


def failure_of_rpc(error: Any) -> pb.Failure:
    """Returns the failure that an RPC error stands for (`grpc.RpcError` with code, details and trailing metadata)."""
    metadata = dict(error.trailing_metadata() or ())
    code, details = error.code().name, error.details() or ""
    failure = pb.Failure(code=code, message=details, retryable=code in ("UNAVAILABLE", "CANCELLED"))
    if "epserve-error" in metadata:
        failure.error = metadata["epserve-error"]
        failure.field = metadata.get("epserve-field", "")
        failure.retryable = metadata.get("epserve-retryable") == "true"
        failure.retry_after_ms = int(metadata.get("retry-after-ms", "0"))
    elif code == "RESOURCE_EXHAUSTED" and "larger than max" in details:  # gRPC's own message limit
        failure.error = errors.TooLarge.__name__
        failure.message = f"{details}; the limit is server.max_message_bytes"
    elif code == "UNAVAILABLE" and details.startswith((ALL_ADDRESSES, ALL_BACKENDS)):
        _explain(failure, details)
    elif code == "DEADLINE_EXCEEDED":
        failure.message = "no reply came before the call's deadline"
    return failure


ALL_ADDRESSES, ALL_BACKENDS = "failed to connect", "connections to all backends failing"
"""The first words of gRPC's message about a connection that it could not make. The end of the last attempt follows. The second
is the message of a client that balances: for it, another front end may only be away."""
UNTRUSTED = "no authority in tls.ca (tls_ca, --tls-ca; none: the system's) has signed the server's certificate"
OTHER_NAME = (
    "the server's certificate is for other names than the target's host; use one that is in it, or say it:"
    " Tls(ca=..., server_name=...), --tls-name on the command line"
)
MISFITS = (
    ("certificate has expired", "the server's certificate has expired; renew it, or set the clock here"),
    ("certificate is not yet valid", "the server's certificate is not valid yet; set the clock here, or there"),
    ("CERTIFICATE_VERIFY_FAILED", UNTRUSTED),
    ("Hostname Verification Check failed", OTHER_NAME),
    ("is not in peer certificate", OTHER_NAME),
    (
        "WRONG_VERSION_NUMBER",
        "the port speaks no TLS; leave tls and tls_ca out, or set server.tls_cert and tls_key there",
    ),
)
"""Words of a failed TLS handshake -> reason and remedy. The next attempt ends alike: only a change on either side helps."""
MAY_WANT_TLS = (
    "the port may want TLS (tls_ca=, or ClientOptions(tls=Tls(ca=...)), --tls-ca on the command line) or, with"
    " server.tls_client_ca, a client's certificate (Tls(ca=..., cert=..., key=...); --tls-cert, --tls-key)"
)
NO_GRPC = "the port may be another service's, or a proxy's, that speaks no gRPC"


def _explain(failure: pb.Failure, details: str) -> None:
    """Adds the reason and the remedy to gRPC's own words about a connection that could not be made."""
    if proxy := proxies.named(details):
        failure.message = f"{details}; {proxy}"
        return
    meaning = next((meaning for words, meaning in MISFITS if words in details), "")
    if meaning:
        failure.message = f"{meaning} ({details})"
        if details.startswith(ALL_ADDRESSES):
            failure.error, failure.retryable = errors.ConfigError.__name__, False
    elif "Socket closed" in details or "Connection reset" in details:  # a server that is stopping closes it, too
        failure.message = f"{details}; {MAY_WANT_TLS}"
    elif "Failed parsing HTTP/2" in details:
        failure.message = f"{details}; {NO_GRPC}"


def error_of_rpc(error: grpc.RpcError) -> EpserveError:
    """Returns the exception that a client raises for an RPC error, with the RPC error as its cause."""
    mapped = error_of(failure_of_rpc(error))
    mapped.__cause__ = error
    return mapped


def error_of(failure: pb.Failure) -> EpserveError:
    """Returns the exception that a client raises for a failure."""
    cls = getattr(errors, failure.error, None)
    if not (isinstance(cls, type) and issubclass(cls, EpserveError)):  # made by gRPC, a proxy or a newer server
        cls = _BY_CODE.get(failure.code, errors.InternalError)
    message = failure.message or failure.code
    if issubclass(cls, errors.CallerError):
        return cls(message, field=failure.field)
    if cls is errors.Overloaded:
        return errors.Overloaded(message, retry_after_s=failure.retry_after_ms / 1000)
    return cls(message)
