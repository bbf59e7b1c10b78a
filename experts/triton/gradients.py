"""Grouped products for the experts' gradients on a GPU: rows sorted by expert, one launch a product, no wait of the host.

Legend: S rows sorted by expert, e experts, N output columns, K inner size.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

BN, BK = 128, 64
THIN, THICK = 32, 128
"""Rows of a tile, for few rows an expert and for many. Each is compiled at warm-up."""
MANY = 64
"""Mean rows of an expert from which on tiles are thick."""


def suits(x_SK: torch.Tensor) -> bool:
    """Returns whether the kernel takes these rows."""
    return x_SK.is_cuda and x_SK.dtype in (torch.bfloat16, torch.float16) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


class Grouped:
    """Multiplies rows that are sorted by expert with the experts' weights."""

    def __init__(self, counts_e: torch.Tensor, num_rows: int, *, tile: int = 0):
        """Lays out the tiles.

        Args:
            counts_e: int64, the rows of each expert, on the device.
            num_rows: the sum of `counts_e`.
            tile: rows of a tile. 0: those that suit the mean.
        """
        experts = len(counts_e)
        self.tile = tile or (THICK if num_rows >= MANY * max(experts, 1) else THIN)
        self.most = num_rows // self.tile + experts
        per_e = (counts_e + self.tile - 1) // self.tile
        ends_e, first_e = per_e.cumsum(0), counts_e.cumsum(0) - counts_e
        tile_T = torch.arange(self.most, device=counts_e.device)
        expert_T = torch.searchsorted(ends_e, tile_T, right=True).clamp(max=experts - 1)
        within_T = (tile_T - (ends_e - per_e)[expert_T]) * self.tile
        rows_T = (counts_e[expert_T] - within_T).clamp(0, self.tile)  # 0: behind the last tile
        self.tiles = torch.stack((expert_T, first_e[expert_T] + within_T, rows_T)).int()

    def linear(self, x_SK: torch.Tensor, w_eNK: torch.Tensor) -> torch.Tensor:
        """Multiplies `(S, K)` by each row's `(N, K)` to `(S, N)`, summed in float32."""
        return self._launch(x_SK, w_eNK, w_eNK.shape[1], transposed=False)

    def product(self, x_SK: torch.Tensor, w_eKN: torch.Tensor) -> torch.Tensor:
        """Multiplies `(S, K)` by each row's `(K, N)` to `(S, N)`, summed in float32."""
        return self._launch(x_SK, w_eKN, w_eKN.shape[2], transposed=True)

    def _launch(self, x_SK: torch.Tensor, w: torch.Tensor, columns: int, *, transposed: bool) -> torch.Tensor:
        from epserve.experts.kernels import gradients as kernels

        assert w.stride(2) == 1
        x_SK = x_SK.contiguous()
        out_SN = x_SK.new_empty((x_SK.shape[0], columns))
        kernels.grouped[(self.most * -(-columns // BN),)](
            x_SK, w, out_SN, self.tiles, self.most, columns, x_SK.shape[1], w.stride(0), w.stride(1),
            TRANSPOSED=transposed, BM=self.tile, BN=BN, BK=BK, num_warps=8 if self.tile == THICK else 4, num_stages=3,
        )  # fmt: skip
        return out_SN
