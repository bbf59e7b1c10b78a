"""What it costs to bring activations to the service and back: `python -m benchmarks.data_paths [--tokens N ...]`.

A real server in a process of its own around an engine that returns its input, so that all time is the data path's: inline
bytes in frames, fp8 in frames, a registered region, each over TCP loopback and over a Unix-domain socket. Beside it, what the
same bytes take there and back over a raw TCP socket, and over a bare gRPC stream whose ends pass frames of 1 MiB on as they
are: the least that a service over gRPC can take.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import queue
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks import reports
from epserve.client import Client
from epserve.engine.planning import Answer
from epserve.link.shm import Arena
from epserve.protocol import wire
from tests.support.fake_engine import FakeEngine, serving

HIDDEN = 2048
TOKENS = (16, 512, 4096)
ARENA_BYTES = 1 << 28
WAYS = ("inline", "fp8", "region")


class Engine(FakeEngine):
    """With memory for requests that is used again, as the real one has it. Pages that are new cost more than the copy."""

    def __init__(self, **info):
        super().__init__(**info)
        self._arena = Arena(ARENA_BYTES)

    def buffer(self, nbytes: int):
        block = self._arena.buffer(nbytes)
        return wire.plain_buffer(nbytes) if block is None else block

    async def answer(self, batch):
        return Answer(out_MK=batch.hidden)  # and nothing is kept, as the fake one does


def serve(path: str, connection) -> None:
    """In a process of its own, until the parent ends."""
    torch.set_num_threads(1)

    async def run() -> None:
        engine = Engine(hidden=HIDDEN, dtype=torch.bfloat16)
        bare = bare_server()
        port = bare.add_insecure_port("127.0.0.1:0")
        await bare.start()
        async with serving(engine, unix_socket=path) as server:
            connection.send((server.address, port))
            await asyncio.to_thread(connection.recv)
        await bare.stop(0)

    asyncio.run(run())


def median_ms(call, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


GRPC_OPTIONS = [
    ("grpc.http2.max_frame_size", wire.HTTP2_FRAME_BYTES),
    ("grpc.max_receive_message_length", 2 * wire.FRAME_BYTES),
]


async def echo_frames(_: Any, context: grpc.aio.ServicerContext) -> None:
    """Returns the frames of a stream, when the empty one says that all are here."""
    held: list[bytes] = []
    while (frame := await context.read()) is not grpc.aio.EOF:
        if frame:
            held.append(frame)
            continue
        for each in held:
            await context.write(each)
        held.clear()


def bare_server() -> grpc.aio.Server:
    server = grpc.aio.server(options=GRPC_OPTIONS)
    handler = grpc.method_handlers_generic_handler("bare", {"Echo": grpc.stream_stream_rpc_method_handler(echo_frames)})
    server.add_generic_rpc_handlers((handler,))
    return server


def bare_grpc_ms(port: int, nbytes: int, repeats: int) -> float:
    """One long-lived stream, frames of at most 1 MiB, without protobuf."""
    payload = bytes(nbytes)
    frames = [payload[start : start + wire.FRAME_BYTES] for start in range(0, nbytes, wire.FRAME_BYTES)]
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS) as channel:
        call = channel.stream_stream("/bare/Echo")(iter(outgoing.get, None))

        def once() -> None:
            for frame in (*frames, b""):
                outgoing.put(frame)
            for _ in frames:
                next(call)

        result = median_ms(once, repeats)
        outgoing.put(None)
    return result


def echo_ms(nbytes: int, repeats: int) -> float:
    """The same bytes there and back between two threads over a TCP socket, in pieces of 1 MiB."""
    listener = socket.create_server(("127.0.0.1", 0))
    payload, back = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))

    def answer() -> None:
        peer, _ = listener.accept()
        buffer = memoryview(bytearray(nbytes))
        with peer:
            while receive(peer, buffer):
                peer.sendall(buffer)

    thread = threading.Thread(target=answer)
    thread.start()
    with socket.create_connection(listener.getsockname()) as client:

        def once() -> None:
            client.sendall(payload)
            receive(client, back)

        result = median_ms(once, repeats)
    thread.join()
    listener.close()
    return result


def receive(connection: socket.socket, buffer: memoryview) -> bool:
    while buffer:
        count = connection.recv_into(buffer, min(len(buffer), 1 << 20))
        if not count:
            return False
        buffer = buffer[count:]
    return True


def measure(target: str, tokens: int, repeats: int) -> dict[str, float]:
    x = torch.randn(tokens, HIDDEN).bfloat16()
    result = {}
    with Client(target) as client, client.register_region(4 * x.nbytes + (1 << 20)) as region:
        inside = region.empty(x.shape, x.dtype)
        inside.copy_(x)
        calls = {
            "inline": lambda: client.forward(1, x),
            "fp8": lambda: client.forward(1, x, wire_format="fp8"),
            "region": lambda: client.forward(1, inside, region=region),
        }
        for way in WAYS:
            result[way] = median_ms(calls[way], repeats)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        process = context.Process(target=serve, args=(path, theirs), daemon=True)
        process.start()
        address, bare_port = ours.recv()
        for tokens in options.tokens:
            nbytes = tokens * HIDDEN * 2
            raw = {"raw_socket_ms": echo_ms(nbytes, options.repeats),
                   "bare_grpc_ms": bare_grpc_ms(bare_port, nbytes, options.repeats)}  # fmt: skip
            for name, target in (("tcp", address), ("unix", f"unix:{path}")):
                times = measure(target, tokens, options.repeats)
                rows.append({"transport": name, "tokens": tokens, "mib_each_way": nbytes / 2**20} | raw | times)
                print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                                for key, value in rows[-1].items()), flush=True)  # fmt: skip
        ours.send("end")
        process.join(20)
    if options.json:
        host = {"machine": platform.platform(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
        result = {"rows": rows, "host": host, "hidden": HIDDEN, "torch": torch.__version__, "unit": "ms, medians"}
        reports.save(options.json, result)


if __name__ == "__main__":
    main()
