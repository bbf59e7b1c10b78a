"""A stand-in for the driver of a GPU, built from `driver.c`, and graphs that are Python functions. With them the thread that
serves lanes on GPUs runs as it is, on machines without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from epserve.client.lanes import on_gpu
from epserve.modular_kernel.steps.graphs import StepGraphs
from epserve.process import cuda_memory
from epserve.rank import kernels as rank_kernels
from epserve.rank.lanes import native
from tests.support.fake_device_memory import FakeGpuMemory, RankOnFakeGpu, clients_on_made_up_gpus

SOURCE = Path(__file__).with_name("driver.c")
why_not = native.why_not


@functools.cache
def driver_path() -> str:
    """Builds the driver, once a process."""
    folder = tempfile.mkdtemp(prefix="made-up-gpu-")
    path = Path(folder) / "libcuda.so"
    compiler = native._compiler()
    assert compiler is not None
    words = [compiler, "-O1", "-std=gnu11", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lpthread"]
    subprocess.run(words, check=True, timeout=120)
    return str(path)


@functools.cache
def driver() -> ctypes.CDLL:
    library = ctypes.CDLL(driver_path())
    library.made_up_stream.restype = ctypes.c_void_p
    return library


def install() -> None:
    """Makes it the driver of this process."""
    cuda_memory.DRIVER = driver_path()
    cuda_memory._driver.cache_clear()


@contextlib.contextmanager
def installed() -> Iterator[ctypes.CDLL]:
    before = cuda_memory.DRIVER
    install()
    try:
        yield driver()
    finally:
        driver().made_up_failure(0)
        driver().made_up_stall(0)
        cuda_memory.DRIVER = before
        cuda_memory._driver.cache_clear()


class Graph:
    """A function that the driver calls. It lives as long as the process, as a stream may still have it."""

    _kept: list[object] = []

    def __init__(self, run: Callable[[], None]):
        def called() -> None:
            with torch.no_grad():
                run()

        self.replay = called
        function = ctypes.CFUNCTYPE(None)(called)
        Graph._kept.append(function)
        self.address = ctypes.cast(function, ctypes.c_void_p).value


class Capture:
    """In place of `TorchCapture`: a graph runs its function again, on the same static tensors."""

    def new_pool(self) -> object:
        return object()

    def record(self, pool: object, run: Callable[[], None]) -> Graph:
        return Graph(run)


class CallbackGraphs(StepGraphs):
    device_type = "cpu"
    capture_type = Capture


class MadeUpDevice:
    """In place of `lanes.CudaDevice`, with a stream that only lanes have."""

    in_order = False

    @functools.cached_property
    def _stream(self) -> int:
        return driver().made_up_stream()

    def stream(self) -> int:
        return self._stream

    def capture(self) -> Capture:
        return Capture()

    def handle(self, graph: Graph) -> int:
        assert graph.address is not None
        return graph.address


class MadeUpStreams:
    """In place of `on_gpu.Streams`: the client's stream is number 0, on which work runs at once."""

    def __init__(self, device: torch.device):
        self.device = device

    def here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current(self) -> int:
        return 0

    def synchronize(self, *, all_streams: bool = False) -> None:
        pass

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class RankWithLanes(RankOnFakeGpu):
    """A CPU rank that says it computes on a GPU, replays graphs, and serves lanes there."""

    def _take_device(self) -> str:
        install()
        rank_kernels.StepGraphs, rank_kernels.why_no_graphs = CallbackGraphs, lambda *_: None
        return super()._take_device()

    def fail_driver(self) -> None:
        """Graphs cannot be launched any more, as after an illegal access."""
        driver().made_up_failure(1)

    def _lane_device(self) -> MadeUpDevice | None:
        return MadeUpDevice() if self._config.server.gpu_lanes else None


@contextlib.contextmanager
def lanes_on_made_up_gpus(monkeypatch) -> Iterator[list[FakeGpuMemory]]:
    """Clients' lanes lie on made-up GPUs, and this process has the stand-in for their driver."""
    monkeypatch.setattr(on_gpu.GpuLane, "streams", MadeUpStreams)
    with clients_on_made_up_gpus(monkeypatch) as made, installed():
        yield made
