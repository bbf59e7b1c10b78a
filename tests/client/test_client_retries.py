"""How long the Python clients try: what is sent again and what is not, deadlines, cancellation."""

import asyncio
import concurrent.futures
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from epserve import errors
from epserve.client import AsyncClient, ClientOptions, RetryPolicy
from epserve.client.attempts import Attempts
from epserve.errors import InvalidRequest
from epserve.server.server import Server
from tests.support.clients import QUICK, SMALL, Flaky, client_of, wait_until
from tests.support.fake_engine import FakeEngine, echo, hang, serving
from tests.support.grpc_calls import until

ROUNDED_S = 0.1  # a deadline travels as what is left of it, in coarse units


class TestRetries:
    @pytest.mark.parametrize("tokens", [SMALL, 16000])
    @pytest.mark.parametrize("error", [errors.RankFailed("died"), errors.Overloaded("full", retry_after_s=0.05)])
    async def test_what_may_succeed_later_is_sent_again(self, error, tokens):
        compute = Flaky(error, times=3)
        async with serving(FakeEngine(compute)) as server, AsyncClient(server.address, QUICK) as client:
            x = torch.randn(tokens, 32)
            assert torch.equal(await client.forward(1, x), x)
        assert len(compute.calls) == 4
        gaps = np.diff(compute.calls)
        assert min(gaps) >= getattr(error, "retry_after_s", 0.005)

    def test_the_blocking_client_too(self):
        compute = Flaky(errors.RankFailed("died"), times=2)
        with client_of(FakeEngine(compute)) as client:
            assert torch.equal(client.forward(1, torch.ones(1, 32)), torch.ones(1, 32))
        assert len(compute.calls) == 3

    @pytest.mark.parametrize("error", [errors.InternalError("defect"), errors.InvalidRequest("wrong")])
    async def test_what_cannot_succeed_is_sent_once(self, error):
        compute = Flaky(error, times=3)
        async with serving(FakeEngine(compute)) as server, AsyncClient(server.address, QUICK) as client:
            with pytest.raises(type(error)):
                await client.forward(1, torch.ones(1, 32))
        assert len(compute.calls) == 1

    @pytest.mark.parametrize(
        ("retry_after_s", "attempts"), [(0.05, 3), (20.0, 1)], ids=["no time left", "too long a wait"]
    )
    async def test_no_retry_passes_the_deadline(self, monkeypatch, retry_after_s, attempts):
        """On a clock by which each attempt takes 10 s."""
        flaky, real = Flaky(errors.Overloaded("full", retry_after_s=retry_after_s), times=100), time.monotonic
        monkeypatch.setattr(
            "epserve.client.attempts.time", SimpleNamespace(monotonic=lambda: real() + 10 * len(flaky.calls))
        )
        async with serving(FakeEngine(flaky)) as server, AsyncClient(server.address, QUICK) as client:
            with pytest.raises(errors.Overloaded) as raised:
                await client.forward(1, torch.ones(1, 32), timeout=29)
        assert len(flaky.calls) == attempts
        assert attempts == 1 or f"after {attempts} attempts" in raised.value.__notes__[0]

    async def test_a_server_that_restarts_is_found_again(self):
        engine = FakeEngine()
        options = ClientOptions(retry=RetryPolicy(attempts=50, longest_s=0.2), timeout_s=20)
        async with serving(engine) as server:
            config = server._config.model_copy(update={"port": server.port})
            client = AsyncClient(server.address, options)
            await client.forward(1, torch.ones(1, 32))
        pending = asyncio.ensure_future(client.forward(1, torch.ones(1, 32)))
        await asyncio.sleep(0.3)
        again = Server(engine, config)
        await again.start()
        assert torch.equal(await pending, torch.ones(1, 32))
        await client.close()
        await again.stop()


class TestDeadlinesAndCancellation:
    @pytest.mark.parametrize("tokens", [SMALL, 16000])
    async def test_the_deadline_ends_a_call(self, tokens):
        engine = FakeEngine(hang)
        async with serving(engine) as server, AsyncClient(server.address, QUICK) as client:
            with pytest.raises(errors.DeadlineExceeded):
                await client.forward(1, torch.ones(tokens, 32), timeout=0.2)
            engine.compute = echo
            assert torch.equal(await client.forward(1, torch.ones(tokens, 32)), torch.ones(tokens, 32))
            await until(lambda: (engine.running, server._calls.in_flight) == (0, 0))

    async def test_every_call_has_a_deadline(self):
        engine = FakeEngine()
        async with serving(engine) as server, AsyncClient(server.address, ClientOptions(timeout_s=70)) as client:
            for tokens in (1, 16000):
                before = time.monotonic()
                await client.forward(1, torch.ones(tokens, 32))
                assert before + 70 - ROUNDED_S <= engine.seen[-1].deadline <= time.monotonic() + 70 + ROUNDED_S

    @pytest.mark.parametrize("tokens", [SMALL, 16000])
    async def test_a_cancelled_task_cancels_the_call(self, tokens):
        engine = FakeEngine(hang)
        async with serving(engine) as server, AsyncClient(server.address, QUICK) as client:
            task = asyncio.ensure_future(client.forward(1, torch.ones(tokens, 32)))
            async with asyncio.timeout(30):
                while not engine.running:
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while engine.running or server._calls.in_flight:
                    await asyncio.sleep(0.01)
        assert engine.cancelled == 1

    @pytest.mark.parametrize("tokens", [SMALL, 16000])
    def test_a_cancelled_future_cancels_the_call(self, tokens):
        engine = FakeEngine(hang)
        with client_of(engine) as client:
            future = client.forward_async(1, torch.ones(tokens, 32))
            wait_until(lambda: engine.running)
            assert future.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                future.result()
            wait_until(lambda: not engine.running)
            engine.compute = echo
            assert torch.equal(client.forward(1, torch.ones(1, 32)), torch.ones(1, 32))
        assert engine.cancelled == 1


@pytest.mark.parametrize("timeout", [float("nan"), -1.0, 0.0])
def test_what_is_no_time_is_refused(timeout):
    with pytest.raises(InvalidRequest, match="timeout: "):
        Attempts(RetryPolicy(), timeout)


async def test_an_endless_timeout_is_a_long_one():
    async with serving(FakeEngine()) as server, AsyncClient(server.address) as client:
        await client.wait_ready(float("inf"))
        assert (await client.forward(1, torch.ones(2, 32), timeout=float("inf"))).shape == (2, 32)
