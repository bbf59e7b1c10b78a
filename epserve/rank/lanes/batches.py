"""The static batch of captured steps as lanes use it: calls of several lanes in one batch, and the check of their values.

Everything here is part of a graph: it waits for nothing, and each tensor stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from epserve.modular_kernel.steps.graphs import GraphPool, StaticBatch
from epserve.rank.gate import BLOCK, ROUTED

from .native import PARTS, BatchPlace

BAD_IDS, NOT_FINITE = 2, 4  # protocol/lane_words.py
MODES = (BLOCK, ROUTED)
"""By the number that a bell has for them."""
WARM_RUNS = 2  # before a capture, as for steps


class LaneBatch:
    """Beside a step's graph: a graph that checks ids in front of it, and one that checks rows and results behind it.

    The rows of a call are one part. A value that is refused makes the whole part NaN, and no other one.
    """

    def __init__(self, batch: StaticBatch, num_experts: int):
        self.batch, self._num_experts = batch, num_experts
        device, rows = batch.x_MK.device, batch.num_tokens
        shape = batch.routing.ids_Mt.shape
        self.ids_Mt = torch.full(shape, -1, dtype=torch.int32, device=device)
        """The ids as clients have them. The batch gets those that are in range."""
        self.weights_Mt = torch.zeros(shape, dtype=torch.float32, device=device)
        self.part_M = torch.full((rows,), PARTS, dtype=torch.int32, device=device)
        """The part of each row, PARTS for padding."""
        self.status_P = torch.zeros(PARTS + 1, dtype=torch.int32, device=device)
        self._zero = torch.zeros((), dtype=torch.int32, device=device)
        self._bad_ids = torch.full((), BAD_IDS, dtype=torch.int32, device=device)
        self._not_finite = torch.full((), NOT_FINITE, dtype=torch.int32, device=device)
        self._largest = torch.finfo(batch.x_MK.dtype).max
        self._pool: GraphPool | None = None
        self.place: BatchPlace | None = None

    def before(self) -> None:
        """Takes ids and weights over. Those that are out of range reach no expert."""
        wrong_Mt, odd_Mt = self._wrong()
        none_Mt = wrong_Mt | odd_Mt | (self.ids_Mt < 0)
        self.batch.routing.ids_Mt.copy_(self.ids_Mt.masked_fill(none_Mt, -1))
        self.batch.routing.weights_Mt.copy_(self.weights_Mt.masked_fill(none_Mt, 0.0))

    def after(self, mode: str) -> None:
        """Finds the status of each part, and makes the rows of those that are refused NaN."""
        out_MK = self.batch.out_MK
        fine_M = torch.maximum(_magnitude(self.batch.x_MK), _magnitude(out_MK)) <= self._largest  # False for NaN too
        status_M = torch.where(fine_M, self._zero, self._not_finite)
        if mode == ROUTED:
            wrong_Mt, odd_Mt = self._wrong()
            status_M = torch.where(odd_Mt.any(1), self._not_finite, status_M)
            status_M = torch.where(wrong_Mt.any(1), self._bad_ids, status_M)
        part_M = self.part_M.long()
        self.status_P.zero_().scatter_reduce_(0, part_M, status_M, "amax")
        out_MK.masked_fill_((self.status_P[part_M] != 0).unsqueeze(1), math.nan)

    def _wrong(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns which ids are out of range, and which weights of the others are not finite."""
        wrong_Mt = (self.ids_Mt < -1) | (self.ids_Mt >= self._num_experts)
        return wrong_Mt, (self.ids_Mt >= 0) & ~wrong_Mt & ~self.weights_Mt.isfinite()

    def capture(self, capture: Callable[[], Any], handle: Callable[[Any], int]) -> None:
        """Captures its graphs. `place` says where everything lies then.

        Args:
            capture: makes the object that captures (`TorchCapture`).
            handle: returns the address of a captured graph.
        """
        pool = self._pool = GraphPool(capture())
        runs: dict[str, Callable[[], None]] = {
            "before": self.before,
            **{mode: partial(self.after, mode) for mode in MODES},
        }
        for name, run in runs.items():
            for _ in range(WARM_RUNS):
                run()
            if self.part_M.device.type == "cuda":
                torch.cuda.synchronize(self.part_M.device)
            pool.record(name, run)
        batch = self.batch
        self.place = BatchPlace(
            x=batch.x_MK.data_ptr(), ids=self.ids_Mt.data_ptr(), weights=self.weights_Mt.data_ptr(),
            count=batch.count_1.data_ptr(), part=self.part_M.data_ptr(), status=self.status_P.data_ptr(),
            out=batch.out_MK.data_ptr(), tokens=batch.num_tokens, row_bytes=batch.x_MK[0].nbytes,
            top_k=self.ids_Mt.shape[1], before=(0, handle(pool.graph("before"))),
            after=(handle(pool.graph(BLOCK)), handle(pool.graph(ROUTED))),
        )  # fmt: skip


def _magnitude(rows_MK: torch.Tensor) -> torch.Tensor:
    """Returns `(M,)`: the largest magnitude of each row, or NaN or infinity if the row holds them."""
    return torch.linalg.vector_norm(rows_MK, math.inf, dim=1)
