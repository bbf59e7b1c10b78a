"""Measures requests a second of this service and of Ray Serve's gRPC ingress, with the same kernel behind both.

    pip install -e '.[benchmarks]'
    python -m benchmarks.ray_serve_peer [--seconds 20] [--json benchmarks/results/ray_serve_peer.json]

One rank, one replica, the same checkpoint, the same `Worker` (kernel, gate, workspaces), the same `Door` (checks, decoding)
and the same messages: `epserve.v1.Experts/Forward` with 8 KB and with 1 MB of hidden states. The experts are small, so the
way to them and back dominates. Ray Serve runs as it is, and with `@serve.batch`, which joins requests as our scheduler does.
Clients are the same processes for both: a raw gRPC stub and a number of requests always under way. Both sides run one after the
other, in turns, each several times. The medians count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import reports
from epserve.config import ServerConfig, parse_config
from epserve.models.demo import write_demo_checkpoint
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import wire

SIZES = {"hidden": 2048, "intermediate": 64, "num_experts": 8, "top_k": 2, "num_layers": 1, "seed": 1}
TOKENS = {"8 KB": 1, "1 MB": 128}
"""float32 rows of 8 KiB."""
READY_S = 400.0  # Ray, Serve and torch on a busy machine
SIDES = ("epserve", "serve", "serve batched")
JOIN_WAIT_S = 0.001
JOIN_MOST = 64


def engine_config(model: str) -> dict[str, Any]:
    return {
        "model": {"path": model},
        "engine": {"ranks": 1, "device": "cpu", "max_tokens_per_rank": 16384},
        "server": {"port": 0},
    }


def serve_with_ray(model: str, port: int, batched: bool) -> None:
    """A process of its own: one replica behind Serve's gRPC proxy, until SIGTERM."""
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    from epserve.modular_kernel import RankContext
    from epserve.rank.step import StepPlan
    from epserve.rank.worker import Worker
    from epserve.server import codec, replies

    class Replica:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            config = parse_config(engine_config(model))
            self._worker = Worker(config, RankContext())
            self._worker.load()
            self._worker.warm_up()
            from epserve.models import open_checkpoint

            info = open_checkpoint(config.model.path, "auto").info
            self._door = codec.Door(info, info.layers, ServerConfig())
            self._steps = 0

        async def Forward(self, request: Any) -> Any:
            checked = self._door.check(request, request.request_id)
            assembly = wire.Assembly(checked.sizes)
            for which in checked.sizes:
                assembly.add(which, checked.headers[which].data)
            x = self._door.decode(checked, assembly.finish()).hidden
            out = await self._joined((checked.layer, x)) if batched else self._step(checked.layer, x)
            reply = pb.ForwardReply(request_id=checked.request_id)
            return wire.reply_message(replies.encode_reply(out, checked).tensors, reply, inline=True)

        @serve.batch(max_batch_size=JOIN_MOST, batch_wait_timeout_s=JOIN_WAIT_S)
        async def _joined(self, requests: list[Any]) -> list[torch.Tensor]:
            rows = self._step(requests[0][0], torch.cat([x for _, x in requests]))
            return list(rows.split([len(x) for _, x in requests]))

        def _step(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            self._steps += 1
            plan = StepPlan(step=self._steps, layer=layer, mode="block", tokens_per_rank=(len(x),))
            return self._worker.step(plan, x, None, None)

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    servicer = ["epserve.protocol.epserve_pb2_grpc.add_ExpertsServicer_to_server"]
    serve.start(
        proxy_location="HeadOnly",
        http_options={"port": port + 1},
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=servicer),
    )
    deployment = serve.deployment(Replica, num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
    serve.run(deployment.bind(), name="experts")
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()


def free_port() -> int:
    """Returns the first of two free neighbouring ports: Serve's HTTP proxy needs one too."""
    import socket

    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


class Side:
    """One of the servers, in a process of its own."""

    def __init__(self, name: str, folder: Path):
        self.name, self._folder = name, folder

    def __enter__(self) -> str:
        """Its address, once it answers."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_SERVE_ENABLE_HA_PROXY": "0"}
        self._log = open(self._folder / f"{self.name}.log", "wb")
        model = str(self._folder / "model")
        if self.name == "epserve":
            config, ready = self._folder / "config.json", self._folder / "ready.json"
            config.write_text(json.dumps(engine_config(model)))  # JSON is YAML
            command = [sys.executable, "-m", "epserve", "serve", str(config), "--ready-file", str(ready)]
            self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
            self._wait(ready.exists)
            return f"127.0.0.1:{json.loads(ready.read_text())['port']}"
        # Serve pickles messages by the name of their module, which is the one that protoc gave it.
        (self._folder / "names").mkdir(exist_ok=True)
        alias = "import sys\nfrom epserve.protocol import epserve_pb2\nsys.modules[__name__] = epserve_pb2\n"
        (self._folder / "names" / "epserve_pb2.py").write_text(alias)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(self._folder / "names"), os.getcwd(), environment.get("PYTHONPATH")])
        )
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.ray_serve_peer", "--serve", model, str(port)]
        command += ["--batched"] if self.name == "serve batched" else []
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        self._wait(lambda: b"ready" in (self._folder / f"{self.name}.log").read_bytes())
        return f"127.0.0.1:{port}"

    def _wait(self, condition: Any) -> None:
        end = time.monotonic() + READY_S
        while not condition():
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise SystemExit(
                    f"{self.name} did not start:\n{(self._folder / f'{self.name}.log').read_text()[-3000:]}"
                )
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def load(address: str, layer: int, tokens: int, under_way: int, seconds: float) -> dict[str, float]:
    """In a process of its own: `under_way` requests at all times. Raises when an answer has another shape or is not finite."""
    return asyncio.run(_load(address, layer, tokens, under_way, seconds))


async def _load(address: str, layer: int, tokens: int, under_way: int, seconds: float) -> dict[str, float]:
    import grpc

    from epserve.protocol import epserve_pb2_grpc as pb_grpc

    torch.set_num_threads(1)
    x = torch.randn((tokens, SIZES["hidden"]), generator=torch.Generator().manual_seed(tokens))
    header = pb.ForwardRequest(layer=layer, request_id="benchmark")
    request = wire.request_message({pb.HIDDEN_STATES: wire.encode(x, "x")}, header, inline=True)
    limits = [("grpc.max_receive_message_length", 4 << 20), ("grpc.max_send_message_length", 4 << 20)]
    times: list[float] = []
    async with grpc.aio.insecure_channel(address, options=limits) as channel:
        forward = pb_grpc.ExpertsStub(channel).Forward
        metadata = (("application", "experts"),)  # Serve's name of the deployment. Our service ignores it
        first = await forward(request, timeout=60, metadata=metadata)
        rows = torch.frombuffer(bytearray(first.hidden_states.data), dtype=torch.float32)
        assert list(first.hidden_states.shape) == list(x.shape)
        assert torch.isfinite(rows).all()
        start = time.perf_counter() + 1  # a second to get into step
        end = start + seconds

        async def one() -> None:
            while (began := time.perf_counter()) < end:
                await forward(request, timeout=60, metadata=metadata)
                now = time.perf_counter()
                if start <= began and now <= end:
                    times.append((now - began) * 1e3)

        await asyncio.gather(*(one() for _ in range(under_way)))
    if not times:
        raise SystemExit(
            f"no request of {tokens} tokens was begun and answered within {seconds:g} s: allow more --seconds"
        )
    times.sort()
    checksum = float(rows.double().abs().sum())
    return {
        "requests_per_s": len(times) / seconds, "p50_ms": statistics.median(times),
        "p99_ms": times[min(len(times) - 1, int(len(times) * 0.99))], "checksum": checksum,
    }  # fmt: skip


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    write_demo_checkpoint("mixtral", folder / "model", dtype=torch.float32, **SIZES)
    from epserve.models import open_checkpoint

    layer = open_checkpoint(folder / "model").info.layers[0]
    rows = []
    for turn in range(options.turns):
        for name in SIDES:
            with Side(name, folder) as address, multiprocessing.get_context("spawn").Pool(1) as pool:
                for size, tokens in TOKENS.items():
                    for under_way in options.under_way:
                        found = pool.apply(load, (address, layer, tokens, under_way, options.seconds))
                        rows.append({"side": name, "size": size, "under_way": under_way, "turn": turn, **found})
                        print(json.dumps(rows[-1]), flush=True)
            (folder / "ready.json").unlink(missing_ok=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over turns, of each side's best number of requests under way, and ours against the better of theirs."""
    for size in TOKENS:
        sums = {round(row["checksum"], 1) for row in rows if row["size"] == size}
        assert len(sums) == 1, f"the sides do not compute the same: {sums}"
    found = []
    for size in TOKENS:
        best = {}
        for name in SIDES:
            own = [row for row in rows if row["side"] == name and row["size"] == size]
            rates = {
                count: statistics.median(row["requests_per_s"] for row in own if row["under_way"] == count)
                for count in {row["under_way"] for row in own}
            }
            best[name] = max(rates.values())
        peer = max(best["serve"], best["serve batched"])
        found.append(
            {"size": size, **best, "x_serve": best["epserve"] / best["serve"], "x_better": best["epserve"] / peer}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--under-way", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--batched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        serve_with_ray(options.serve[0], int(options.serve[1]), options.batched)
        return
    import ray

    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        rows = measure(options, Path(name))
    result = {"summary": summary(rows), "rows": rows}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result["run"] = {
        "machine": platform.platform(), "cpus": os.cpu_count(), "load_before": load_before, "sizes": SIZES,
        "seconds": options.seconds, "turns": options.turns, "torch": torch.__version__, "ray": ray.__version__,
        "commit": commit.stdout.strip(),
    }  # fmt: skip
    for line in result["summary"]:
        print(json.dumps(line))
    if options.json:
        reports.save(options.json, result)


if __name__ == "__main__":
    main()
