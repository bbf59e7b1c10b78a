"""Captures CUDA graphs of whole steps at warm-up, one for each layer, mode and bucket of tokens, and replays them in serving.

A graph has fixed addresses and sizes. Every rank pads its batch to the bucket with zero rows whose ids are all -1: they reach no
expert and change no bit of the others. The bucket follows from the busiest rank's tokens, which all ranks know, so that all
ranks replay the same graph. The number of rows lies in device memory, so that the padding is part of the graph.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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

GRAPH_BYTES = 256 << 10
"""Allowance for what the driver keeps of one graph of some twenty launches. The start's log says what all graphs took."""
SEGMENT_BYTES = 20 << 20
"""Steps in which torch's allocator takes memory for a pool of graphs."""

Forward = Callable[..., torch.Tensor]
"""`FusedMoEModularKernel.forward`, or a function in its place."""


class StaticBatch:
    """Holds the tensors that the graphs of one bucket read and write. All layers share them: one step runs at a time.

    `count_1` rows are real. `first_1` is the number of the first one among the tokens of all ranks.
    """

    def __init__(self, num_tokens: int, spec: LayerSpec, device: torch.device, *, ids_dtype: torch.dtype = torch.int32):
        shape = spec.shape
        self.x_MK = torch.zeros((num_tokens, shape.hidden), dtype=shape.dtype, device=device)
        ids_Mt = torch.full((num_tokens, shape.top_k), -1, dtype=ids_dtype, device=device)
        self.routing = Routing(ids_Mt=ids_Mt, weights_Mt=torch.zeros(ids_Mt.shape, dtype=torch.float32, device=device))
        self.out_MK = torch.zeros_like(self.x_MK)
        self.count_1, self.first_1 = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._row_M1 = torch.arange(num_tokens, device=device).unsqueeze(1)
        self._told = (0, 0)

    @property
    def num_tokens(self) -> int:
        return self.x_MK.shape[0]

    def fill(self, x_MK: torch.Tensor, routing: Routing | None, first: int = 0) -> None:
        """Takes the rows of a step, from any device. Does not wait. `routing` None: the step has a gate."""
        count = x_MK.shape[0]
        self.x_MK[:count].copy_(x_MK, non_blocking=True)
        if routing is not None:
            self.routing.ids_Mt[:count].copy_(routing.ids_Mt, non_blocking=True)
            self.routing.weights_Mt[:count].copy_(routing.weights_Mt, non_blocking=True)
        # Steps follow each other on one stream, so the words of the last one still stand. A launch less for equal steps.
        if self._told[0] != count:
            self.count_1.fill_(count)
        if self._told[1] != first:
            self.first_1.fill_(first)
        self._told = count, first

    def forget(self) -> None:
        """Notes that other work on the stream has written the number of rows."""
        self._told = (-1, -1)

    def beyond(self) -> torch.Tensor:
        """Returns `(M, 1)`: whether a row is padding. The device reads the number of rows. Part of the graph."""
        return self._row_M1 >= self.count_1

    def padded(self, beyond_M1: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states with zeros behind the step's rows. Part of the graph."""
        return self.x_MK.masked_fill_(beyond_M1, 0)

    def padded_routing(self, beyond_M1: torch.Tensor) -> Routing:
        """Returns the given routing, with no expert behind the step's rows. Part of the graph."""
        self.routing.ids_Mt.masked_fill_(beyond_M1, -1)
        self.routing.weights_Mt.masked_fill_(beyond_M1, 0)
        return self.routing


Run = Callable[[StaticBatch], torch.Tensor]
"""A step on all rows of a batch, which it pads by the batch's own means: `(M, K)`. It waits for nothing."""


def kernel_step(
    forward: Forward, weights: ExpertWeights, shared_experts: SharedExperts | None, num_ranks: int = 1
) -> Run:
    """Returns the step of a kernel alone: its batches bring physical ids."""

    def run(batch: StaticBatch) -> torch.Tensor:
        beyond_M1 = batch.beyond()
        return forward(
            batch.padded(beyond_M1), batch.padded_routing(beyond_M1), weights=weights,
            tokens_per_rank=(batch.num_tokens,) * num_ranks, shared_experts=shared_experts,
        )  # fmt: skip

    return run


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

    def graph(self, key: Hashable) -> Any:
        """Returns a captured graph, which the pool keeps."""
        return self._graphs[key]

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

    def __init__(
        self, ranks: RankContext, spec: LayerSpec, buckets: Sequence[int], *, ids_dtype: torch.dtype = torch.int32
    ):
        """Checks the buckets. Raises ConfigError when graphs are not possible.

        Args:
            buckets: tokens of the busiest rank, in ascending order.
            ids_dtype: the dtype of ids that the steps' prepare/finalize takes.
        """
        if ranks.device.type != self.device_type:
            raise ConfigError(f"CUDA graphs need a CUDA device, this rank has {ranks.device}")
        if not buckets or sorted(set(buckets)) != list(buckets) or buckets[0] < 1:
            raise ConfigError(f"buckets of CUDA graphs must be positive, ascending and distinct, got {tuple(buckets)}")
        self.ranks, self.spec, self.buckets, self.ids_dtype = ranks, spec, tuple(buckets), ids_dtype
        self._batches: dict[int, StaticBatch] = {}
        self._graphs = GraphPool(self.capture_type())
        """The graphs by (key of the step, bucket)."""
        self.replays = 0

    def bucket(self, tokens_per_rank: Sequence[int]) -> int | None:
        """Returns the smallest bucket that holds the busiest rank's tokens. None: they are too many for a graph."""
        at = bisect.bisect_left(self.buckets, max(tokens_per_rank))
        return self.buckets[at] if at < len(self.buckets) else None

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, key: Hashable, bucket: int | None) -> bool:
        return (key, bucket) in self._graphs

    def captured(self, key: Hashable, bucket: int) -> tuple[StaticBatch, Any] | None:
        """Returns the batch and the graph of a step, for launches by other means than `replay`. None: there is no such graph."""
        return (self._batch(bucket), self._graphs.graph((key, bucket))) if self.has(key, bucket) else None

    def warm(self, run: Run) -> None:
        """Runs eager steps of every bucket, so that nothing is set up for the first time inside a capture. Collective."""
        for bucket in self.buckets:
            for _ in range(WARM_RUNS):
                self._run(self._batch(bucket), run)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def capture(self, key: Hashable, run: Run) -> None:
        """Captures one graph a bucket of this step, whose tensors must stay where they are as long as `key` is replayed.

        key: of the step (a layer, the version of its placement, a mode). Nothing runs, so no other rank is needed. When one
        fails, no graph of any key is left: this rank must not step on, since the others would replay what it lacks.
        """
        for bucket in self.buckets:
            self._graphs.record((key, bucket), partial(self._run, self._batch(bucket), run))

    def drop(self, key: Hashable) -> None:
        self._graphs.drop([known for known in self._graphs if known[0] == key])

    def keep(self, buckets: Sequence[int]) -> None:
        """Forgets all graphs, and captures these buckets alone from now on. One at least."""
        self._graphs.clear()
        self.buckets = tuple(each for each in self.buckets if each in buckets)
        assert self.buckets
        self._batches = {bucket: self._batches[bucket] for bucket in self.buckets if bucket in self._batches}

    def step_keys(self) -> set[Hashable]:
        return {known[0] for known in self._graphs}

    def replay(
        self, key: Hashable, bucket: int, x_MK: torch.Tensor, routing: Routing | None = None, *, first: int = 0
    ) -> torch.Tensor:
        """Returns `(M, K)` of this rank's own rows, in fresh memory. Collective. The rows may lie on any device."""
        batch = self._batch(bucket)
        batch.fill(x_MK, routing, first)
        self._graphs.replay((key, bucket))
        self.replays += 1
        return batch.out_MK[: x_MK.shape[0]].clone()

    def _batch(self, bucket: int) -> StaticBatch:
        if bucket not in self._batches:
            self._batches[bucket] = StaticBatch(bucket, self.spec, self.ranks.device, ids_dtype=self.ids_dtype)
        return self._batches[bucket]

    def _run(self, batch: StaticBatch, run: Run) -> None:
        batch.out_MK.copy_(run(batch))


def graph_memory(spec: LayerSpec, buckets: Sequence[int], num_steps: int, dense: int) -> int:
    """Returns the bytes that graphs of so many steps take: the batches exactly, the rest by estimate.

    dense: the widest row between the halves of a shared expert, 0 without one.
    """
    if not buckets or not num_steps:
        return 0
    shape = spec.shape
    row = shape.hidden * shape.dtype.itemsize
    batches = sum(buckets) * (2 * row + 8 * shape.top_k)
    # What the largest step holds at a time, and the same again for what the allocator cannot fill. Later graphs use it again.
    step = 2 * buckets[-1] * (2 * row + 3 * dense * shape.dtype.itemsize)
    pool = -(-step // SEGMENT_BYTES) * SEGMENT_BYTES
    return batches + pool + num_steps * len(buckets) * GRAPH_BYTES


def why_no_graphs(spec: LayerSpec, pf_graphs: bool, experts_graphs: bool, names: tuple[str, str]) -> str | None:
    """Returns the reason why steps of this pair run eagerly, or None."""
    if spec.device != "cuda":
        return f"the ranks run on {spec.device}: every step is eager"
    if not pf_graphs:
        return f"{names[0]} waits on the host in every dispatch: no CUDA graph can hold it"
    if not experts_graphs:
        return f"{names[1]} waits on the host: no CUDA graph can hold it"
    return None
