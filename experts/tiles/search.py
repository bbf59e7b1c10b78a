"""The search for tiles: which candidates are timed, in what order and how often, and when one may replace what would serve.

Nothing here touches a device: a bench compiles, times and compares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .cache import Times
from .candidates import First, Option, Options, joined
from .sizes import Tiles

GAIN = 0.01
"""What new tiles must win over those that would serve: noise must not decide."""
AGAIN = 4
"""So many of the best are timed twice more: clocks fall while a chip is warm, so that order matters."""
COMPILING = 0.5
"""Most of a token tile's share of the time that goes into compiling."""


class Bench(Protocol):
    """One cell on a device: the same batches for every candidate."""

    def compile(self, options: Options, deadline: float) -> Options:
        """Those of the options, in order, that were compiled or are being tried until the deadline."""

    def time(self, which: str, bm: int, option: Option, partner: Option) -> float | None:
        """Microseconds of one GEMM ("gate_up" with what comes before it, "down" with what comes after) for one batch. None:
        it failed. partner: of the other GEMM; its result is what "down" reads."""

    def compare(self, old: Tiles, new: Tiles) -> tuple[float, float, str | None]:
        """Microseconds of the whole layer with each, in turn, and what is wrong with the new one's result, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The tiles of a cell, perhaps those that it had, and whole layers' times. `timed`: candidates."""

    tiles: Tiles
    times: Times
    timed: int
    note: str = ""


Clock = Callable[[], float]


def search(
    bench: Bench, current: Tiles, options: Sequence[Options], *, deadline: float, clock: Clock = time.monotonic
) -> Found | None:
    """The fastest pair of GEMMs over all token tiles, checked against `current` as a whole layer; None: nothing was timed.

    Runs over the deadline by one measurement at most, and by the last comparison.
    """
    best: tuple[float, Tiles] | None = None
    timed, begin = 0, clock()
    for turn, each in enumerate(options):
        each = _with_current(each, current)
        if (best is not None and clock() > deadline) or not each.first or not each.second:
            continue
        share = (deadline - begin) / len(options)
        start = begin + turn * share
        usable = bench.compile(each, start + COMPILING * share)
        first, seen = _fastest(bench, "gate_up", usable, usable.second[0], start + 0.75 * share, clock)
        timed += seen
        if first is None:
            continue
        second, seen = _fastest(bench, "down", usable, first[1], start + share, clock)
        timed += seen
        if second is not None and (best is None or first[0] + second[0] < best[0]):
            best = first[0] + second[0], joined(each.bm, first[1], second[1])
    if best is None:
        return None
    return _settled(bench, current, best[1], timed)


def _with_current(options: Options, current: Tiles) -> Options:
    """What would serve comes first: it is timed whenever anything is."""
    if options.bm != current.bm:
        return options
    first = First(current.gate_up, current.expand)
    return Options(
        bm=options.bm,
        first=(first, *(each for each in options.first if each != first)),
        second=(current.down, *(each for each in options.second if each != current.down)),
    )


def _fastest(
    bench: Bench, which: str, options: Options, partner: Option, limit: float, clock: Clock
) -> tuple[tuple[float, Option] | None, int]:
    """Microseconds and option; and how many were timed. Each once, then the best few again, in turn."""
    seen: dict[Option, list[float]] = {}
    for option in options.of(which):
        if seen and clock() > limit:
            break
        us = bench.time(which, options.bm, option, partner)
        if us is not None:
            seen[option] = [us]
    if not seen:
        return None, 0
    for option in 2 * sorted(seen, key=lambda each: seen[each][0])[:AGAIN]:
        if clock() > limit:
            break
        us = bench.time(which, options.bm, option, partner)
        if us is not None:
            seen[option].append(us)
    most = max(len(times) for times in seen.values())
    score = {option: statistics.mean(times[1:] or times) for option, times in seen.items() if len(times) == most}
    winner = min(score, key=lambda each: score[each])
    return (score[winner], winner), len(seen)


def _settled(bench: Bench, current: Tiles, new: Tiles, timed: int) -> Found:
    if new == current:
        us, _, _ = bench.compare(current, current)
        return Found(tiles=current, times=Times(us=us, before_us=us), timed=timed)
    before, us, wrong = bench.compare(current, new)
    kept = Found(tiles=current, times=Times(us=before, before_us=before), timed=timed, note=wrong or "")
    if wrong or us >= before * (1 - GAIN):
        return kept
    return Found(tiles=new, times=Times(us=us, before_us=before), timed=timed)
