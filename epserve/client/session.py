"""This module is an engine's connection to a service: what engines share, without any engine.

    with connect("10.0.0.5:50051") as session:
        calls = session.layer(3)                         # once a layer
        y = calls.forward(x, ids, weights)               # batches of any length
        with calls.begin(x, ids, weights, out=y) as sent:
            own_work()
            sent.wait()

A batch above the limit of one request becomes several, which are under way at the same time. A request that may succeed
later (the service restarts, a rank is replaced, a queue is full) is sent again until `retry_for_s` has passed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from epserve.errors import CallerError, EpserveError, InvalidRequest, NotReady, UnknownLayer

from . import autograd
from .checks import check_no_gradient, requires_gradient
from .clients import Client
from .lanes.ways import Given, LaneWays
from .options import ClientOptions, RetryPolicy
from .sending import Pending

log = logging.getLogger(__name__)

REGISTER_AGAIN_S = 1.0
"""The time in which lost shared memory is replaced. A request goes over the wire if that takes longer."""
RETRY_FOR_S = 120.0
"""The time for retries. It is longer than a service needs to replace a rank and load its weights again."""


def connect(
    target: Any, *, options: ClientOptions | None = None, retry_for_s: float = RETRY_FOR_S, shared_memory_bytes: int = 0
) -> Session:
    """Connects to a service at "host:port". Raises EpserveError when it cannot be reached.

    Args:
        target: an address, or an object with the methods of `epserve.client.Client`.
        options: token, TLS, priority, balance. `retry_for_s` replaces its timeout and retries.
        shared_memory_bytes: for a service on this host: tensors go through so much shared memory instead of messages.
    """
    if isinstance(target, str):
        given = options or ClientOptions()
        target = Client(target, replace(given, timeout_s=retry_for_s, retry=RetryPolicy()))  # until the deadline
    try:
        return Session(target, retry_for_s=retry_for_s, shared_memory_bytes=shared_memory_bytes)
    except EpserveError:
        target.close()
        raise


class Session:
    """A session is the connection of one process. Threads may share it."""

    def __init__(self, transport: Any, *, retry_for_s: float = RETRY_FOR_S, shared_memory_bytes: int = 0):
        self.transport = transport
        self.model = transport.model()
        """GetModelReply: the served model, and the limits of a request."""
        self.closed = False
        row = self.model.hidden * 4 + self.model.top_k * 8  # float32 rows, int32 ids, float32 weights
        self.max_tokens = max(1, min(self.model.max_tokens_per_request, self.model.max_message_bytes // row))
        """The most tokens of one request."""
        row += self.model.hidden * 4  # the gradients of results
        self.max_backward_tokens = max(1, min(self.model.max_tokens_per_request, self.model.max_message_bytes // row))
        self._ways = Ways(transport, retry_for_s, shared_memory_bytes, LaneWays(transport, self.max_tokens))
        self._layers = {number: LayerCalls(self, number) for number in self.model.layers}

    def layer(self, number: int) -> LayerCalls:
        """Returns the calls of one layer. Raises UnknownLayer."""
        found = self._layers.get(number)
        if found is None:
            served = ", ".join(map(str, self.model.layers))
            raise UnknownLayer(f"layer: {number} is not served; the layers are {served}", field="layer")
        return found

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._ways.close()
            self.transport.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class LayerCalls:
    """The calls of one layer. Arguments of `forward` and `begin`:

    hidden: (tokens, hidden size).
    ids, weights: (tokens, 1 to top_k), or neither where the service gates.
    out: a tensor like `hidden` that takes the result. By default a new one.
    num_valid: rows from here on are padding. They are not sent, and the result has zeros there. A batch without any valid
        row (a profile run, a warm-up, an idle data-parallel rank) makes no request at all.
    """

    def __init__(self, session: Session, number: int):
        self.session, self.number = session, number

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        num_valid: int | None = None,
    ) -> torch.Tensor:
        """Returns the layer's output. Raises the errors of `Client.forward`.

        When `hidden` or `weights` requires a gradient and torch records gradients, the output has one too.
        """
        if requires_gradient(hidden, weights):
            return self._recorded(hidden, ids, weights, out, num_valid)
        tokens = len(hidden)
        valid = _valid(tokens, num_valid)
        if out is not None or valid != tokens or not 0 < tokens <= self.session.max_tokens:
            with self.begin(hidden, ids, weights, out=out, num_valid=num_valid) as sent:
                return sent.wait()
        return self.session._ways.forward(self.number, (hidden, ids, weights))

    def backward(
        self,
        hidden: torch.Tensor,
        gradient: torch.Tensor,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the gradients of `hidden` and `weights`, in their dtypes, from the `gradient` of the layer's output.

        Rows with values that are not finite come as they are. Raises the errors of `Client.backward`.
        """
        parts, most = [], self.session.max_backward_tokens

        def part(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor | None) -> Any:
            rows = slice(first, first + most)
            return self.session._ways.backward(self.number, (x, g, None if ids is None else ids[rows], w))

        for first in range(0, max(len(hidden), 1), most):
            x, g, w = (None if each is None else each[first : first + most] for each in (hidden, gradient, weights))
            assert x is not None
            assert g is not None
            parts.append(autograd.gradients(part, x, g, w))
        if len(parts) == 1:
            return parts[0]
        rows, of_weights = zip(*parts, strict=True)
        return torch.cat(rows), None if weights is None else torch.cat(of_weights)

    def _recorded(self, hidden: Any, ids: Any, weights: Any, out: Any, num_valid: int | None) -> torch.Tensor:
        if out is not None or num_valid is not None:
            field = "out" if out is not None else "num_valid"
            text = f"{field}: has no gradient beside hidden or weights that require one; leave it out, or use torch.no_grad()"
            raise InvalidRequest(text, field=field)
        return autograd.recorded(
            lambda x, w: self.forward(x, ids, w), lambda x, g, w: self.backward(x, g, ids, w), hidden, weights
        )

    def begin(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        num_valid: int | None = None,
    ) -> Begun:
        """Sends the batch from this thread and returns at once. Tensors that require a gradient are refused."""
        check_no_gradient(hidden, "hidden_states")
        check_no_gradient(weights, "topk_weights")
        if out is not None and (out.shape, out.dtype, out.device) != (hidden.shape, hidden.dtype, hidden.device):
            text = f"out: {tuple(out.shape)} {out.dtype} on {out.device}, must be like hidden, {tuple(hidden.shape)}"
            raise InvalidRequest(f"{text} {hidden.dtype} on {hidden.device}", field="out")
        for name, value in (("topk_ids", ids), ("topk_weights", weights)):
            if value is not None and len(value) != len(hidden):
                raise InvalidRequest(f"{name}: {len(value)} rows, hidden_states has {len(hidden)}", field=name)
        begun = Begun(self.session._ways, like=hidden, out=out)
        valid, most = _valid(len(hidden), num_valid), self.session.max_tokens
        try:
            for first in range(0, valid, most):
                rows = slice(first, min(first + most, valid))
                given = tuple(None if value is None else value[rows] for value in (hidden, ids, weights))
                begun.add(self.number, rows, given)
        except BaseException:
            begun.drop()
            raise
        return begun


def _valid(tokens: int, num_valid: int | None) -> int:
    if num_valid is not None and not 0 <= num_valid <= tokens:
        raise InvalidRequest(f"num_valid: {num_valid}, must be 0 to {tokens}, the rows of hidden", field="num_valid")
    return tokens if num_valid is None else num_valid


class Begun:
    """A batch that is under way. `wait` returns its result, once. Leaving a `with` block without it gives the batch up."""

    def __init__(self, ways: Ways, *, like: torch.Tensor, out: torch.Tensor | None):
        self._ways, self._like, self._out = ways, like, out
        self._pieces: list[tuple[slice, Sent]] = []
        self._over = False

    def add(self, layer: int, rows: slice, given: Given) -> None:
        self._pieces.append((rows, self._ways.begin(layer, given)))

    def wait(self) -> torch.Tensor:
        """Returns the result, `out` where that was given. Raises the errors of `Client.forward`."""
        if self._over:
            raise CallerError("this batch has been waited for or given up; begin another one")
        out = self._out
        try:
            if out is None and len(self._pieces) == 1 and self._pieces[0][0] == slice(0, len(self._like)):
                return self._ways.result(self._pieces[0][1])
            if out is None:
                out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
            done = 0
            for rows, sent in self._pieces:
                out[rows].copy_(self._ways.result(sent))
                done = rows.stop
            out[done:].zero_()
            return out
        finally:
            self.drop()

    def drop(self) -> None:
        self._over = True
        pieces, self._pieces = self._pieces, []
        for _, sent in pieces:
            sent.pending.drop()

    def __enter__(self) -> Begun:
        return self

    def __exit__(self, *_) -> None:
        self.drop()


@dataclass(frozen=True, slots=True)
class Sent:
    """Holds one request in flight, with its inputs for another way to send it. `region`: the memory it goes through."""

    pending: Pending
    layer: int
    given: Given
    region: Any
    deadline: float


class Ways:
    """The ways of a session's requests: a lane to a service on this host, shared memory where the session has some, and
    the wire, which is always there.

    This is the only place that chooses. Shared memory that is full serves later requests, and one that the service has
    forgotten is registered anew: the request at hand goes over the wire.
    """

    def __init__(self, transport: Any, retry_for_s: float, shared_memory_bytes: int, lane: LaneWays):
        self._transport, self._retry_for_s, self._bytes = transport, retry_for_s, shared_memory_bytes
        self._lane = lane
        self._lock = threading.Lock()
        self._held = ExitStack()  # the region's registration
        self._region: Any = None
        if shared_memory_bytes:
            self._register(retry_for_s)

    def forward(self, layer: int, given: Given) -> torch.Tensor:
        """One request, in this thread. Over the wire that is quicker than to begin and wait."""
        if (result := self._lane.forward(layer, given)) is not None:
            return result
        return self._call(partial(self._transport.forward, layer, *given))

    def backward(self, layer: int, given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One request. given: hidden states, gradients of results, ids and weights."""
        return self._call(partial(self._transport.backward, layer, *given, not_finite_rows=[]))

    def _call(self, call: Callable[..., Any]) -> Any:
        region, deadline = self._known_region(), time.monotonic() + self._retry_for_s
        if region is None:
            return call()
        try:
            return call(region=region)
        except (NotReady, InvalidRequest) as error:
            return self._over_wire(error, region, call, deadline)

    def begin(self, layer: int, given: Given) -> Sent:
        region, deadline = self._known_region(), time.monotonic() + self._retry_for_s
        if region is not None:
            try:
                return Sent(self._transport.begin(layer, *given, region=region), layer, given, region, deadline)
            except (NotReady, InvalidRequest) as error:
                self._doubt(error, region)
        return Sent(self._transport.begin(layer, *given), layer, given, None, deadline)

    def result(self, sent: Sent) -> torch.Tensor:
        try:
            return sent.pending.wait()
        except (NotReady, InvalidRequest) as error:
            again = partial(self._transport.forward, sent.layer, *sent.given)
            return self._over_wire(error, sent.region, again, sent.deadline)

    def close(self) -> None:
        self._lane.close()
        with self._lock:
            self._region, self._bytes = None, 0
            self._held.close()

    def _over_wire(self, error: EpserveError, region: Any, call: Callable[..., Any], deadline: float) -> Any:
        """Sends a request again that has failed in shared memory. Raises its error when no time is left for that."""
        left = deadline - time.monotonic()
        if region is None or left <= 0:
            raise error
        self._doubt(error, region)
        return call(timeout=left)

    def _known_region(self) -> Any:
        if self._region is None and self._bytes:
            with suppress(EpserveError):  # a service that is just away: the request waits for it
                self._register(REGISTER_AGAIN_S)
        return self._region

    def _register(self, timeout_s: float) -> None:
        with self._lock:
            if self._region is None and self._bytes:
                registration = self._transport.register_region(self._bytes, timeout=timeout_s)
                self._region = self._held.enter_context(registration)

    def _doubt(self, error: EpserveError, region: Any) -> None:
        """A full region stays. After any other error the service may have restarted, and the next request registers."""
        if getattr(error, "field", "") == "region":
            return
        with self._lock:
            if self._region is region:
                self._region = None
                self._held.close()
