"""Ports, front ends that join them, in this process and in others: for tests of several front ends."""

import asyncio
import contextlib
import json
import sys
import time

from epserve.client import ClientOptions, RetryPolicy
from epserve.config import SchedulerConfig
from epserve.engine.planning import Batch
from epserve.engine.scheduler import Scheduler
from epserve.joining.peers import Peers
from epserve.joining.port import JoinPort
from epserve.joining.remote import RemoteEngine
from tests.engine.fake_ranks import FakeRanks
from tests.support.fake_engine import FakeEngine, serving
from tests.support.grpc_calls import until

SECRET = b"sixteen letters!"
ONCE = ClientOptions(retry=RetryPolicy(attempts=1))


@contextlib.asynccontextmanager
async def ordering(engine, address="127.0.0.1:0", *, max_bytes=1 << 30, peers=None):
    port = JoinPort(engine, address, SECRET, max_bytes=max_bytes, peers=peers)
    port.start()
    try:
        yield port
    finally:
        await port.close()


@contextlib.asynccontextmanager
async def joining(port, secret=SECRET, **more):
    engine = await RemoteEngine.join(port.address, secret, timeout_s=30, **more)
    try:
        yield engine
    finally:
        await engine.close()


def batch(x, layer=1, **more):
    return Batch(**{"layer": layer, "hidden": x, "deadline": time.monotonic() + 20, **more})


class ScheduledEngine(FakeEngine):
    """With the real queue, over ranks that add the layer's number."""

    def __init__(self):
        super().__init__(self._compute)
        self.ranks = FakeRanks()
        self.scheduler = Scheduler(SchedulerConfig(), self.ranks)
        self.scheduler.on_step = self.tell_step

    async def _compute(self, batch):
        return await self.scheduler.submit(batch)


@contextlib.asynccontextmanager
async def service(engine, *, further=2, **config):
    """Servers of the orderer and of `further` front ends, in this process; the port, and the peers of each server."""
    async with contextlib.AsyncExitStack() as stack:
        peers = [Peers() for _ in range(1 + further)]
        port = await stack.enter_async_context(ordering(engine, peers=peers[0]))
        servers = [await stack.enter_async_context(serving(engine, peers=peers[0], **config))]
        for each in peers[1:]:
            remote = await stack.enter_async_context(joining(port, peers=each))
            servers.append(await stack.enter_async_context(serving(remote, peers=each, **config)))
        yield servers, port, peers


async def spawn(*command: str, **options) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", *command, **options)


async def ready(path, process, seconds=300.0) -> dict:
    await until(lambda: path.exists() or process.returncode is not None, seconds)
    assert process.returncode is None, "it ended"
    return json.loads(path.read_text())


@contextlib.asynccontextmanager
async def front_end_processes(port, tmp_path, count, *more):
    """`epserve front-end` so many times."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    files = [tmp_path / f"ready-{number}.json" for number in range(count)]
    common = (
        "epserve",
        "front-end",
        "--join",
        port.address,
        "--secret-file",
        str(secret),
        "--set",
        "server.port=0",
        *more,
    )
    processes = [await spawn(*common, "--ready-file", str(file)) for file in files]
    try:
        yield processes, await asyncio.gather(*map(ready, files, processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
