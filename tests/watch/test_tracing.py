"""Traces from a client's call to the ranks' phases, with the real OpenTelemetry SDK and an exporter in memory."""

import asyncio
import logging
import socket
import subprocess
import sys
import time

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import StatusCode

from epserve.client import AsyncClient, Client
from epserve.errors import ConfigError, UnknownLayer
from epserve.process import tracing
from epserve.process.phases import PHASES
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_calls import Frames, connect, message
from tests.support.observed import WatchedEngine, record, watched

FORWARD = "epserve.v1.Experts/Forward"
CLOCK_NS = 1_000_000
unix_ns = tracing._unix_ns


class Collected:
    """A provider and what it has exported. `shutdown` is the server's business; the spans stay readable."""

    def __init__(self, **options):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self):
        return list(self.exporter.get_finished_spans())

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def one(self, name):
        (span,) = self.named(name)
        return span


@pytest.fixture(autouse=True)
def one_clock(monkeypatch):
    """Spans are placed by reading two clocks one after the other, and a starved machine does something else in between."""
    ahead = max(time.time_ns() - time.monotonic_ns() for _ in range(50))
    monkeypatch.setattr(tracing, "_unix_ns", lambda seconds: round(seconds * 1e9) + ahead)


def test_spans_are_placed_at_the_time_of_day():
    assert abs(max(unix_ns(time.monotonic()) - time.time_ns() for _ in range(50))) < CLOCK_NS


@pytest.fixture
def server_side():
    return Collected()


@pytest.fixture
def client_side(monkeypatch):
    """The application's own provider, which the client follows."""
    collected = Collected()
    monkeypatch.setattr(trace, "get_tracer", lambda *args: collected.provider.get_tracer("application"))
    return collected


def parent_of(span):
    return span.parent.span_id if span.parent is not None else None


async def test_one_trace_from_the_clients_call_to_the_ranks_phases(server_side, client_side):
    async with watched(provider=server_side.provider) as server, AsyncClient(server.address) as client:
        await client.forward(1, torch.ones(5, 32), request_id="mine")
    call, rpc, request = client_side.one("epserve.forward"), server_side.one(FORWARD), server_side.one("request")
    assert call.kind is trace.SpanKind.CLIENT
    assert rpc.kind is trace.SpanKind.SERVER
    assert {span.context.trace_id for span in (call, *server_side.spans)} == {call.context.trace_id}
    assert parent_of(rpc) == call.context.span_id
    assert parent_of(request) == rpc.context.span_id
    assert dict(request.attributes) == {
        "epserve.request": "mine", "epserve.layer": 1, "epserve.tokens": 5, "epserve.status": "OK"
    }  # fmt: skip
    for name in ("door", "queue", "step"):
        assert parent_of(server_side.one(name)) == request.context.span_id
    step = server_side.one("step")
    for rank in (0, 1):
        for number, phase in enumerate(PHASES, 1):
            span = server_side.one(f"rank {rank}: {phase}")
            assert parent_of(span) == step.context.span_id
            assert (span.end_time - span.start_time) / 1e6 == pytest.approx((rank + 1) * number, rel=1e-3)
    first = server_side.one("rank 0: check")
    assert first.start_time == pytest.approx(step.start_time, abs=CLOCK_NS)
    assert server_side.one("rank 0: copy in").start_time == pytest.approx(first.end_time, abs=CLOCK_NS)


async def test_times_of_the_parts_lie_inside_their_request(server_side):
    async def compute(batch):
        queued = record(seconds=0.02, waited=0.0)
        await asyncio.sleep(0.05)
        engine.tell_step(record(seconds=0.02, waited=0.01, traces=(batch.trace,), phases=queued.phases))
        return batch.hidden

    engine = FakeEngine(compute)
    async with watched(engine, provider=server_side.provider) as server, connect(server) as channel:
        await pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)))
    request, door, queue, step = map(server_side.one, ("request", "door", "queue", "step"))
    assert request.start_time <= door.start_time <= door.end_time <= queue.start_time + 1_000_000
    assert queue.end_time == pytest.approx(step.start_time, abs=CLOCK_NS)
    assert step.start_time < step.end_time <= request.end_time + 1_000_000
    assert (step.end_time - step.start_time) / 1e9 == pytest.approx(0.02, abs=1e-3)


async def test_the_blocking_client_and_its_threads_carry_the_callers_span(server_side, client_side):
    def call(address):
        with client_side.provider.get_tracer("app").start_as_current_span("outer"), Client(address) as client:
            client.forward(1, torch.ones(1, 32))
            client.forward_async(1, torch.ones(1, 32)).result(60)

    async with watched(provider=server_side.provider) as server:
        await asyncio.to_thread(call, server.address)
    outer = client_side.one("outer")
    calls = client_side.named("epserve.forward")
    assert len(calls) == 2
    assert {parent_of(span) for span in calls} == {outer.context.span_id}
    assert {parent_of(span) for span in server_side.named(FORWARD)} == {span.context.span_id for span in calls}


async def test_large_requests_go_by_stream_and_keep_their_trace(server_side, client_side):
    async with watched(provider=server_side.provider) as server, AsyncClient(server.address) as client:
        await client.forward(1, torch.ones(10_000, 32))  # 1.28 MB
    call, rpc = client_side.one("epserve.forward"), server_side.one("epserve.v1.Experts/ForwardStream")
    assert parent_of(rpc) == call.context.span_id
    assert parent_of(server_side.one("request")) == rpc.context.span_id


async def test_requests_of_one_stream_are_siblings(server_side):
    async with watched(provider=server_side.provider) as server, connect(server) as channel:
        frames = Frames(channel)
        for number in range(3):
            await frames.send(number, torch.ones(1, 32), request_id=f"r{number}")
        await frames.replies(3)
        await frames.call.done_writing()
        await frames.call.read()
    rpc = server_side.one("epserve.v1.Experts/ForwardStream")
    requests = server_side.named("request")
    assert {span.attributes["epserve.request"] for span in requests} == {"r0", "r1", "r2"}
    assert {parent_of(span) for span in requests} == {rpc.context.span_id}
    assert len(server_side.named("door")) == 3


async def test_a_failure_is_an_error_of_its_request_and_the_clients_call(server_side, client_side):
    async def fail(batch):
        raise ZeroDivisionError

    async with (
        watched(FakeEngine(fail), provider=server_side.provider) as server,
        AsyncClient(server.address) as client,
    ):
        with pytest.raises(Exception, match="internal error"):
            await client.forward(1, torch.ones(1, 32))
        with pytest.raises(UnknownLayer):
            await client.forward(99, torch.ones(1, 32))
    request = server_side.one("request")  # the unknown layer was refused before it was one
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes["epserve.status"] == "INTERNAL"
    assert all(span.status.status_code is StatusCode.ERROR for span in client_side.named("epserve.forward"))
    assert len(server_side.named(FORWARD)) == 2


async def test_a_call_that_is_begun_now_and_waited_for_later_is_the_servers_parent(server_side, client_side):
    def call(address):
        with Client(address) as client:
            client.begin(1, torch.ones(1, 32)).wait()
            client.begin(1, torch.ones(1, 32)).drop()

    async with watched(provider=server_side.provider) as server:
        await asyncio.to_thread(call, server.address)
    waited, dropped = client_side.named("epserve.forward")
    assert waited.context.span_id in {parent_of(span) for span in server_side.named(FORWARD)}
    assert dropped.end_time


def test_requests_that_share_a_step_link_to_the_one_that_has_the_ranks(server_side):
    traces = tracing.Tracing(server_side.provider)
    requests = [traces.request(request=f"r{number}") for number in range(3)]
    traces.step(record(traces=(None, *requests)))  # the first one is not traced
    steps = server_side.named("step")
    assert [parent_of(step) for step in steps] == [request.get_span_context().span_id for request in requests]
    assert [len(step.links) for step in steps] == [0, 1, 1]
    assert steps[1].links[0].context.span_id == steps[0].context.span_id
    ranks = [span for span in server_side.spans if span.name.startswith("rank")]
    assert len(ranks) == 2 * len(PHASES)
    assert {parent_of(span) for span in ranks} == {steps[0].context.span_id}
    assert steps[0].attributes["epserve.requests"] == 4


def test_of_many_ranks_the_slowest_are_told(server_side):
    traces = tracing.Tracing(server_side.provider)
    phases = [{"experts": 0.001 * (rank % 50)} for rank in range(100)]
    traces.step(record(tokens=(1,) * 100, traces=(traces.request(),), phases=phases))
    told = {span.attributes["epserve.rank"] for span in server_side.spans if span.name.startswith("rank")}
    assert told == {46, 47, 48, 49, 96, 97, 98, 99}


@pytest.mark.parametrize(
    ("header", "recorded"),
    [
        pytest.param("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True, id="the client records"),
        pytest.param("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", False, id="the client does not"),
        pytest.param("nonsense", False, id="broken: a trace of our own, which this sampler drops"),
    ],
)
async def test_the_clients_decision_is_followed(header, recorded):
    collected = Collected(sampler=ParentBased(ALWAYS_OFF))
    async with watched(provider=collected.provider) as server, connect(server) as channel:
        await pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)), metadata=(("traceparent", header),))
    assert bool(collected.spans) is recorded
    if recorded:
        assert collected.one(FORWARD).context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
        assert collected.one("step")


async def test_without_a_provider_nothing_is_traced_and_batches_carry_nothing():
    engine = WatchedEngine()
    async with watched(engine) as server, connect(server) as channel:
        await pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)))
    assert [batch.trace for batch in engine.seen] == [None]


def test_a_client_whose_application_has_no_opentelemetry_does_not_import_it():
    code = (
        "import sys\n"
        "from epserve.client import ClientOptions\n"
        "from epserve.process import tracing\n"
        "with tracing.client_call('x', {}): pass\n"
        "assert ClientOptions(token='t').metadata == (('authorization', 'Bearer t'),)\n"
        "assert 'opentelemetry' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_package_is_a_configuration_error_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp"):
        tracing.exporting("http://127.0.0.1:4317", 1.0)


def test_the_exporter_is_made_with_the_ratio():
    provider = tracing.exporting("http://127.0.0.1:9", 0.0)
    try:
        assert not provider.get_tracer("t").start_span("s").is_recording()
        assert provider.resource.attributes["service.name"] == "epserve"
    finally:
        provider.shutdown()


@pytest.mark.parametrize("listens", [False, True])
def test_a_collector_that_is_down_is_not_waited_for(monkeypatch, caplog, listens):
    """It took 10 to 30 s to stop: refused, as well as connected to somebody who never answers."""
    monkeypatch.setattr(tracing, "CLOSE_S", 0.3)
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if listens:
            collector.listen()
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}"
        provider = tracing.exporting(endpoint, 1.0)
        for _ in range(2000):  # several batches
            provider.get_tracer("t").start_span("s").end()
        start = time.monotonic()
        tracing.Tracing(provider).close()
        took = time.monotonic() - start
    assert took < 6
    assert f"{endpoint} (server.otlp_endpoint) took no spans for 0.3 s: the last ones are lost" in caplog.text
    assert "already shutdown" not in caplog.text and logging.getLogger("opentelemetry").level == logging.NOTSET
