"""The truth beside CUDA graphs: a step on the same padded batch without a graph."""

import torch

from epserve.modular_kernel import Routing
from epserve.modular_kernel.steps.graphs import Run, StaticBatch, StepGraphs


def padded_eager(
    graphs: StepGraphs, run: Run, bucket: int, x_MK: torch.Tensor, routing: Routing | None = None, *, first: int = 0
) -> torch.Tensor:
    """Runs the step. `graphs.replay` must equal it bit for bit. Collective."""
    batch = StaticBatch(bucket, graphs.spec, graphs.ranks.device, ids_dtype=graphs.ids_dtype)
    batch.fill(x_MK, routing, first)
    batch.out_MK.copy_(run(batch))
    return batch.out_MK[: x_MK.shape[0]].clone()
