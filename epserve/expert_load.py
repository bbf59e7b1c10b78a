"""How many tokens each expert gets: counted on the ranks while they route, added up where the service is watched.

Legend: m tokens of one rank, t = top-k, L served layers, P physical experts of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class LoadCounter:
    """On a rank: what its tokens send to each physical expert, `(L, P)` int64 on the rank's device.

    Counting never waits for the device, and neither does reading.
    """

    def __init__(self, layers: Sequence[int], num_physical: int, device: torch.device):
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._cuda = device.type == "cuda"
        # Column 0 counts the slots without an expert (id -1), so that no mask is needed.
        self._counts_LP1 = torch.zeros((len(layers), num_physical + 1), dtype=torch.int64, device=device)
        self._snapshot = torch.zeros_like(self._counts_LP1, device="cpu", pin_memory=self._cuda)
        self._copying: Any = None
        self._stream: Any = None

    def add(self, layer: int, ids_mt: torch.Tensor) -> None:
        """Physical ids, -1 for none."""
        row_P1, slots = self._counts_LP1[self._rows[layer]], ids_mt.reshape(-1)
        if self._cuda:  # bincount would wait for the device to learn the largest id
            slots = slots.long() + 1
            row_P1.scatter_add_(0, slots, torch.ones_like(slots))
        else:
            row_P1 += torch.bincount(slots + 1, minlength=len(row_P1))

    def read(self) -> bytes:
        """`(L, P)` int64, row-major. On CUDA the counts of the read before, copied meanwhile on a stream of its own."""
        if not self._cuda:
            return self._counts_LP1[:, 1:].contiguous().numpy().tobytes()
        if self._copying is None or self._copying.query():
            done = self._snapshot[:, 1:].contiguous().numpy().tobytes()
            self._start_copy()
            return done
        return b""

    def _start_copy(self) -> None:
        # Counts that change while they are copied are a few tokens early or late, which no reader can tell.
        self._stream = self._stream or torch.cuda.Stream(self._counts_LP1.device)
        with torch.cuda.stream(self._stream):
            self._snapshot.copy_(self._counts_LP1, non_blocking=True)
            self._copying = torch.cuda.Event()
            self._copying.record()


class LoadTotals:
    """In the service: the sum over ranks, and over the processes that a rank has had."""

    def __init__(self, layers: Sequence[int], num_physical: int):
        self.layers = tuple(layers)
        self._shape = len(layers), num_physical
        self._ended_LP = torch.zeros(self._shape, dtype=torch.int64)
        self._latest: dict[int, tuple[int, torch.Tensor]] = {}

    def update(self, rank: int, process: int, counts: bytes) -> None:
        """What `LoadCounter.read` gave in that process of the rank; another process starts from zero."""
        if not counts:
            return
        counts_LP = torch.frombuffer(bytearray(counts), dtype=torch.int64).reshape(self._shape)
        before = self._latest.get(rank)
        if before is not None and before[0] != process:
            self._ended_LP += before[1]
        self._latest[rank] = process, counts_LP

    def total(self) -> torch.Tensor:
        """`(L, P)` int64 tokens since the start."""
        return torch.stack([self._ended_LP, *(counts_LP for _, counts_LP in self._latest.values())]).sum(0)


def by_layer(totals: LoadTotals) -> Mapping[int, tuple[int, ...]]:
    """Layer -> tokens of each physical expert."""
    return dict(zip(totals.layers, map(tuple, totals.total().tolist()), strict=True))
