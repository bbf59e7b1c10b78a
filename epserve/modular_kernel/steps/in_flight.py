"""Keeps two batches in flight: a batch is cut in halves, so that one half's communication hides behind the other's experts.

    dispatch A | dispatch B ........ | combine A ........ | combine B
               | experts A           | experts B          |

The order of calls is the same on every rank, since the halves are cut from what all ranks know. No more than two handles are
ever outstanding: before a third dispatch starts, the oldest combine is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epserve.errors import Incompatible
from epserve.modular_kernel.contracts import FusedMoEPrepareAndFinalizeModular, Prepared
from epserve.modular_kernel.handles import Receiver
from epserve.modular_kernel.kernel import FusedMoEModularKernel, SharedExperts
from epserve.modular_kernel.types import ExpertWeights, Routing
from epserve.modular_kernel.workspace import Workspaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Names rows start .. stop-1 of this rank's batch, and every rank's number of rows in this piece (None: not known)."""

    start: int
    stop: int
    counts: list[int] | None


def cut(longest: int, cap: int | None) -> int:
    """Returns the rows of one piece, for an even number of pieces within the cap. Equal on all ranks for the same `longest`."""
    pieces = 2 * -(-longest // cap) if cap is not None else 2
    return max(1, -(-longest // max(pieces, 1)))


def pieces_of(num_tokens: int, longest: int, size: int, counts: Sequence[int] | None) -> list[Piece]:
    """Returns the pieces. Every rank has the same number of them, and a rank with fewer tokens has empty ones."""
    made = []
    for start in range(0, max(longest, 1), size):
        taken = None if counts is None else [min(max(count - start, 0), size) for count in counts]
        made.append(Piece(start=min(start, num_tokens), stop=min(start + size, num_tokens), counts=taken))
    return made


def why_not_two(pf: FusedMoEPrepareAndFinalizeModular) -> str | None:
    """Returns the reason why this backend cannot hold two batches, or None."""
    if not pf.has_prepare_no_receive():
        return f"{type(pf).__name__} has no asynchronous dispatch: nothing would overlap"
    return None


class TwoInFlight:
    """Runs the steps of one kernel as halves that overlap. Bit-equal to the same halves one after the other."""

    def __init__(self, kernel: FusedMoEModularKernel, *, second: Workspaces | None = None, from_tokens: int = 2):
        """Joins a kernel with the workspaces of the second half. Raises Incompatible.

        Args:
            second: the workspaces of the second half. They outlive a kernel. The first half uses the kernel's own.
            from_tokens: a step whose busiest rank has fewer tokens runs as one batch.
        """
        if reason := why_not_two(kernel.prepare_finalize):
            raise Incompatible("two batches in flight are not possible:", (reason,))
        self.kernel, self.from_tokens = kernel, max(2, from_tokens)
        self.second = second or Workspaces(kernel.prepare_finalize.ranks.device)

    def warm_up(self) -> None:
        """Reserves as much for the second half as the kernel has, then locks it. The kernel's own warm-up comes before."""
        self.second.reserve(self.kernel.workspace_shapes())
        self.second.lock()

    def forward(
        self,
        x_MK: torch.Tensor,
        routing: Routing,
        *,
        weights: ExpertWeights,
        tokens_per_rank: Sequence[int] | None = None,
        shared_experts: SharedExperts | None = None,
        overlap: bool = True,
    ) -> torch.Tensor:
        """Does the same as `FusedMoEModularKernel.forward`. Collective. overlap False: each piece ends before the next begins."""
        kernel, num_tokens = self.kernel, x_MK.shape[0]
        longest = max(tokens_per_rank) if tokens_per_rank is not None else kernel.agree_longest(num_tokens)
        if longest < self.from_tokens:
            return kernel.forward(
                x_MK, routing, weights=weights, tokens_per_rank=tokens_per_rank, shared_experts=shared_experts
            )
        size = cut(longest, kernel.prepare_finalize.max_num_tokens_per_rank())
        x_MK, routing = x_MK.contiguous(), routing.with_ids(kernel.prepare_finalize.topk_indices_dtype())
        flight = _Flight(self, x_MK, routing, weights, shared_experts)
        pieces = pieces_of(num_tokens, longest, size, tokens_per_rank)
        if overlap:
            flight.interleave(pieces)
        else:
            flight.one_by_one(pieces)
        return flight.out_MK


class _Flight:
    """Runs one step."""

    def __init__(self, owner: TwoInFlight, x_MK, routing: Routing, weights: ExpertWeights, shared):
        self.kernel, self.spaces = owner.kernel, (owner.kernel.workspaces, owner.second)
        self.x_MK, self.routing, self.weights, self.shared = x_MK, routing, weights, shared
        self.out_MK = torch.empty_like(x_MK)
        self.reduce = owner.kernel.fused_experts.finalize_weight_and_reduce_impl()

    def interleave(self, pieces: list[Piece]) -> None:
        coming: Receiver[Prepared] | None = self._start(pieces[0])
        leaving: tuple[Piece, Receiver[torch.Tensor], torch.Tensor | None] | None = None
        for index, piece in enumerate(pieces):
            assert coming is not None
            shared_MK = self.shared(self.x_MK[piece.start : piece.stop]) if self.shared is not None else None
            prepared, coming = coming(), None
            if index + 1 < len(pieces):
                if leaving is not None:  # this piece and the next are in flight, so the earlier one must end first
                    self._land(leaving)
                    leaving = None
                coming = self._start(pieces[index + 1])
            # NOTE: a piece has its own workspace: the combine of the piece before may still read that piece's results.
            y = self.kernel.run_experts(prepared, self.weights, self.spaces[index % 2])
            if leaving is not None:
                self._land(leaving)
            self.kernel.on_phase("finalize")
            out_MK = self.out_MK[piece.start : piece.stop]
            home = self.kernel.prepare_finalize.finalize_no_wait(prepared.handle, y, reduce=self.reduce, out_MK=out_MK)
            leaving = (piece, home, shared_MK)
        assert leaving is not None
        self._land(leaving)

    def one_by_one(self, pieces: list[Piece]) -> None:
        for index, piece in enumerate(pieces):
            shared_MK = self.shared(self.x_MK[piece.start : piece.stop]) if self.shared is not None else None
            prepared = self._start(piece)()
            y = self.kernel.run_experts(prepared, self.weights, self.spaces[index % 2])
            out_MK = self.out_MK[piece.start : piece.stop]
            home = self.kernel.prepare_finalize.finalize_no_wait(prepared.handle, y, reduce=self.reduce, out_MK=out_MK)
            self._land((piece, home, shared_MK))

    def _start(self, piece: Piece) -> Receiver[Prepared]:
        self.kernel.on_phase("prepare")
        rows, routed = self.x_MK[piece.start : piece.stop], self.routing.rows(piece.start, piece.stop)
        pf, quant = self.kernel.prepare_finalize, self.kernel.quant
        return pf.prepare_no_receive(rows, routed, quant=quant, tokens_per_rank=piece.counts)

    def _land(self, leaving: tuple[Piece, Receiver[torch.Tensor], torch.Tensor | None]) -> None:
        piece, home, shared_MK = leaving
        home()
        if shared_MK is not None:
            self.out_MK[piece.start : piece.stop] += shared_MK
