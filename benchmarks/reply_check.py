"""What the look at every result costs: `python -m benchmarks.reply_check [--json FILE]`.

A real server around an engine that returns its input, so that the way in and out is all there is: the worst case for the check.
bfloat16 rows of 2,048 values, by message, in frames and in a region. Calls with the check and without it in turn, medians: the
ratio counts, the times depend on the machine. `check_ms` is the look itself, without a server.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from pathlib import Path
from unittest import mock

import torch

from benchmarks import reports
from benchmarks.data_paths import HIDDEN, Engine
from epserve.client import AsyncClient
from epserve.server import replies
from tests.support.fake_engine import serving

TOKENS = {1: 300, 16: 300, 128: 100, 4096: 16}
"""Tokens of a request -> calls of each kind."""


async def call(client: AsyncClient, x: torch.Tensor, region) -> float:
    start = time.perf_counter()
    await client.forward(1, x, region=region)
    return time.perf_counter() - start


async def measure(client: AsyncClient, tokens: int, region, rounds: int) -> dict[str, float]:
    x = torch.randn(tokens, HIDDEN).bfloat16()
    if region is not None:
        inside = region.empty(x.shape, x.dtype)
        inside.copy_(x)
        x = inside
    checked: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        checked.append(await call(client, x, region))
        with mock.patch.object(replies, "rows_not_finite", return_value=[]):
            bare.append(await call(client, x, region))
    looks = []
    for _ in range(rounds):
        start = time.perf_counter()
        replies.rows_not_finite(x)
        looks.append(time.perf_counter() - start)
    with_ms, without_ms, check_ms = (statistics.median(each) * 1e3 for each in (checked, bare, looks))
    return {"with_ms": with_ms, "without_ms": without_ms, "ratio": with_ms / without_ms, "check_ms": check_ms}


async def run(scale: float) -> list[dict]:
    cells = []
    async with serving(Engine(hidden=HIDDEN, dtype=torch.bfloat16)) as server, AsyncClient(server.address) as client:  # noqa: SIM117
        async with client.register_region(1 << 28) as region:
            for tokens, rounds in TOKENS.items():
                for way in (None, region):
                    name = "region" if way is not None else "message" if tokens < 128 else "frames"
                    cell = {
                        "tokens": tokens,
                        "way": name,
                        **await measure(client, tokens, way, max(2, int(rounds * scale))),
                    }
                    cells.append(cell)
                    print(f"{tokens:5} tokens, {name:8} {cell['with_ms']:8.3f} ms with the check,"
                          f" {cell['ratio']:.3f} times without; the look {cell['check_ms']:.3f} ms", flush=True)  # fmt: skip
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of calls")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = asyncio.run(run(options.scale))
    if options.json:
        meta = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        reports.save(options.json, {"meta": meta, "cells": cells})


if __name__ == "__main__":
    main()
