"""OpenTelemetry traces, from a client's call to the phases on the ranks. Off without the packages or the configuration.

    epserve.forward                          the client's call, in its process (`traceparent` travels as gRPC metadata)
    └─ epserve.v1.Experts/Forward            the gRPC call on the server
       └─ request                            one call. A stream has many
          ├─ door                            checks and conversion
          ├─ queue                           admission to step, repeated for each step of a long request
          └─ step                            to all ranks and back, with links to the requests that share it
             └─ rank 0: experts              each phase on each rank: durations of the rank's clock, one after the other

OpenTelemetry is imported only in functions, since it is the extra `tracing`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from epserve import __version__
from epserve.errors import ConfigError

from . import proxies

log = logging.getLogger(__name__)

NAME = "epserve"
CLOSE_S = 2.0
"""How long a stopping server waits for its collector. OpenTelemetry's own wait is 30 s."""
MAX_TRACED_RANKS = 8
"""Most ranks that a step's span shows, the slowest first. A trace of 1,000 ranks is of no use to a reader."""
CARRIERS = ("traceparent", "tracestate")

Metadata = Sequence[tuple[str, str | bytes]]


# The client's side follows the application, which may or may not have set OpenTelemetry up.


class ClientSpan:
    """A span of the application's tracer for one call. Free for applications that do not import OpenTelemetry."""

    def __init__(self, name: str, attributes: Mapping[str, Any]):
        self._span: Any = None
        if "opentelemetry" in sys.modules:
            from opentelemetry import trace

            tracer = trace.get_tracer(NAME, __version__)
            self._span = tracer.start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the present span of a block. An error of the block is the span's."""
        if self._span is None:
            yield
            return
        from opentelemetry import trace

        with trace.use_span(self._span, end_on_exit=False):
            yield

    def end(self) -> None:
        if self._span is not None:
            self._span.end()


@contextmanager
def client_call(name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Opens a ClientSpan around a call."""
    span = ClientSpan(name, attributes)
    try:
        with span.current():
            yield
    finally:
        span.end()


def outgoing(metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Returns `metadata` with the present span's context."""
    if "opentelemetry" not in sys.modules:
        return metadata
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return (*metadata, *carrier.items())


# The server's side uses the provider that it is given, or none.


def exporting(endpoint: str, ratio: float) -> Any:
    """Returns a TracerProvider that sends to an OTLP/gRPC collector. Raises ConfigError when the packages are missing.

    `ratio` is the share of traces recorded among those that begin here. Traces of a client follow the client's choice.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint: {error.name} is not installed;"
            " pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
        ) from None
    resource = Resource.create({"service.name": NAME, "service.version": __version__})
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(ratio)))
    address = endpoint.partition("://")[2].partition("/")[0] or endpoint
    exporter = OTLPSpanExporter(
        endpoint=endpoint,
        insecure=not endpoint.startswith("https://"),
        channel_options=tuple(proxies.channel_options(address)),  # type: ignore[arg-type]  # of strings, it says
    )
    quiet = logging.getLogger("opentelemetry")

    class Bounded(BatchSpanProcessor):
        """Drops the last spans if the collector does not take them within CLOSE_S."""

        def shutdown(self) -> None:
            given_up = threading.Timer(CLOSE_S, give_up)
            given_up.daemon = True
            given_up.start()
            level = quiet.level
            super().shutdown()
            given_up.cancel()
            quiet.setLevel(level)

    def give_up() -> None:
        log.warning(
            "the trace collector %s (server.otlp_endpoint) took no spans for %g s: the last ones are lost",
            endpoint,
            CLOSE_S,
        )
        quiet.setLevel(logging.CRITICAL)  # it would tell of each batch
        exporter.shutdown()  # ends the call that is under way, and every later one at once

    provider.add_span_processor(Bounded(exporter))
    return provider


class Tracing:
    """Makes the spans of one server. With `provider` None every method returns at once."""

    def __init__(self, provider: Any = None):
        self._provider = provider
        self._tracer = provider.get_tracer(NAME, __version__) if provider is not None else None
        self.on = provider is not None

    def close(self) -> None:
        """Sends the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()

    @contextmanager
    def call(self, method: str, metadata: Metadata) -> Iterator[Any]:
        """Opens a span around a gRPC call on the server and yields it, or None."""
        if self._tracer is None:
            yield None
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {key: value for key, value in metadata if key in CARRIERS and isinstance(value, str)}
        parent = TraceContextTextMapPropagator().extract(carrier)
        attributes = {"rpc.system": "grpc", "rpc.method": method}
        with self._tracer.start_as_current_span(
            method, context=parent, kind=SpanKind.SERVER, attributes=attributes, record_exception=False
        ) as span:
            yield span

    def request(self, **attributes: Any) -> Any:
        """Returns a span under the present call's span, or None when the call is not recorded. End it with `ended`."""
        if self._tracer is None:
            return None
        span = self._tracer.start_span("request", attributes=_prefixed(attributes))
        return span if span.is_recording() else None

    def ended(self, span: Any, status: str) -> None:
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        span.set_attribute("epserve.status", status)
        if status != "OK":
            span.set_status(Status(StatusCode.ERROR, status))
        span.end()

    def part(
        self, parent: Any, name: str, start: float, end: float, links: Sequence[Any] = (), **attributes: Any
    ) -> Any:
        """Returns a finished span below `parent`, which may be a parent itself. Times are time.monotonic() seconds."""
        if parent is None or self._tracer is None:
            return None
        from opentelemetry.trace import Link, set_span_in_context

        began = _unix_ns(start)
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            start_time=began,
            links=[Link(other.get_span_context()) for other in links],
            attributes=_prefixed(attributes),
        )
        span.end(began + round((end - start) * 1e9))
        return span

    def step(self, record: Any) -> None:
        """Makes a StepRecord's queue, step and rank spans below each request. The first request's step has the ranks."""
        if self._tracer is None:
            return
        first = None
        for part in record.parts:
            if not hasattr(part.trace, "get_span_context"):
                continue  # not traced, or by the front end that sent it
            self.part(part.trace, "queue", part.queued, record.started)
            span = self.part(
                part.trace,
                "step",
                record.started,
                record.ended,
                links=[first] if first is not None else (),
                step=record.step,
                layer=record.layer,
                mode=record.mode,
                tokens=record.tokens,
                requests=len(record.parts),
            )
            if first is None:
                first = span
                self._ranks(span, record)

    def _ranks(self, parent: Any, record: Any) -> None:
        slowest = sorted(range(len(record.phases)), key=lambda rank: -sum(record.phases[rank].values()))
        for rank in sorted(slowest[:MAX_TRACED_RANKS]):
            start = record.started
            for phase, seconds in record.phases[rank].items():
                self.part(parent, f"rank {rank}: {phase}", start, start + seconds, rank=rank, phase=phase)
                start += seconds


def trace_id_of(span: Any) -> str:
    """Returns the trace id for log lines. Empty without a span."""
    return f"{span.get_span_context().trace_id:032x}" if span is not None else ""


def _prefixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"epserve.{name}": value for name, value in attributes.items()}


def _unix_ns(monotonic_s: float) -> int:
    """Converts anew for each span, since the system's clock may be set meanwhile."""
    return round(monotonic_s * 1e9) + time.time_ns() - time.monotonic_ns()
