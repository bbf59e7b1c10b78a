"""Ranks that share a GPU: for a machine with fewer GPUs than a benchmark has ranks. Right and wrong show there, times do not."""

from __future__ import annotations

import argparse
import os
from typing import Any

PARTS = 10_000  # Ray counts GPUs in such parts


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks-per-gpu", type=int, default=int(os.environ.get("EPSERVE_TEST_RANKS_PER_GPU", "1")), metavar="N",
        help="with --device cuda: so many ranks and spares share a GPU; the result says so, and its times are not those of a"
        " GPU for each",
    )  # fmt: skip


def cluster_section(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the section of the configuration."""
    if args.ranks_per_gpu < 1:
        raise SystemExit(f"--ranks-per-gpu must be at least 1, got {args.ranks_per_gpu}")
    if sharing(args) == 1:
        return {}
    return {"gpus_per_rank": PARTS // args.ranks_per_gpu / PARTS}


def sharing(args: argparse.Namespace) -> int:
    """For the result: how many ranks may be on one GPU."""
    return args.ranks_per_gpu if args.device == "cuda" else 1
