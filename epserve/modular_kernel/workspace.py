"""Manages scratch memory of the experts: two declared regions and the output, in one allocation that is reused, then locked."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from epserve.errors import TooLarge

ALIGN = 256  # bytes. cudaMalloc aligns alike, so that TMA and vector loads may assume 16 everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceShapes:
    """Describes the memory that one `apply` needs.

    Region 13 holds the first GEMM's result. Region 2 holds the second GEMM's input and result. The regions do not overlap, and
    the output lies apart from both: experts may read one while writing another.
    """

    workspace13: tuple[int, ...]
    workspace2: tuple[int, ...]
    output: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the two regions."""
    output_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(
            _round(math.prod(shape) * dtype.itemsize)
            for shape, dtype in (
                (self.workspace13, self.dtype),
                (self.workspace2, self.dtype),
                (self.output, self.output_dtype),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Holds the tensors for one `apply`. Their contents are undefined."""

    workspace13: torch.Tensor
    workspace2: torch.Tensor
    output: torch.Tensor


class Workspaces:
    """Owns one growing allocation. After `lock()`, which follows warm-up, a larger request is an error that names both sizes.

    NOTE: the next `carve` overwrites the result of the last one. Two batches in flight need two of these objects.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.locked = False
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def reserve(self, shapes: WorkspaceShapes) -> None:
        if shapes.nbytes <= self.nbytes:
            return
        if self.locked:
            raise TooLarge(
                f"this batch needs {shapes.nbytes} bytes of workspace, {self.nbytes} were reserved at warm-up;"
                " raise max_tokens_per_rank or send a smaller batch"
            )
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)  # the old memory is freed before it grows
        self._bytes = torch.empty(shapes.nbytes, dtype=torch.uint8, device=self.device)

    def lock(self) -> None:
        self.locked = True

    def poison(self) -> None:
        """Fills the memory with a pattern that is NaN in every float type. Tests show with it that stale bytes change nothing."""
        self._bytes.fill_(0xFF)

    def carve(self, shapes: WorkspaceShapes) -> Workspace:
        self.reserve(shapes)
        start, parts = 0, []
        for shape, dtype in (
            (shapes.workspace13, shapes.dtype),
            (shapes.workspace2, shapes.dtype),
            (shapes.output, shapes.output_dtype),
        ):
            size = math.prod(shape) * dtype.itemsize
            parts.append(self._bytes[start : start + size].view(dtype).view(shape))
            start += _round(size)
        return Workspace(workspace13=parts[0], workspace2=parts[1], output=parts[2])


def _round(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
