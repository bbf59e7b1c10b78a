"""Decides which calls come in: by TLS, client certificates and bearer tokens."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from epserve.config import ServerConfig
from epserve.errors import ConfigError, EpserveError, PermissionDenied
from epserve.protocol import status

from .accounts import Accounts

OPEN_METHODS = "/grpc.health.v1.Health/"
"""Load balancers and kubelets ask for health without credentials."""
ADMIN_METHODS = ("/grpc.reflection.", "/epserve.v1.Admin/")
"""Methods for tokens marked `admin`, if the file marks any."""


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known `authorization: Bearer TOKEN`, before their message is read."""

    def __init__(self, accounts: Accounts):
        self._accounts = accounts

    async def intercept_service(self, continuation, handler_call_details):
        method = handler_call_details.method
        if not method.startswith(OPEN_METHODS):
            try:
                policy = self._accounts.identify(handler_call_details.invocation_metadata).current()
                if method.startswith(ADMIN_METHODS) and not policy.admin:
                    raise PermissionDenied(
                        f"client {policy.name!r} may not call {method}: its token is not marked admin",
                        field="authorization",
                    )
            except EpserveError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: EpserveError):
    """Returns a streaming handler, for methods of every kind, since it runs before any request message is received."""

    async def refuse(request_iterator, context: grpc.aio.ServicerContext) -> None:
        await status.abort(context, status.failure_of(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Returns the credentials of the port, or None without TLS. Raises ConfigError that names the file at fault."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = _read(config.tls_cert, "tls_cert"), _read(config.tls_key, "tls_key")
    client_ca = None if config.tls_client_ca is None else _read(config.tls_client_ca, "tls_client_ca")
    try:
        probe = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        probe.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca is not None:
            probe.load_verify_locations(config.tls_client_ca)
    except ssl.SSLError as error:  # gRPC's own message would only be a line of its C core on stderr
        raise ConfigError(f"server.tls_cert, tls_key or tls_client_ca: not a PEM pair that fits: {error}") from None
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"server.{key}: cannot read {path}: {error.strerror}") from None
