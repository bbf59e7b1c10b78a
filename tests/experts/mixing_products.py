"""A processor whose bf16 products read past a row's end, in place of one with AMX: each product looks where that reads.

oneDNN's kernels for AMX take the inner size K in tiles of 32 columns. Where K is not a multiple of it, the rest of a row's
last tile is what comes behind the row in memory, times zero: NaN where that is NaN or infinite. Behind the last row lies memory
of anybody, which counts as NaN here. Real kernels do so for some shapes only; this one does for all.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TILE = 32
LEFT = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "addmv": 1, "mv": 0, "baddbmm": 1}
"""Products and which of their arguments has the rows."""


class MixingProducts(TorchDispatchMode):
    """A context, of one thread. `crossed`: products that read past the ends of rows."""

    def __init__(self):
        super().__init__()
        self.crossed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in LEFT:
            return out
        x = args[LEFT[name]]
        if x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.ndim >= 2 and x.shape[-1] % TILE:
            self.crossed += 1
            with torch._C._DisableTorchDispatch():
                spoilt = _behind(x.detach()).isfinite().all(-1).logical_not()
                out.masked_fill_(spoilt if out.ndim == spoilt.ndim else spoilt[..., None], float("nan"))
        return out


def _behind(x: torch.Tensor) -> torch.Tensor:
    """`(..., rest of the tile)`: the values behind each row, NaN where the storage ends."""
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    ends = torch.full(x.shape[:-1], x.storage_offset() + x.shape[-1])
    for dim, (size, step) in enumerate(zip(x.shape[:-1], x.stride()[:-1], strict=True)):
        ends += (torch.arange(size) * step).view(-1, *[1] * (x.ndim - 2 - dim))
    at = ends[..., None] + torch.arange(-x.shape[-1] % TILE)
    values = torch.full(at.shape, float("nan"), dtype=x.dtype)
    inside = at < storage.numel()
    values[inside] = storage[at[inside]]
    return values
