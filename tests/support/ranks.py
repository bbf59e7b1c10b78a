"""Multi-rank tests as ordinary test functions: a pool of rank processes that lives as long as the test session.

`run_ranks(fn, world_size, *args)` calls `fn(ranks: RankContext, *args)` on every rank and returns the results in rank
order. `fn` lives at a module's top level; arguments and results are pickled. Nothing waits without a deadline: when a
rank fails, dies or hangs, the pool is thrown away and the next call starts a new one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from epserve.modular_kernel import RankContext

START_TIMEOUT_S = 200.0  # four processes that import torch on two busy cores
GROUP_TIMEOUT_S = 60.0  # of each wait inside a rank
CLOSE_S = 10.0  # what they all get to end by themselves
GRACE_S = 3.0  # what the other ranks get to report after the first failure
RANKS_PER_GPU = int(os.environ.get("EPSERVE_TEST_RANKS_PER_GPU", "1"))
"""More than 1: ranks share GPUs where there are fewer than a test needs. Right and wrong show there, times do not."""


def num_places() -> int:
    """Ranks that the GPUs here can take."""
    return torch.cuda.device_count() * RANKS_PER_GPU


def cluster_section() -> dict[str, float]:
    """Of a service's configuration: the same for its ranks."""
    return {"gpus_per_rank": 10_000 // RANKS_PER_GPU / 10_000}  # Ray counts in such parts


def take_gpu(rank: int) -> torch.device:
    """The device of a rank, made the current one. Before the process group is made."""
    if RANKS_PER_GPU > 1:  # NCCL takes ranks of one host on one GPU for a mistake, so each gets a host of its own
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    place = torch.device("cuda", rank // RANKS_PER_GPU)
    torch.cuda.set_device(place)
    return place


class RanksFailed(AssertionError):
    """Some ranks failed; the message has every traceback, the earliest failure first."""


class RankPool:
    """`size` processes, and one process group for the first 1, 2, ... `size` of them."""

    def __init__(self, size: int, device: str = "cpu"):
        self.size, self.device = size, device
        # Port 0, and the socket stays with this process: nobody can take the port between two steps.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, device, self._store.port, theirs)
            process = context.Process(target=_rank_main, args=args, daemon=True, name=f"rank{rank}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self._collect(range(size), START_TIMEOUT_S)

    def run(self, fn, world_size: int, *args, timeout: float = 150.0) -> list:
        assert 1 <= world_size <= self.size
        for pipe in self._pipes[:world_size]:
            pipe.send((fn, world_size, args))
        return self._collect(range(world_size), timeout)

    def _collect(self, ranks, timeout: float) -> list:
        results: dict[int, object] = {}
        failures: list[tuple[float, int, str]] = []
        waiting, deadline = set(ranks), time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            pipes = {self._pipes[rank]: rank for rank in waiting}
            for pipe in multiprocessing.connection.wait(list(pipes), timeout=max(0, deadline - time.monotonic())):
                rank = pipes[pipe]
                waiting.discard(rank)
                try:
                    failed_at, value = pipe.recv()
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    failed_at, value = time.time(), f"the process died (exit code {self.processes[rank].exitcode})"
                if failed_at is None:
                    results[rank] = value
                    continue
                failures.append((failed_at, rank, value))
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures or waiting:
            self.kill()
            texts = [f"rank {rank}: {text}" for _, rank, text in sorted(failures)]
            texts += [f"rank {rank}: no answer, killed after {timeout:g} s or another's failure" for rank in waiting]
            raise RanksFailed("\n".join(texts))
        return [results[rank] for rank in ranks]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()

    def close(self) -> None:
        """An orderly end, in which the processes remove their temporary folders; whoever does not end is killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + CLOSE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)


_pools: dict[tuple[int, str, str], RankPool] = {}


def own_pool(pf_name: str, world_size: int) -> str:
    """The pool of a backend whose library takes one number of ranks for the life of a process; empty: the shared one."""
    return f"{pf_name} {world_size}" if pf_name == "nvshmem" else ""


def run_ranks(fn, world_size: int, *args, timeout: float = 150.0, device: str = "cpu", pool: str = "") -> list:
    """`[fn(ranks, *args) for each rank]`, on a pool shared by the session, or by all calls that name one. Raises RanksFailed."""
    size = max(world_size, 4) if device == "cpu" else num_places()
    key = (size, device, pool)
    ranks = _pools.get(key)
    if ranks is None or not ranks.alive:
        ranks = _pools[key] = RankPool(size, device)
    return ranks.run(fn, world_size, *args, timeout=timeout)


@atexit.register
def _kill_pools() -> None:
    for pool in _pools.values():
        if pool.alive:
            pool.close()
    _pools.clear()


def _rank_main(rank: int, size: int, device: str, port: int, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        contexts = _join(rank, size, device, port)
    except Exception:
        pipe.send((time.time(), traceback.format_exc()))
        return
    pipe.send((None, "ready"))
    while True:
        try:
            fn, world_size, args = pipe.recv()
        except EOFError:  # the test session is gone
            return
        try:
            answer = (None, fn(contexts[world_size], *args))
        except BaseException:
            answer = (time.time(), traceback.format_exc())
        pipe.send(answer)


def _join(rank: int, size: int, device: str, port: int) -> dict[int, RankContext]:
    place = torch.device("cpu")
    if device == "cuda":
        place = take_gpu(rank)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    contexts = {}
    for world_size in range(1, size + 1):
        group = dist.new_group(list(range(world_size)), timeout=timeout)  # collective: every rank makes every group
        if rank < world_size:
            contexts[world_size] = RankContext(
                rank=rank,
                world_size=world_size,
                device=place,
                group=group,
                timeout_s=GROUP_TIMEOUT_S,
                sharers=RANKS_PER_GPU if device == "cuda" else 1,
            )
    return contexts
