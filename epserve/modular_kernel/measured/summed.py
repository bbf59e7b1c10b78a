"""Adds the weighted sum to experts that leave one row a slot, so that they can replace experts that sum themselves."""

from __future__ import annotations

import math

import torch

from epserve.modular_kernel.contracts import FusedMoEExpertsModular, Prepared
from epserve.modular_kernel.reduce import TopKWeightAndReduceContiguous, TopKWeightAndReduceNoOP
from epserve.modular_kernel.types import ExpertWeights
from epserve.modular_kernel.workspace import Workspace, WorkspaceShapes

SLOT_BYTES = 64 << 20
"""The most scratch for rows of slots, in bytes. Longer batches run in pieces: `(M, t, K)` can be far larger than the batch."""


class SummedExperts(FusedMoEExpertsModular):
    """Computes `(M, K)` in Standard format through `inner`. It keeps no state of a batch."""

    def __init__(self, inner: FusedMoEExpertsModular):
        super().__init__(inner.spec)
        assert isinstance(inner.finalize_weight_and_reduce_impl(), TopKWeightAndReduceContiguous)
        self.inner = inner
        self.capability = inner.capability  # type: ignore[misc]

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        return self.inner.prepare_weights(weights)

    def warm_up(self, weights: ExpertWeights, max_rows: int) -> None:
        self.inner.warm_up(weights, self._piece(max_rows, self.spec.shape.top_k))

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        inner = self.inner.workspace_shapes(self._piece(num_rows, top_k), top_k, num_experts)
        sizes = [nbytes(shape, inner.dtype) for shape in (inner.workspace13, inner.workspace2)]
        return WorkspaceShapes(
            workspace13=(sizes[0],), workspace2=(_aligned(sizes[1]) + nbytes(inner.output, inner.output_dtype),),
            output=(num_rows, self.spec.shape.hidden), dtype=torch.uint8, output_dtype=inner.output_dtype,
        )  # fmt: skip

    def apply(self, output, prepared, *, weights, workspace):
        assert prepared.routing is not None
        num_rows, top_k = prepared.routing.ids_Mt.shape
        size = max(1, self._piece(num_rows, top_k))
        for start in range(0, num_rows, size):
            stop = min(start + size, num_rows)
            routing = prepared.routing.rows(start, stop)
            scales = None if prepared.scales is None else prepared.scales[start:stop]
            piece = Prepared(x=prepared.x[start:stop], scales=scales, routing=routing, handle=prepared.handle)
            y = self._piece_of(piece, weights, workspace)
            TopKWeightAndReduceContiguous().apply(y, routing, output[start:stop])
        return output

    def _piece_of(self, piece: Prepared, weights: ExpertWeights, workspace: Workspace) -> torch.Tensor:
        assert piece.routing is not None
        num_rows, top_k = piece.routing.ids_Mt.shape
        shapes = self.inner.workspace_shapes(num_rows, top_k, weights.num_experts)
        slots_at = _aligned(nbytes(shapes.workspace2, shapes.dtype))
        own = Workspace(
            workspace13=view(workspace.workspace13, shapes.workspace13, shapes.dtype),
            workspace2=view(workspace.workspace2, shapes.workspace2, shapes.dtype),
            output=view(workspace.workspace2[slots_at:], shapes.output, shapes.output_dtype),
        )
        return self.inner.apply(own.output, piece, weights=weights, workspace=own)

    def _piece(self, num_rows: int, top_k: int) -> int:
        row = max(1, top_k * self.spec.shape.hidden * self.spec.shape.dtype.itemsize)
        return min(num_rows, max(1, SLOT_BYTES // row))


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def view(region: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the start of a byte region as a tensor."""
    return region[: nbytes(shape, dtype)].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256
