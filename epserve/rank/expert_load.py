"""How many tokens each expert gets: counted on the ranks while they route, added up where the service is watched.

By logical expert: placements change while the service runs, experts do not. Legend: m tokens of one rank, t = top-k,
L served layers, E logical experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

MAX_PROCESSES = 4096
"""Whose counts are kept apart: more than ranks at a time."""


class LoadCounter:
    """On a rank: what its tokens send to each expert, `(L, E)` int64 on the rank's device.

    Counting never waits for the device, and neither does reading.
    """

    def __init__(self, layers: Sequence[int], num_experts: int, device: torch.device):
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._cuda = device.type == "cuda"
        # Column 0 counts the slots without an expert (id -1), so that no mask is needed.
        self._counts_LE1 = torch.zeros((len(layers), num_experts + 1), dtype=torch.int64, device=device)
        self._snapshot = torch.zeros_like(self._counts_LE1, device="cpu", pin_memory=self._cuda)
        self._copying: Any = None
        # Made here: the first stream of a process is made only when the device is idle.
        self._stream = torch.cuda.Stream(device) if self._cuda else None

    def add(self, layer: int, ids_mt: torch.Tensor) -> None:
        """Logical ids, -1 for none."""
        row_E1, slots = self._counts_LE1[self._rows[layer]], ids_mt.reshape(-1)
        if self._cuda:  # bincount would wait for the device to learn the largest id
            slots = slots.long() + 1
            row_E1.scatter_add_(0, slots, torch.ones_like(slots))
        else:
            row_E1 += torch.bincount(slots + 1, minlength=len(row_E1))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Steps within do not count."""
        before_LE1 = self._counts_LE1.clone()
        try:
            yield
        finally:
            self._counts_LE1.copy_(before_LE1)

    def read(self) -> bytes:
        """`(L, E)` int64, row-major. On CUDA the counts of the read before, copied meanwhile on a stream of its own."""
        if not self._cuda:
            return self._counts_LE1[:, 1:].contiguous().numpy().tobytes()
        if self._copying is None or self._copying.query():
            done = self._snapshot[:, 1:].contiguous().numpy().tobytes()
            self._start_copy()
            return done
        return b""

    def _start_copy(self) -> None:
        # Counts that change while they are copied are a few tokens early or late, which no reader can tell.
        with torch.cuda.stream(self._stream):
            self._snapshot.copy_(self._counts_LE1, non_blocking=True)
            self._copying = torch.cuda.Event()
            self._copying.record()


class LoadTotals:
    """In the service: the sum over all processes that ranks have had, so that a lost rank takes no count along."""

    def __init__(self, layers: Sequence[int], num_experts: int):
        self.layers = tuple(layers)
        self._shape = len(layers), num_experts
        self._folded_LE = torch.zeros(self._shape, dtype=torch.int64)
        self._latest: dict[Hashable, torch.Tensor] = {}

    def update(self, process: Hashable, counts: bytes) -> None:
        """What `LoadCounter.read` gave in that process last. Empty: nothing new."""
        if not counts:
            return
        self._latest.pop(process, None)
        self._latest[process] = torch.frombuffer(bytearray(counts), dtype=torch.int64).reshape(self._shape)
        if len(self._latest) > MAX_PROCESSES:  # the one that was heard of longest ago is gone
            self._folded_LE += self._latest.pop(next(iter(self._latest)))

    def total(self) -> torch.Tensor:
        """`(L, E)` int64 tokens since the start."""
        return torch.stack([self._folded_LE, *self._latest.values()]).sum(0)

    def of_layer(self, layer: int) -> torch.Tensor:
        """`(E,)` int64."""
        row = self.layers.index(layer)
        return torch.stack([self._folded_LE[row], *(counts_LE[row] for counts_LE in self._latest.values())]).sum(0)


def by_layer(totals: LoadTotals) -> Mapping[int, tuple[int, ...]]:
    """Layer -> tokens of each logical expert."""
    return dict(zip(totals.layers, map(tuple, totals.total().tolist()), strict=True))
