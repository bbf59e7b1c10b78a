"""Metrics, traces and status of a service with real ranks: what the ranks count and measure arrives."""

import json
from pathlib import Path

import pytest
import ray
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from epserve.client import AsyncClient
from epserve.config import parse_config
from epserve.engine.engine import Engine
from epserve.models import open_checkpoint
from epserve.process.phases import PHASES
from epserve.rank.gate import route
from epserve.server.server import Server
from tests.support.checkpoints import write
from tests.support.grpc_calls import until
from tests.support.observed import fetch, sample
from tests.watch.test_metrics import values

TOKENS = 40


@pytest.mark.slow
async def test_counts_times_and_spans_of_two_ranks(tmp_path):
    path = write("mixtral", tmp_path / "model", dtype=torch.float32)
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": 2, "device": "cpu"},
            "server": {"port": 0, "metrics_port": 0, "log_format": "json"},
        }
    )
    engine, exporter = Engine(config), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server = Server(engine, config.server, tracer_provider=provider)
    await server.start()
    try:
        assert (await fetch(server.metrics_port, "/healthz")).status == 503
        await engine.start()
        assert (await fetch(server.metrics_port, "/healthz")).status == 200
        layer = engine.layers[-1]
        x = torch.randn((TOKENS, engine.info.hidden), generator=torch.Generator().manual_seed(1))
        async with AsyncClient(server.address) as client:
            await client.forward(layer, x, request_id="seen")
            slots = TOKENS * engine.info.top_k
            await until(lambda: sum(engine.status().expert_tokens.get(layer, ())) == slots, 60)
            sample(server)
            status = await client.status()
        for rank in status.ranks:  # whatever a rank says in its process's log is an object that names it
            folder = Path(ray._private.worker._global_node.get_logs_dir_path())
            (file,) = folder.glob(f"worker-*-{rank.pid}.err")
            lines = file.read_text().splitlines()
            said = [json.loads(line) for line in lines if line.startswith("{")]
            (ready,) = [line for line in said if line["message"].startswith("ready in generation")]
            assert (ready["rank"], ready["generation"], ready["level"]) == (rank.rank, 1, "info")
            assert not [line for line in lines if "epserve." in line and not line.startswith("{")]
        found = values((await fetch(server.metrics_port, "/metrics")).text)
    finally:
        await server.stop()
        await engine.close()

    weights = open_checkpoint(path).load_layer(layer, range(engine.info.num_experts), torch.device("cpu"))
    ids = route(x, weights.gate, engine.info.gate).ids_Mt
    wanted = torch.bincount(ids.flatten().long(), minlength=engine.info.num_experts).tolist()
    counted = [found[f'epserve_expert_tokens_total{{expert="{expert}"}}'] for expert in range(len(wanted))]
    assert counted == wanted  # warm-up's steps are not in it
    assert [load for rank in status.ranks for load in rank.expert_tokens] == wanted
    assert found['epserve_rank_tokens_total{rank="0"}'] == found['epserve_rank_tokens_total{rank="1"}'] == TOKENS / 2
    assert found['epserve_rank_expert_tokens_total{rank="0"}'] == sum(wanted[: len(wanted) // 2])
    assert found['epserve_triton_late_compiles_total{rank="0"}'] == 0
    assert found["epserve_steps_total"] == found["epserve_step_seconds_count"] == 1
    for phase in PHASES:
        assert 0 < found[f'epserve_phase_seconds_sum{{phase="{phase}"}}'] < found["epserve_step_seconds_sum"]
    assert set(status.ranks[1].phase_seconds) == set(PHASES)

    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {f"rank {rank}: {phase}" for rank in (0, 1) for phase in PHASES} <= set(spans)
    assert spans["request"].attributes["epserve.request"] == "seen"
    step = spans["step"]
    assert spans["queue"].end_time <= step.end_time
    spent = sum(spans[f"rank 0: {phase}"].end_time - spans[f"rank 0: {phase}"].start_time for phase in PHASES)
    assert 0 < spent < step.end_time - step.start_time
