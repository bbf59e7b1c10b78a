"""A lane on a GPU beside the bare graph of the step: one client process and one rank on the same GPU.

    python -m benchmarks.gpu_lanes --json benchmarks/results/gpu_lanes.json
    python -m benchmarks.gpu_lanes --cpu --hidden 64 --intermediate 32 --repeats 3

A layer of DeepSeek-V3's sizes with `--experts`, in fp8 blocks, gate and shared expert included. All times are microseconds a
call, by the host's clock around `--calls` calls that are queued at once, the median of `--repeats`:

    graph          the captured graph of the step, one replay behind the other
    in process     calls of a lane whose client is in the rank's process, on a stream of its own. It stands for two GPUs
    two processes  calls of a lane through the service. The driver gives the two processes of one GPU turns
    as a graph     likewise, all calls as one CUDA graph of the client
    one            likewise, one call, waited for
    region         one call over a region on the GPU

`idle share`: the processor time of the rank's thread while a lane is open and nothing calls. With --cpu the GPU and its driver
are made up, and the times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing as mp
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import reports
from benchmarks.cuda_regions import LAYER, write_checkpoint
from epserve.client import Client, RetryPolicy
from epserve.client.lanes.on_gpu import GpuLane, Rows
from epserve.config import Config, parse_config
from epserve.modular_kernel import RankContext
from epserve.pool import members
from epserve.process import words
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import wire
from epserve.rank import kernels as rank_kernels
from epserve.rank.lanes.lanes import CudaDevice, RankLanes
from epserve.rank.worker import Worker
from epserve.service.run import running
from tests.support.gpu_driver import CallbackGraphs, MadeUpDevice, RankWithLanes, lanes_on_made_up_gpus
from tests.support.gpu_driver.door import handing_out

TOKENS = (1, 16, 128)
GPU = "cuda:0"
WARM = 2
IDLE_S = 3.0
LIMIT_S = 600


def config_of(folder: Path, args) -> Config:
    return parse_config(
        {
            "model": {"path": str(folder)},
            "engine": {
                "ranks": 1, "device": "cpu" if args.cpu else "cuda", "max_tokens_per_rank": max(TOKENS), "standbys": 0,
                "cuda_graph_tokens": list(TOKENS),
            },
            "server": {"port": 0, "gpu_lanes": True},
        }
    )  # fmt: skip


@contextlib.contextmanager
def gpus(args) -> Iterator[None]:
    """Real ones, or made-up ones."""
    if not args.cpu:
        torch.cuda.set_device(0)
        yield
        return
    with pytest.MonkeyPatch.context() as patch, lanes_on_made_up_gpus(patch):
        patch.setattr(members, "RankActor", RankWithLanes)
        patch.setattr(rank_kernels, "StepGraphs", CallbackGraphs)
        patch.setattr(rank_kernels, "why_no_graphs", lambda *_: None)
        yield


def wait(args) -> None:
    if not args.cpu:
        torch.cuda.synchronize()


@contextlib.contextmanager
def own_stream(args) -> Iterator[None]:
    if args.cpu:
        yield
    else:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield


def a_call(args, run: Callable[[], object], calls: int) -> float:
    """The median time of a call in microseconds, where `run` queues so many."""
    found = []
    for _ in range(WARM + args.repeats):
        start = time.perf_counter()
        run()
        wait(args)
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found[WARM:])


def repeated(run: Callable[[], object], calls: int) -> Callable[[], None]:
    def all_of_them() -> None:
        for _ in range(calls):
            run()

    return all_of_them


def alone(folder: Path, args) -> dict[str, Any]:
    """The rank's process by itself: graphs, and a lane whose client is here too."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"graph": {}, "in process": {}}
    with gpus(args), own_stream(args):
        config = config_of(folder, args)
        worker = Worker(config, RankContext(device=torch.device("cpu" if args.cpu else GPU)))
        worker.load()
        worker.warm_up()
        graphs = worker.kernels.of(LAYER).first.graphs
        key = (LAYER, worker.placements[LAYER].version, "block")
        for tokens in TOKENS:
            _, graph = graphs.captured(key, tokens)
            found["graph"][tokens] = a_call(args, repeated(graph.replay, args.calls), args.calls)
        lanes = RankLanes(MadeUpDevice() if args.cpu else CudaDevice())
        lanes.configure(config)
        lanes.ready(worker)
        with lane_in_process(lanes, worker) as lane, own_stream(args):
            for tokens in TOKENS:
                lane.x()[:tokens].normal_()
                run = repeated(lambda tokens=tokens: lane.call(LAYER, tokens), args.calls)
                found["in process"][tokens] = a_call(args, run, args.calls)
            lane.check()
        lanes.close_all()
    return found


@contextlib.contextmanager
def lane_in_process(lanes: RankLanes, worker: Worker) -> Iterator[GpuLane]:
    """A lane without a service: the words and the rows are handed over here."""
    info = worker.info
    dtype = wire.DTYPES[str(info.dtype).removeprefix("torch.")]
    model = pb.GetModelReply(
        hidden=info.hidden, top_k=info.top_k, dtype=dtype, max_tokens_per_request=max(TOKENS), layers=[LAYER]
    )
    rows = Rows(model, max(TOKENS), 1, GPU)
    layout = rows.layout
    memory = words.sealed_memory("epserve-lane", layout.shared)
    with handing_out(memory) as name:
        parts = {part: layout.part(0, part)[0] for part in ("x", "y", "ids", "weights")}
        asked = {
            "socket": name, "key": bytes(32).hex(), "size": layout.shared, "slots": 1, "layers": [LAYER],
            "most": layout.cap, "slot": {**parts, "bytes": layout.slot_bytes, "routing_bytes": layout.routing_bytes},
        }  # fmt: skip
        lanes.open(1, rows.memory.piece(0, layout.gpu_bytes)[1], asked)
        reply = pb.OpenLaneReply(
            lane="in-process", socket=name, key=bytes(32), byte_size=layout.shared, slots=1, max_tokens=layout.cap,
            dtype=dtype, hidden=info.hidden, top_k=info.top_k, layers=[LAYER], timeout_ms=20_000,
        )  # fmt: skip
        lane = GpuLane(reply, RetryPolicy(), rows)
    yield lane
    lane.close()
    lanes.close(1)


def client(address: str, args) -> dict[str, Any]:
    """The client's process."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {name: {} for name in ("two processes", "as a graph", "one", "region")}
    with (
        gpus(args),
        own_stream(args),
        Client(address) as service,
        service.open_lane(max(TOKENS), device=GPU) as lane,
        service.register_cuda_region(64 << 20, device=GPU) as region,
    ):
        assert not lane.queued, "the rank's own thread does not serve the lane; the service's log says why"
        assert lane.max_tokens == max(TOKENS)
        for tokens in TOKENS:
            x = region.empty((tokens, lane.hidden), lane.dtype)
            x.normal_()
            lane.x()[:tokens] = x

            def call(tokens: int = tokens) -> torch.Tensor:
                return lane.call(LAYER, tokens)

            y = call()
            wait(args)
            assert torch.equal(y, service.forward(LAYER, x, region=region)), "other bits than over gRPC"
            many = repeated(call, args.calls)
            found["two processes"][tokens] = a_call(args, many, args.calls)
            found["one"][tokens] = a_call(args, call, 1)
            if not args.cpu:
                found["as a graph"][tokens] = a_call(args, captured(many), args.calls)
            found["region"][tokens] = a_call(args, lambda x=x: service.forward(LAYER, x, region=region), 1)
            lane.check()
        time.sleep(IDLE_S)
        found["idle share"] = service.status().lanes.gpu_polling_share
    return found


def captured(run: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        run()
    return graph.replay


async def served(folder: Path, args, pool: Any) -> dict[str, Any]:
    with gpus(args) if args.cpu else contextlib.nullcontext():
        async with running(config_of(folder, args)) as (_, server):
            asked = pool.apply_async(client, (f"127.0.0.1:{server.port}", args))
            return await asyncio.to_thread(asked.get, LIMIT_S)


def show(result: dict[str, Any]) -> None:
    print(f"{'tokens':>8}" + "".join(f"{name:>16}" for name in result["us"]))
    for tokens in map(str, TOKENS):
        row = (result["us"][name].get(tokens) for name in result["us"])
        print(f"{tokens:>8}" + "".join(f"{value:16.1f}" if value is not None else f"{'-':>16}" for value in row))
    for name, of in result["beyond_the_graph_us"].items():
        print(f"{name}, beyond the graph: " + ", ".join(f"{us:+.1f} us at {tokens}" for tokens, us in of.items()))
    print(f"{result['calls']} in a row over the bare graphs: {result['calls_over_graphs']}")
    print(f"idle share of a core: {result['idle_share']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--calls", type=int, default=60, help="queued at once, as the layers of a model")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cpu", action="store_true", help="made-up GPU, to see that everything runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gpu-lanes-") as place:
        folder = Path(place) / "model"
        scheme = "none" if args.cpu else "fp8_block"
        with context.Pool(1, maxtasksperchild=1) as pool:  # a process for each part, which leaves the GPU at its end
            pool.apply(write_checkpoint, (folder, args, scheme, 1))
            found = pool.apply(alone, (folder, args))
            found |= asyncio.run(served(folder, args, pool))
    idle = found.pop("idle share")
    us = {name: {str(tokens): round(value, 1) for tokens, value in of.items()} for name, of in found.items()}
    ways = ("in process", "two processes", "as a graph")
    beyond = {
        name: {tokens: round(value - us["graph"][tokens], 1) for tokens, value in us[name].items()} for name in ways
    }
    over = {
        name: {tokens: round(value / us["graph"][tokens], 3) for tokens, value in us[name].items()} for name in ways
    }
    result = {
        "machine": {
            "gpu": "made up" if args.cpu else torch.cuda.get_device_name(0), "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
        },
        "sizes": {"hidden": args.hidden, "intermediate": args.intermediate, "experts": args.experts, "scheme": scheme},
        "calls": args.calls, "repeats": args.repeats, "us": us, "beyond_the_graph_us": beyond,
        "calls_over_graphs": over, "idle_share": round(idle, 4),
    }  # fmt: skip
    show(result)
    if args.json is not None:
        reports.save(args.json, result)


if __name__ == "__main__":
    main()
