"""Shared parts of the DeepEP backends: the check for the library, and ids and rows in its form.

Functions import `deep_ep` when they run. The library's ids are int64, so the gate writes them so (`topk_indices_dtype`). Its
experts are even over the ranks, so uneven experts are spread: expert i of rank r becomes `r * max(counts) + i`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from epserve.errors import ConfigError
from epserve.modular_kernel import LayerSpec, RankContext, Routing
from epserve.modular_kernel.gathering import gather
from epserve.modular_kernel.quantization import BLOCK, FP8, quantise_blocks

from .symmetric import GIB

TILE = 32  # tokens of one program
CHUNK = 1024  # columns that one program quantises at a time
KEPT = 2  # batches whose buffers are kept: as many as may be in flight


def unavailable() -> str | None:
    """Returns the reason why `deep_ep.Buffer` cannot be used here and the remedy, or None if it can."""
    if find_spec("deep_ep") is None:
        return "the package deep_ep (DeepEP) is not installed: build it for this torch, or install a wheel that fits"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"compute capability {torch.cuda.get_device_capability()}, DeepEP's kernels need (9, 0)"
    try:
        with _lazy_symbols():
            import deep_ep
    except (ImportError, OSError) as error:  # a wheel for another torch or NCCL: undefined symbol, missing library
        loaded = version_text(nccl_version())
        return f"deep_ep does not load with torch {torch.__version__} and NCCL {loaded} (another ABI?): {error}"
    return None if hasattr(deep_ep, "Buffer") else "the installed deep_ep has no Buffer"


@contextlib.contextmanager
def _lazy_symbols():
    """Lets a library load although a function that it never calls is missing, as with DeepEP 2 beside another torch."""
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)
    try:
        yield
    finally:
        sys.setdlopenflags(before)


def nccl_version() -> tuple[int, ...]:
    """Returns the version of the NCCL library that this process has loaded. Empty: none is loaded.

    `torch.cuda.nccl.version()` is a constant of torch's build, and stays the same with another library before torch's own.
    """
    number = ctypes.c_int()
    for name in (
        None,
        "libnccl.so.2",
    ):  # the process's symbols, as any extension finds them, then a library without them
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=os.RTLD_LAZY | (os.RTLD_NOLOAD if name else 0))
            if library.ncclGetVersion(ctypes.byref(number)) == 0:
                major, rest = divmod(number.value, 10_000)
                return major, *divmod(rest, 100)
    return ()


def version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "(none is loaded)"


def check_memory(ranks: RankContext, asked: int, backend: str) -> None:
    """Checks the free memory of every rank. Collective: every rank raises the ConfigError of the first that lacks memory."""
    free, total = torch.cuda.mem_get_info(ranks.device)
    text = None
    if asked * ranks.sharers > free:
        shared = f", as do all {ranks.sharers} ranks on its GPU" if ranks.sharers > 1 else ""
        text = (
            f"{backend} asks for {asked / GIB:.2f} GiB on rank {ranks.rank}{shared}, {free / GIB:.2f} of {total / GIB:.2f} GiB"
            " are free; lower max_tokens_per_rank"
        )
    for problem in gather(ranks, text):
        if problem:
            raise ConfigError(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Holds the inputs of one dispatch of M tokens over R ranks and E experts of the library.

    `x` is `(M, K)` in bf16, or in e4m3 with float32 scales `(M, K/128)`. `ids_Mt` is int64 and `weights_Mt` float32. A token
    names an expert at most once, and -1 is no expert. With a layout, `in_rank` bool `(M, R)` marks the ranks of each token,
    and int32 `per_rank` `(R,)` and `per_expert` `(E,)` count tokens.
    """

    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ids_Mt: torch.Tensor
    weights_Mt: torch.Tensor
    in_rank: torch.Tensor | None = None
    per_rank: torch.Tensor | None = None
    per_expert: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Holds the outputs of one launch, kept for later batches of the same size. Memory that the library reads must not move."""

    x: torch.Tensor | None
    scales: torch.Tensor | None
    ids_Mt: torch.Tensor
    weights_Mt: torch.Tensor
    in_rank: torch.Tensor | None
    counts: torch.Tensor | None
    per_rank: torch.Tensor | None
    per_expert: torch.Tensor | None


class Sender:
    """Turns int64 physical ids and rows into the library's form, by one launch on a CUDA device.

    Args:
        quantised: rows travel as e4m3 in 1x128 blocks.
        layout: compute the destinations of tokens too, which the library's high-throughput dispatch takes.

    NOTE: steps follow each other on one stream. The caller calls `give_back` when the library has finished with a batch.
    """

    def __init__(self, spec: LayerSpec, device: torch.device, *, quantised: bool = False, layout: bool = False):
        counts, offsets = spec.layout.counts, spec.layout.offsets
        self.per_rank, self.num_ranks = max(counts), len(counts)
        self.total = self.per_rank * self.num_ranks
        self.quantised, self.layout, self.device = quantised, layout, device
        moves = [rank * self.per_rank - offsets[rank] for rank, count in enumerate(counts) for _ in range(count)]
        self.shifts = torch.tensor(moves, dtype=torch.int64, device=device) if any(moves) else None
        self.by_kernel = device.type == "cuda"
        self._spare: list[tuple[int, Buffers]] = []
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._partial = torch.empty(0, dtype=torch.int32, device=device)

    def ready(self, x_MK: torch.Tensor, routing: Routing) -> tuple[Outgoing, Buffers | None]:
        """Returns the batch to send, and the buffers to give back after the library has sent and used them."""
        assert routing.ids_Mt.dtype == torch.int64, "topk_indices_dtype: the caller brings the library's ids"
        if self.by_kernel:
            return self._launch(x_MK, routing)
        ids_Mt, weights_Mt = name_once(routing, self.shifts)
        x = quantise_blocks(x_MK) if self.quantised else x_MK
        if not self.layout:
            return Outgoing(x=x, ids_Mt=ids_Mt, weights_Mt=weights_Mt), None
        in_rank, per_rank, per_expert = lay_out(ids_Mt, self.num_ranks, self.per_rank)
        return Outgoing(
            x=x, ids_Mt=ids_Mt, weights_Mt=weights_Mt, in_rank=in_rank, per_rank=per_rank, per_expert=per_expert
        ), None

    def give_back(self, buffers: Buffers | None) -> None:
        if buffers is not None:
            self._spare = [(buffers.ids_Mt.shape[0], buffers), *self._spare[: KEPT - 1]]

    def _take(self, num_tokens: int, top_k: int, hidden: int) -> Buffers:
        for index, (rows, kept) in enumerate(self._spare):
            if rows == num_tokens:
                del self._spare[index]
                return kept
        on: dict[str, Any] = {"device": self.device}
        x = scales = in_rank = counts = per_rank = per_expert = None
        if self.quantised:
            x = torch.empty((num_tokens, hidden), dtype=FP8, **on)
            scales = torch.empty((num_tokens, hidden // BLOCK), dtype=torch.float32, **on)
        if self.layout:
            in_rank = torch.empty((num_tokens, self.num_ranks), dtype=torch.bool, **on)
            counts = torch.empty(self.num_ranks + self.total, dtype=torch.int32, **on)
            per_rank, per_expert = counts[: self.num_ranks], counts[self.num_ranks :]
        return Buffers(
            x=x, scales=scales, in_rank=in_rank, counts=counts, per_rank=per_rank, per_expert=per_expert,
            ids_Mt=torch.empty((num_tokens, top_k), dtype=torch.int64, **on),
            weights_Mt=torch.empty((num_tokens, top_k), dtype=torch.float32, **on),
        )  # fmt: skip

    def _launch(self, x_MK: torch.Tensor, routing: Routing) -> tuple[Outgoing, Buffers]:
        from epserve.all2all.kernels import rows as kernels

        num_tokens, top_k = routing.ids_Mt.shape
        hidden = x_MK.shape[1]
        made = self._take(num_tokens, top_k, hidden)
        tiles = max(1, -(-num_tokens // TILE))
        if self.layout and self._partial.numel() < tiles * (self.num_ranks + self.total):
            self._partial = torch.empty(tiles * (self.num_ranks + self.total), dtype=torch.int32, device=self.device)
        units = num_tokens * -(-hidden // CHUNK) if self.quantised else 0
        rows = x_MK if self.quantised else None
        kernels.ready[(tiles + min(units, 132 * 16),)](
            rows, made.x, made.scales, routing.ids_Mt, routing.weights_Mt, self.shifts, made.ids_Mt, made.weights_Mt,
            made.in_rank, made.counts, self._partial, self._arrived, num_tokens, H=hidden, K=top_k, RANKS=self.num_ranks,
            EACH=self.per_rank, SHIFT=self.shifts is not None, FP8=self.quantised, LAYOUT=self.layout, TILE=TILE, BLOCK=CHUNK,
            num_warps=4,
        )  # fmt: skip
        x = (made.x, made.scales) if made.x is not None and made.scales is not None else x_MK
        out = Outgoing(x=x, ids_Mt=made.ids_Mt, weights_Mt=made.weights_Mt, in_rank=made.in_rank, per_rank=made.per_rank,
                       per_expert=made.per_expert)  # fmt: skip
        return out, made


def name_once(routing: Routing, shifts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `ids_Mt` and `weights_Mt` of `Outgoing`, computed in torch."""
    ids_Mt, slots = routing.ids_Mt, torch.arange(routing.ids_Mt.shape[1], device=routing.ids_Mt.device)
    same_Mtt = ids_Mt[:, :, None] == ids_Mt[:, None, :]
    first_Mt = (torch.where(same_Mtt, slots, len(slots)).amin(-1) == slots) & (ids_Mt >= 0)
    weights_Mt = torch.where(ids_Mt >= 0, routing.weights_Mt, 0.0)
    shares_Mt = (same_Mtt * weights_Mt[:, None, :]).sum(-1)
    if shifts is not None:
        ids_Mt = ids_Mt + shifts[ids_Mt.clamp(min=0)]
    ids_Mt = torch.where(first_Mt, ids_Mt, -1)
    return ids_Mt, torch.where(first_Mt, shares_Mt, 0.0)


def lay_out(ids_Mt: torch.Tensor, num_ranks: int, each: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `in_rank`, `per_rank`, `per_expert` of `Outgoing` from the library's ids. `each`: experts of a rank."""
    owners = torch.arange(num_ranks, device=ids_Mt.device)
    in_rank = ((ids_Mt >= 0) & (ids_Mt // each == owners[:, None, None])).any(-1).T.contiguous()
    per_expert = torch.bincount(ids_Mt[ids_Mt >= 0], minlength=num_ranks * each).int()
    return in_rank, in_rank.sum(0, dtype=torch.int32), per_expert


def pad(x: torch.Tensor, hidden: int) -> torch.Tensor:
    """Returns `x` with zeros behind the last column, or `x` itself when it needs no padding."""
    return x if x.shape[-1] == hidden else F.pad(x, (0, hidden - x.shape[-1]))


def unpad(x: torch.Tensor, hidden: int) -> torch.Tensor:
    return x if x.shape[-1] == hidden else x[..., :hidden].contiguous()


def sends_quantised(spec: LayerSpec, dispatch_quantised: bool) -> bool:
    return dispatch_quantised and spec.quant.dispatch_dtype is not None and spec.shape.hidden % BLOCK == 0


def destroy(buffer: Any) -> None:
    """Destroys a buffer of the library. Collective."""
    torch.cuda.synchronize()
    buffer.destroy()
