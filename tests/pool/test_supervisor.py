"""The supervisor's looks at the ranks, without ranks: a pool and members that answer as told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from epserve.pool import members
from epserve.pool.supervisor import Supervisor


class Member:
    """Its first ping raises what no ping should; from then on there is no answer."""

    rank, where, link, pulse = 1, "node a", None, None

    def __init__(self):
        self.pings = 0

    async def ping(self, limit: float) -> bool:
        self.pings += 1
        if self.pings == 1:
            raise ValueError("not foreseen")
        return False

    async def beat(self, limit: float) -> bool:
        return True


@pytest.mark.asyncio
async def test_a_look_that_fails_is_logged_and_does_not_end_the_looking(caplog, monkeypatch):
    serving, failed = asyncio.Event(), asyncio.Event()
    serving.set()
    member = Member()
    pool = SimpleNamespace(
        config=SimpleNamespace(scheduler=SimpleNamespace(heartbeat_s=0.4, step_timeout_s=30)),
        serving=serving,
        members=[member],
    )
    supervisor, causes = Supervisor(pool), []

    def fail(cause, *, silent=()):
        causes.append((cause, tuple(silent)))
        serving.clear()
        failed.set()

    monkeypatch.setattr(supervisor, "fail", fail)
    supervisor.start()
    try:
        await asyncio.wait_for(failed.wait(), 30)
    finally:
        for task in supervisor.close():
            task.cancel()
    assert member.pings == 2 and "looking after the ranks failed" in caplog.text and "not foreseen" in caplog.text
    assert causes == [("no sign of life for 0.4 s: rank 1 (node a)", (member,))]


def test_a_process_that_ends_while_it_starts_leaves_its_reason():
    class Died(RayError):
        pass

    starting = (
        "The actor died because of an error raised in its creation task, ray::A.__init__()\n  File\nImportError: boom"
    )
    assert members._reason(Died(starting)) == "ImportError: boom"
    assert members._reason(Died("The actor died unexpectedly.\n\tpid: 24097\nWorker exit type: SYSTEM_ERROR")) == "Died"
