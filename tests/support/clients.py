"""A server in a thread for blocking clients, and what its engine computes: for tests of the Python clients."""

import asyncio
import threading
import time
from contextlib import contextmanager

from epserve.client import Client, ClientOptions, RetryPolicy
from tests.support.fake_engine import FakeEngine, serving

QUICK = ClientOptions(retry=RetryPolicy(first_s=0.01, longest_s=0.05), timeout_s=50)


@contextmanager
def serving_in_thread(engine: FakeEngine, **config):
    """A server whose loop runs in a thread, for blocking clients."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = serving(engine, **config)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(60)
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def client_of(engine: FakeEngine, options: ClientOptions = QUICK, **config):
    with serving_in_thread(engine, **config) as server, Client(server.address, options) as client:
        yield client


class Flaky:
    """Fails a number of times with an error, then answers."""

    def __init__(self, error: Exception, times: int):
        self.error, self.left, self.calls = error, times, []

    async def __call__(self, batch):
        self.calls.append(time.monotonic())
        if self.left > 0:
            self.left -= 1
            raise self.error
        return batch.hidden


SMALL, LARGE = 5, 40000  # tokens of 32 floats: one message, and frames


def wait_until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
