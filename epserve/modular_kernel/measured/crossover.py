"""Chooses the all-to-all of a step: measured at start-up on the ranks themselves, agreed between them, looked up by token count.

A wrong choice is not a slow step but a hang: ranks that choose differently wait for each other in different libraries. So the
choice is a pure function of `tokens_per_rank`, which every rank has in its step plan, over one table that all ranks hold alike.
In that table, each candidate's time is the time of its slowest rank.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from epserve.errors import ConfigError
from epserve.modular_kernel.capability import LayerSpec
from epserve.modular_kernel.contracts import RankContext
from epserve.modular_kernel.gathering import gather
from epserve.modular_kernel.types import Routing

from .buckets import BUCKETS, bucket_of

LOG = logging.getLogger("epserve.crossover")
WARM_RUNS, REPEATS = 2, 5
MIB = 1 << 20

Run = Callable[[torch.Tensor, Routing, Sequence[int]], object]
"""A function that runs one collective step of a candidate: (`x_MK`, physical routing, tokens_per_rank)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Holds the agreed table.

    Args:
        caps: candidate -> the most tokens of the busiest rank that it may get (None: any), in order of preference.
        times: bucket -> candidate -> seconds of the slowest rank. A candidate that a bucket lacks is not chosen there.
    """

    caps: Mapping[str, int | None]
    times: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    num_ranks: int = 0
    """The number of ranks that measured the table. 0: it was made otherwise."""

    def __post_init__(self):
        if all(cap is not None for cap in self.caps.values()):
            raise ConfigError(f"one all-to-all candidate at least must take batches of any size, got {dict(self.caps)}")

    def choice(self, tokens_per_rank: Sequence[int]) -> str:
        """Returns the candidate for a step. It is the same on every rank: it depends on the arguments and on this table alone."""
        longest = max(tokens_per_rank)
        able = [name for name, cap in self.caps.items() if cap is None or longest <= cap]
        times = self.times.get(bucket_of(longest), {})
        timed = [name for name in able if name in times]
        return min(timed, key=lambda name: times[name]) if timed else able[0]

    def explain(self) -> list[str]:
        """Returns a sentence for each bucket, for the log and `GetStatus`."""
        lines = []
        for bucket, times in sorted(self.times.items()):
            seen = ", ".join(
                f"{name} {seconds * 1e6:.0f} us" for name, seconds in sorted(times.items(), key=lambda i: i[1])
            )
            lines.append(f"about {bucket} tokens on the busiest rank: {self.choice((bucket,))} ({seen})")
        for name, cap in self.caps.items():
            if cap is not None:
                lines.append(f"{name} never above {cap} tokens a rank: its blocks hold no more")
        return lines


def measure(ranks: RankContext, spec: LayerSpec, candidates: Mapping[str, Run], caps: Mapping[str, int | None],
            *, most: int) -> Crossover:  # fmt: skip
    """Times every candidate at every bucket up to `most` tokens a rank. Collective: all ranks return the same table."""
    mine: dict[int, dict[str, float]] = {}
    for bucket in [each for each in BUCKETS if each <= most]:
        counts = (bucket,) * ranks.world_size
        x_MK, routing = example(spec, bucket, ranks)
        times = mine[bucket] = {}
        for name, run in candidates.items():
            cap = caps[name]
            if cap is not None and bucket > cap:
                continue
            for _ in range(WARM_RUNS):
                run(x_MK, routing, counts)
            spans = []
            for _ in range(REPEATS):
                meet(ranks)
                spans.append(seconds(partial(run, x_MK, routing, counts), ranks.device))
            times[name] = statistics.median(spans)
    of_ranks = [_times_from_json(each) for each in gather(ranks, mine)]
    table = Crossover(caps=dict(caps), times=slowest(of_ranks), num_ranks=ranks.world_size)
    for line in table.explain():
        LOG.info("all-to-all for %s", line)
    return table


def slowest(of_ranks: Sequence[Mapping[int, Mapping[str, float]]]) -> dict[int, dict[str, float]]:
    """Merges the tables of all ranks into one: a step is as slow as its slowest rank."""
    first = of_ranks[0]
    return {
        bucket: {name: max(times[bucket][name] for times in of_ranks) for name in first[bucket]} for bucket in first
    }


def agree(ranks: RankContext, mine: Crossover | None, caps: Mapping[str, int | None]) -> Crossover | None:
    """Returns a table that some rank still has for these candidates, the same on all ranks, or None. Collective.

    After a failure the survivors have a table, perhaps of another number of ranks, and a newcomer has none. None: the ranks
    have to measure.
    """
    told = gather(ranks, asdict(mine) if mine is not None else None)
    fitting = [
        Crossover(caps=dict(caps), times=_times_from_json(table["times"]), num_ranks=table["num_ranks"])
        for table in told
        if table is not None and table["caps"] == dict(caps)
    ]
    return next((table for table in fitting if table.num_ranks == ranks.world_size), next(iter(fitting), None))


def _times_from_json(times: Mapping[str, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    return {int(bucket): dict(of_bucket) for bucket, of_bucket in times.items()}


def check_budget(asked: Mapping[str, int], limit: int, *, setting: str) -> None:
    """Raises ConfigError when the candidates' buffers exceed the limit.

    asked: bytes of each candidate's buffers and of their shared memory. limit: in bytes. 0: there is no limit.
    """
    total = sum(asked.values())
    if limit and total > limit:
        parts = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in asked.items())
        raise ConfigError(
            f"{setting}: the all-to-all candidates together ask for {total / MIB:.0f} MiB on each rank ({parts}), the limit is"
            f" {limit / MIB:.0f} MiB; raise it, name fewer candidates, or lower max_tokens_per_rank or low_latency_max_tokens"
        )


def example(spec: LayerSpec, num_tokens: int, ranks: RankContext) -> tuple[torch.Tensor, Routing]:
    """Returns random rows of this rank, routed evenly over all experts."""
    generator = torch.Generator().manual_seed(1000 * num_tokens + ranks.rank)
    shape, device = spec.shape, ranks.device
    scores = torch.rand((num_tokens, shape.num_experts), generator=generator)
    ids = scores.topk(min(shape.top_k, shape.num_experts), 1).indices.int().contiguous().to(device)
    x = torch.randn((num_tokens, shape.hidden), generator=generator).to(shape.dtype).to(device)
    weights = torch.full(ids.shape, 1.0 / max(ids.shape[1], 1), device=device)
    return x, Routing(ids_Mt=ids, weights_Mt=weights)


def meet(ranks: RankContext) -> None:
    """Waits until all ranks are here, so that no rank times another's delay."""
    if ranks.world_size > 1:
        word = torch.zeros(1, device=ranks.device)
        dist.all_reduce(word, group=ranks.group)
        word.item()


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()  # NOTE: the time includes the host's work: in some of these libraries the host waits
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
