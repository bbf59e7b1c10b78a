"""One layer's step in one mode as a rank computes it: gate, placement, count of loads, kernel, shared experts.

The same parts run one by one for any number of rows, or as one CUDA graph on a batch of fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from epserve.models import LayerWeights
from epserve.modular_kernel import GateSpec, LayerSpec, RankContext, Routing
from epserve.modular_kernel.kernel import SharedExperts
from epserve.modular_kernel.measured.crossover import example
from epserve.modular_kernel.steps.graphs import Forward, Run, StaticBatch

from .backward.result import step_result
from .expert_load import LoadCounter
from .gate import BLOCK, ROUTED, route, whole
from .placement import Placement, to_physical

Key = tuple[int, int, str]
"""A layer, the version of its placement, and the mode: a rank finds its graphs by them."""
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`RankKernels.backward`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerStep:
    """The step of one layer. Weights and tables stay where they are as long as graphs of the step are replayed."""

    layer: int
    mode: str
    placement: Placement
    weights: LayerWeights
    gate: GateSpec
    counter: LoadCounter

    @property
    def key(self) -> Key:
        return self.layer, self.placement.version, self.mode

    @property
    def shared(self) -> SharedExperts | None:
        return self.weights.shared if self.mode == BLOCK else None

    def compute(
        self,
        forward: Forward,
        x_MK: torch.Tensor,
        logical: Routing,
        tokens_per_rank: Sequence[int],
        first: int | torch.Tensor,
    ) -> torch.Tensor:
        """Runs the part behind the gate. Collective.

        Args:
            forward: the kernel's forward.
            x_MK: this rank's rows.
            logical: logical ids, and their weights.
            tokens_per_rank: rows of each rank.
            first: number of the first row among the tokens of all ranks.
        """
        physical = to_physical(logical, self.placement, token_offset=first)
        return forward(
            x_MK, whole(physical, self.gate.top_k), weights=self.weights.experts, tokens_per_rank=tokens_per_rank,
            shared_experts=self.shared,
        )  # fmt: skip

    def gradients(
        self,
        backward: Backward,
        both: tuple[torch.Tensor, torch.Tensor],
        logical: Routing,
        tokens_per_rank: Sequence[int],
        first: int,
    ) -> torch.Tensor:
        """Runs the part behind the gate of a backward step. Collective.

        Args:
            backward: the kernels' backward.
            both: this rank's rows, and the gradients of their results.
            logical: logical ids, and their weights.
            tokens_per_rank: rows of each rank.
            first: number of the first row among the tokens of all ranks.
        """
        physical = whole(to_physical(logical, self.placement, token_offset=first), self.gate.top_k)
        found = backward(*both, physical, weights=self.weights.experts, tokens_per_rank=tokens_per_rank)
        return step_result(found, both, logical, self.weights, self.gate if self.mode == BLOCK else None)

    def eager(
        self,
        forward: Forward,
        ids_dtype: torch.dtype,
        x_MK: torch.Tensor,
        given: Routing | None,
        tokens_per_rank: Sequence[int],
    ) -> torch.Tensor:
        """Runs the whole step on rows as they are, to be timed against its graph. Collective."""
        logical = given if given is not None else self.route(x_MK, ids_dtype)
        self.counter.add(self.layer, logical.ids_Mt)
        return self.compute(forward, x_MK, logical, tokens_per_rank, 0)

    def route(self, x_MK: torch.Tensor, ids_dtype: torch.dtype) -> Routing:
        """Runs the layer's gate, which writes ids in the dtype that the step's prepare/finalize takes."""
        return route(x_MK, self.weights.gate, self.gate, ids_dtype=ids_dtype)

    def example(self, spec: LayerSpec, ranks: RankContext, num_tokens: int) -> tuple[torch.Tensor, Routing | None]:
        """Returns random rows of this rank, and their routing if the step has no gate."""
        x_MK, routing = example(spec, num_tokens, ranks)
        ids_Mt = routing.ids_Mt % self.placement.num_logical  # an expert may have more than one slot
        return x_MK, replace(routing, ids_Mt=ids_Mt) if self.mode == ROUTED else None

    def as_run(self, forward: Forward, num_ranks: int, device: torch.device, ids_dtype: torch.dtype) -> Run:
        """Returns the whole step on a batch of fixed size, for a graph."""
        if not self.placement.is_identity:
            self.placement.tables(device, ids_dtype)  # made here, since a copy from the host must not be captured

        def run(batch: StaticBatch) -> torch.Tensor:
            beyond_M1 = batch.beyond()
            x_MK = batch.padded(beyond_M1)
            if self.mode == BLOCK:
                gated = self.route(x_MK, ids_dtype)
                logical = Routing(ids_Mt=gated.ids_Mt.masked_fill_(beyond_M1, -1), weights_Mt=gated.weights_Mt)
            else:
                logical = batch.padded_routing(beyond_M1)
            self.counter.add(self.layer, logical.ids_Mt)
            return self.compute(forward, x_MK, logical, (batch.num_tokens,) * num_ranks, batch.first_1)

        return run
