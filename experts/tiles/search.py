"""The search for tiles: the order and number of timings of candidates, and the condition to replace the current tiles.

This module touches no device: a bench compiles, times and compares.
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
"""Fraction of the time that new tiles must win over the current tiles, so that noise does not decide."""
AGAIN = 4
"""Number of best candidates that are timed twice more. Clocks fall while a chip is warm, so order matters."""
COMPILING = 0.5
"""Largest fraction of a token tile's share of the time that goes into compiling."""


class Bench(Protocol):
    """Measures one cell on a device, with the same batches for every candidate."""

    def compile(self, options: Options, deadline: float) -> Options:
        """Compiles options until the deadline and returns, in order, those that were compiled or are being tried."""

    def time(self, which: str, bm: int, option: Option, partner: Option) -> float | None:
        """Returns the microseconds of one GEMM for one batch, or None if it failed.

        Args:
            which: "gate_up" with the steps before it, or "down" with the steps after it.
            partner: option of the other GEMM, whose result "down" reads.
        """

    def compare(self, old: Tiles, new: Tiles) -> tuple[float, float, str | None]:
        """Returns the microseconds of the whole layer with `old` and with `new`, in turn, and an error in `new`'s result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Holds the best tiles of a cell, perhaps its current ones, and times of the whole layer. `timed`: number of candidates."""

    tiles: Tiles
    times: Times
    timed: int
    note: str = ""


Clock = Callable[[], float]


def search(
    bench: Bench, current: Tiles, options: Sequence[Options], *, deadline: float, clock: Clock = time.monotonic
) -> Found | None:
    """Returns the fastest pair of GEMMs over all token tiles, checked against `current` as a whole layer, or None without times.

    It runs over the deadline by one measurement at most, and by the last comparison.
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
    """Returns the options with the current tiles first, so that they are timed whenever any option is."""
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
    """Times each option once, then the best few again, in turn. Returns the best (microseconds, option) and the number timed."""
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
