"""Describes the packing of a layer's weights by an experts class, and turns packed weights back into rows.

Packed weights keep the shape and dtype of plain ones, and replace them. Only plain rows move
between ranks: a rank that receives an expert packs it for its own backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class HowPacked(Protocol):
    """The layout that an experts class gave the matrices of a layer."""

    def matrices(self, weights: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both matrices of one expert of these ExpertWeights as plain rows, in new memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Describes blocks of `rows` output rows that lie column by column, with `run` columns of a row side by side.

    interleaved: rows of gate and up alternate in the first matrix.
    """

    rows: int
    run: int = 1
    interleaved: bool = False

    def matrices(self, weights: Any, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        w13_NK, w2_KN = weights.w13_eNK[expert], weights.w2_eKN[expert]
        return self.plain(w13_NK, first=True), self.plain(w2_KN, first=False)

    def plain(self, packed_NK: torch.Tensor, *, first: bool) -> torch.Tensor:
        """Returns one expert's matrix as `ExpertWeights` describes it, in new memory. first: it is the matrix of gate and up."""
        size, columns = packed_NK.shape
        blocks = packed_NK.view(size // self.rows, columns // self.run, self.rows, self.run)
        whole_NK = blocks.transpose(1, 2).reshape(size, columns)
        if first and self.interleaved:
            return whole_NK.view(size // 2, 2, columns).transpose(0, 1).reshape(size, columns)
        return whole_NK


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Reorders `(2N, ...)` from rows of gate, then rows of up, to gate and up in turn. `Packing.plain` undoes it."""
    gate, up = rows.chunk(2)
    return torch.stack((gate, up), dim=1).flatten(0, 1)
