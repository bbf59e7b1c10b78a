"""Captures CUDA graphs of whole kernel steps at warm-up, one for each layer and bucket of tokens, and replays them in serving.

A graph has fixed addresses and sizes. Every rank pads its batch to the bucket with rows whose ids are all -1: they reach no
expert and change no bit of the others. The bucket follows from the busiest rank's tokens, which all ranks know, so that all
ranks replay the same graph.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from epserve.errors import ConfigError
from epserve.modular_kernel.capability import LayerSpec
from epserve.modular_kernel.contracts import RankContext
from epserve.modular_kernel.kernel import SharedExperts
from epserve.modular_kernel.types import ExpertWeights, Routing

LOG = logging.getLogger("epserve.graphs")
WARM_RUNS = 2  # eager runs before a capture: a library's set-up on first use must not happen inside the capture

Forward = Callable[..., torch.Tensor]
"""`FusedMoEModularKernel.forward`, or a function in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBatch:
    """Holds the tensors that the graphs of one bucket read and write. All layers share them: one step runs at a time."""

    x_MK: torch.Tensor
    routing: Routing
    out_MK: torch.Tensor

    @classmethod
    def empty(cls, num_tokens: int, spec: LayerSpec, device: torch.device) -> StaticBatch:
        x_MK = torch.zeros((num_tokens, spec.shape.hidden), dtype=spec.shape.dtype, device=device)
        ids_Mt = torch.full((num_tokens, spec.shape.top_k), -1, dtype=torch.int32, device=device)
        weights_Mt = torch.zeros(ids_Mt.shape, dtype=torch.float32, device=device)
        return cls(x_MK=x_MK, routing=Routing(ids_Mt=ids_Mt, weights_Mt=weights_Mt), out_MK=torch.empty_like(x_MK))

    def fill(self, x_MK: torch.Tensor, routing: Routing) -> None:
        """Copies a batch, perhaps a shorter one. The rows behind it go to no expert."""
        count = x_MK.shape[0]
        self.x_MK[:count] = x_MK
        self.routing.ids_Mt[:count] = routing.ids_Mt
        self.routing.ids_Mt[count:] = -1
        self.routing.weights_Mt[:count] = routing.weights_Mt


class TorchCapture:
    """Captures with torch for `GraphPool`. Tests have another class for it."""

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, pool: Any, run: Callable[[], None]) -> Any:
        """Returns a graph whose `replay()` repeats the launches of `run`."""
        graph = torch.cuda.CUDAGraph()
        # The outer context is needed because torch.cuda.graph leaves its own stream current when it cannot begin or end.
        # With "thread_local", other threads of this process may allocate meanwhile.
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                run()
        except BaseException:
            self._close(pool)
            raise
        return graph

    @staticmethod
    def _close(pool: Any) -> None:
        """Removes a capture that could not be ended from torch's allocator.

        torch leaves it there: the allocator then asks the graph, which no longer exists, at every allocation whether it is still
        capturing, and returns no memory that another stream has used.
        """
        device = torch.cuda.current_device()
        try:
            torch._C._cuda_endAllocateToPool(device, pool)
        except RuntimeError:  # the capture ended or never began, so the allocator does not know it
            return
        torch._C._cuda_releasePool(device, pool)


class GraphPool:
    """Owns graphs and the memory that they share. They replay one at a time, and their results lie outside that memory.

    Two rules of torch's allocator stand behind it. A pool whose graphs are all gone is closed and refused ("use_count > 0"),
    so the first graph after that gets another pool. A pool with a capture that could not be ended takes no other capture: after
    any failure every graph of the pool is dropped, and the next capture begins with a new pool.
    """

    def __init__(self, capture: Any):
        self._capture, self._pool = capture, None
        self._graphs: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __iter__(self) -> Iterator[Any]:
        return iter(self._graphs)

    def record(self, key: Hashable, run: Callable[[], None]) -> None:
        """Captures `run` under `key`. An error of `run` is raised, with a note of the later error that ends a broken capture."""
        first: list[BaseException] = []

        def watched() -> None:
            try:
                run()
            except BaseException as error:
                first.append(error)
                raise

        if self._pool is None:
            self._pool = self._capture.new_pool()
        try:
            self._graphs[key] = self._capture.record(self._pool, watched)
        except BaseException as error:
            self.clear()
            if first and error is not first[0]:
                first[0].add_note(f"then the capture could not be ended: {type(error).__name__}: {error}")
                raise first[0] from None
            raise

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def drop(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            del self._graphs[key]
        if not self._graphs:
            self._pool = None

    def clear(self) -> None:
        self.drop(list(self._graphs))


class StepGraphs:
    """Captures and replays the steps of one kernel. It is not collective: ranks capture alike since they are configured alike."""

    device_type = "cuda"
    capture_type: Callable[[], Any] = TorchCapture

    def __init__(self, forward: Forward, ranks: RankContext, spec: LayerSpec, buckets: Sequence[int]):
        """buckets: tokens of the busiest rank, in ascending order. Raises ConfigError when graphs are not possible."""
        if ranks.device.type != self.device_type:
            raise ConfigError(f"CUDA graphs need a CUDA device, this rank has {ranks.device}")
        if not buckets or sorted(set(buckets)) != list(buckets) or buckets[0] < 1:
            raise ConfigError(f"buckets of CUDA graphs must be positive, ascending and distinct, got {tuple(buckets)}")
        self.forward, self.ranks, self.spec, self.buckets = forward, ranks, spec, tuple(buckets)
        self._batches: dict[int, StaticBatch] = {}
        self._graphs = GraphPool(self.capture_type())
        """The graphs by (key of the weights, with a shared expert, bucket)."""
        self.replays = 0

    def bucket(self, tokens_per_rank: Sequence[int]) -> int | None:
        """Returns the smallest bucket that holds the busiest rank's tokens. None: they are too many for a graph."""
        at = bisect.bisect_left(self.buckets, max(tokens_per_rank))
        return self.buckets[at] if at < len(self.buckets) else None

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, key: Hashable, shared: bool, bucket: int | None) -> bool:
        return (key, shared, bucket) in self._graphs

    def warm(self, weights: ExpertWeights, shared_experts: SharedExperts | None) -> None:
        """Runs eager steps of every bucket, so that no first set-up happens inside a capture. Collective."""
        for bucket in self.buckets:
            batch = self._batch(bucket)
            for _ in range(WARM_RUNS):
                self._run(batch, weights, shared_experts)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def capture(self, key: Hashable, weights: ExpertWeights, shared_experts: SharedExperts | None) -> None:
        """Captures one graph for each bucket with these weights. They must not move as long as `key` is replayed.

        Nothing runs, so no other rank is needed. After a failure no graph of any key is left. This rank must then run no
        further step, since the others would replay graphs that it lacks.

        Args:
            key: the identity of the weights (a layer and the version of its placement).
        """
        for bucket in self.buckets:
            batch = self._batch(bucket)
            known = (key, shared_experts is not None, bucket)
            self._graphs.record(known, partial(self._run, batch, weights, shared_experts))

    def drop(self, key: Hashable) -> None:
        self._graphs.drop([known for known in self._graphs if known[0] == key])

    def weight_keys(self) -> set[Hashable]:
        return {known[0] for known in self._graphs}

    def replay(self, key: Hashable, x_MK: torch.Tensor, routing: Routing, *, shared: bool, bucket: int) -> torch.Tensor:
        """Replays a step and returns `(M, K)` for this rank's own rows, in fresh memory. Collective."""
        batch = self._batch(bucket)
        batch.fill(x_MK, routing)
        self._graphs.replay((key, shared, bucket))
        self.replays += 1
        return batch.out_MK[: x_MK.shape[0]].clone()

    def padded_eager(
        self,
        x_MK: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        shared_experts: SharedExperts | None,
        bucket: int,
    ) -> torch.Tensor:
        """Runs the same padded batch without a graph. `replay` must equal it bit for bit. Collective."""
        batch = self._batch(bucket)
        batch.fill(x_MK, routing)
        self._run(batch, weights, shared_experts)
        return batch.out_MK[: x_MK.shape[0]].clone()

    def _batch(self, bucket: int) -> StaticBatch:
        if bucket not in self._batches:
            self._batches[bucket] = StaticBatch.empty(bucket, self.spec, self.ranks.device)
        return self._batches[bucket]

    def _run(self, batch: StaticBatch, weights: ExpertWeights, shared_experts: SharedExperts | None) -> None:
        counts = (batch.x_MK.shape[0],) * self.ranks.world_size
        out_MK = self.forward(
            batch.x_MK, batch.routing, weights=weights, tokens_per_rank=counts, shared_experts=shared_experts
        )
        batch.out_MK.copy_(out_MK)


def why_no_graphs(spec: LayerSpec, pf_graphs: bool, experts_graphs: bool, names: tuple[str, str]) -> str | None:
    """Returns the reason why steps of this pair run eagerly, or None."""
    if spec.device != "cuda":
        return f"the ranks run on {spec.device}: every step is eager"
    if not pf_graphs:
        return f"{names[0]} waits on the host in every dispatch: no CUDA graph can hold it"
    if not experts_graphs:
        return f"{names[1]} waits on the host: no CUDA graph can hold it"
    return None
