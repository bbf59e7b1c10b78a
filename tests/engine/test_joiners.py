"""The wait for requests that may join a step, on a clock that moves only when everybody waits."""

import asyncio
import time

import pytest

from epserve.config import SchedulerConfig
from epserve.engine.scheduler import Scheduler
from tests.engine.fake_ranks import SlowRanks, batch

TURN_S = 1e-5
"""What a turn of the loop costs on that clock, so that a loop of turns comes to its end."""


class ClockedLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time: where nothing is ready, the clock goes on to the next timer."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        select = self._selector.select

        def select_at_once(timeout=None):
            found = select(0)
            self.now += TURN_S if found or not timeout else timeout
            return found

        self._selector.select = select_at_once

    def time(self):
        return self.now


@pytest.fixture
def run(monkeypatch):
    """Runs a coroutine on that clock, which time.monotonic shows too."""
    loop = ClockedLoop()
    monkeypatch.setattr(time, "monotonic", loop.time)
    yield loop.run_until_complete
    loop.close()


async def rounds(scheduler, clients, count):
    """Each client sends again as soon as it has its answer."""

    async def one(number):
        for _ in range(count):
            await scheduler.submit(batch(1, client=str(number)))

    started = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(clients)))
    return time.monotonic() - started


def test_the_wait_for_joiners_ends_when_all_are_there_and_a_lone_client_never_waits(run):
    async def work():
        patient = Scheduler(SchedulerConfig(join_wait_ms=1000, join_wait_share=1), SlowRanks(0.05))
        assert await rounds(patient, 1, 5) < 0.26
        assert await rounds(patient, 8, 5) < 0.36, "eight came back at once: nobody waits a second for a ninth"
        await patient.close()

    run(work())


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.2, 0.21), (0.5, 0.29, 0.31)])
def test_the_wait_for_joiners_is_never_more_than_its_share_of_a_step(run, share, least, most):
    async def work():
        scheduler = Scheduler(SchedulerConfig(join_wait_ms=1000, join_wait_share=share), SlowRanks(0.2))
        await rounds(scheduler, 2, 3)
        scheduler._joined_last = 100  # many were there a moment ago, and are gone
        started = time.monotonic()
        await scheduler.submit(batch(1))
        took = time.monotonic() - started
        assert least <= took < most, "it does wait for them, where it may"
        await scheduler.close()

    run(work())
