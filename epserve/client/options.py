"""This module has the options of a connection: TLS, token, retries."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import grpc

from epserve.errors import ConfigError
from epserve.process import tracing
from epserve.protocol import wire

from .checks import bounded, check_choice, check_kind, check_token, is_number, whole_number

HEALTH_NAME = "epserve.v1.Experts"
Priority = Literal["", "low", "normal", "high"]
Balance = Literal["", "round_robin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """These are the files and names of TLS.

    `ca` is the authority of the server's certificate (None: the system's). `cert` and `key` are the client's own, for
    mutual TLS. `server_name` replaces the target's host name when the certificate has another one.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ConfigError for a file that gRPC would reject only later."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: cert and key come together")
        self._check()
        ca, key, cert = (None if path is None else _read(path) for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def channel_options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def _check(self) -> None:
        """Raises ConfigError for a file that gRPC would report only on stderr, at each connection."""
        probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca is not None:
                _read(self.ca)
                probe.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"tls.ca (tls_ca): {self.ca} holds no certificate in PEM: {error}") from None
        if self.cert is None or self.key is None:
            return
        for path in (self.cert, self.key):
            _read(path)
        try:
            probe.load_cert_chain(self.cert, self.key, password="")  # a password is an error, not a prompt
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls.cert, tls.key: {self.cert} and {self.key} are no PEM pair without a password: {error}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Waits grow twofold from `first_s` to `longest_s`, with jitter, and never pass the call's deadline.

    `attempts` is the largest number of attempts, the first one included. None allows as many as fit before the
    deadline. Raises ConfigError.
    """

    attempts: int | None = None
    first_s: float = 0.05
    longest_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts is not None and (whole_number(self.attempts) or 0) < 1:
            text = "is not a whole number from 1 up; None for as many as fit before the deadline"
            raise ConfigError(f"retry.attempts: {self.attempts!r} {text}")
        for name, wait in (("first_s", self.first_s), ("longest_s", self.longest_s)):
            if not (is_number(wait) and 0 < wait < float("inf")):
                raise ConfigError(f"retry.{name}: {wait!r} is not a positive number of seconds")
        if self.longest_s < self.first_s:
            raise ConfigError(f"retry.longest_s: {self.longest_s} is below retry.first_s, {self.first_s}; raise it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The options raise ConfigError, or InvalidRequest for `timeout_s`, that names the option and the allowed values."""

    token: str = field(default="", repr=False)
    tls: Tls | None = None
    timeout_s: float = 60.0
    """The seconds for calls that set no timeout."""
    retry: RetryPolicy = RetryPolicy()
    priority: Priority = ""
    """The priority of all calls. Empty means normal, or the highest that the service allows this client when that is
    less."""

    balance: Balance = ""
    """With round_robin, calls go in turn to the target's addresses whose health is SERVING. The target is then a name
    with several addresses, or a list: "ipv4:10.0.0.1:50051,10.0.0.2:50051". Empty is gRPC's choice, the first address
    that connects."""

    def __post_init__(self) -> None:
        check_token(self.token)
        if self.tls is not None:
            check_kind("tls", self.tls, Tls)
        check_kind("retry", self.retry, RetryPolicy)
        check_choice("priority", self.priority, get_args(Priority))
        check_choice("balance", self.balance, get_args(Balance))
        bounded(self.timeout_s, "timeout_s")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call: the token, and the present trace when the application has one."""
        return tracing.outgoing((("authorization", f"Bearer {self.token}"),) if self.token else ())

    def channel_options(self) -> list[tuple[str, Any]]:
        message = wire.FRAME_BYTES + wire.OVERHEAD_BYTES  # larger tensors come in frames
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", message),
            ("grpc.max_send_message_length", message),
            ("grpc.http2.max_frame_size", wire.HTTP2_FRAME_BYTES),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),
            ("grpc.initial_reconnect_backoff_ms", 100),  # a restarted server is found again soon
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        if self.balance:
            policy = {"loadBalancingConfig": [{self.balance: {}}], "healthCheckConfig": {"serviceName": HEALTH_NAME}}
            options.append(("grpc.service_config", json.dumps(policy)))
        if self.tls is not None:
            options += self.tls.channel_options()
        return options


def _read(path: Path | str) -> bytes:
    if not isinstance(path, str | Path):
        raise ConfigError(f"tls: a file's path is wanted, not {type(path).__name__}; write the PEM text into a file")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: cannot read {path}: {error.strerror}") from None
