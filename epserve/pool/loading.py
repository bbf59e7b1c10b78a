"""Logs how far newcomers have read their weights, while they read. A large model takes minutes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from epserve.rank.reports import Loading

from .members import Member

log = logging.getLogger(__name__)

EVERY_S = 5.0
ANSWER_S = 2.0


@asynccontextmanager
async def told(members: Sequence[Member], *, every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Logs the progress of `members` every `every_s` seconds until the block ends. A short load logs nothing."""
    telling = asyncio.create_task(_tell(members, every_s))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(members: Sequence[Member], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await asyncio.gather(*(member.ping(ANSWER_S) for member in members))
        found = [member.pulse.loading for member in members if member.pulse is not None]
        if (text := progress([each for each in found if each is not None])) is not None:
            log.info("%s", text)


def progress(ranks: Sequence[Loading]) -> str | None:
    """Returns one line on all ranks, or None before the first layer of any of them.

    The seconds that are left are those of the slowest rank at its speed so far.
    """
    if not ranks:
        return None
    slowest = max(ranks, key=lambda each: each.seconds / each.layers * each.of_layers)
    done = sum(each.nbytes for each in ranks)
    whole = sum(each.nbytes / each.layers * each.of_layers for each in ranks)
    speed = sum(each.nbytes / each.seconds for each in ranks)
    left = slowest.seconds / slowest.layers * (slowest.of_layers - slowest.layers)
    return (
        f"loading weights: {slowest.layers} of {slowest.of_layers} layers, {done / 1e9:.1f} of about {whole / 1e9:.1f} GB"
        f" at {speed / 1e9:.2f} GB/s, about {left:.0f} s left"
    )
