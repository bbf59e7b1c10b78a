"""Which graphs are worth their memory: replayed and eager steps timed on the ranks themselves, and agreed between them.

A bucket is judged by the smallest step that would be padded to it, where a graph gains least. All ranks keep the same buckets,
since a rank that replays and one that runs eagerly would not understand each other.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from epserve.modular_kernel.contracts import RankContext
from epserve.modular_kernel.gathering import gather
from epserve.modular_kernel.measured.crossover import meet, seconds
from epserve.modular_kernel.types import Routing

from .graphs import Run, StepGraphs

LOG = logging.getLogger("epserve.graphs")
WARM_RUNS, REPEATS = 2, 7

Batch = tuple[torch.Tensor, Routing | None]
"""Rows, and their routing unless the step has a gate."""
Eager = Callable[[torch.Tensor, Routing | None, Sequence[int]], object]
"""The same step without a graph: (rows, routing, tokens_per_rank). Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """Seconds of the slowest rank for a step whose busiest rank has `tokens`."""

    bucket: int
    tokens: int
    graph: float
    eager: float

    @property
    def pays(self) -> bool:
        return self.graph < self.eager

    def explain(self) -> str:
        what = f"{self.tokens} token{'s' * (self.tokens > 1)}, padded to {self.bucket}"
        verdict = "graph" if self.pays else "eager"
        return f"{what}: {verdict} ({self.graph * 1e6:.0f} us as a graph, {self.eager * 1e6:.0f} us eagerly)"


def try_capture(ranks: RankContext, graphs: StepGraphs, key: Hashable, run: Run) -> str | None:
    """Collective: captures a step on every rank. Returns the first rank's reason where one cannot, and then no graph is left."""
    reason = None
    try:
        graphs.capture(key, run)
    except Exception as error:
        LOG.warning("a step cannot be captured as a CUDA graph", exc_info=True)
        reason = f"rank {ranks.rank} cannot capture a step ({short(error)})"
    found = next((each for each in gather(ranks, reason) if each is not None), None)
    if found is not None:
        for each in graphs.step_keys():
            graphs.drop(each)
    return found


def short(error: Exception) -> str:
    """Returns an error's type and first line."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def times(
    ranks: RankContext, graphs: StepGraphs, key: Hashable, eager: Eager, example: Callable[[int], Batch]
) -> tuple[BucketTimes, ...]:
    """Collective: times of every bucket, the same on all ranks. Graphs of `key` are there. `example` makes so many rows."""
    smallest = [1, *(bucket + 1 for bucket in graphs.buckets[:-1])]
    mine = []
    for bucket, tokens in zip(graphs.buckets, smallest, strict=True):
        (x_MK, routing), counts = example(tokens), (tokens,) * ranks.world_size
        graph = partial(graphs.replay, key, bucket, x_MK, routing, first=tokens * ranks.rank)
        mine.append([_median(ranks, graph), _median(ranks, partial(eager, x_MK, routing, counts))])
    of_ranks = gather(ranks, mine)
    slowest = [[max(spans) for spans in zip(*of_bucket, strict=True)] for of_bucket in zip(*of_ranks, strict=True)]
    return tuple(
        BucketTimes(bucket=bucket, tokens=tokens, graph=graph_s, eager=eager_s)
        for bucket, tokens, (graph_s, eager_s) in zip(graphs.buckets, smallest, slowest, strict=True)
    )


def _median(ranks: RankContext, run: Callable[[], object]) -> float:
    for _ in range(WARM_RUNS):
        run()
    spans = []
    for _ in range(REPEATS):
        meet(ranks)
        spans.append(seconds(run, ranks.device))
    return statistics.median(spans)
