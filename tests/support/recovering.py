"""Clients and waits of the tests in which ranks are lost."""

import asyncio
import contextlib
import time

import torch

from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import RankFailed
from epserve.models.demo import reference_module
from tests.support.checkpoints import LAYER
from tests.support.ranks import cluster_section

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
STEP_TIMEOUT_S = 8.0
HEARTBEAT_S = 4.0
NOTICE_S = 5.0  # from the kill to a state other than serving
BACK_S = 120.0  # from the kill to serving again; seconds on a free machine, most of it the start of a Python with torch


@contextlib.asynccontextmanager
async def running(path, **engine):
    """An engine over the checkpoint, of CPU ranks unless told otherwise, with these choices in its section `engine`."""
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"device": "cpu", "experts": "grouped_mm", "standbys": 0, **engine},
            "cluster": {"start_timeout_s": 240, **cluster_section()},
            "scheduler": {"step_timeout_s": STEP_TIMEOUT_S, "heartbeat_s": HEARTBEAT_S},
        }
    )
    started = Engine(config)
    await started.start()
    try:
        yield started
    finally:
        await started.close()


class Load:
    """Clients that ask without pause. Every answer is compared; `retryable` counts the errors that a client may retry.

    gradient: (rows, gradients of results) -> gradients of rows; with it every second client asks for those.
    """

    def __init__(self, engine, reference, clients=6, gradient=None):
        self.engine, self.reference, self.gradient = engine, reference, gradient
        self.answers = self.retryable = 0
        self.slowest = 0.0
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(clients)]

    async def _ask(self, number):
        x = torch.randn((1 + 7 * number, 64), generator=torch.Generator().manual_seed(number))
        backward = self.gradient is not None and number % 2 == 1
        g = x.flip(0) if backward else None
        expected = self.gradient(x, g) if backward else self.reference(x)
        while not self._stop:
            start = time.monotonic()
            try:
                y = await self.engine.forward(Batch(layer=LAYER, hidden=x, gradient=g, deadline=start + BACK_S + 60))
            except RankFailed:
                self.retryable += 1
                continue
            torch.testing.assert_close(y, expected, **TOLERANCE)
            self.answers += 1
            self.slowest = max(self.slowest, time.monotonic() - start)

    async def stop(self):
        self._stop = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), BACK_S)


async def ask(engine, reference, count=9):
    x = torch.randn((count, 64), generator=torch.Generator().manual_seed(count))
    y = await engine.forward(Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + 120))
    torch.testing.assert_close(y, reference(x), **TOLERANCE)


async def until(condition, seconds, what):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def back(engine):
    return await until(lambda: engine.state() == "serving", BACK_S, "serving again")


async def spare(engine):
    await until(lambda: engine.status().spares == 1, BACK_S, "a spare")


def pids(engine):
    return [rank.pid for rank in engine.status().ranks]


def reference_gradient(path, layer):
    """`(M, K)` rows and `(M, K)` gradients of their results -> the rows' gradient by transformers' own block of `layer`."""
    block = reference_module(path, layer).requires_grad_(False)

    def run(x_MK: torch.Tensor, g_MK: torch.Tensor) -> torch.Tensor:
        leaf = x_MK.detach().requires_grad_()
        out = block(leaf.unsqueeze(0))
        y_MK = (out[0] if isinstance(out, tuple) else out).reshape(x_MK.shape)
        return torch.autograd.grad(y_MK, leaf, g_MK)[0]

    return run
