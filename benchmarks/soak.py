"""Runs a service under good and bad calls of every kind: `python -m benchmarks.soak [--seconds 600] [--clients 200]`.

It starts `epserve serve` with a demo model on CPU ranks, in processes of its own, and runs clients that choose at random: calls
by the layer's gate, by ids, in frames, in fp8, through shared memory and over the Open Inference Protocol, cancelled calls,
deadlines that cannot be met, malformed messages, and streams that are left half-open or never read. Below gRPC there are messages
that stop in the middle and replies that are never read, until the connection is closed or the server ends the call. Every answer
is compared with the dense result of the same rows, and every error must be one that was provoked. Memory is that of the service's
front end and of its ranks, without shared pages, from the third minute on (in short runs, the last three quarters): the mean of
its first third against that of its last, and the slope of a line through all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import torch
import yaml

from benchmarks import reports
from epserve.client import AsyncClient, ClientOptions, RetryPolicy
from epserve.errors import DeadlineExceeded, EpserveError, Overloaded
from epserve.models.demo import write_demo_checkpoint
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.protocol import status
from tests.server.raw_http2 import RawConnection

HIDDEN, TOP_K, NUM_EXPERTS = 256, 2, 8
SIZES = {"hidden": HIDDEN, "intermediate": 128, "num_experts": NUM_EXPERTS, "top_k": TOP_K, "num_layers": 2, "seed": 1}
ROWS = (1, 3, 16, 64)
FRAMED_ROWS = 1500  # 1.5 MB: two frames
CALL_S = 60.0
"""A call that was meant to succeed and takes longer counts as unanswered."""
DEADLINE_S = 10.0
"""The service's, for clients that give none."""
SAMPLE_S = 2.0
WARM_UP_S = 120.0
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
"""The statuses of malformed messages. A message that is still right after a mutation gets an answer."""


class Tally:
    """What happened: action -> outcome -> count, and the first things that should not have."""

    def __init__(self) -> None:
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.unexpected: list[str] = []
        self.milliseconds: list[float] = []

    def wrong(self, action: str, what: object) -> None:
        self.outcomes[action]["unexpected"] += 1
        self.unexpected.append(f"{action}: {type(what).__name__}: {what}"[:400])


class Reference:
    """Inputs, and the answers that the service itself gave to them one at a time, before the load."""

    def __init__(self, rows_MK: torch.Tensor, ids_Mt: torch.Tensor, weights_Mt: torch.Tensor):
        self.rows, self.ids, self.weights = rows_MK, ids_Mt, weights_Mt
        self.gated = self.routed = torch.empty(0)

    @classmethod
    def draw(cls) -> Reference:
        generator = torch.Generator().manual_seed(7)
        rows = torch.randn(FRAMED_ROWS, HIDDEN, generator=generator)
        ids = torch.randint(0, NUM_EXPERTS, (FRAMED_ROWS, TOP_K), generator=generator)
        return cls(rows, ids, torch.rand(FRAMED_ROWS, TOP_K, generator=generator))

    async def ask(self, client: AsyncClient, layer: int) -> None:
        self.gated = await client.forward(layer, self.rows)
        self.routed = await client.forward(layer, self.rows, self.ids, self.weights)


class Caller:
    """One client with a connection of its own."""

    def __init__(self, address: str, layer: int, number: int, reference: Reference, tally: Tally):
        self.address, self.layer, self.random = address, layer, random.Random(number)
        self.reference, self.tally = reference, tally
        once = ClientOptions(retry=RetryPolicy(attempts=1), timeout_s=CALL_S)
        self.client = AsyncClient(address, once)
        # NOTE: without this, gRPC lets channels of one process share a connection
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.stub = pb_grpc.ExpertsStub(self.channel)

    def slice(self, rows: int | None = None) -> slice:
        size = rows or self.random.choice(ROWS)
        start = self.random.randrange(FRAMED_ROWS - size + 1)
        return slice(start, start + size)

    def compare(self, got: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
        """Requests that share a step change the order of no sum, but GEMMs of another size may change the last bits."""
        if not torch.allclose(got, expected, rtol=rtol, atol=rtol * float(expected.abs().max())):
            raise AssertionError(f"a wrong answer: off by {float((got - expected).abs().max())}")

    async def gated(self) -> None:
        at = self.slice()
        self.compare(await self.client.forward(self.layer, self.reference.rows[at]), self.reference.gated[at])

    async def routed(self) -> None:
        at, of = self.slice(), self.reference
        got = await self.client.forward(self.layer, of.rows[at], of.ids[at], of.weights[at])
        self.compare(got, of.routed[at])

    async def framed(self) -> None:
        got = await self.client.forward(self.layer, self.reference.rows)
        self.compare(got, self.reference.gated)

    async def fp8(self) -> None:
        at, of = self.slice(), self.reference
        got = await self.client.forward(self.layer, of.rows[at], of.ids[at], of.weights[at], wire_format="fp8")
        self.compare(got, of.routed[at], rtol=0.2)

    async def region(self) -> None:
        async with self.client.register_region(1 << 20) as region:
            for _ in range(self.random.randint(1, 5)):
                at = self.slice()
                got = await self.client.forward(self.layer, self.reference.rows[at], region=region)
                self.compare(got, self.reference.gated[at])

    async def stream(self) -> None:
        async with self.client.stream() as stream:
            parts = [self.slice() for _ in range(8)]
            calls = (stream.forward(self.layer, self.reference.rows[at]) for at in parts)
            for at, got in zip(parts, await asyncio.gather(*calls), strict=True):
                self.compare(got, self.reference.gated[at])

    async def inference_protocol(self) -> None:
        at = self.slice()
        x = self.reference.rows[at]
        tensor = kserve.ModelInferRequest.InferInputTensor(name="hidden_states", datatype="FP32", shape=x.shape)
        request = kserve.ModelInferRequest(
            model_name=f"layer-{self.layer}", inputs=[tensor], raw_input_contents=[x.numpy().tobytes()]
        )
        try:
            reply = await kserve_grpc.GRPCInferenceServiceStub(self.channel).ModelInfer(request, timeout=CALL_S)
        except grpc.RpcError as error:
            raise status.error_of_rpc(error) from None
        got = torch.frombuffer(bytearray(reply.raw_output_contents[0]), dtype=torch.float32).view(x.shape)
        self.compare(got, self.reference.gated[at])

    async def cancelled(self) -> None:
        task = asyncio.ensure_future(self.client.forward(self.layer, self.reference.rows[self.slice(FRAMED_ROWS // 2)]))
        await asyncio.sleep(self.random.random() * 0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def late(self) -> None:
        timeout = self.random.choice([0.001, 0.003, 0.01])
        with contextlib.suppress(DeadlineExceeded):
            await self.client.forward(self.layer, self.reference.rows[self.slice()], timeout=timeout)

    async def malformed(self) -> None:
        x = self.reference.rows[self.slice(1)]
        tensor = pb.Tensor(dtype=pb.FP32, shape=x.shape, data=x.numpy().tobytes())
        payload = bytearray(pb.ForwardRequest(layer=self.layer, hidden_states=tensor).SerializeToString())
        for _ in range(self.random.randint(1, 5)):
            payload[self.random.randrange(min(40, len(payload)))] = self.random.randrange(256)
        payload = payload[: self.random.choice([len(payload), self.random.randrange(len(payload))])]
        method = self.random.choice(["/epserve.v1.Experts/Forward", "/inference.GRPCInferenceService/ModelInfer"])
        try:
            await self.channel.unary_unary(method)(bytes(payload), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code().name not in REFUSALS:
                raise AssertionError(f"{method} gave {error.code().name}: {error.details()}") from None

    async def half_open(self) -> None:
        """The header of a large request, some bytes, and silence."""
        call = self.stub.ForwardStream()
        header = pb.Tensor(dtype=pb.FP32, shape=(FRAMED_ROWS, HIDDEN))
        request = pb.ForwardRequest(layer=self.layer, hidden_states=header, timeout_ms=2000)
        await call.write(pb.RequestFrame(call=1, begin=request))
        await call.write(pb.RequestFrame(call=1, part=pb.Part(field=pb.HIDDEN_STATES, data=bytes(5000))))
        await asyncio.sleep(self.random.random())
        call.cancel()

    async def unread(self) -> None:
        """Sends many requests on a stream and reads no reply."""
        call = self.stub.ForwardStream()
        x = self.reference.rows[self.slice(64)]
        tensor = pb.Tensor(dtype=pb.FP32, shape=x.shape, data=x.numpy().tobytes())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 + self.random.random()):
                for number in range(20):
                    request = pb.ForwardRequest(layer=self.layer, hidden_states=tensor, timeout_ms=5000)
                    await call.write(pb.RequestFrame(call=number, begin=request))
        call.cancel()

    async def raw(self, *, window: int, size: int | None) -> None:
        """Some calls of one connection below gRPC, left alone for a while: until their deadline, now and then."""
        x = self.reference.rows
        tensor = pb.Tensor(dtype=pb.FP32, shape=x.shape, data=x.numpy().tobytes())
        body = pb.ForwardRequest(layer=self.layer, hidden_states=tensor).SerializeToString()
        async with await RawConnection(window=window).connect(self.address) as connection:
            for _ in range(self.random.randint(1, 4)):
                await connection.send("/epserve.v1.Experts/Forward", body, size=size, timeout_s=5)
            await asyncio.sleep(self.random.choice([0.1, 1.0, DEADLINE_S + 2]))

    async def unread_reply(self) -> None:
        await self.raw(window=0, size=None)

    async def half_message(self) -> None:
        await self.raw(window=65535, size=self.random.randrange(self.reference.rows.nbytes))

    def actions(self) -> dict[Callable[[], Awaitable[None]], int]:
        """How often, relatively."""
        return {
            self.gated: 30, self.routed: 20, self.framed: 2, self.fp8: 8, self.region: 4, self.stream: 4,
            self.inference_protocol: 10, self.cancelled: 5, self.late: 6, self.malformed: 8, self.half_open: 2,
            self.unread: 1, self.unread_reply: 1, self.half_message: 1,
        }  # fmt: skip

    async def run(self, end: float) -> None:
        choices = self.actions()
        while time.monotonic() < end:
            (action,) = self.random.choices(list(choices), list(choices.values()))
            name, start = action.__name__, time.perf_counter()
            try:
                await action()
            except Overloaded as error:  # a full queue says so, and is meant to
                self.tally.outcomes[name]["refused: Overloaded"] += 1
                await asyncio.sleep(error.retry_after_s)
            except (EpserveError, AssertionError, grpc.RpcError, asyncio.InvalidStateError) as error:
                self.tally.wrong(name, error)
            else:
                self.tally.outcomes[name]["as expected"] += 1
                if action in (self.gated, self.routed):
                    self.tally.milliseconds.append((time.perf_counter() - start) * 1e3)
            await asyncio.sleep(self.random.random() * 0.2)

    async def close(self) -> None:
        await self.client.close()
        await self.channel.close()


def resident_mib(pid: int) -> float:
    """Without pages that are shared, such as those of regions."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0.0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def sample(pids: dict[str, int], end: float) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in pids}
    while time.monotonic() < end:
        for name, pid in pids.items():
            samples[name].append(resident_mib(pid))
        await asyncio.sleep(SAMPLE_S)
    return samples


def growth(values: list[float]) -> dict[str, float]:
    """After the warm-up, in which caches, arenas and pools fill. Requests that are under way make the values scatter."""
    settled = values[min(round(WARM_UP_S / SAMPLE_S), len(values) // 4) :]
    third = max(1, len(settled) // 3)
    before, after = statistics.mean(settled[:third]), statistics.mean(settled[-third:])
    slope = statistics.linear_regression(range(len(settled)), settled).slope if len(settled) > 1 else 0.0
    return {
        "first_third_mib": before, "last_third_mib": after, "ratio": after / before if before else 0.0,
        "lowest_ratio": min(settled[-third:]) / min(settled[:third]), "mib_a_minute": slope * 60 / SAMPLE_S,
    }  # fmt: skip


async def soak(address: str, front_end: int, options: argparse.Namespace) -> dict:
    tally, reference = Tally(), Reference.draw()
    async with AsyncClient(address) as probe:
        ready = await probe.wait_ready(120)
        layer = (await probe.model()).layers[0]
        await reference.ask(probe, layer)
        callers = [Caller(address, layer, number, reference, tally) for number in range(options.clients)]
        end = time.monotonic() + options.seconds
        pids = {"front end": front_end, **{f"rank {rank.rank}": rank.pid for rank in ready.ranks}}
        running = [caller.run(end) for caller in callers]
        samples, *_ = await asyncio.gather(sample(pids, end), *running)
        for caller in callers:
            await caller.close()
        await asyncio.sleep(DEADLINE_S + 3)  # a call that is given up lasts until its deadline at the most
        last = await probe.status()
        regions = (await pb_grpc.ExpertsStub(probe._channel).ListRegions(pb.ListRegionsRequest())).regions
    times = sorted(tally.milliseconds)
    return {
        "outcomes": {name: dict(counts) for name, counts in sorted(tally.outcomes.items())},
        "unexpected": len(tally.unexpected),
        "first_unexpected": tally.unexpected[:20],
        "memory": {name: growth(values) for name, values in samples.items()},
        "memory_samples_mib": {name: [round(value, 1) for value in values] for name, values in samples.items()},
        "latency_ms": {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)], "calls": len(times)},
        "afterwards": {
            "state": last.state, "calls_in_flight": last.calls_in_flight, "buffered_bytes": last.buffered_bytes,
            "queue_tokens": last.queue_tokens, "recoveries": last.recoveries, "regions": len(regions), "steps": last.steps,
        },
    }  # fmt: skip


def serve(folder: Path, options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], dict]:
    """The service and its ready file's contents."""
    write_demo_checkpoint("mixtral", folder / "model", dtype=torch.float32, **SIZES)
    config = {
        "model": {"path": str(folder / "model")},
        "engine": {"ranks": options.ranks, "device": "cpu", "max_tokens_per_rank": 2048},
        "scheduler": {"max_queued_tokens": 16384, "default_deadline_s": DEADLINE_S},
        "server": {"port": 0, "max_tokens_per_request": 4096},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "epserve", "serve", str(folder / "config.yaml"), "--ready-file", str(ready)]
    with open(folder / "service.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 180
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise SystemExit((folder / "service.log").read_text()[-3000:])
        time.sleep(0.2)
    return process, json.loads(ready.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        process, ready = serve(Path(name), options)
        try:
            result = asyncio.run(soak(f"127.0.0.1:{ready['port']}", ready["pid"], options))
        finally:
            process.send_signal(signal.SIGTERM)
            exit_code = process.wait(60)
        log = (Path(name) / "service.log").read_text()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result |= {
        "exit_code": exit_code,
        "tracebacks_in_log": log.count("Traceback"),
        "connections_that_held_too_much": log.count("are ended"),
        "run": {
            "seconds": options.seconds, "clients": options.clients, "ranks": options.ranks, "sizes": SIZES,
            "machine": platform.platform(), "cpus": os.cpu_count(), "load_before": os.getloadavg()[2],
            "torch": torch.__version__, "commit": commit.stdout.strip(),
        },
    }  # fmt: skip
    shown = {key: value for key, value in result.items() if key != "memory_samples_mib"}
    print(json.dumps(shown, indent=1))
    if options.json:
        reports.save(options.json, result)
    if result["tracebacks_in_log"]:
        print(log[log.index("Traceback") - 500 :][:4000])
    if exit_code:
        print(log[-3000:])
    flat = all(0.98 <= entry["ratio"] <= 1.02 for entry in result["memory"].values())
    print(f"unexpected outcomes: {result['unexpected']}; memory flat within 2 %: {flat}")


if __name__ == "__main__":
    main()
