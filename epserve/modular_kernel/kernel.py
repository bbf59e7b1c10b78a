"""Runs the fused-MoE modular kernel: prepare -> workspaces -> experts -> finalize, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from epserve.errors import Incompatible, InvalidRequest

from . import capability
from .contracts import FusedMoEExpertsModular, FusedMoEPrepareAndFinalizeModular, Prepared
from .types import ExpertWeights, FusedMoEActivationFormat, Routing
from .workspace import Workspaces, WorkspaceShapes

SharedExperts = Callable[[torch.Tensor], torch.Tensor]
"""A function `(M, K)` -> `(M, K)`. A method `begin`, which takes `(M, K)` and returns a function for the rest, splits it into two
halves: one runs beside the dispatch, the other beside the combine."""


class FusedMoEModularKernel:
    """Joins one prepare/finalize and one experts object that fit, with the workspaces between them.

    It serves every layer of its shape: the weights come with each call.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular,
        fused_experts: FusedMoEExpertsModular,
        *,
        workspaces: Workspaces | None = None,
    ):
        pf, experts = prepare_finalize, fused_experts
        names = type(pf).__name__, type(experts).__name__
        capability.check(names, pf.capability, experts.capability, pf.spec)
        unfit = pf.why_not_reduce(experts.finalize_weight_and_reduce_impl())
        if unfit:
            raise Incompatible(f"{names[0]} cannot finish what {names[1]} leaves to it:", (unfit,))
        self.prepare_finalize, self.fused_experts = pf, experts
        self.workspaces = workspaces or Workspaces(pf.ranks.device)
        self.top_k, self.quant = pf.spec.shape.top_k, pf.spec.quant
        self.on_phase: Callable[[str], object] = lambda phase: None
        """Receives "prepare", "experts" and "finalize" as each phase begins, for clocks and for errors that name the phase."""

    def workspace_shapes(self, prepared: Prepared | None = None) -> WorkspaceShapes:
        """Returns the shapes for one batch, or for the largest batch that prepare can return."""
        pf = self.prepare_finalize
        if pf.activation_format() is FusedMoEActivationFormat.Standard:
            rows = pf.max_rows() if prepared is None else prepared.x.shape[0]
            top_k = self.top_k if prepared is None or prepared.routing is None else prepared.routing.ids_Mt.shape[1]
            return self.fused_experts.workspace_shapes(rows, top_k, pf.num_local_experts())
        num_experts, capacity = pf.num_local_experts(), pf.max_rows()
        if prepared is not None:
            num_experts, capacity = prepared.x.shape[:2]
        return self.fused_experts.workspace_shapes(0, self.top_k, num_experts, capacity)

    def warm_up(self, weights: ExpertWeights) -> None:
        """Chooses kernel variants, reserves workspaces for the largest batch, warms the experts up, and locks the workspaces."""
        self.fused_experts.tune(weights, self.prepare_finalize.max_rows())
        self.workspaces.reserve(self.workspace_shapes())
        self.fused_experts.warm_up(weights, self.prepare_finalize.max_rows())
        self.workspaces.lock()

    def forward(
        self,
        x_MK: torch.Tensor,
        routing: Routing,
        *,
        weights: ExpertWeights,
        tokens_per_rank: Sequence[int] | None = None,
        shared_experts: SharedExperts | None = None,
    ) -> torch.Tensor:
        """Runs one step of one layer: `(M, K)` in, `(M, K)` out, in the dtype of `x_MK`. Collective.

        Args:
            routing: physical ids, checked by the caller (see `check_routing`). Ids of another dtype than the prepare/finalize
                takes are converted here, once.
            tokens_per_rank: M of every rank. A batch above the cap becomes rounds, and all ranks run as many as the longest
                batch needs. Without this argument the ranks agree on the number by an all-reduce first.
            shared_experts: run while rows are under way, see `SharedExperts`. Their result is added to the output.
        """
        x_MK, routing = x_MK.contiguous(), routing.with_ids(self.prepare_finalize.topk_indices_dtype())
        out_MK = torch.empty_like(x_MK)
        cap = self.prepare_finalize.max_num_tokens_per_rank()
        counts = list(tokens_per_rank) if tokens_per_rank is not None else None
        for start, stop, round_counts in self._rounds(x_MK.shape[0], cap, counts):
            rows, routed = x_MK[start:stop], routing.rows(start, stop)
            self._round(rows, routed, out_MK[start:stop], weights, round_counts, shared_experts)
        return out_MK

    def _rounds(self, num_tokens: int, cap: int | None, counts: list[int] | None):
        if cap is None:
            yield 0, num_tokens, counts
            return
        longest = max(counts) if counts is not None else self.agree_longest(num_tokens)
        for start in range(0, max(longest, 1), cap):
            taken = None if counts is None else [min(max(count - start, 0), cap) for count in counts]
            yield min(start, num_tokens), min(start + cap, num_tokens), taken

    def agree_longest(self, num_tokens: int) -> int:
        ranks = self.prepare_finalize.ranks
        if ranks.world_size == 1:
            return num_tokens
        longest = torch.tensor([num_tokens], dtype=torch.int64, device=ranks.device)
        torch.distributed.all_reduce(longest, op=torch.distributed.ReduceOp.MAX, group=ranks.group)
        return int(longest)

    def _round(self, x_MK, routing, out_MK, weights, counts, shared_experts) -> None:
        pf, reduce = self.prepare_finalize, self.fused_experts.finalize_weight_and_reduce_impl()
        self.on_phase("prepare")
        if shared_experts is None:  # nothing to compute meanwhile
            prepared = pf.prepare(x_MK, routing, quant=self.quant, tokens_per_rank=counts)
            y = self.run_experts(prepared, weights, self.workspaces)
            self.on_phase("finalize")
            pf.finalize(prepared.handle, y, reduce=reduce, out_MK=out_MK)
            return
        receive = pf.prepare_no_receive(x_MK, routing, quant=self.quant, tokens_per_rank=counts)
        finish = begin(shared_experts, x_MK)
        y = self.run_experts(prepared := receive(), weights, self.workspaces)
        self.on_phase("finalize")
        receive_out = pf.finalize_no_wait(prepared.handle, y, reduce=reduce, out_MK=out_MK)
        shared_MK = finish()
        receive_out()
        out_MK += shared_MK

    def run_experts(self, prepared: Prepared, weights: ExpertWeights, workspaces: Workspaces) -> torch.Tensor:
        """Returns the experts' result for one batch, in `prepared.output` or in `workspaces`, until they are used again."""
        self.on_phase("experts")
        shapes = self.workspace_shapes(prepared)
        workspace, output = workspaces.carve(shapes), prepared.output
        if output is None or (output.shape, output.dtype) != (torch.Size(shapes.output), shapes.output_dtype):
            output = workspace.output
        return self.fused_experts.apply(output, prepared, weights=weights, workspace=workspace)


def begin(shared_experts: SharedExperts, x_MK: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Runs the first half of `shared_experts` now, or all of it if it has no halves. Returns a function for the rest."""
    halves = getattr(shared_experts, "begin", None)
    if halves is not None:
        return halves(x_MK)
    shared_MK = shared_experts(x_MK)
    return lambda: shared_MK


def check_routing(ids: torch.Tensor, weights: torch.Tensor, *, num_tokens: int, num_experts: int) -> Routing:
    """Checks routing that a client sent, and returns it with int32 ids.

    Raises InvalidRequest that names the field, the value and the allowed values.
    """
    if ids.dtype not in (torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.int8):
        raise InvalidRequest(f"topk_ids: dtype {ids.dtype} is not an integer type; send int32", field="topk_ids")
    for name, value in (("topk_ids", ids), ("topk_weights", weights)):
        if value.ndim != 2 or value.shape[0] != num_tokens:
            shape = tuple(value.shape)
            raise InvalidRequest(f"{name}: shape {shape}, but hidden_states has {num_tokens} tokens", field=name)
    if weights.shape != ids.shape:
        text = f"topk_weights: shape {tuple(weights.shape)} differs from topk_ids {tuple(ids.shape)}"
        raise InvalidRequest(text, field="topk_weights")
    if not weights.dtype.is_floating_point:
        raise InvalidRequest(f"topk_weights: dtype {weights.dtype} is not a float type", field="topk_weights")
    weights = weights.float()
    given, values = ids.cpu().numpy(), weights.cpu().numpy()  # for a few tokens NumPy is ten times quicker than torch
    if given.size and (given.min() < -1 or given.max() >= num_experts):
        bad = int(given[(given < -1) | (given >= num_experts)][0])
        text = f"topk_ids: id {bad} is outside 0..{num_experts - 1} (-1 means no expert)"
        raise InvalidRequest(text, field="topk_ids")
    # The weight of an id of -1 may be anything. Most requests have no such id, and a first look at all weights is quicker.
    if not np.isfinite(values).all() and not np.isfinite(values[given >= 0]).all():
        row, column = np.argwhere(~np.isfinite(values) & (given >= 0))[0].tolist()
        raise InvalidRequest(
            f"topk_weights: holds values that are not finite; the first is in row {row}, column {column}:"
            f" {values[row, column]}; send finite ones, or the id -1 where a token goes to no expert",
            field="topk_weights",
        )
    return Routing(ids_Mt=ids.int().contiguous(), weights_Mt=weights.contiguous())
