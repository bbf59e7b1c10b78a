"""Shared memory: how much of it one program may have on a GPU, and how much the Triton kernels take with given tiles.

The sums are of what Triton 3.6 allocates; `tests/experts/triton_aot/check_shared_memory.py` holds them against compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .sizes import GemmTiles

KIB = 1024
BLOCKS = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (12, 0): 99,
    (12, 1): 99,
}
"""KiB of shared memory that one program may have, by compute capability (CUDA programming guide)."""
LEAST = 99
"""KiB of the others."""
SPARE = 2 * KIB
"""Bytes beside the pipeline's buffers: barriers, and sums across warps."""
GROUPS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}
"""4-bit weights that share a scale; int4: in the layers with the most scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What tiles depend on. `capability`: (0, 0) where it is not NVIDIA's. `shared_memory`: bytes that one program may have."""

    capability: tuple[int, int]
    shared_memory: int

    @classmethod
    def like(cls, capability: tuple[int, int]) -> Gpu:
        """One that is not there: for ahead-of-time compiles."""
        return cls(capability=capability, shared_memory=BLOCKS.get(capability, LEAST) * KIB)

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Of a device; without a GPU the one that can do most."""
        if device.type != "cuda":
            return HOPPER
        capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        for name in ("shared_memory_per_block_optin", "shared_memory_per_block"):  # ROCm has the second only
            if size := getattr(properties, name, 0):
                return cls(capability=capability, shared_memory=size)
        return cls.like(capability)

    @property
    def reads_operands_in_place(self) -> bool:
        """Tensor cores read shared memory themselves (9.0, 10.x); others take registers, and a buffer is free a step earlier."""
        return self.capability[0] in (9, 10)

    def fits(self, size: int) -> bool:
        return size + SPARE <= self.shared_memory


HOPPER = Gpu.like((9, 0))


def bytes_of(c: GemmTiles, bm: int, *, scheme: str, gated: bool, gpu: Gpu, group: int = 0) -> int:
    """Shared memory of one GEMM's buffers, `SPARE` apart. `group` of 4-bit weights shares a scale; 0: as GROUPS says."""
    packed, sides = scheme in GROUPS, 2 if gated else 1
    size = 2 if scheme == "none" or packed else 1
    if c.specialised:
        return c.stages * c.bk * (bm + 256) * size
    in_place, ahead = gpu.reads_operands_in_place, max(1, c.stages - 1)
    buffers = c.stages if in_place else ahead
    rows = bm * c.bk * (2 if c.fly else size)
    weights = sides * c.bn * c.bk * size
    if packed:
        scales = c.bk // (group or GROUPS[scheme]) * (1 if scheme == "mxfp4" else 4)
        words = sides * c.bn * (c.bk // 2 + max(4, scales))
        widened = 0 if in_place and c.swap else weights  # else they pass through shared memory once more
        return buffers * rows + ahead * words + widened
    if in_place:
        # Largest values of rows, across warps.
        scratch = 4 * bm * c.warps if gated and scheme == "fp8_block" and gpu.capability[0] == 10 else 0
        return buffers * (rows + weights) + scratch
    quantised = bm * c.bk if c.fly else 0
    if gpu.capability[0] == 8:  # no TMA: Triton loads weights by pointers, and none ahead
        return buffers * rows + weights + quantised
    return buffers * (rows + weights) + quantised


def programs_at_once(c: GemmTiles, bm: int, *, scheme: str, gated: bool, gpu: Gpu, group: int = 0) -> int:
    """How many programs of one GEMM a multiprocessor holds, at most: by shared memory, and by registers as compiled kernels
    have them (of 65,536)."""
    most = 4 if c.warps <= 4 else 2
    if not gpu.reads_operands_in_place:
        most //= 2  # mostly 150 to 255 registers a thread: operands lie there, too
    elif scheme in GROUPS:
        most = min(most, 2 if gated else 3)  # 207 to 243 registers a thread, 96 to 195 in the second GEMM
    size = bytes_of(c, bm, scheme=scheme, gated=gated, gpu=gpu, group=group)
    return max(1, min(most, gpu.shared_memory // (size + SPARE)))
