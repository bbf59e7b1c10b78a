"""Bytes and time of the all-to-all between hosts: two hosts of this machine in network namespaces, gloo ranks, shaped links.

    python -m benchmarks.hosts_all2all --out benchmarks/results/hosts_all2all.json

A step is one dispatch and one combine of rows that nothing computes on. `bytes` is what the interfaces counted, headers of all
protocols included. `bytes_ratio` compares it with one row for each token and other host, each way. `counted_bytes` is what the
ranks themselves count for the metrics.

Each link gets a delay of 1 ms and 10 Gb/s where the kernel has `tc netem`. The bound of a step's time is then three hops of the
delay (sizes, rows, rows home) and the bytes at the link's rate. On a kernel without it the links are as fast as the processors
copy, the result says `"shaped": false`, and there is no bound. Needs root and network namespaces: says so and ends with 77
without them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import reports
from epserve import all2all
from epserve.modular_kernel import (
    UNQUANTIZED,
    ExpertLayout,
    ExpertShape,
    LayerSpec,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
    TopKWeightAndReduceNoOP,
)
from tests.hosts import fake_hosts, why_not

SKIPPED = 77  # what automake's tests end with when they cannot run
DELAY_S, RATE_BPS = 1e-3, 10e9
HOPS = 3
PORT = 29555
HOSTS = 2


def transmitted() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def rank_main(args: argparse.Namespace) -> None:
    """One rank in its host's namespace. Prints a line of JSON for each backend and number of tokens."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    world = HOSTS * args.per_host
    store = dist.TCPStore("10.88.0.10", PORT, world, is_master=args.rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=world)
    hosts = tuple(rank // args.per_host for rank in range(world))
    ranks = RankContext(rank=args.rank, world_size=world, group=dist.group.WORLD, hosts=hosts, timeout_s=120)
    shape = ExpertShape(hidden=args.hidden, intermediate=8, num_experts=64, top_k=8, dtype=torch.bfloat16)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(64, world))
    for name in args.backends.split(","):
        manager = all2all.REGISTRY.get(name)(ranks)
        pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=4096))
        for tokens in map(int, args.tokens.split(",")):
            print(json.dumps(measured(pf, ranks, spec, name, tokens, args.steps)), flush=True)
        manager.destroy()
    dist.destroy_process_group()


def measured(pf, ranks: RankContext, spec: LayerSpec, name: str, tokens: int, steps: int) -> dict:
    gen = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn((tokens, spec.shape.hidden), generator=gen).to(spec.shape.dtype)
    ids = torch.rand((tokens, spec.shape.num_experts), generator=gen).topk(spec.shape.top_k, dim=1).indices.int()
    routing = Routing(ids_Mt=ids, weights_Mt=torch.full(ids.shape, 1 / spec.shape.top_k))
    host_of = torch.tensor(ranks.hosts).repeat_interleave(spec.shape.num_experts // ranks.world_size)[ids.long()]
    pairs = sum(int((host_of == host).any(1).sum()) for host in set(ranks.hosts) - {ranks.hosts[ranks.rank]})
    out, times, counted = torch.empty_like(x), [], pf.network_bytes()

    def step() -> None:
        prepared = pf.prepare(x, routing, quant=UNQUANTIZED)
        pf.finalize(prepared.handle, prepared.x, reduce=TopKWeightAndReduceNoOP(), out_MK=out)

    for _ in range(3):
        step()
    dist.barrier()
    before, counted = transmitted(), pf.network_bytes()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    dist.barrier()
    return {
        "backend": name, "tokens": tokens, "rank": ranks.rank, "host": ranks.hosts[ranks.rank], "pairs": pairs,
        "row": x[:1].nbytes, "seconds": statistics.median(times), "counted": (pf.network_bytes() - counted) / steps,
        "transmitted": (transmitted() - before) / steps,
    }  # fmt: skip


def cell(lines: list[dict], per_host: int, shaped: bool) -> dict:
    """Returns one backend's cell: the slowest rank's time, and each host's own interface once."""
    rows = sum(2 * line["pairs"] * line["row"] for line in lines)
    sent = sum(next(line["transmitted"] for line in lines if line["host"] == host) for host in range(HOSTS))
    seconds = max(line["seconds"] for line in lines)
    bound = HOPS * DELAY_S + rows / HOSTS / (RATE_BPS / 8) if shaped else None
    return {
        "backend": lines[0]["backend"], "tokens": lines[0]["tokens"], "ranks_per_host": per_host,
        "row_bytes": rows, "counted_bytes": sum(line["counted"] for line in lines), "bytes": sent,
        "bytes_ratio": round(sent / rows, 3), "seconds": seconds, "bound_seconds": bound,
        "time_ratio": round(seconds / bound, 2) if bound else None,
    }  # fmt: skip


def shape(namespace: str) -> bool:
    """Gives a host's link its delay and rate. Returns whether the kernel can do so."""
    netem = ["netem", "delay", f"{DELAY_S * 1e3:g}ms", "rate", f"{RATE_BPS / 1e9:g}gbit", "limit", "100000"]
    words = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", "eth0", "root", *netem]
    return bool(shutil.which("tc")) and subprocess.run(words, capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="all_to_all,all_to_all_by_host")
    parser.add_argument("--tokens", default="128,4096")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return 0
    if reason := why_not():
        print(f"skipped: {reason}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder, fake_hosts(HOSTS, Path(folder) / "hosts") as hosts:
        shaped = all(list(map(shape, (f"{hosts.tag}-{host}" for host in range(HOSTS)))))
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{hosts.tag}-{rank // args.per_host}", sys.executable, "-m",
                 "benchmarks.hosts_all2all", "--rank", str(rank), "--backends", args.backends, "--tokens", args.tokens,
                 "--hidden", str(args.hidden), "--per-host", str(args.per_host), "--steps", str(args.steps)],
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(HOSTS * args.per_host)
        ]  # fmt: skip
        lines = [json.loads(line) for each in started for line in each.communicate(timeout=900)[0].splitlines()]
        if any(each.returncode for each in started):
            return 1
    keys = [(name, int(tokens)) for name in args.backends.split(",") for tokens in args.tokens.split(",")]
    cells = [
        cell([line for line in lines if (line["backend"], line["tokens"]) == wanted], args.per_host, shaped)
        for wanted in keys
    ]
    for each in cells:
        print(json.dumps(each))
    link = {"shaped": shaped, **({"delay_s": DELAY_S, "rate_bps": RATE_BPS} if shaped else {})}
    if args.out:
        reports.save(args.out, {**link, "hidden": args.hidden, "cells": cells})
    return 0


if __name__ == "__main__":
    sys.exit(main())
