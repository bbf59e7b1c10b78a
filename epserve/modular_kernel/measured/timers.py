"""Measures the seconds that one call costs a step on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Timer = Callable[[Callable[[], object]], float]
"""A function that returns the seconds of one call on the device."""


def time_call(run: Callable[[], object]) -> float:
    """Returns the seconds with launches, as in a step without graphs."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_graph(run: Callable[[], object]) -> float:
    """Returns the seconds without launches, as in a captured step."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        run()
    graph.replay()
    return time_call(graph.replay)
