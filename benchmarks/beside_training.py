"""What a client's calls take while another client trains: `python -m benchmarks.beside_training [--seconds 10]`.

One service on a CPU rank of this machine, and two clients with tokens of their own, each a process. The first sends batches of
16 tokens, one after the other, with a pause as attention would take. The second is idle, sends forwards of `--tokens` tokens
without a pause, or trains: a forward and a backward of as many tokens, without a pause. No step is interrupted, so a call waits
for the step that it finds under way. By its share of the ranks it then goes first. The bound beside each percentile is the
percentile beside an idle client, plus the longest step of the second client: the slowest that this order allows.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import reports
from epserve.client import Client, ClientOptions
from epserve.config import parse_config
from epserve.models.demo import write_demo_checkpoint
from epserve.service.run import running

RESULT = Path(__file__).parent / "results" / "beside_training_cpu.json"
SIZES = {"hidden": 1024, "intermediate": 512, "num_experts": 16, "top_k": 2, "num_layers": 2, "seed": 1}
TOKENS = {"serving": "s" * 32, "training": "t" * 32}
CALL_TOKENS, PAUSE_S, SETTLE_S = 16, 0.005, 2.0


def serve_calls(address: str, seconds: float) -> list[float]:
    """Returns the seconds of each call of 16 tokens."""
    torch.set_num_threads(1)
    found = []
    with Client(address, ClientOptions(token=TOKENS["serving"])) as client:
        x = torch.randn(CALL_TOKENS, SIZES["hidden"])
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            start = time.perf_counter()
            client.forward(0, x)
            found.append(time.perf_counter() - start)
            time.sleep(PAUSE_S)
    return found


def other(address: str, kind: str, tokens: int, stop: Any, answer: Any) -> None:
    """The second client, until it is told to stop. It answers with the seconds of its longest call and their number."""
    torch.set_num_threads(1)
    longest, number = 0.0, 0
    with Client(address, ClientOptions(token=TOKENS["training"])) as client:
        x = torch.randn(tokens, SIZES["hidden"])
        while not stop.is_set():
            client.forward(0, x)
            if kind == "training":
                client.backward(0, x, x)
            number += 1
    answer.put((longest, number))


def steps_alone(address: str, tokens: int) -> dict[str, float]:
    """Returns the median milliseconds of a forward and of a backward call of `tokens` tokens, alone."""
    with Client(address, ClientOptions(token=TOKENS["training"])) as client:
        x = torch.randn(tokens, SIZES["hidden"])
        kinds = {"forward": lambda: client.forward(0, x), "backward": lambda: client.backward(0, x, x)}
        return {name: percentiles([seconds(run) for _ in range(12)][2:])["p50_ms"] for name, run in kinds.items()}


def seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {f"p{p}_ms": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in (50, 99)}


def measure(address: str, args: argparse.Namespace) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    alone = steps_alone(address, args.tokens)
    found: dict[str, Any] = {"calls_alone_ms": {name: round(ms, 2) for name, ms in alone.items()}}
    for kind in ("idle", "forwards", "training"):
        stop, answer = spawn.Event(), spawn.Queue()
        process = spawn.Process(target=other, args=(address, kind, args.tokens, stop, answer))
        if kind != "idle":
            process.start()
            time.sleep(SETTLE_S)
        times = serve_calls(address, args.seconds)
        row = percentiles(times) | {"calls": len(times)}
        if kind != "idle":
            stop.set()
            row["other_rounds"] = answer.get(timeout=120)[1]
            process.join()
            longest = max(alone.values()) if kind == "training" else alone["forward"]
            row["bound_ms"] = round(found["idle"]["p99_ms"] + longest, 2)
        found[kind] = row
        print(kind, row, flush=True)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of calls, for each kind of the second client")
    parser.add_argument("--tokens", type=int, default=256, help="of the second client's batches")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, tokens_file = Path(folder) / "model", Path(folder) / "tokens"
        write_demo_checkpoint("mixtral", path, dtype=torch.float32, **SIZES)
        tokens_file.write_text("".join(f"{token} name={name}\n" for name, token in TOKENS.items()))
        tokens_file.chmod(0o600)
        config = parse_config({
            "model": {"path": str(path)}, "engine": {"device": "cpu", "standbys": 0, "experts": "grouped_mm"},
            "server": {"port": 0, "tokens_file": str(tokens_file)},
        })  # fmt: skip
        async with running(config) as (_, server):
            found = await asyncio.to_thread(measure, f"127.0.0.1:{server.port}", args)
    report = {
        "what": "python -m benchmarks.beside_training", "sizes": SIZES, "call_tokens": CALL_TOKENS, "other_tokens": args.tokens,
        "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__, **found,
    }  # fmt: skip
    if args.json:
        reports.save(args.json, report)


if __name__ == "__main__":
    asyncio.run(main())
