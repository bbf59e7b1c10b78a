"""Symmetric memory of CPU ranks on one host, which run the kernels in Triton's interpreter."""

import os
import uuid

import torch

from epserve.all2all.transport.symmetric import Region
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.gathering import gather


class SharedFiles:
    """Maps files in /dev/shm on all ranks."""

    name = "shared files"

    @classmethod
    def unavailable(cls) -> str | None:
        return None if os.path.isdir("/dev/shm") else "there is no /dev/shm"

    @classmethod
    def allocate(cls, ranks: RankContext, num_bytes: int) -> Region:
        prefix = gather(ranks, f"/dev/shm/epserve_{uuid.uuid4().hex}_")[0]
        mine = torch.from_file(prefix + str(ranks.rank), True, num_bytes, dtype=torch.uint8)
        gather(ranks, None)
        parts = [
            mine if rank == ranks.rank else torch.from_file(f"{prefix}{rank}", True, num_bytes, dtype=torch.uint8)
            for rank in range(ranks.world_size)
        ]
        gather(ranks, None)
        os.unlink(prefix + str(ranks.rank))
        return Region(
            mine=mine,
            addresses=tuple(part.data_ptr() for part in parts),
            provider=cls.name,
            parts=tuple(parts),
            release=lambda collective: parts.clear(),
        )
