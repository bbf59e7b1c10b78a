"""How an experts class has packed a layer's weights, and the way back to rows.

Packed weights keep the shape and dtype of plain ones, so they take as much memory and replace them. Whatever moves experts
between ranks moves plain rows: a rank that receives an expert packs it as its own backend wants it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Blocks of `rows` output rows that lie column by column, `run` columns of a row side by side.

    interleaved: rows of gate and up alternate in the first matrix.
    """

    rows: int
    run: int = 1
    interleaved: bool = False

    def plain(self, packed_NK: torch.Tensor, *, first: bool) -> torch.Tensor:
        """One expert's matrix as `ExpertWeights` describes it, in new memory. first: it is the one of gate and up."""
        size, columns = packed_NK.shape
        blocks = packed_NK.view(size // self.rows, columns // self.run, self.rows, self.run)
        whole_NK = blocks.transpose(1, 2).reshape(size, columns)
        if first and self.interleaved:
            return whole_NK.view(size // 2, 2, columns).transpose(0, 1).reshape(size, columns)
        return whole_NK


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """`(2N, ...)`, the rows of gate and then those of up -> gate and up in turn. `Packing.plain` undoes it."""
    gate, up = rows.chunk(2)
    return torch.stack((gate, up), dim=1).flatten(0, 1)
