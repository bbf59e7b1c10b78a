"""Connects models of transformers to services, and chooses the service of a model that is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from epserve.client import session as sessions
from epserve.client.clients import ClientOptions
from epserve.client.session import RETRY_FOR_S, Session
from epserve.errors import ConfigError

from . import operators


class Service:
    """Is a connection that models use for their experts. `connect` makes it. `close` it when the models are done."""

    def __init__(self, session: Session, *, gate: str):
        self.session, self.gate = session, gate
        target = getattr(session.transport, "target", type(session.transport).__name__)
        self.name = operators.register(self, f"{target}, gate {gate}, checkpoint {self.model.fingerprint[:12]}")
        """The name by which compiled and exported graphs find the service."""

    @property
    def model(self) -> Any:
        """Returns the GetModelReply: the served model, and the limits of a request."""
        return self.session.model

    @property
    def max_tokens(self) -> int:
        """Returns the most tokens of one request. Longer batches become several requests."""
        return self.session.max_tokens

    def forward(
        self,
        layer: int,
        hidden_MK: torch.Tensor,
        ids_Mt: torch.Tensor | None = None,
        weights_Mt: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs one layer for `(M, K)`. Pieces of a batch above the limit are in flight at the same time."""
        return self.session.layer(layer).forward(hidden_MK, ids_Mt, weights_Mt)

    def backward(
        self,
        layer: int,
        hidden_MK: torch.Tensor,
        gradient_MK: torch.Tensor,
        ids_Mt: torch.Tensor | None = None,
        weights_Mt: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the gradients of hidden states and weights."""
        return self.session.layer(layer).backward(hidden_MK, gradient_MK, ids_Mt, weights_Mt)

    def close(self) -> None:
        if not self.session.closed:
            operators.forget(self.name)
            if self in _open:
                _open.remove(self)
            self.session.close()

    def __deepcopy__(self, memo: dict) -> Service:
        """Returns the service itself: copies of a model share it."""
        return self

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        self.close()


_open: list[Service] = []
_loading: ContextVar[Service | None] = ContextVar("epserve_loading", default=None)


def connect(
    target: Any,
    *,
    options: ClientOptions | None = None,
    retry_for_s: float = RETRY_FOR_S,
    gate: str = "local",
    shared_memory_bytes: int = 0,
) -> Service:
    """Connects to a service at "host:port". Until it is closed, models loaded with "epserve" use it (the last one opened).

    Args:
        target: an address, or an object with the methods of `epserve.client.Client`.
        options: token, TLS, priority, balance. `retry_for_s` replaces its timeout and retries.
        gate: "local": this process gates and computes shared experts. "remote": the service does both, and their weights are
            not loaded here either. It is for families whose block returns hidden states only.
        shared_memory_bytes: with a service on this host, tensors go through this much shared memory instead of messages.

    Raises:
        EpserveError: the service cannot be reached.
    """
    if gate not in ("local", "remote"):
        raise ConfigError(f"gate must be 'local' or 'remote', got {gate!r}")
    session = sessions.connect(
        target, options=options, retry_for_s=retry_for_s, shared_memory_bytes=shared_memory_bytes
    )
    service = Service(session, gate=gate)
    _open.append(service)
    return service


@contextmanager
def use(service: Service) -> Iterator[None]:
    """Loads models within the block for `service`, even if other services are open."""
    token = _loading.set(service)
    try:
        yield
    finally:
        _loading.reset(token)


def current() -> Service:
    """Returns the service for a model that is loaded now. Raises ConfigError when none is open."""
    service = _loading.get() or (_open[-1] if _open else None)
    if service is None:
        raise ConfigError(
            "experts_implementation='epserve' needs a service: call epserve.transformers.connect(address) first"
        )
    return service
