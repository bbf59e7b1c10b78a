"""Batches, and ranks that compute in this process: for tests of the queue and of what uses it."""

import asyncio
import time

import torch

from epserve.engine.planning import Batch, Priority
from epserve.rank.step import StepResult

HIDDEN = 4


def batch(count, *, layer=1, top_k=0, seconds=5.0, seed=0, client="", priority=Priority.NORMAL):
    generator = torch.Generator().manual_seed(seed * 1000 + count)
    ids = torch.randint(0, 8, (count, top_k), dtype=torch.int32, generator=generator) if top_k else None
    weights = torch.rand((count, top_k), generator=generator) if top_k else None
    hidden = torch.randn((count, HIDDEN), generator=generator)
    return Batch(
        layer=layer, hidden=hidden, ids=ids, weights=weights, deadline=time.monotonic() + seconds,
        client=client, priority=priority,
    )  # fmt: skip


class FakeRanks:
    """Adds the layer number to each row; `fail` takes exceptions for the next steps, `gate` holds steps back."""

    num_ranks = 2
    experts_missing = False
    stuck = ""

    def __init__(self):
        self.serving = asyncio.Event()
        self.serving.set()
        self.steps, self.fail = [], []
        self.gate = asyncio.Event()
        self.gate.set()

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    async def step(self, plans, parts):
        self.steps.append(plans[0])
        await self.gate.wait()
        if self.fail:
            error = self.fail.pop(0)
            if error is not None:
                raise error
        return StepResult(out_MK=torch.cat([part[0] for part in parts]) + plans[0].layer)


class SlowRanks(FakeRanks):
    """Each step takes `seconds`; one at a time, as the ranks do."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.busy = seconds, asyncio.Lock()

    async def step(self, plans, parts):
        async with self.busy:
            await asyncio.sleep(self.seconds)
            return await super().step(plans, parts)
