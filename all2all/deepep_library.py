"""What the DeepEP backends share: finding the library and saying what is missing, ids and rows as it wants them.

`deep_ep` is imported inside functions only. The library's ids are int64 and its experts are even over the ranks, so uneven
ones are spread: expert i of rank r becomes `r * max(counts) + i`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from epserve.errors import ConfigError
from epserve.modular_kernel import LayerSpec, RankContext, Routing
from epserve.modular_kernel.quantization import BLOCK, FP8, quantise_blocks

from .symmetric import GIB, gather


def unavailable() -> str | None:
    """Why `deep_ep.Buffer` cannot be used here, and what to do about it."""
    if find_spec("deep_ep") is None:
        return "the package deep_ep (DeepEP) is not installed: build it for this torch, or install a wheel that fits"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"compute capability {torch.cuda.get_device_capability()}, DeepEP's kernels need (9, 0)"
    try:
        import deep_ep
    except (ImportError, OSError) as error:  # a wheel for another torch or NCCL: undefined symbol, missing library
        return f"deep_ep does not load with torch {torch.__version__} (another ABI or NCCL?): {error}"
    return None if hasattr(deep_ep, "Buffer") else "the installed deep_ep has no Buffer"


def check_memory(ranks: RankContext, asked: int, backend: str) -> None:
    """Collective: every rank raises the ConfigError of the first that lacks memory."""
    free, total = torch.cuda.mem_get_info(ranks.device)
    text = None
    if asked > free:
        text = (
            f"{backend} asks for {asked / GIB:.2f} GiB on rank {ranks.rank}, {free / GIB:.2f} of {total / GIB:.2f} GiB"
            " are free; lower max_tokens_per_rank"
        )
    for problem in gather(ranks, text):
        if problem:
            raise ConfigError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryIds:
    """int64 ids and float32 weights `(M, t)`; a token names an expert once."""

    ids_Mt: torch.Tensor
    weights_Mt: torch.Tensor


class Experts:
    """Physical ids <-> the library's."""

    def __init__(self, spec: LayerSpec, device: torch.device):
        counts, offsets = spec.layout.counts, spec.layout.offsets
        self.per_rank, self.num_local = max(counts), counts
        self.total = self.per_rank * len(counts)
        moves = [rank * self.per_rank - offsets[rank] for rank, count in enumerate(counts) for _ in range(count)]
        self.shifts = torch.tensor(moves, dtype=torch.int32, device=device) if any(moves) else None

    def widen(self, routing: Routing) -> LibraryIds:
        if routing.ids_Mt.is_cuda:
            return self._widen_fast(routing)
        return widen(routing, self.shifts)

    def _widen_fast(self, routing: Routing) -> LibraryIds:
        from .kernels import rows as kernels

        num_tokens, top_k = routing.ids_Mt.shape
        ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=routing.ids_Mt.device)
        weights = torch.empty_like(routing.weights_Mt)
        if num_tokens:
            tile = 32
            kernels.widen[(-(-num_tokens // tile),)](
                routing.ids_Mt, routing.weights_Mt, self.shifts, ids, weights, num_tokens,
                K=top_k, SHIFT=self.shifts is not None, TILE=tile,
            )  # fmt: skip
        return LibraryIds(ids_Mt=ids, weights_Mt=weights)


def widen(routing: Routing, shifts: torch.Tensor | None) -> LibraryIds:
    """What the kernel of this name does, in torch."""
    ids_Mt, slots = routing.ids_Mt.long(), torch.arange(routing.ids_Mt.shape[1], device=routing.ids_Mt.device)
    same_Mtt = ids_Mt[:, :, None] == ids_Mt[:, None, :]
    first_Mt = (torch.where(same_Mtt, slots, len(slots)).amin(-1) == slots) & (ids_Mt >= 0)
    weights_Mt = torch.where(ids_Mt >= 0, routing.weights_Mt, 0.0)
    shares_Mt = (same_Mtt * weights_Mt[:, None, :]).sum(-1)
    if shifts is not None:
        ids_Mt = ids_Mt + shifts[ids_Mt.clamp(min=0)]
    ids_Mt = torch.where(first_Mt, ids_Mt, -1)
    return LibraryIds(ids_Mt=ids_Mt, weights_Mt=torch.where(first_Mt, shares_Mt, 0.0))


def quantise(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 `(M, K)` and float32 scales `(M, K/128)`."""
    if not x_MK.is_cuda:
        return quantise_blocks(x_MK)
    from .kernels import rows as kernels

    num_rows, hidden = x_MK.shape
    out = torch.empty((num_rows, hidden), dtype=FP8, device=x_MK.device)
    scales = torch.empty((num_rows, hidden // BLOCK), dtype=torch.float32, device=x_MK.device)
    if num_rows:
        units = num_rows * -(-hidden // 1024)
        kernels.quantise[(min(units, 132 * 16),)](x_MK, out, scales, num_rows, H=hidden, BLOCK=1024, num_warps=4)
    return out, scales


def pad(x: torch.Tensor, hidden: int) -> torch.Tensor:
    """Zeros behind the last column; the same tensor when there is nothing to pad."""
    return x if x.shape[-1] == hidden else F.pad(x, (0, hidden - x.shape[-1]))


def unpad(x: torch.Tensor, hidden: int) -> torch.Tensor:
    return x if x.shape[-1] == hidden else x[..., :hidden].contiguous()


def sends_quantised(spec: LayerSpec, dispatch_quantised: bool) -> bool:
    return dispatch_quantised and spec.quant.dispatch_dtype is not None and spec.shape.hidden % BLOCK == 0


def destroy(buffer: Any) -> None:
    """Collective."""
    torch.cuda.synchronize()
    buffer.destroy()
