"""Where the time of a rank's step goes: seconds of each phase, on the device's own clock where there is one.

A phase begins when it is entered and ends when the next one is. On CUDA the marks are events on the current stream: they
cost microseconds, and are read only after somebody has waited for the step's result.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

FIRST = "check"
"""Entering it begins a step: what was measured before is forgotten."""
IDLE = "idle"
COPY_OUT = "copy out"
"""Of results into clients' regions of a GPU; only steps that have such ones enter it. Other results come home after the step."""
PHASES = (FIRST, "copy in", "gate", "prepare", "experts", "finalize")
"""Of a step, in order. With several rounds the last three repeat, and their times add up."""


class PhaseClock:
    """Of one rank; one step at a time."""

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
        """Of the last step, which must have been waited for; phases in the order in which they were first entered."""
        return self._between(self._marks)

    def take(self) -> Callable[[], dict[str, float]]:
        """What gives `seconds`, once, when the step has been waited for: also when the next one has begun, in any thread."""
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
                continue  # between a step and what its rank does with the result
            took = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            spent[phase] = spent.get(phase, 0.0) + took
        return spent

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event
