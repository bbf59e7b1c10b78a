"""Passes the events of one server on to metrics, the last minutes, traces and the log context.

All methods run in the server's event loop. Any thread may call `snapshot()`: the values that it reads are replaced, never
changed.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from epserve import __version__
from epserve.engine.face import EngineFace
from epserve.process import logs, tracing
from epserve.process.tracing import Tracing

from .history import History, Percentiles
from .layer_counts import LayerCounts, Spent
from .load import Layout, heat, hottest
from .metrics import Metrics

if TYPE_CHECKING:
    from epserve.engine.records import StepRecord

log = logging.getLogger("epserve.server")

SAMPLE_S = 1.0
RATES = ("tokens", "requests", "errors", "steps")


class Watch:
    """Watches one request, from its accepted header to its end. `trace` goes with its Batch."""

    def __init__(self, observer: Observer, span: Any, layer: int, tokens: int, received: int):
        self._observer, self.trace = observer, span
        self._layer, self._tokens, self._received = layer, tokens, received
        self._start = time.monotonic()
        self.sent = 0
        """The bytes of the reply, once there is one."""
        self.spent: Spent | None = None
        """Where the time went, once the reply is made."""

    def decoded(self) -> None:
        """Marks the end of the door's work."""
        self._observer.tracing.part(self.trace, "door", self._start, time.monotonic())

    def ended(self, status: str) -> None:
        seconds = time.monotonic() - self._start
        observer = self._observer
        observer.metrics.request(status, seconds, tokens=self._tokens, received=self._received, sent=self.sent)
        observer.layers.request(self._layer, tokens=self._tokens, seconds=seconds, spent=self.spent)
        if status == "OK":
            observer.history.request(seconds)
        observer.tracing.ended(self.trace, status)


class Observer:
    """Observes one server: `start()` once the server's loop runs, `stop()` at its end."""

    def __init__(self, engine: EngineFace, *, max_expert_series: int = 64, provider: Any = None):
        self._engine = engine
        info = engine.info
        self.metrics = Metrics(model=info.name, family=info.family, max_expert_series=max_expert_series)
        self.history = History()
        self.layers = LayerCounts()
        self.tracing = Tracing(provider)
        self.started = time.monotonic()
        self._seen: tuple[Any, np.ndarray, Any] | None = None
        self._described: tuple[Any, dict[str, Any]] = (None, {"state": "starting"})
        self._slots: dict[int, list[int]] = {}
        self._layout: Layout | None = None
        self._sampling: asyncio.Task[None] | None = None
        engine.on_step(self._step)

    def start(self, calls: Any) -> None:
        """Starts. `calls`: the Calls whose calls in flight and bytes are watched."""
        self.metrics.calls_in_flight.set_function(lambda: calls.in_flight)
        self.metrics.buffered_bytes.set_function(lambda: calls.buffered_bytes)
        self._sampling = asyncio.create_task(self._sample_always(calls))

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await asyncio.to_thread(self.tracing.close)

    def request(self, request_id: str, *, layer: int, tokens: int, received: int) -> Watch:
        """Begins to watch a request. It must run in the task that serves the request: its log lines then carry the id."""
        span = self.tracing.request(request=request_id, layer=layer, tokens=tokens)
        logs.request_id.set(request_id)
        logs.trace_id.set(tracing.trace_id_of(span))
        return Watch(self, span, layer, tokens, received)

    def error(self, code: str) -> None:
        """Counts a failure that a caller is told."""
        self.metrics.error(code)
        self.history.error()

    def snapshot(self) -> dict[str, Any]:
        """Returns the contents of the status page, at most a second old and ready for JSON. It costs milliseconds."""
        seen = self._seen
        if seen is not None and seen is not self._described[0]:
            self._described = seen, self._describe(*seen)
        return self._described[1]

    def interceptor(self) -> grpc.aio.ServerInterceptor:
        return _Interceptor(self)

    def _step(self, record: StepRecord) -> None:
        self.metrics.step(record)
        self.history.step(record.tokens)
        self.layers.step(record.layer)
        self.tracing.step(record)

    async def _sample_always(self, calls: Any) -> None:
        last = time.monotonic()
        while True:
            try:
                now = time.monotonic()
                self.sample(calls, max(now - last, 1e-3))
                last = now
            except Exception:  # a defect here must not end the service, but it must be seen
                log.exception("cannot sample the service's state")
            await asyncio.sleep(SAMPLE_S)

    def sample(self, calls: Any, seconds: float = SAMPLE_S) -> None:
        status, history, layout = self._engine.status(), self.history, self._layout
        history.sample(time.time(), seconds, queue_tokens=status.queue_tokens, load=status.expert_tokens)
        self._layout = layout = Layout.of(status) or layout
        recent = history.recent_load()
        self.metrics.take(status, layout, recent)
        self._slots = _slots(status.ranks, layout, recent)
        self._seen = status, recent, calls

    def latency(self) -> Percentiles:
        """Returns the percentiles of the last minute."""
        return self.history.latency()

    def rates(self) -> dict[str, float]:
        """Returns rates per second, as means of the last ten seconds."""
        return {name: round(self.history.rate(name), 3) for name in RATES}

    def recent_slots(self, rank: int) -> list[int]:
        """Returns the tokens of each of a rank's slots in the last minute, over all layers."""
        return self._slots.get(rank, [])

    def phases_of(self, rank: int) -> dict[str, float]:
        """Returns the seconds of a rank's steps since the start, by phase."""
        spent = list(self.metrics.rank_phases.items())  # a copy, since the loop may add to it meanwhile
        return {phase: seconds for (each, phase), seconds in spent if each == rank}

    def _describe(self, status: Any, recent: np.ndarray, calls: Any) -> dict[str, Any]:
        info, latency = self._engine.info, self.latency()
        ranks = [
            {
                "rank": rank.rank,
                "node": rank.node,
                "pid": rank.pid,
                "device": rank.device,
                "gpu": rank.gpu_uuid,
                "alive": rank.alive,
                "phase": rank.phase,
                "tokens": rank.tokens_done,
                "weights_bytes": rank.weights_bytes,
                "late_compiles": rank.late_compiles,
                "experts": list(rank.experts),
                "load": self.recent_slots(rank.rank),
                "phases": {phase: round(seconds, 6) for phase, seconds in self.phases_of(rank.rank).items()},
            }
            for rank in status.ranks
        ]
        return {
            "state": status.state,
            "version": __version__,
            "uptime_s": round(time.monotonic() - self.started, 1),
            "model": {"name": info.name, "family": info.family, "experts": info.num_experts, "top_k": info.top_k},
            "generation": status.generation,
            "recoveries": status.recoveries,
            "replayed_requests": status.replayed_requests,
            "steps": status.steps,
            "backends": status.backends,
            "queue_tokens": status.queue_tokens,
            "calls_in_flight": calls.in_flight,
            "buffered_bytes": calls.buffered_bytes,
            "rates": self.rates(),
            "latency": {name: round(value, 3) for name, value in asdict(latency).items()},
            "ranks": ranks,
            "heat": heat(self._layout, recent),
            "hot": list(hottest(self._layout, recent)),
            "series": self.history.series(),
        }


def _slots(ranks: Any, layout: Layout | None, recent: np.ndarray) -> dict[int, list[int]]:
    """Returns rank -> load of each of its slots, over all layers. It is empty while the ranks are not up."""
    if layout is None or len(layout.bounds) != len(ranks) + 1 or len(recent) != len(layout.layers):
        return {}
    per_slot = [round(load) for load in layout.slot_loads(recent).sum(axis=0).tolist()]
    return {
        rank.rank: per_slot[low:high]
        for rank, (low, high) in zip(ranks, itertools.pairwise(layout.bounds), strict=True)
    }


class _Interceptor(grpc.aio.ServerInterceptor):
    """Counts every call that ends, and opens its span. It must be the first interceptor, to see calls that others refuse."""

    def __init__(self, observer: Observer):
        self._observer = observer
        self._made: dict[str, tuple[Any, Any]] = {}
        """Method -> its handler and the watched one, made once instead of for each call."""

    async def intercept_service(self, continuation, handler_call_details):
        handler = await continuation(handler_call_details)
        if handler is None:  # the method does not exist, and its name must not become a label
            self._observer.metrics.rpc("unknown", "UNIMPLEMENTED")
            return handler
        method = handler_call_details.method
        known = self._made.get(method)
        if known is None or known[0] is not handler:
            around = self._around(handler, method.lstrip("/"))
            if handler.request_deserializer is None:  # this handler is a refusal, made for this call
                return around
            known = self._made[method] = handler, around
        return known[1]

    def _around(self, handler: Any, method: str) -> Any:
        behaviour, kind = _behaviour(handler)
        watched: Any
        if inspect.iscoroutinefunction(behaviour):

            async def watched(request, context):
                with self._watching(method, context):
                    return await behaviour(request, context)

        elif inspect.isasyncgenfunction(behaviour):

            async def watched(request, context):
                with self._watching(method, context):
                    async for reply in behaviour(request, context):
                        yield reply

        else:
            return handler
        return kind(
            watched,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @contextmanager
    def _watching(self, method: str, context: Any) -> Iterator[None]:
        code = "UNKNOWN"
        metadata = (context.invocation_metadata() or ()) if self._observer.tracing.on else ()
        with self._observer.tracing.call(method, metadata):
            try:
                yield
                code = _code(context) or "OK"
            except (asyncio.CancelledError, GeneratorExit):
                code = "CANCELLED"
                raise
            except Exception:
                code = _code(context) or "UNKNOWN"
                raise
            finally:
                self._observer.metrics.rpc(method, code)
                if code not in ("OK", "CANCELLED"):
                    self._observer.error(code)


def _code(context: Any) -> str:
    """Returns the name of the status that was set so far. Empty: none was. grpc.aio keeps its number."""
    code = context.code()
    name = _CODES.get(code, "") if isinstance(code, int) else getattr(code, "name", "")
    return "" if name == "OK" else name


_CODES = {code.value[0]: code.name for code in grpc.StatusCode}  # type: ignore[index]


def _behaviour(handler: Any) -> tuple[Any, Any]:
    """Returns the handler's function and the maker of a handler of its kind."""
    kinds = (
        ("stream_stream", grpc.stream_stream_rpc_method_handler),
        ("stream_unary", grpc.stream_unary_rpc_method_handler),
        ("unary_stream", grpc.unary_stream_rpc_method_handler),
        ("unary_unary", grpc.unary_unary_rpc_method_handler),
    )
    return next((found, kind) for name, kind in kinds if (found := getattr(handler, name)) is not None)
