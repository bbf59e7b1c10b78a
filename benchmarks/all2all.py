"""All-to-all backends on the GPUs of one host: time, bandwidth, distance to a floor.

    python benchmarks/all2all.py --json result.json                       # every GPU, every candidate
    python benchmarks/all2all.py --only nvlink nccl_a2a --tokens 1 128
    TRITON_INTERPRET=1 python benchmarks/all2all.py --cpu --only nccl_a2a # gloo ranks, tiny cases: the plumbing alone

Candidates are our backends through the modular kernel's prepare and finalize, and the libraries' bare calls beside them
(`benchmarks/all2all_candidates.py`). Every case is checked with identity experts before and after it is timed: the output
is x times the sum of weights. A candidate that fails, hangs or is wrong is reported, the others go on, and the exit status
is 1. A candidate that cannot run on this machine is only reported.

Times are the slowest rank's median of one call. A candidate with `graph` runs as replayed CUDA graphs of 10 calls: of
dispatch, of combine, of the two in turn (our backends' combine is the difference: it is good for one dispatch). Any other
candidate, DeepEP high throughput among them, runs eagerly, with a spin of about 50 us in place of the experts, so that combine's
launch is hidden as in use. Its round trip is dispatch + combine.
GB/s: rows received, one per (token, destination rank), with rows that stay on the rank. For low latency: rows sent, one per
(token, expert). A row has 2H bytes, in fp8 H + H/32 with its scales.
floor = bytes of the rows for other ranks, one per (token, destination rank), at the busiest rank in its busier direction /
bandwidth of a large copy to the next GPU, by all GPUs at once, measured in the same run + 2 us a hop.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import reports
from benchmarks.all2all_candidates import CANDIDATES, Case, destinations

GPU_CASES = {"hidden": [4096, 7168], "experts": [64, 256], "tokens": [1, 8, 32, 128, 512, 1024, 4096], "topk": 8}
CPU_CASES = {"hidden": [256], "experts": [8, 16], "tokens": [1, 7], "topk": 3}
PHASES = {"dispatch": 1, "combine": 1, "round trip": 2}  # and their hops, one after the other
HOP_US = 2.0
GRAPH_CALLS = 10  # even: low-latency kernels alternate between two buffers
EAGER_CALLS, SPIN_CYCLES = 40, 100_000
START_S, GRACE_S = 60, 20
UNAVAILABLE, LEFT_OUT = "not available: ", "the time was up"


class Unavailable(RuntimeError):
    """Raised on every rank before anything is set up: it cannot run here, and the processes are as good as before."""


class Ranks:
    """One rank. What ranks tell each other goes over gloo on the host, where every wait has a deadline."""

    def __init__(self, rank: int, options):
        self.rank, self.world = rank, options.world
        self.device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
        meeting = {"init_method": options.meeting, "rank": rank, "world_size": options.world}
        if options.cpu:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", **meeting)
        else:
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device, **meeting)
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=options.limit_s))

    def gather(self, value) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values


def mark(device: torch.device):
    """A point in time: on the device's current stream, or on the host's clock."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_us(start, end) -> float:
    return (end - start) * 1e6 if isinstance(start, float) else start.elapsed_time(end) * 1e3


def time_graph(call, ranks: Ranks):
    """Median us of one call, and what the last call of the last replay returned."""
    for _ in range(GRAPH_CALLS):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            result = call()

    def replay_us(repeats: int) -> list[float]:
        ranks.gather(None)
        marks = [mark(ranks.device)]
        for _ in range(repeats):
            graph.replay()
            marks.append(mark(ranks.device))
        torch.cuda.synchronize()
        return [elapsed_us(start, end) for start, end in itertools.pairwise(marks)]

    slowest = max(ranks.gather(replay_us(3)[-1]))
    times = replay_us(int(min(50, max(8, 40e3 / slowest))))
    return statistics.median(times) / GRAPH_CALLS, result


def time_eager(candidate, y, ranks: Ranks) -> list[float]:
    """Returns the median us of dispatch and of combine. Each state is finalised once."""
    spans = []
    ranks.gather(None)
    for _ in range((EAGER_CALLS if ranks.device.type == "cuda" else 2) + 3):
        marks = [mark(ranks.device)]
        state = candidate.prepare()
        marks.append(mark(ranks.device))
        if ranks.device.type == "cuda":
            torch.cuda._sleep(SPIN_CYCLES)
        marks.append(mark(ranks.device))
        candidate.finalize(state, y if y.shape[0] == candidate.rows(state) else candidate.identity(state))
        spans.append([*marks, mark(ranks.device)])
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return [statistics.median(elapsed_us(marks[i], marks[i + 1]) for marks in spans[3:]) for i in (0, 2)]


def measure(candidate, case: Case, tokens: int, ranks: Ranks, copy_gbps: float) -> dict:
    """Checks and times one case. Every rank returns the same. Raises ValueError when the output is wrong."""
    on = {"device": case.device, "generator": torch.Generator(case.device).manual_seed(1000 * case.rank + tokens)}
    x = torch.randn((tokens, case.hidden), dtype=torch.bfloat16, **on)
    ids = torch.rand((tokens, case.experts), **on).topk(case.topk).indices.int()
    weights = torch.rand((tokens, case.topk), **on) + 0.1
    candidate.load(x, ids, weights)
    want = candidate.expected(x, weights)

    def check(out) -> float:
        error = ((out.float() - want).norm() / want.norm()).item()
        error = max(ranks.gather(error if math.isfinite(error) else math.inf))
        if error > (5e-2 if candidate.fp8 else 1e-2):
            raise ValueError(f"wrong output, relative L2 error {error:.3g}")
        return error

    state = candidate.prepare()
    y = candidate.identity(state)
    errors = [check(candidate.finalize(state, y))]
    if candidate.graph and case.device.type == "cuda":
        round_trip, _ = time_graph(lambda: candidate.finalize(candidate.prepare(), y), ranks)
        dispatch, state = time_graph(candidate.prepare_again, ranks)
        y = candidate.identity(state)
        if candidate.paired:  # rows may arrive in another order than in `state`
            combine, state = round_trip - dispatch, candidate.prepare()
            out = candidate.finalize(state, candidate.identity(state))
        else:
            combine, out = time_graph(lambda: candidate.finalize(state, y), ranks)
    else:
        dispatch, combine = time_eager(candidate, y, ranks)
        round_trip = dispatch + combine
        state = candidate.prepare()
        out = candidate.finalize(state, candidate.identity(state))
    errors.append(check(out))

    pairs = torch.tensor(ranks.gather(destinations(ids, case).sum(0).tolist()))  # [source rank, destination rank]
    remote = pairs - pairs.diag().diag()
    busiest = max(remote.sum(0).max().item(), remote.sum(1).max().item())
    rows = tokens * case.topk if candidate.row_per_expert else pairs.sum().item() / case.world
    sent = case.hidden + case.hidden // 32 if candidate.fp8 else 2 * case.hidden
    cell = {"hidden": case.hidden, "experts": case.experts, "tokens": tokens, "error": max(errors)}
    times = [max(of_ranks) for of_ranks in zip(*ranks.gather((dispatch, combine, round_trip)), strict=True)]
    rates = (sent, 2 * case.hidden, sent + 2 * case.hidden)
    for (phase, hops), us, row in zip(PHASES.items(), times, rates, strict=True):
        floor = busiest * row / copy_gbps / 1e3 + hops * HOP_US
        cell[phase] = {"us": us, "gbps": rows * row / us / 1e3, "floor_us": floor, "x_floor": us / floor}
    return cell


def run_candidate(name: str, ranks: Ranks, options):
    """Yield a cell for every case of one candidate."""
    kind = CANDIDATES[name]
    if missing := kind.unavailable(ranks.device.type):
        raise Unavailable(missing)
    for hidden in options.hidden:
        for experts in options.experts:
            case = Case(
                rank=ranks.rank, world=ranks.world, device=ranks.device, hidden=hidden, experts=experts,
                topk=options.topk, max_tokens=max(options.tokens), largest_hidden=max(options.hidden),
                largest_experts=max(options.experts),
            )  # fmt: skip
            candidate = kind(dist.group.WORLD, case)
            for tokens in options.tokens:
                if kind.max_tokens is None or tokens <= kind.max_tokens:
                    yield {"backend": name, **measure(candidate, case, tokens, ranks, options.copy_gbps)}
            candidate.destroy()
    kind.close()


def worker(rank: int, options, names: list[str], run, inbox) -> None:
    """One rank. Reports each cell and, at a candidate's end, its error and whether this set of processes can go on."""
    try:
        ranks = Ranks(rank, options)
    except Exception:
        traceback.print_exc()
        raise
    for name in names:
        error = None
        try:
            for cell in run(name, ranks, options):
                if rank == 0:
                    inbox.put({"cell": cell})
        except Unavailable as exception:
            error = f"{UNAVAILABLE}{exception}"
        except Exception as exception:  # one candidate's failure must not end the run
            error = f"{type(exception).__name__}: {exception}".splitlines()[0][:200]
            if not isinstance(exception, ImportError):
                traceback.print_exc()
        try:
            errors = ranks.gather(error)
        except RuntimeError:
            errors = [error, "another rank did not answer"]
        intact = all(each is None or each.startswith(UNAVAILABLE) for each in errors)
        if rank == 0 or not intact:
            inbox.put({"backend": name, "error": error or next(filter(None, errors), None), "intact": intact})
        if not intact:
            return
    dist.destroy_process_group()


def supervise(
    names: list[str], options, run=run_candidate, *, stop: float = math.inf
) -> tuple[list[dict], dict[str, str]]:
    """Runs the candidates in one set of processes. A failure can damage the set, so the rest then runs in a new one.

    Args:
        run: (name, Ranks, options) -> its cells, a function at a module's top level.
        stop: a time on the monotonic clock. A candidate that still runs then is killed, and its cells so far are kept.
    """
    cells: list[dict] = []
    failures: dict[str, str] = {}
    pending = list(names)
    while pending and time.monotonic() < stop:
        with tempfile.TemporaryDirectory() as folder:  # no port, which another program could take meanwhile
            options.meeting = f"file://{folder}/meeting"
            inbox = mp.get_context("spawn").Queue()
            processes = mp.spawn(
                worker, (options, list(pending), run, inbox), options.world, join=False, daemon=True
            ).processes
            intact, deadline = True, time.monotonic() + options.limit_s + START_S
            while pending and intact:
                try:
                    report = inbox.get(timeout=0.5)
                except queue.Empty:
                    dead = [process.exitcode for process in processes if not process.is_alive()]
                    if not dead and time.monotonic() < min(deadline, stop):
                        continue
                    error = f"a rank's process ended, exit code {dead[0]}" if dead else "a rank hangs"
                    error = f"{LEFT_OUT}, stopped in the middle" if time.monotonic() >= stop else error
                    report = last_words(inbox) or {"backend": pending[0], "error": error, "intact": False}
                deadline = time.monotonic() + options.limit_s + GRACE_S
                if "cell" in report:
                    cells.append(report["cell"])
                    continue
                name, error, intact = report["backend"], report["error"], report["intact"]
                pending.remove(name)
                failures |= {name: error} if error else {}
                print(f"{name}: {error or 'done'}", flush=True)
                if options.json:
                    write(options, cells, failures)
            for process in processes:
                process.join(10 if intact else 0)
                process.kill()
    failures |= dict.fromkeys(pending, f"{LEFT_OUT}, not begun")
    return cells, failures


def last_words(inbox) -> dict | None:
    """What a process said right before it ended."""
    try:
        return inbox.get(timeout=0.5)
    except queue.Empty:
        return None


def copy_to_next_gpu(_, world: int, inbox) -> None:
    """Reports (GB/s in one direction, GPU name). All GPUs copy 512 MiB to the next at once. Best round, slowest GPU."""
    sources = [torch.ones(1 << 29, dtype=torch.uint8, device=f"cuda:{i}") for i in range(world)]
    targets = [torch.zeros_like(sources[(i + 1) % world]) for i in range(world)]
    streams = [torch.cuda.Stream(device=i) for i in range(world)]
    rounds_us = []
    for _ in range(5):
        spans = []
        for source, target, stream in zip(sources, targets, streams, strict=True):
            with torch.cuda.stream(stream):
                start = mark(source.device)
                target.copy_(source, non_blocking=True)
                spans.append((start, mark(source.device)))
        for device in range(world):
            torch.cuda.synchronize(device)
        rounds_us.append(max(elapsed_us(start, end) for start, end in spans))
    inbox.put((sources[0].numel() / min(rounds_us) / 1e3, torch.cuda.get_device_name()))


def write(options, cells: list[dict], failures: dict[str, str]) -> None:
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    meta = {
        "gpu": options.gpu,
        "world": options.world,
        "copy_gbps": options.copy_gbps if options.gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if options.gpu else None,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or options.commit,
        "date": time.strftime("%Y-%m-%d"),
    }
    reports.save(options.json, {"meta": meta, "cells": cells, "failures": failures})


def print_table(cells: list[dict], names: list[str]) -> None:
    """Prints round trips in us, a column each, then each candidate's phases."""
    keys = sorted({(cell["hidden"], cell["experts"], cell["tokens"]) for cell in cells})
    at = {(cell["backend"], cell["hidden"], cell["experts"], cell["tokens"]): cell for cell in cells}
    names = [name for name in names if any(cell["backend"] == name for cell in cells)]
    print("| H | E | T | floor | " + " | ".join(names) + " |")
    for key in keys:
        floors = [cell["round trip"]["floor_us"] for cell in cells if not CANDIDATES[cell["backend"]].fp8
                  and (cell["hidden"], cell["experts"], cell["tokens"]) == key]  # fmt: skip
        row = [f"{max(floors):.1f}" if floors else "-"]
        for name in names:
            cell = at.get((name, *key))
            row.append(
                "-"
                if cell is None
                else f"{cell['round trip']['us']:.1f} ({cell['dispatch']['us']:.1f}+{cell['combine']['us']:.1f})"
            )
        print("| " + " | ".join([*map(str, key), *row]) + " |")


def print_ratios(cells: list[dict]) -> None:
    """What our prepare and finalize cost over the bare calls of the library beneath. fp8 rows are bare quantised beforehand."""
    at = {
        (cell["backend"], cell["hidden"], cell["experts"], cell["tokens"]): cell["round trip"]["us"] for cell in cells
    }
    for (name, *case), us in at.items():
        bare = at.get((name.removeprefix("ours_"), *case))
        if name.startswith("ours_") and bare:
            print(f"{name} / bare, hidden {case[0]}, {case[1]} experts, {case[2]} tokens: {us / bare:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=tuple(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--hidden", nargs="+", type=int)
    parser.add_argument("--experts", nargs="+", type=int)
    parser.add_argument("--tokens", nargs="+", type=int, help="per rank")
    parser.add_argument("--topk", type=int)
    parser.add_argument("--world", type=int, help="ranks; default: every GPU, or 2 with --cpu")
    parser.add_argument("--cpu", action="store_true", help="gloo ranks without GPUs")
    parser.add_argument("--limit-s", type=float, default=40, help="the longest that a rank waits for another")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--commit", help="recorded where there is no git")
    options = parser.parse_args()
    for name, value in (CPU_CASES if options.cpu else GPU_CASES).items():
        setattr(options, name, getattr(options, name) or value)
    options.world = options.world or (2 if options.cpu else torch.cuda.device_count())
    if options.world < 2 or any(experts % options.world for experts in options.experts):
        parser.error(f"{options.world} ranks: at least 2 are needed, and each number of experts a multiple of them")
    options.copy_gbps, options.gpu = math.inf, None
    if not options.cpu:
        inbox = mp.get_context("spawn").SimpleQueue()
        mp.spawn(copy_to_next_gpu, (options.world, inbox), 1)
        options.copy_gbps, options.gpu = inbox.get()
    cells, failures = supervise(options.only, options)
    print_table(cells, options.only)
    print_ratios(cells)
    print(f"{options.world} ranks, {options.gpu or 'no GPU'}; copy to the next GPU: {options.copy_gbps:.0f} GB/s")
    for name, error in failures.items():
        print(f"FAILED {name}: {error}")
    if options.json:
        write(options, cells, failures)
    wrong = [error for error in failures.values() if not error.startswith(UNAVAILABLE)]
    return 1 if wrong or not cells else 0


if __name__ == "__main__":
    sys.exit(main())
