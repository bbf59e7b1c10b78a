"""Makes the Prometheus metrics, with every name and label. Dashboards and alert rules under deploy/ use them.

The number of series is bounded: experts are grouped so that at most `max_expert_series` remain, and nothing is labelled by
client, request, layer and rank together. The engine's own counts are read at scrape time from its last status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epserve import __version__

from .load import Layout, hottest

STATES = ("starting", "serving", "recovering", "resizing", "draining", "stopped", "disconnected")
COUNTED = (
    "generation", "queue_tokens", "steps", "recoveries", "replayed_requests", "spares", "rebalances", "rebalances_skipped",
    "front_ends",
)  # fmt: skip
"""Counters of the engine's status, under the same names."""
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
PHASE_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Holds one service's metrics in a registry of their own. Methods cost microseconds. `status` is replaced each second."""

    def __init__(self, *, model: str, family: str, max_expert_series: int):
        disable_created_metrics()  # otherwise each counter and histogram has a second series with its start time
        self.registry = CollectorRegistry(auto_describe=True)
        self.status: Any = None
        """The engine's last EngineStatus."""
        self.hot: list[dict[str, Any]] = []
        self.imbalance: float | None = None
        self.rank_expert_tokens: dict[int, float] = {}
        self._counted: np.ndarray | None = None
        self.rank_phases: dict[tuple[int, str], float] = {}
        self.max_expert_series = max_expert_series
        make: Any = {"registry": self.registry}
        info = Gauge("epserve_info", "What runs; always 1.", ("version", "model", "family"), **make)
        info.labels(__version__, model, family).set(1)
        self._requests = Counter(
            "epserve_requests", "Requests that passed the door, by how they ended.", ("status",), **make
        )
        self._errors = Counter(
            "epserve_errors", "Failures that callers were told, at the door too, by gRPC status.", ("status",), **make
        )
        self._rpcs = Counter("epserve_rpcs", "gRPC calls that ended; a stream is one.", ("method", "code"), **make)
        self._request_seconds = Histogram(
            "epserve_request_seconds", "From a complete request to its encoded reply.", buckets=STEP_SECONDS, **make
        )
        self._request_tokens = Histogram("epserve_request_tokens", "Tokens of a request.", buckets=TOKENS, **make)
        self._received = Counter("epserve_received_bytes", "Tensor bytes of accepted requests.", **make)
        self._sent = Counter("epserve_sent_bytes", "Tensor bytes of replies.", **make)
        self._queue_seconds = Histogram(
            "epserve_queue_seconds", "From a request's admission to its step.", buckets=STEP_SECONDS, **make
        )
        self._step_seconds = Histogram(
            "epserve_step_seconds", "One step: to all ranks, through the layer, and back.", buckets=STEP_SECONDS, **make
        )
        self._step_tokens = Histogram("epserve_step_tokens", "Tokens of a step, all ranks.", buckets=TOKENS, **make)
        self._step_requests = Histogram(
            "epserve_step_requests", "Requests that share a step.", buckets=REQUESTS, **make
        )
        self._phase_seconds = Histogram(
            "epserve_phase_seconds", "A phase of a step on its slowest rank.", ("phase",), buckets=PHASE_SECONDS, **make
        )
        self.calls_in_flight = Gauge(
            "epserve_calls_in_flight", "Requests on their way here, here, or with a reply that is not sent.", **make
        )
        self.buffered_bytes = Gauge("epserve_buffered_bytes", "Bytes of those requests and of their replies.", **make)
        self.lanes: Callable[[], Any] | None = None
        """What lanes have done (`pb.Lanes`)."""
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        ProcessCollector(registry=self.registry)
        self.registry.register(_StatusCollector(self))

    def request(self, status: str, seconds: float, *, tokens: int, received: int, sent: int) -> None:
        self._child(self._requests, status).inc()
        self._request_seconds.observe(seconds)
        self._request_tokens.observe(tokens)
        self._received.inc(received)
        self._sent.inc(sent)

    def _child(self, metric: Any, *labels: str) -> Any:
        """Returns the child of these labels from a cache: `labels()` takes 10 us. The pairs of method and code are few."""
        key = metric, labels
        if key not in self._children:
            self._children[key] = metric.labels(*labels)
        return self._children[key]

    def error(self, status: str) -> None:
        self._errors.labels(status).inc()

    def rpc(self, method: str, code: str) -> None:
        """Counts a call. `method` must be a method of the server, so that callers cannot make series."""
        self._child(self._rpcs, method, code).inc()

    def step(self, record: Any) -> None:
        """Counts a step by its StepRecord."""
        self._step_seconds.observe(record.seconds)
        self._step_tokens.observe(record.tokens)
        self._step_requests.observe(len(record.parts))
        for part in record.parts:
            self._queue_seconds.observe(max(record.started - part.queued, 0.0))
        slowest: dict[str, float] = {}
        for rank, phases in enumerate(record.phases):
            for phase, seconds in phases.items():
                slowest[phase] = max(slowest.get(phase, 0.0), seconds)
                self.rank_phases[rank, phase] = self.rank_phases.get((rank, phase), 0.0) + seconds
        for phase, seconds in slowest.items():
            self._phase_seconds.labels(phase).observe(seconds)

    def take(self, status: Any, layout: Layout | None, recent: np.ndarray) -> None:
        """Takes the engine's status, the places of experts, and `(layers, experts)` tokens of the last minute, each second."""
        counted = np.array(list(status.expert_tokens.values()), dtype=np.int64)
        self.status = status
        if layout is None or len(counted) != len(layout.layers):
            return
        # Only the tokens since the last second follow the new placement: experts may move, and a rank keeps its counts.
        before = self._counted if self._counted is not None else np.zeros_like(counted)
        for rank, tokens in enumerate(layout.rank_loads(np.maximum(counted - before, 0)).tolist()):
            self.rank_expert_tokens[rank] = self.rank_expert_tokens.get(rank, 0.0) + tokens
        self._counted = counted
        loads = layout.rank_loads(recent)
        self.imbalance = float(loads.max() / loads.mean()) if loads.sum() else None
        self.hot = list(hottest(layout, recent))


class _StatusCollector(Collector):
    """Collects the engine's own counts."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return list(_families().values())

    def collect(self) -> Iterator[Metric]:
        families, status = _families(), self._metrics.status
        if status is not None:
            _fill(families, status)
            for (rank, phase), seconds in sorted(self._metrics.rank_phases.items()):
                families["rank_phase_seconds"].add_metric([str(rank), phase], seconds)
            _fill_experts(families, self._metrics)
        if self._metrics.lanes is not None:
            lanes = self._metrics.lanes()
            families["lanes"].add_metric([], lanes.open)
            families["lanes_polling_share"].add_metric([], lanes.polling_share)
            families["lanes_on_gpu"].add_metric([], lanes.on_gpu)
            families["lanes_gpu_polling_share"].add_metric([], lanes.gpu_polling_share)
            for name in ("calls", "joined", "refused", "waited"):
                families["lane_calls" if name == "calls" else f"lane_calls_{name}"].add_metric([], getattr(lanes, name))
        yield from families.values()


def _families() -> dict[str, Any]:
    """Returns name without prefix -> empty family."""
    gauges = {
        "state": ("1 for the state that the service is in.", ("state",)),
        "generation": ("Of the ranks' process group; one more after each recovery.", ()),
        "queue_tokens": ("Tokens that are accepted and not answered.", ()),
        "spares": ("Ranks that wait, loaded, to replace a lost one.", ()),
        "front_ends": ("Other front ends that bring requests to this one, which orders the steps.", ()),
        "rank_up": ("1 while the rank's process answers.", ("rank",)),
        "rank_weights_bytes": ("Bytes of the experts that a rank holds.", ("rank",)),
        "rank_load_imbalance": ("Busiest rank's expert tokens over the mean rank's, last minute.", ()),
        "hot_expert_id": ("Logical expert with the n-th most tokens in the last minute, all layers.", ("place",)),
        "lanes": ("Lanes that clients have open.", ()),
        "lanes_polling_share": ("Processor time of the thread that serves lanes over the time; 1 is one core.", ()),
        "lanes_on_gpu": ("Of the lanes: their rows lie on a GPU.", ()),
        "lanes_gpu_polling_share": ("Likewise, of the rank's thread that serves those.", ()),
        "hot_expert_load": ("Its tokens over the mean expert's.", ("place",)),
    }
    counters = {
        "steps": ("Steps that all ranks finished.", ()),
        "recoveries": ("Times that ranks were rebuilt.", ()),
        "replayed_requests": ("Requests that ran again after a rank failed.", ()),
        "rebalances": ("Times that experts moved to balance the load.", ()),
        "rebalances_skipped": ("Layers that then stayed as they were for want of memory.", ()),
        "rank_tokens": ("Tokens that a rank was home to.", ("rank",)),
        "rank_expert_tokens": ("Tokens that a rank's experts got, one for each of a token's experts.", ("rank",)),
        "rank_phase_seconds": ("Seconds of a rank in each phase of its steps.", ("rank", "phase")),
        "rank_network_bytes": ("Bytes that a rank sent to ranks of other hosts.", ("rank",)),
        "expert_tokens": ("Tokens of an expert or a range of experts (logical ids), all layers.", ("expert",)),
        "lane_calls": ("Calls that came through lanes.", ()),
        "lane_calls_joined": ("Of those: they shared a step with others.", ()),
        "lane_calls_refused": ("Of those: they were refused, or failed.", ()),
        "lane_calls_waited": ("Of those: they went through the queue, since the ranks were not free.", ()),
        "triton_late_compiles": ("Kernels compiled after warm-up, on the request path.", ("rank",)),
    }
    made: dict[str, Any] = {}
    for name, (about, labels) in gauges.items():
        made[name] = GaugeMetricFamily(f"epserve_{name}", about, labels=labels)
    for name, (about, labels) in counters.items():
        made[name] = CounterMetricFamily(f"epserve_{name}", about, labels=labels)
    return made


def _fill(families: Mapping[str, Any], status: Any) -> None:
    for state in STATES:
        families["state"].add_metric([state], float(status.state == state))
    for name in COUNTED:
        families[name].add_metric([], getattr(status, name))
    for rank in status.ranks:
        label = [str(rank.rank)]
        families["rank_up"].add_metric(label, float(rank.alive))
        families["rank_tokens"].add_metric(label, rank.tokens_done)
        families["rank_weights_bytes"].add_metric(label, rank.weights_bytes)
        families["triton_late_compiles"].add_metric(label, rank.late_compiles)
        families["rank_network_bytes"].add_metric(label, getattr(rank, "network_bytes", 0))


def _fill_experts(families: Mapping[str, Any], metrics: Metrics) -> None:
    for rank, tokens in sorted(metrics.rank_expert_tokens.items()):
        families["rank_expert_tokens"].add_metric([str(rank)], tokens)
    totals = np.array(list(metrics.status.expert_tokens.values()), dtype=np.int64)
    per_expert = totals.sum(axis=0) if totals.ndim == 2 else np.zeros(0)
    for label, members in expert_groups(len(per_expert), metrics.max_expert_series):
        families["expert_tokens"].add_metric([label], float(per_expert[members].sum()))
    if metrics.imbalance is not None:
        families["rank_load_imbalance"].add_metric([], metrics.imbalance)
    for place, each in enumerate(metrics.hot, start=1):
        families["hot_expert_id"].add_metric([str(place)], each["expert"])
        families["hot_expert_load"].add_metric([str(place)], each["percent"] / 100)


def expert_groups(num_experts: int, limit: int) -> Iterator[tuple[str, slice]]:
    """Yields at most `limit` groups of neighbours: ("7", 7..7) for each expert if they fit, otherwise ("8-11", 8..11)."""
    width = max(1, -(-num_experts // limit))
    for start in range(0, num_experts, width):
        stop = min(start + width, num_experts)
        yield (str(start) if width == 1 else f"{start}-{stop - 1}"), slice(start, stop)
