"""The service process around its parts: signals, the ready file, an orderly end. The parts are stand-ins."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from epserve import service
from tests.grpc_calls import until

CONFIG = SimpleNamespace(engine=SimpleNamespace(ranks=2), server=SimpleNamespace(host="127.0.0.1"))


class Parts:
    """What `service.running` makes; `history` tells what happened to it."""

    def __init__(self, loading_s: float = 0.0):
        self.loading_s = loading_s
        self.history: list[str] = []

    @asynccontextmanager
    async def running(self, config, others):
        try:
            await asyncio.sleep(self.loading_s)
            reload = lambda: self.history.append("reload")  # noqa: E731
            yield (
                SimpleNamespace(info=SimpleNamespace(name="m")),
                SimpleNamespace(port=7, metrics_port=0, reload=reload),
            )
        finally:
            await asyncio.sleep(0.05)  # a drain; a cancel that arrives late would cut it short
            self.history.append("closed")


@pytest.fixture
def parts(monkeypatch):
    parts = Parts()
    monkeypatch.setattr(service, "running", parts.running)
    return parts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_service_after_its_drain(parts, tmp_path, number):
    ready = tmp_path / "ready.json"
    task = asyncio.create_task(service.serve(CONFIG, ready_file=ready))
    await until(ready.exists)
    assert json.loads(ready.read_text()) == {"host": "127.0.0.1", "port": 7, "pid": os.getpid()}
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: parts.history == ["reload"])
    os.kill(os.getpid(), number)
    await asyncio.wait_for(task, 5)
    assert parts.history == ["reload", "closed"]
    assert not ready.exists()


async def test_a_signal_while_the_ranks_load_ends_it_too(parts, tmp_path):
    parts.loading_s = 60
    ready = tmp_path / "ready.json"
    task = asyncio.create_task(service.serve(CONFIG, ready_file=ready))
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 5)
    assert parts.history == ["closed"]
    assert not ready.exists()
