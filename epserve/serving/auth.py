"""Who may call: TLS, client certificates, and bearer tokens from a file."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path

import grpc

from epserve.config import ServerConfig
from epserve.errors import ConfigError, Unauthenticated
from epserve.serving import status

OPEN_METHODS = "/grpc.health.v1.Health/"
"""Load balancers and kubelets ask for health without credentials."""


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known `authorization: Bearer TOKEN`, before their message is read.

    Keeps digests only. Their comparison takes the same time whatever was sent.
    """

    def __init__(self, tokens: tuple[str, ...]):
        self._digests = tuple(_digest(token) for token in tokens)
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation, handler_call_details):
        if handler_call_details.method.startswith(OPEN_METHODS) or self._known(
            handler_call_details.invocation_metadata
        ):
            return await continuation(handler_call_details)
        return self._refusal

    def _known(self, metadata) -> bool:
        sent = next((value for key, value in metadata if key == "authorization"), "")
        scheme, _, token = sent.partition(" ")
        digest = _digest(token.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


async def _refuse(request_iterator, context: grpc.aio.ServicerContext) -> None:
    """A streaming handler for every method: it runs before any request message is received."""
    error = Unauthenticated("authorization: missing or unknown bearer token (server.tokens_file)")
    await status.abort(context, status.failure_of(error))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def read_tokens(path: Path) -> tuple[str, ...]:
    """One token a line; blank lines and lines that start with # do not count. Raises ConfigError."""
    lines = (line.strip() for line in _read(path, "tokens_file").decode(errors="replace").splitlines())
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ConfigError(f"server.tokens_file: {path} holds no token; put one on each line")
    if any(" " in token or not token.isascii() for token in tokens):
        raise ConfigError(f"server.tokens_file: {path} holds a token with spaces or non-ASCII characters")
    return tokens


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """None without TLS. Raises ConfigError that names the file at fault."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = _read(config.tls_cert, "tls_cert"), _read(config.tls_key, "tls_key")
    client_ca = None if config.tls_client_ca is None else _read(config.tls_client_ca, "tls_client_ca")
    try:
        probe = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        probe.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca is not None:
            probe.load_verify_locations(config.tls_client_ca)
    except ssl.SSLError as error:  # gRPC's own message would be a line of its C core on stderr
        raise ConfigError(f"server.tls_cert, tls_key or tls_client_ca: not a PEM pair that fits: {error}") from None
    return grpc.ssl_server_credentials([(key, cert)], client_ca, require_client_auth=client_ca is not None)


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"server.{key}: cannot read {path}: {error.strerror}") from None
