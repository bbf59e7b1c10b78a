"""Seconds of each phase of a rank's step, on the device's own clock if it has one.

A phase begins when it is entered and ends when the next one is entered. On CUDA the marks are events on the current stream.
They cost microseconds, and are read only after a thread has waited for the step's result.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

FIRST = "check"
"""Entering this phase begins a step and drops earlier measurements."""
IDLE = "idle"
COPY_OUT = "copy out"
"""Copies results into clients' GPU regions. Only steps with such results enter it. Other results are copied after the step."""
PHASES = (FIRST, "copy in", "gate", "prepare", "experts", "finalize")
"""Phases of a step, in order. With several rounds the last three repeat, and their times add up."""


class Marks:
    """Records the seconds of each stage of a longer piece of work, on the process's clock."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def add(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage], self._last = now - self._last, now

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in self.seconds.items())


class PhaseClock:
    """Times the phases of one rank, one step at a time."""

    def __init__(self, device: torch.device):
        self.phase = IDLE
        self._cuda = device.type == "cuda"
        self._spare: list[Any] = []
        self._marks: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        self.phase = phase
        if phase == FIRST:
            if self._cuda:
                self._spare += [mark for _, mark in self._marks]
            self._marks.clear()
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Returns the phases of the last step in the order of their first entry. The caller has waited for the step."""
        return self._between(self._marks)

    def take(self) -> Callable[[], dict[str, float]]:
        """Returns a function that gives `seconds` of this step. Call it once, after waiting for the step, from any thread.

        It also works after the next step has begun.
        """
        marks, self._marks = self._marks, []

        def seconds() -> dict[str, float]:
            spent = self._between(marks)
            if self._cuda:
                self._spare.extend(mark for _, mark in marks)
            return spent

        return seconds

    def _between(self, marks: Sequence[tuple[str, Any]]) -> dict[str, float]:
        spent: dict[str, float] = {}
        for (phase, start), (_, end) in itertools.pairwise(marks):
            if phase == IDLE:
                continue  # the time between a step and the use of its result
            took = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            spent[phase] = spent.get(phase, 0.0) + took
        return spent

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event
