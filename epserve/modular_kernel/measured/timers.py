"""Seconds of one call on a device, as a step pays them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Timer = Callable[[Callable[[], object]], float]
"""Seconds that one call takes on the device."""


def time_call(run: Callable[[], object]) -> float:
    """Launches count: that is what a step without graphs pays."""
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
    """As a step that was captured: launches are free."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        run()
    graph.replay()
    return time_call(graph.replay)
