"""Shared memory: how much of it one program may have on a GPU, and how much the Triton kernels take with given tiles.

The sums match the allocations of Triton 3.6. `tests/experts/triton_aot/check_shared_memory.py` compares them with compiled
kernels.
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
"""KiB of shared memory for all other compute capabilities."""
SPARE = 2 * KIB
"""Bytes beside the pipeline's buffers: barriers, and sums across warps."""
GROUPS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}
"""Number of 4-bit weights that share a scale. For int4 it is the number in the layers with the most scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Holds the limits of a GPU for tiles. `capability` is (0, 0) unless NVIDIA's. `shared_memory`: most bytes of one program."""

    capability: tuple[int, int]
    shared_memory: int

    @classmethod
    def like(cls, capability: tuple[int, int]) -> Gpu:
        """Returns a GPU that need not be present, for ahead-of-time compiles."""
        return cls(capability=capability, shared_memory=BLOCKS.get(capability, LEAST) * KIB)

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Returns the limits of a device. Without a GPU it returns the most capable one."""
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
        """Returns whether tensor cores read shared memory (9.0, 10.x). Others read registers and free a buffer a step earlier."""
        return self.capability[0] in (9, 10)

    def fits(self, size: int) -> bool:
        return size + SPARE <= self.shared_memory


HOPPER = Gpu.like((9, 0))


def bytes_of(c: GemmTiles, bm: int, *, scheme: str, gated: bool, gpu: Gpu, group: int = 0) -> int:
    """Returns the bytes of one GEMM's buffers, without `SPARE`. `group`: 4-bit weights that share a scale, 0 for GROUPS."""
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
    """Returns the most programs of one GEMM that a multiprocessor holds, by shared memory and by the registers (65,536 in all)
    of compiled kernels."""
    most = 4 if c.warps <= 4 else 2
    if not gpu.reads_operands_in_place:
        most //= 2  # mostly 150 to 255 registers a thread, which hold operands too
    elif scheme in GROUPS:
        most = min(most, 2 if gated else 3)  # 207 to 243 registers a thread, 96 to 195 in the second GEMM
    size = bytes_of(c, bm, scheme=scheme, gated=gated, gpu=gpu, group=group)
    return max(1, min(most, gpu.shared_memory // (size + SPARE)))
