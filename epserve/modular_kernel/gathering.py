"""Exchanges small values between all ranks, as JSON in tensors: a rank unpickles nothing that it receives."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from epserve.errors import RankFailed

from .contracts import RankContext

MAX_BYTES = 1 << 24
"""The largest value of one rank, as JSON. A large model's tables of times have a few KB."""


def gather(ranks: RankContext, value: Any) -> list[Any]:
    """Returns every rank's value, in rank order, after a JSON round trip: lists for tuples, text for keys. Collective.

    Raises RankFailed when another rank does not answer or sends no JSON.
    """
    text = json.dumps(value).encode()
    if ranks.world_size == 1:
        return [json.loads(text)]
    try:
        texts = _texts(ranks, text)
    except RuntimeError as error:
        raise RankFailed(f"set-up: rank {ranks.rank} of {ranks.world_size} got no answer from another rank") from error
    try:
        return [json.loads(each) for each in texts]
    except ValueError as error:
        raise RankFailed(
            f"set-up: rank {ranks.rank} of {ranks.world_size} got a value that is no JSON: {error}"
        ) from None


def _texts(ranks: RankContext, mine: bytes) -> list[bytes]:
    device = ranks.device if "nccl" in dist.get_backend(ranks.group) else torch.device("cpu")
    lengths = _all_gather(ranks, torch.tensor([len(mine)], dtype=torch.int64, device=device))
    counts = [int(each) for each in lengths]
    if not 0 <= min(counts) <= max(counts) <= MAX_BYTES:
        raise RankFailed(f"set-up: ranks tell {counts} bytes, at most {MAX_BYTES} each")
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    parts = _all_gather(ranks, padded.to(device))
    return [part.cpu()[:count].numpy().tobytes() for part, count in zip(parts, counts, strict=True)]


def _all_gather(ranks: RankContext, mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(parts, mine, group=ranks.group)
    return parts
