"""OpenTelemetry traces, from a client's call to the phases on the ranks. Without the packages, or unconfigured: nothing.

    epserve.forward                          the client's call, in its process (`traceparent` travels as gRPC metadata)
    └─ epserve.v1.Experts/Forward            the gRPC call on the server
       └─ request                            one call of it; a stream has many
          ├─ door                            checks and conversion
          ├─ queue                           admission to step; again for each step that a long request takes
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
"""A step's span tells of so many ranks, the slowest first: a trace of 1,000 ranks is of no use to a reader."""
CARRIERS = ("traceparent", "tracestate")

Metadata = Sequence[tuple[str, str | bytes]]


# The client's side: follows the application, which has or has not set OpenTelemetry up.


@contextmanager
def client_call(name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
    """A span of the application's own tracer around a call. Free for applications that do not import OpenTelemetry."""
    if "opentelemetry" not in sys.modules:
        yield
        return
    from opentelemetry import trace

    with trace.get_tracer(NAME, __version__).start_as_current_span(
        name, kind=trace.SpanKind.CLIENT, attributes=attributes
    ):
        yield


def outgoing(metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """`metadata` with the present span's context."""
    if "opentelemetry" not in sys.modules:
        return metadata
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return (*metadata, *carrier.items())


# The server's side: a provider that is handed over, or none.


def exporting(endpoint: str, ratio: float) -> Any:
    """A TracerProvider that sends to an OTLP/gRPC collector. Raises ConfigError where the packages are missing.

    ratio: of the traces that begin here; those that a client began follow the client's choice.
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
        """Gives the last spans up where the collector does not take them within CLOSE_S."""

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
    """Spans of one server. With `provider` None every method returns at once."""

    def __init__(self, provider: Any = None):
        self._provider = provider
        self._tracer = provider.get_tracer(NAME, __version__) if provider is not None else None
        self.on = provider is not None

    def close(self) -> None:
        """Sends what is left."""
        if self._provider is not None:
            self._provider.shutdown()

    @contextmanager
    def call(self, method: str, metadata: Metadata) -> Iterator[Any]:
        """Around a gRPC call on the server; yields its span, or None."""
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
        """A span under the present call's, or None where nobody records it. End it with `ended`."""
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
        """A finished span below `parent`; times are time.monotonic() seconds. Returns it, so that others can be below it."""
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
        """A StepRecord's queue, step and rank spans below each of its requests. The first request's step has the ranks."""
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
    """For log lines; empty without a span."""
    return f"{span.get_span_context().trace_id:032x}" if span is not None else ""


def _prefixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"epserve.{name}": value for name, value in attributes.items()}


def _unix_ns(monotonic_s: float) -> int:
    """Anew for each span: the system's clock may be set meanwhile."""
    return round(monotonic_s * 1e9) + time.time_ns() - time.monotonic_ns()
