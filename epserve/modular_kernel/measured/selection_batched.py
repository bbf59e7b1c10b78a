"""Selects experts of the batched format by time: one choice for all batches, since the host does not know how full blocks are."""

from __future__ import annotations

import torch

from epserve.modular_kernel.contracts import FusedMoEExpertsModular, Prepared
from epserve.modular_kernel.handles import DispatchHandle, HandleBook
from epserve.modular_kernel.types import ExpertWeights, FusedMoEActivationFormat
from epserve.modular_kernel.workspace import Workspaces, WorkspaceShapes

from .selection import TOO_LONG, MeasuredExperts

FILL = 0.25
"""The timed batch has this share of the most rows that all ranks together can send: blocks are for thin batches."""


class MeasuredBatchedExperts(MeasuredExperts):
    """Takes and returns `(e, T, K)`. `warm_up` gets T, which never changes, and times the candidates for it."""

    FORMAT = FusedMoEActivationFormat.BatchedExperts

    def _bucket_of(self, size: int) -> int:
        """Returns the only measured size for any size."""
        return next(iter(self.times), size)

    def _buckets(self, max_rows: int) -> list[int]:
        return [max_rows]

    def _size_of(self, prepared: Prepared) -> int:
        return prepared.x.shape[1]

    def _describe(self, bucket: int) -> str:
        return f"blocks of {bucket} rows, about {self._rows(bucket)} of them filled"

    def _untimed(self, bucket: int, limit: float) -> str:
        return f"blocks of {bucket} rows: not timed, whole blocks might take longer than {limit:g} s"

    def key(self, weights: ExpertWeights) -> str:
        return super().key(weights) + ", blocks"

    def _examples(self, bucket: int, weights: ExpertWeights) -> list[Prepared]:
        return [self._filled(bucket, weights, 0)]

    def _measure(self, buckets: list[int], weights: ExpertWeights) -> None:
        """Measures, unless a candidate that computes whole blocks might need longer than the budget at the first one's pace."""
        (capacity,) = buckets
        batch, spaces = self._filled(capacity, weights, 0), Workspaces(weights.w13_eNK.device)
        first = next(iter(self.candidates.values()))
        workspace = spaces.carve(self._shapes(self, batch, weights.num_experts))
        once = self._timer(lambda: self._run(first, workspace.output, batch, weights, workspace))
        if 2 * once * capacity / self._rows(capacity) > self.measuring.budget_s:
            self.times[capacity] = {TOO_LONG: self.measuring.budget_s}
            return
        super()._measure(buckets, weights)

    def _shapes(self, experts: FusedMoEExpertsModular, prepared: Prepared, num_experts: int) -> WorkspaceShapes:
        return experts.workspace_shapes(0, self.spec.shape.top_k, num_experts, prepared.x.shape[1])

    def _real(self, y: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        counts = prepared.expert_num_tokens
        assert counts is not None
        held = torch.arange(y.shape[1], device=y.device)[None, :] < counts[:, None]
        return torch.where(held[..., None], y, 0).float()

    def _rows(self, capacity: int) -> int:
        """Returns the mean number of rows of one expert."""
        shape = self.spec.shape
        return max(1, min(capacity, round(FILL * capacity * shape.top_k / shape.num_experts)))

    def _filled(self, capacity: int, weights: ExpertWeights, seed: int) -> Prepared:
        """Returns a batch with counts from 0 to twice the mean. The rest of each block, its larger part, is not even written."""
        device, e, K = weights.w13_eNK.device, weights.num_experts, self.spec.shape.hidden
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, min(capacity, 2 * self._rows(capacity)) + 1, (e,), generator=generator)
        counts[seed % e] = max(1, int(counts[seed % e]))
        there = torch.Generator(device).manual_seed(seed)
        x = torch.empty((e, capacity, K), dtype=self.spec.shape.dtype, device=device)
        most = int(counts.max())
        x[:, :most] = torch.randn((e, most, K), generator=there, device=device).to(x.dtype)
        held = counts.int().to(device)
        return Prepared(x=x, expert_num_tokens=held, handle=DispatchHandle(HandleBook("measured selection"), None))
