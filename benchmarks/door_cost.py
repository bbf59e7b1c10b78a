"""Measures the processor time of a request on its way in and out: `python -m benchmarks.door_cost [--rounds N]`.

A real server runs in a process of its own around an engine that returns its input. Each case has the user and system time of
server and client for a request, and the wall time. On a busy machine only the processor time can be compared. Beside each case
a bare gRPC server and client pass the same bytes on as they are. Figures are medians of rounds, with cases in turn.

  1 token             `Client.forward`, 8 KiB, one at a time
  16 tokens x 64      64 `AsyncClient`s with a connection each, one request of 128 KiB under way on each
  1 MiB               `Client.forward`, 128 tokens, one at a time
  16 MiB              `Client.forward` of (4096, 2048) bfloat16, in frames of 1 MiB
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import queue
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks import reports
from benchmarks.data_paths import GRPC_OPTIONS, HIDDEN, Engine, echo_frames
from epserve.client import AsyncClient, Client
from epserve.protocol import wire
from tests.support.fake_engine import serving

CLIENTS = 64
REQUESTS = {"1 token": 400, "16 tokens x 64": 640, "1 MiB": 80, "16 MiB": 12}
"""The requests of a round."""


def used_s() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(connection: Any) -> None:
    """In a process of its own: answers each message with the time used so far, until an empty one."""
    torch.set_num_threads(1)

    async def echo(request: bytes, _: Any) -> bytes:
        return request

    async def run() -> None:
        bare = grpc.aio.server(options=GRPC_OPTIONS)
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(echo),
            "EchoFrames": grpc.stream_stream_rpc_method_handler(echo_frames),
        }
        bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        port = bare.add_insecure_port("127.0.0.1:0")
        await bare.start()
        narrow, wide = (Engine(hidden=HIDDEN, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        async with serving(narrow) as first, serving(wide) as second:
            connection.send((first.address, second.address, f"127.0.0.1:{port}"))
            while await asyncio.to_thread(connection.recv):
                connection.send(used_s())
        await bare.stop(0)

    asyncio.run(run())


class Measurement:
    def __init__(self, connection: Any):
        self._connection = connection
        self.rows: dict[tuple[str, str], list[dict[str, float]]] = {}

    @contextmanager
    def of(self, case: str, way: str) -> Iterator[None]:
        """Around all requests of a round."""
        count = REQUESTS[case]
        server, client, start = self._server_s(), used_s(), time.perf_counter()
        yield
        wall, client = time.perf_counter() - start, used_s() - client
        spent = {"wall_us": wall, "server_us": self._server_s() - server, "client_us": client}
        self.rows.setdefault((case, way), []).append({name: value / count * 1e6 for name, value in spent.items()})

    def _server_s(self) -> float:
        self._connection.send("used")
        return self._connection.recv()


def one_by_one(measurement: Measurement, case: str, way: str, call: Callable[[], Any]) -> None:
    for _ in range(max(3, REQUESTS[case] // 10)):
        call()
    with measurement.of(case, way):
        for _ in range(REQUESTS[case]):
            call()


def one_round(measurement: Measurement, narrow: str, wide: str, bare: str) -> None:
    small, large = torch.randn(1, HIDDEN), torch.randn(128, HIDDEN)
    huge = torch.randn(4096, HIDDEN).bfloat16()
    with Client(wide) as client, grpc.insecure_channel(bare, options=GRPC_OPTIONS) as channel:
        echo = channel.unary_unary("/bare/Echo")
        for case, x in (("1 token", small), ("1 MiB", large)):
            payload = bytes(x.nbytes)
            one_by_one(measurement, case, "bare gRPC", lambda payload=payload: echo(payload))
            one_by_one(measurement, case, "epserve", lambda x=x: client.forward(1, x))
    with Client(narrow) as client, grpc.insecure_channel(bare, options=GRPC_OPTIONS) as channel, ExitStack() as held:
        frames = [bytes(wire.FRAME_BYTES)] * (huge.nbytes // wire.FRAME_BYTES)
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        held.callback(outgoing.put, None)
        call = channel.stream_stream("/bare/EchoFrames")(iter(outgoing.get, None))

        def stream() -> None:
            for frame in (*frames, b""):
                outgoing.put(frame)
            for _ in frames:
                next(call)

        one_by_one(measurement, "16 MiB", "bare gRPC", stream)
        one_by_one(measurement, "16 MiB", "epserve", lambda: client.forward(1, huge))
    asyncio.run(many(measurement, wide, bare))


async def many(measurement: Measurement, wide: str, bare: str) -> None:
    case, x = "16 tokens x 64", torch.randn(16, HIDDEN)
    payload = bytes(x.nbytes)

    async def drive(calls: list[Callable[[], Any]], count: int) -> None:
        turns = iter(range(count))

        async def one(call: Callable[[], Any]) -> None:
            for _ in turns:
                await call()

        await asyncio.gather(*map(one, calls))

    async def measured(way: str, calls: list[Callable[[], Any]]) -> None:
        await drive(calls, 2 * CLIENTS)
        with measurement.of(case, way):
            await drive(calls, REQUESTS[case])

    clients = [AsyncClient(wide) for _ in range(CLIENTS)]
    await measured("epserve", [lambda client=client: client.forward(1, x) for client in clients])
    for client in clients:
        await client.close()
    channels = [grpc.aio.insecure_channel(bare, options=GRPC_OPTIONS) for _ in range(CLIENTS)]
    echoes = [channel.unary_unary("/bare/Echo") for channel in channels]
    await measured("bare gRPC", [lambda echo=echo: echo(payload) for echo in echoes])
    for channel in channels:
        await channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    where = ours.recv()
    measurement = Measurement(ours)
    for _ in range(options.rounds):
        one_round(measurement, *where)
    ours.send("")
    process.join(20)
    rows = []
    for (case, way), found in measurement.rows.items():
        medians = {name: round(statistics.median(each[name] for each in found)) for name in found[0]}
        rows.append({"case": case, "way": way, **medians, "cpu_us": medians["server_us"] + medians["client_us"]})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        host = {"machine": platform.platform(), "cpus": os.cpu_count(), "load": os.getloadavg(), "commit": commit.stdout.strip(),
                "torch": torch.__version__, "grpc": grpc.__version__}  # fmt: skip
        result = {"rows": rows, "host": host, "rounds": options.rounds, "unit": "us a request, medians of rounds"}
        reports.save(options.json, result)


if __name__ == "__main__":
    main()
