"""Measures a remote layer's cost beyond the service's own time: `python -m benchmarks.remote_experts [--repeats N]`.

One service runs on one CPU rank of this machine, and one client process has a model of two MoE layers loaded with remote
experts. For each batch size the model's experts module is called as `generate` calls it. The reply to the same request, sent in
turn with it, carries the time between the engine's admission and its result, and that time is subtracted. The rest is the client,
gRPC over loopback or the doorbell, and the server's checks. Figures are medians, with the machine's load beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import epserve.transformers
from benchmarks import reports
from epserve.client.exchange import OutgoingRequest
from epserve.protocol import epserve_pb2_grpc as pb_grpc

RESULT = Path(__file__).parent / "results" / "remote_experts.json"
TOKENS = (1, 64)
HIDDEN, EXPERTS, TOP_K = 2048, 16, 4
START_S = 300


def write_checkpoint(folder: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
    moe = {"moe_intermediate_size": 64, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **moe), dtype=torch.bfloat16).save_pretrained(folder)


def start(folder: Path) -> tuple[subprocess.Popen, str]:
    ready, config = folder / "ready.json", folder / "service.yaml"
    settings = {"model": {"path": str(folder)}, "engine": {"ranks": 1, "device": "cpu"}, "server": {"port": 0}}
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "epserve", "serve", str(config), "--ready-file", str(ready)]
    with (folder / "service.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "service.log").read_text())
        time.sleep(0.1)
    where = json.loads(ready.read_text())
    return process, f"{where['host']}:{where['port']}"


def both_ms(experts: torch.nn.Module, address: str, batch: tuple, repeats: int) -> tuple[list[float], list[float]]:
    """Returns times of the module, and of the engine by the same requests' replies, in turn, as the machine's load varies."""
    hidden, ids, weights = batch
    whole, engine = [], []
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.ExpertsStub(channel)
        for _ in range(repeats):
            begin = time.perf_counter()
            experts(*batch)
            whole.append((time.perf_counter() - begin) * 1e3)
            with OutgoingRequest(0, hidden, ids.int(), weights, request_id="") as request:
                engine.append(stub.Forward(request.message().message()).timings.engine_us / 1e3)
    return whole, engine


@torch.no_grad()
def measure(folder: Path, address: str, repeats: int, shared_memory_bytes: int) -> list[dict]:
    rows = []
    with epserve.transformers.connect(address, shared_memory_bytes=shared_memory_bytes):
        model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="epserve")
        experts = model.model.layers[0].mlp.experts
        for tokens in TOKENS:
            ids = torch.arange(tokens * TOP_K).reshape(tokens, TOP_K) % EXPERTS
            batch = (torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.full((tokens, TOP_K), 0.25))
            both_ms(experts, address, batch, repeats // 10)
            whole, engine = both_ms(experts, address, batch, repeats)
            p50 = statistics.median(whole), statistics.median(engine)
            rows.append(
                {
                    "tokens": tokens,
                    "way": "shared memory" if shared_memory_bytes else "messages",
                    "layer_ms_p50": round(p50[0], 3),
                    "layer_ms_p10": round(sorted(whole)[repeats // 10], 3),
                    "engine_ms_p50": round(p50[1], 3),
                    "overhead_ms_p50": round(p50[0] - p50[1], 3),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    repeats, result_file = options.repeats, options.json
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="epserve-benchmark-") as name:
        folder = Path(name)
        write_checkpoint(folder)
        process, address = start(folder)
        try:
            rows = [row for size in (0, 16 << 20) for row in measure(folder, address, repeats, size)]
        finally:
            process.terminate()
            process.wait(timeout=60)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
    result = {"machine": machine, "torch": torch.__version__, "hidden": HIDDEN, "dtype": "bfloat16", "rows": rows}
    reports.save(result_file, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
