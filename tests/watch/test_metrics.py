"""Metrics: what is counted, under which names, with how many series; dashboards that fit."""

import asyncio
import json
import re
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from epserve.errors import Overloaded, RankFailed
from epserve.process.phases import PHASES
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.server.watch.load import Layout
from epserve.server.watch.metrics import Metrics, expert_groups
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_calls import Frames, connect, message, status_of, until
from tests.support.observed import engine_status, fetch, rank_status, record, sample, watched

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def values(text: str) -> dict[str, float]:
    """`name{label="value",...}` -> number."""
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(each.labels.items()))
            found[f"{each.name}{{{labels}}}" if labels else each.name] = each.value
    return found


def scrape(metrics: Metrics) -> dict[str, float]:
    return values(generate_latest(metrics.registry).decode())


def make(**changes) -> Metrics:
    return Metrics(**{"model": "m", "family": "f", "max_expert_series": 64, **changes})


def full() -> Metrics:
    """Every metric has a value."""
    metrics = make()
    metrics.step(record())
    metrics.request("OK", 0.1, tokens=4, received=64, sent=64)
    metrics.error("INTERNAL")
    metrics.rpc("epserve.v1.Experts/Forward", "OK")
    take(metrics, engine_status([rank_status(0, (0, 1)), rank_status(1, (2, 3))], {1: (1, 2, 3, 4)}))
    return metrics


async def statistics_of(channel, model: str) -> kserve.ModelStatistics:
    stub = kserve_grpc.GRPCInferenceServiceStub(channel)
    (found,) = (await stub.ModelStatistics(kserve.ModelStatisticsRequest(name=model))).model_stats
    return found


def take(metrics: Metrics, status, recent=None) -> None:
    counted = np.array(list(status.expert_tokens.values()))
    metrics.take(status, Layout.of(status), counted if recent is None else np.array(recent))


class TestRegistry:
    def test_a_step_fills_its_histograms_with_the_slowest_rank(self):
        metrics = make()
        metrics.step(record(seconds=0.02, waited=0.005, traces=(None, None)))
        found = scrape(metrics)
        assert found["epserve_step_seconds_sum"] == pytest.approx(0.02)
        assert found["epserve_step_tokens_sum"] == 5
        assert found["epserve_step_requests_sum"] == found["epserve_queue_seconds_count"] == 2
        assert found["epserve_queue_seconds_sum"] == pytest.approx(0.01)
        assert found['epserve_phase_seconds_sum{phase="check"}'] == pytest.approx(0.002)  # rank 1 is twice as slow
        assert found['epserve_phase_seconds_count{phase="finalize"}'] == 1

    def test_time_by_rank_and_phase_adds_up_over_steps(self):
        metrics = full()
        metrics.step(record())
        found = scrape(metrics)
        assert found['epserve_rank_phase_seconds_total{phase="gate",rank="0"}'] == pytest.approx(2 * 0.003)
        assert found['epserve_rank_phase_seconds_total{phase="gate",rank="1"}'] == pytest.approx(2 * 0.006)

    def test_what_the_engine_counts_is_read_from_its_status(self):
        metrics = make()
        assert "epserve_generation" not in scrape(metrics)  # before the first status
        dead = rank_status(1, (2, 3), alive=False, late_compiles=4, tokens_done=9)
        take(metrics, engine_status([rank_status(0, (0, 1)), dead], {1: (1, 2, 3, 4), 2: (10, 20, 30, 40)}))
        found = scrape(metrics)
        assert found["epserve_generation"] == 2
        assert found["epserve_recoveries_total"] == 1
        assert found["epserve_replayed_requests_total"] == 3
        assert found["epserve_queue_tokens"] == 11
        assert (found['epserve_rank_up{rank="0"}'], found['epserve_rank_up{rank="1"}']) == (1, 0)
        assert found['epserve_rank_tokens_total{rank="1"}'] == 9
        assert found['epserve_triton_late_compiles_total{rank="1"}'] == 4
        assert found['epserve_rank_expert_tokens_total{rank="0"}'] == 33
        assert found['epserve_expert_tokens_total{expert="3"}'] == 44
        assert found['epserve_state{state="serving"}'] == 1
        assert sum(value for name, value in found.items() if name.startswith("epserve_state{")) == 1

    def test_copies_of_an_expert_share_its_tokens(self):
        metrics = make()
        take(metrics, engine_status([rank_status(0, (0, 1)), rank_status(1, (1, 2))], {1: (5, 4, 8)}))
        found = scrape(metrics)
        assert found['epserve_expert_tokens_total{expert="1"}'] == 4
        assert found['epserve_rank_expert_tokens_total{rank="0"}'] == 5 + 2
        assert found['epserve_rank_expert_tokens_total{rank="1"}'] == 8 + 2
        assert found['epserve_hot_expert_id{place="1"}'] == 2
        assert found['epserve_hot_expert_load{place="1"}'] == pytest.approx(8 / (17 / 3), abs=0.005)
        assert found["epserve_rank_load_imbalance"] == pytest.approx(10 / 8.5)

    def test_experts_that_move_take_no_count_along(self):
        metrics, ranks = make(), [rank_status(0, (0, 1)), rank_status(1, (2, 3))]
        take(metrics, engine_status(ranks, {1: (10, 0, 0, 0), 2: (0, 0, 0, 4)}))
        take(
            metrics, engine_status(ranks, {1: (17, 0, 0, 0), 2: (0, 0, 0, 4)}, slots={1: (3, 2, 1, 0), 2: (0, 1, 2, 3)})
        )
        found = scrape(metrics)
        assert found['epserve_expert_tokens_total{expert="0"}'] == 17
        assert found['epserve_rank_expert_tokens_total{rank="0"}'] == 10
        assert found['epserve_rank_expert_tokens_total{rank="1"}'] == 4 + 7

    def test_while_ranks_change_the_last_numbers_stay(self):
        metrics = full()
        before = scrape(metrics)
        take(metrics, engine_status([], {}, state="recovering"))
        after = scrape(metrics)
        assert (
            after['epserve_rank_expert_tokens_total{rank="1"}'] == before['epserve_rank_expert_tokens_total{rank="1"}']
        )
        assert after['epserve_state{state="recovering"}'] == 1

    @pytest.mark.parametrize(
        ("num_experts", "limit", "first", "last"),
        [
            pytest.param(8, 64, "0", "7", id="few: one series each"),
            pytest.param(64, 64, "0", "63", id="just as many"),
            pytest.param(65, 64, "0-1", "64-64", id="one too many, and an odd rest"),
            pytest.param(2048, 64, "0-31", "2016-2047", id="many"),
            pytest.param(7, 1, "0-6", "0-6", id="a single series"),
        ],
    )
    def test_experts_are_grouped_within_the_limit_and_each_counts_once(self, num_experts, limit, first, last):
        groups = list(expert_groups(num_experts, limit))
        assert len(groups) <= limit
        assert (groups[0][0], groups[-1][0]) == (first, last)
        covered = [expert for _, members in groups for expert in range(num_experts)[members]]
        assert covered == list(range(num_experts))

    def test_the_number_of_series_does_not_grow_with_experts_layers_or_requests(self):
        few, many = make(max_expert_series=16), make(max_expert_series=16)
        few.step(record())
        few.request("OK", 0.1, tokens=4, received=64, sent=64)
        take(few, engine_status([rank_status(0, range(8)), rank_status(1, range(8, 16))], {1: tuple(range(16))}))
        take(
            many,
            engine_status(
                [rank_status(0, range(2000)), rank_status(1, range(2000, 2048))],
                {n: tuple(range(2048)) for n in range(60)},
            ),
        )
        for number in range(500):
            many.step(record(number, layer=number, traces=(None,) * 8))
            many.request("OK", 0.001 * number, tokens=number, received=1, sent=1)
        assert len(scrape(few)) == len(scrape(many))


class TestServer:
    async def test_answers_and_refusals_are_counted_by_status(self):
        async with watched() as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            for tokens in (2, 3):
                await stub.Forward(message(torch.ones(tokens, 32)))
            await status_of(stub.Forward(message(torch.ones(1, 32), layer=99)))
            await status_of(stub.Forward(message(torch.ones(1, 31))))
            unknown = channel.unary_unary("/epserve.v1.Experts/Nonsense")
            assert (await status_of(unknown(b""))).code() is grpc.StatusCode.UNIMPLEMENTED
            statistics = await statistics_of(channel, "layer-1")
            sample(server)
            found = values((await fetch(server.metrics_port, "/metrics")).text)
        assert found['epserve_requests_total{status="OK"}'] == found["epserve_request_seconds_count"] == 2
        assert found["epserve_request_tokens_sum"] == 5
        assert (statistics.inference_count, statistics.execution_count) == (5, 2)
        assert (statistics.inference_stats.success.count, statistics.inference_stats.fail.count) == (2, 0)
        assert found["epserve_received_bytes_total"] == found["epserve_sent_bytes_total"] == 5 * 32 * 4
        assert found['epserve_errors_total{status="NOT_FOUND"}'] == 1
        assert found['epserve_errors_total{status="INVALID_ARGUMENT"}'] == 1
        assert found['epserve_rpcs_total{code="OK",method="epserve.v1.Experts/Forward"}'] == 2
        assert found['epserve_rpcs_total{code="NOT_FOUND",method="epserve.v1.Experts/Forward"}'] == 1
        assert found['epserve_rpcs_total{code="UNIMPLEMENTED",method="unknown"}'] == 1
        assert not [name for name in found if "Nonsense" in name]
        assert found["epserve_step_tokens_sum"] == 5
        assert found['epserve_expert_tokens_total{expert="7"}'] == 35

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            pytest.param(Overloaded("full", retry_after_s=1.0), "RESOURCE_EXHAUSTED", id="refused by the queue"),
            pytest.param(RankFailed("gone"), "UNAVAILABLE", id="a rank died"),
            pytest.param(ZeroDivisionError(), "INTERNAL", id="a defect"),
        ],
    )
    async def test_failures_of_the_engine_count_as_requests_and_as_errors(self, error, status):
        async def fail(batch):
            raise error

        async with watched(FakeEngine(fail)) as server, connect(server) as channel:
            await status_of(pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32))))
            statistics = await statistics_of(channel, "layer-1")
            found = values((await fetch(server.metrics_port, "/metrics")).text)
        assert found[f'epserve_requests_total{{status="{status}"}}'] == 1
        assert found[f'epserve_errors_total{{status="{status}"}}'] == 1
        assert (statistics.inference_count, statistics.inference_stats.fail.count) == (0, 1)

    async def test_failures_on_a_stream_are_errors_though_the_stream_goes_on(self):
        async with watched() as server, connect(server) as channel:
            frames = Frames(channel)
            await frames.send(1, torch.ones(2, 32), layer=99)
            await frames.send(2, torch.ones(2, 32))
            replies = await frames.replies(2)
            await frames.call.done_writing()
            assert await frames.call.read() is grpc.aio.EOF
            found = values((await fetch(server.metrics_port, "/metrics")).text)
        assert isinstance(replies[1], pb.Failure)
        assert found['epserve_errors_total{status="NOT_FOUND"}'] == 1
        assert found['epserve_requests_total{status="OK"}'] == 1
        assert found['epserve_rpcs_total{code="OK",method="epserve.v1.Experts/ForwardStream"}'] == 1

    async def test_a_call_without_a_token_is_counted_though_no_servicer_saw_it(self, tmp_path):
        (tmp_path / "tokens").write_text("let-me-in\n")
        async with watched(tokens_file=tmp_path / "tokens") as server, connect(server) as channel:
            await status_of(pb_grpc.ExpertsStub(channel).GetModel(pb.GetModelRequest()))
            reply = await fetch(server.metrics_port, "/metrics", Authorization="Bearer let-me-in")
        assert values(reply.text)['epserve_errors_total{status="UNAUTHENTICATED"}'] == 1

    async def test_a_cancelled_call_is_no_error(self):
        entered = asyncio.Event()

        async def wait(batch):
            entered.set()
            await asyncio.sleep(60)

        async with watched(FakeEngine(wait)) as server, connect(server) as channel:
            call = pb_grpc.ExpertsStub(channel).Forward(message(torch.ones(1, 32)))
            await entered.wait()
            inside = values((await fetch(server.metrics_port, "/metrics")).text)
            call.cancel()
            await until(lambda: server._calls.in_flight == 0)
            found = values((await fetch(server.metrics_port, "/metrics")).text)
        assert (inside["epserve_calls_in_flight"], inside["epserve_buffered_bytes"]) == (1, 2 * 128), "and its reply"
        assert found['epserve_requests_total{status="CANCELLED"}'] == 1
        assert found["epserve_calls_in_flight"] == 0
        assert not [name for name in found if name.startswith("epserve_errors_total")]

    async def test_the_status_reply_has_latency_rates_and_load(self):
        async with watched() as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            for _ in range(4):
                await stub.Forward(message(torch.ones(10, 32)))
            sample(server)
            reply = await stub.GetStatus(pb.GetStatusRequest())
        assert reply.latency.count == 4
        assert 0 < reply.latency.p50_ms <= reply.latency.p99_ms
        assert reply.rates.tokens > 0
        assert list(reply.ranks[1].expert_tokens) == [160, 200, 240, 280]
        assert set(reply.ranks[0].phase_seconds) == set(PHASES)


class TestDeploy:
    """Dashboards and rules use names that exist, so that none of their panels stays empty for ever."""

    NAMES = re.compile(r"\bepserve_[a-z0-9_]+")

    def exported(self) -> set[str]:
        return {name.partition("{")[0] for name in scrape(full())}

    @pytest.mark.parametrize("path", sorted((DEPLOY / "grafana").glob("*.json")), ids=lambda path: path.name)
    def test_every_query_of_a_dashboard_names_metrics_that_exist(self, path):
        dashboard = json.loads(path.read_text())
        targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        assert len(targets) >= 15
        for expression in targets:
            names = set(self.NAMES.findall(expression))
            assert names
            assert names <= self.exported(), expression

    @pytest.mark.parametrize("path", sorted((DEPLOY / "prometheus").glob("*.yaml")), ids=lambda path: path.name)
    def test_every_alert_names_metrics_that_exist_and_says_what_to_do(self, path):
        rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
        assert rules
        for rule in rules:
            names = set(self.NAMES.findall(rule["expr"]))
            assert names
            assert names <= self.exported(), rule["alert"]
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
            page, _, anchor = rule["annotations"]["runbook_url"].rpartition("#")
            assert page.endswith("/docs/operations.md")
            assert anchor == rule["alert"].lower()
            assert f"\n### {rule['alert']}\n" in (DEPLOY.parent / "docs" / "operations.md").read_text()

    @pytest.mark.parametrize("path", sorted((DEPLOY / "grafana").glob("*.json")), ids=lambda path: path.name)
    def test_every_panel_of_a_dashboard_says_how_to_read_it(self, path):
        panels = [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]
        assert [panel["title"] for panel in panels if not panel.get("description", "").endswith(".")] == []

    def test_panels_of_a_dashboard_do_not_overlap(self):
        for path in (DEPLOY / "grafana").glob("*.json"):
            taken: set[tuple[int, int]] = set()
            for panel in json.loads(path.read_text())["panels"]:
                place = panel["gridPos"]
                cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
                assert not cells & taken, panel["title"]
                assert max(x for x, _ in cells) < 24
                taken |= cells

    def test_every_metric_is_described_in_the_docs(self):
        page = (DEPLOY.parent / "docs" / "observability.md").read_text()
        families = text_string_to_metric_families(generate_latest(full().registry).decode())
        names = {family.name for family in families if family.name.startswith("epserve_")}
        assert names <= {name.removesuffix("_total") for name in self.NAMES.findall(page)}
