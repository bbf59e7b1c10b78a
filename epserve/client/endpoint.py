"""This module is the common part of blocking and asyncio clients: target and options, checked, and the requests and
attempts that they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from epserve.errors import CallerError, DeadlineExceeded, EpserveError, NotReady
from epserve.process import allocator, proxies
from epserve.protocol import status

from .attempts import Attempts
from .checks import check_kind, check_target
from .cuda_region import CudaClientRegion
from .exchange import OutgoingRequest, WireFormat
from .options import ClientOptions, Tls
from .region import ClientRegion


class Endpoint:
    """An endpoint holds the state that both clients share."""

    def __init__(self, target: str, options: ClientOptions | None, token: str | None, tls_ca: Path | str | None):
        check_target(target)
        options = options or ClientOptions()
        check_kind("options", options, ClientOptions)
        if token is not None:
            options = replace(options, token=token)
        if tls_ca is not None:
            options = replace(options, tls=replace(options.tls or Tls(), ca=tls_ca))
        self.target, self.options = target, options
        self._closed = False
        allocator.expect_messages()

    def _channel_options(self) -> list[tuple[str, Any]]:
        return self.options.channel_options() + proxies.channel_options(self.target)

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self.options.retry, self.options.timeout_s if timeout is None else timeout)

    def _request(
        self, layer: int, hidden: Any, topk_ids: Any, topk_weights: Any,
        request_id: str, region: ClientRegion | CudaClientRegion | None, wire_format: WireFormat,
        not_finite_rows: list[int] | None, gradient: Any = None,
    ) -> OutgoingRequest:  # fmt: skip
        return OutgoingRequest(
            layer,
            hidden,
            topk_ids,
            topk_weights,
            request_id=request_id,
            region=region,
            wire_format=wire_format,
            priority=self.options.priority,
            not_finite_rows=not_finite_rows,
            gradient=gradient,
        )

    def _not_held(self, error: Exception, attempts: Attempts, what: str) -> EpserveError:
        """Returns the error of an attempt to register a region or open a lane, which the client raises or retries."""
        if attempts.over or isinstance(error, TimeoutError):
            return DeadlineExceeded(f"{self.target} did not {what} in time")
        if isinstance(error, grpc.RpcError):
            return status.error_of_rpc(error)
        return NotReady(f"{self.target} ended the call before it could {what}; it may be stopping")

    def _check_open(self) -> None:
        if self._closed:
            raise CallerError(f"this client of {self.target} is closed")
