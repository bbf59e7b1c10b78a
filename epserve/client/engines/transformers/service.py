"""The connection of this process's models to a service: requests, their pieces, and the shared memory that carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from epserve.client.clients import Client, ClientOptions, RetryPolicy
from epserve.errors import ConfigError, EpserveError, InvalidRequest, NotReady

from . import operators

REGISTER_AGAIN_S = (
    1.0  # for a region in the place of one that is lost; the request goes over the wire where that takes longer
)
RETRY_FOR_S = 120.0  # longer than a service needs to replace a rank and load its weights again


class Service:
    """A connection that models use for their experts. Made by `connect`; `close` it when the models are done."""

    def __init__(self, transport: Any, *, gate: str, shared_memory_bytes: int = 0):
        self.transport, self.gate = transport, gate
        self.model = transport.model()
        """GetModelReply: what is served, and the limits of a request."""
        self.closed = False
        target = getattr(transport, "target", type(transport).__name__)
        self.name = operators.register(self, f"{target}, gate {gate}, checkpoint {self.model.fingerprint[:12]}")
        """By which compiled and exported graphs find it."""
        self._shared_memory_bytes = shared_memory_bytes
        self._held = ExitStack()  # the region's registration
        self._region: Any = None

    @property
    def max_tokens(self) -> int:
        """The most tokens of one request; longer batches become several."""
        row = self.model.hidden * 4 + self.model.top_k * 8  # float32 rows, int32 ids, float32 weights
        return max(1, min(self.model.max_tokens_per_request, self.model.max_message_bytes // row))

    def forward(
        self,
        layer: int,
        hidden_MK: torch.Tensor,
        ids_Mt: torch.Tensor | None = None,
        weights_Mt: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer for `(M, K)`; pieces of a batch above the limit are under way at the same time."""
        given = [value for value in (hidden_MK, ids_Mt, weights_Mt) if value is not None]
        if len(hidden_MK) <= self.max_tokens:
            return self._over_region(self.transport.forward, layer, given)
        pieces = list(zip(*(value.split(self.max_tokens) for value in given), strict=True))
        sent = [self._over_region(self.transport.forward_async, layer, piece) for piece in pieces]
        return torch.cat([self._result(future, layer, piece) for future, piece in zip(sent, pieces, strict=True)])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            operators.forget(self.name)
            if self in _open:
                _open.remove(self)
            self._held.close()
            self.transport.close()

    def __deepcopy__(self, memo: dict) -> Service:
        """Copies of a model share its service."""
        return self

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def register_region(self, timeout: float | None = None) -> None:
        """Make the shared memory known to the service; does nothing where there is none, or it is known. timeout: seconds,
        default: as long as a request is sent again."""
        if self._region is None and self._shared_memory_bytes:
            registration = self.transport.register_region(self._shared_memory_bytes, timeout=timeout)
            self._region = self._held.enter_context(registration)

    def _over_region(self, send: Callable[..., Any], layer: int, given: Sequence[torch.Tensor]) -> Any:
        """Through the shared memory; over the wire where there is none, it is full, or the service does not know it."""
        with suppress(EpserveError):  # a service that is just away: the request below waits for it
            self.register_region(REGISTER_AGAIN_S)
        if self._region is None:
            return send(layer, *given)
        try:
            return send(layer, *given, region=self._region)
        except (NotReady, InvalidRequest) as error:
            self._doubt_region(error)
        return send(layer, *given)

    def _result(self, future: Any, layer: int, given: Sequence[torch.Tensor]) -> torch.Tensor:
        try:
            return future.result()
        except (NotReady, InvalidRequest) as error:
            if self._region is None:
                raise
            self._doubt_region(error)
        return self.transport.forward(layer, *given)

    def _doubt_region(self, error: EpserveError) -> None:
        """A full region stays; after any other error the service may have restarted, and the next request registers anew."""
        if getattr(error, "field", "") != "region":
            self._region = None
            self._held.close()


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
    """Connect to a service at "host:port". Until it is closed, models loaded with "epserve" use it (the last one opened).

    target: an address, or an object with the methods of `epserve.client.Client`.
    options: token, TLS, priority, balance; its timeout and retries are replaced by `retry_for_s`.
    gate: "local": this process gates and computes shared experts. "remote": the service does both, and their weights are
    not loaded here either; for families whose block returns hidden states only.
    shared_memory_bytes: for a service on this host: tensors go through so much shared memory instead of messages.
    Raises EpserveError where the service cannot be reached.
    """
    if gate not in ("local", "remote"):
        raise ConfigError(f"gate must be 'local' or 'remote', got {gate!r}")
    if isinstance(target, str):
        given = options or ClientOptions()
        target = Client(target, replace(given, timeout_s=retry_for_s, retry=RetryPolicy()))  # until the deadline
    try:
        service = Service(target, gate=gate, shared_memory_bytes=shared_memory_bytes)
        service.register_region()
    except EpserveError:
        target.close()
        raise
    _open.append(service)
    return service


@contextmanager
def use(service: Service) -> Iterator[None]:
    """Within the block models are loaded for `service`, whichever others are open."""
    token = _loading.set(service)
    try:
        yield
    finally:
        _loading.reset(token)


def current() -> Service:
    """The service that a model which is loaded now belongs to. Raises ConfigError where none is open."""
    service = _loading.get() or (_open[-1] if _open else None)
    if service is None:
        raise ConfigError(
            "experts_implementation='epserve' needs a service: call epserve.transformers.connect(address) first"
        )
    return service
