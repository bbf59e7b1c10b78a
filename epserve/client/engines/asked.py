"""How an engine is told of its service: one object of the engine's own configuration, and the environment for containers."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epserve.client.options import ClientOptions, Tls
from epserve.client.session import RETRY_FOR_S, Session, connect
from epserve.config import read_token
from epserve.errors import ConfigError

PREFIX = "EPSERVE_"


class Asked(BaseModel):
    """The service of one engine. Secrets are named by files, since engines log their configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Annotated[str, Field(min_length=1)]
    """host:port."""
    token_file: Path | None = None
    """A file whose first word is the bearer token."""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_name: str = ""
    """As of `epserve call`."""
    retry_for_s: Annotated[float, Field(gt=0)] = RETRY_FOR_S
    """Seconds for which a request that may succeed later is sent again."""
    shared_memory_bytes: Annotated[int, Field(ge=0)] = 0
    """For a service on this host: each process of the engine shares so much memory with it, for tensors."""

    def connect(self) -> Session:
        """Raises EpserveError: the files cannot be read, or the service cannot be reached."""
        tls = None
        if self.tls_ca or self.tls_cert or self.tls_key or self.tls_name:
            tls = Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, server_name=self.tls_name)
        token = read_token(self.token_file) if self.token_file else ""
        return connect(
            self.target,
            options=ClientOptions(token=token, tls=tls),
            retry_for_s=self.retry_for_s,
            shared_memory_bytes=self.shared_memory_bytes,
        )


def asked(given: Any, source: str, environment: Mapping[str, str] = os.environ) -> Asked | None:
    """Returns what an engine was told, or None when nothing asks for a service.

    Args:
        given: the value of the engine's configuration: a target, an object with the fields of Asked, or None.
        source: its name there, for messages.
        environment: EPSERVE_TARGET and so on, for the fields that `given` lacks.

    Raises:
        ConfigError: an unknown key, a wrong value, or settings without a target.
    """
    if isinstance(given, str):
        given = {"target": given}
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{source}: must be host:port or an object of settings, got {type(given).__name__}")
    told = {name: environment.get(PREFIX + name.upper()) for name in Asked.model_fields}
    values = {name: value for name, value in told.items() if value is not None} | dict(given or {})
    if given is None and not told["target"]:
        return None
    try:
        return Asked(**values)
    except ValidationError as error:
        raise ConfigError("; ".join(_told(item, source, given or {}) for item in error.errors())) from None


def _told(item: Any, source: str, given: Mapping[str, Any]) -> str:
    name = str(item["loc"][0])
    where = f"{source}.{name}" if name in given else PREFIX + name.upper()
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, Asked.model_fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{where}: unknown key{hint} (known: {', '.join(Asked.model_fields)})"
    if item["type"] == "missing":
        return f"{source}.{name}: missing; give host:port of the service"
    return f"{where}: {item['msg']} (got {item['input']!r})"
