"""The lanes that a rank serves on its GPU. They open and close with the regions of their rows, and share the rank's stream with
the steps of the engine: the thread of `loop.c` and the step thread take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from epserve.config import Config
from epserve.modular_kernel.steps.graphs import StaticBatch, StepGraphs, TorchCapture
from epserve.process import cuda_memory, words
from epserve.rank.device_memory import Refused
from epserve.rank.placement import Placement

from .batches import MODES, LaneBatch
from .native import SIZES, Counts, Limits, Loop, NoCompiler, Place, check

log = logging.getLogger(__name__)

ANSWER_AT, PER_SLOT = 192, 128  # protocol/lane_words.py
NEED_ONE_RANK = "lanes on GPUs need one rank, there are {}; use a region on the GPU"
PREFIX = "lanes on GPUs: "
NUM_BATCHES = 256
DRAINED_S = 5.0
"""Longest wait for steps that were launched, before groups are left or memory goes."""


class Device(Protocol):
    """The GPU of a rank, as lanes need it. `in_order`: the stream of the steps keeps them and lanes' steps apart."""

    in_order: bool

    def stream(self) -> int: ...

    def capture(self) -> Any: ...

    def handle(self, graph: Any) -> int: ...


class CudaDevice:
    """The GPU that is current in the step thread."""

    in_order = True

    def stream(self) -> int:
        """Returns the stream of this thread's steps."""
        return torch.cuda.current_stream().cuda_stream

    def capture(self) -> TorchCapture:
        return TorchCapture()

    def handle(self, graph: Any) -> int:
        """Returns the driver's handle of a graph that torch captured. Raises Refused for a torch without it."""
        if not hasattr(graph, "raw_cuda_graph_exec"):
            raise Refused(
                f"torch {torch.__version__} does not give the handle of a CUDA graph; use a newer one", "cuda"
            )
        return graph.raw_cuda_graph_exec()


class Steps(Protocol):
    """A `Worker`: its layers, their graphs, and their placements."""

    kernels: Any
    info: Any
    ranks: Any

    @property
    def placements(self) -> Mapping[int, Placement]: ...


class Words:
    """The words of a lane, mapped here and on the GPU."""

    def __init__(self, memory: int, size: int):
        self._map = words.map_sealed(memory, size)
        self.host = _address(self._map)
        self.device = cuda_memory.register_host(self.host, size)

    def answered(self, slots: int) -> list[int]:
        """Returns the number of each slot's last answer."""
        view = memoryview(self._map).cast("Q")
        return [view[(ANSWER_AT + PER_SLOT * slot) >> 3] >> 32 for slot in range(slots)]

    def close(self) -> None:
        cuda_memory.unregister_host(self.host)


@dataclass(slots=True)
class _Open:
    number: int
    words: Words
    rows: torch.Tensor


class RankLanes:
    """One rank's lanes. `open`, `close`, `ready`, `refresh` and `pause` run while no step does."""

    def __init__(self, device: Device | None):
        """device: None on a CPU, which serves no lanes here."""
        self._device = device
        self._loop: Loop | None = None
        self._finished: mmap.mmap | None = None
        self._worker: Steps | None = None
        self._open: dict[int, _Open] = {}
        self._batches: dict[int, tuple[LaneBatch, int]] = {}
        self._left: list[Words] = []
        """Words of lanes that have ended before their last step. They stay for as long as the process."""
        self._seen = 0
        self._limits: Limits | None = None
        self._failed = ""
        self.note = ""
        """How lanes on the GPU are served, for people. Empty where the configuration has none."""

    # For the steps of the engine.

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The lanes' thread launches nothing meanwhile."""
        loop = self._loop
        if loop is None:
            yield
            return
        loop.hold()
        try:
            if self._device is not None and not self._device.in_order:
                loop.drained(DRAINED_S)
            if (launched := loop.launched) != self._seen:
                self._seen = launched
                for batch, _ in self._batches.values():
                    batch.batch.forget()
            yield
        finally:
            loop.release()

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """As `turn`, and the steps that were launched have ended."""
        with self.turn():
            if self._loop is not None and not self._loop.drained(DRAINED_S):
                log.warning("lanes: steps have not ended within %.0f s", DRAINED_S)
            yield

    # Their life.

    def configure(self, config: Config) -> None:
        """Takes the settings that the thread will start with."""
        server, scheduler = config.server, config.scheduler
        self._limits = Limits(
            hot_s=server.gpu_lane_hot_ms / 1e3, nap_s=server.gpu_lane_nap_us / 1e6,
            join_wait_s=scheduler.join_wait_ms / 1e3, join_wait_share=scheduler.join_wait_share,
            stuck_s=scheduler.step_timeout_s,
        )  # fmt: skip

    def ready(self, worker: Steps) -> None:
        """Starts the thread if lanes can be served, or goes on with the graphs of this worker."""
        self._worker, self._failed = worker, ""
        if self._device is None:
            return
        try:
            loop, _ = self._running()
            self.refresh()
            most = self._most(loop, worker, list(worker.placements))
            self.note = f"lanes on GPUs: a thread of the rank serves calls of up to {most} tokens"
        except Refused as error:
            self.note = f"lanes on GPUs go through the queue: {str(error).removeprefix(PREFIX)}"
        log.info(self.note)

    def refresh(self) -> None:
        """Takes the graphs that the worker has now. When that fails, calls that wait end at their limit, and new lanes go
        through the queue."""
        if self._loop is None or self._worker is None:
            return
        with self.between():
            try:
                self._fill(self._loop, self._worker)
            except Exception as error:  # a defect here must not end the rank
                log.exception("lanes on GPUs")
                self._loop.clear()
                self._failed = f"lanes on GPUs have failed: {type(error).__name__}: {error}"

    def pause(self) -> None:
        """Forgets all graphs before they go. Calls wait until `ready`."""
        self._worker = None
        if self._loop is not None:
            with self.between():
                self._loop.clear()
                self._batches.clear()

    def open(self, number: int, rows: torch.Tensor, asked: dict[str, Any]) -> int:
        """Serves a lane whose slots lie in `rows`. Returns the most tokens of one call. Raises Refused.

        asked: the front end's "socket" and "key" for the words, "size" of their memory, "slots", "layers", "most", and "slot",
            where x, y, ids and weights lie (`Place`).
        """
        loop, worker = self._running()
        most = min(self._most(loop, worker, asked["layers"]), asked["most"])
        try:
            memory, bell = words.receive_descriptors(asked["socket"], bytes.fromhex(asked["key"]))
        except (OSError, ValueError) as error:
            raise Refused(f"the rank does not get the lane's words: {error}", "lane") from None
        os.close(bell)
        slot = asked["slot"]
        assert rows.nbytes >= asked["slots"] * slot["bytes"]
        try:
            page = Words(memory, asked["size"])
        except (OSError, ValueError, cuda_memory.DriverError) as error:
            raise Refused(f"the lane's words cannot be shared with the GPU: {error}", "cuda") from None
        place = Place(
            page=page.host, page_device=page.device, rows=rows.data_ptr(), slot_bytes=slot["bytes"], x=slot["x"], y=slot["y"],
            routing_bytes=slot["routing_bytes"], ids=slot["ids"], weights=slot["weights"], slots=asked["slots"], most=most,
        )  # fmt: skip
        with self.turn():
            index = loop.open(place, asked["layers"], page.answered(asked["slots"]))
        if index < 0:
            page.close()
            raise Refused("too many lanes are open on this rank; close one", "lane")
        self._open[number] = _Open(index, page, rows)
        return most

    def close(self, number: int) -> None:
        """Ends a lane after its calls that have begun. Does nothing for another number."""
        if (lane := self._open.pop(number, None)) is None:
            return
        assert self._loop is not None
        with self.between():
            self._loop.close_lane(lane.number)
            if not self._loop.drained(0.0):  # the GPU may still write its words
                self._left.append(lane.words)
                return
        with contextlib.suppress(cuda_memory.DriverError):
            lane.words.close()

    def close_all(self) -> None:
        for number in list(self._open):
            self.close(number)
        loop, self._loop = self._loop, None
        self._batches.clear()
        if loop is not None:
            loop.close()
            finished, self._finished = self._finished, None
            if finished is not None and not self._left:
                with contextlib.suppress(cuda_memory.DriverError):
                    cuda_memory.unregister_host(_address(finished))

    @property
    def error(self) -> str:
        """Why lanes, and the GPU, are of no use any more. Empty: they are."""
        return self._loop.error if self._loop is not None else ""

    def shown(self) -> dict[str, Any]:
        """Returns what each lane has done, by the number of its region, the thread's processor time, and why lanes are not
        served any more, if so."""
        several = self._worker is not None and self._worker.ranks.world_size > 1
        why = NEED_ONE_RANK.format(self._worker.ranks.world_size) if several and self._worker is not None else ""
        if self._loop is None:
            return {"cpu_s": 0.0, "lanes": {}, "why": why}
        found: dict[int, Counts] = {number: self._loop.counts(lane.number) for number, lane in self._open.items()}
        return {
            "cpu_s": self._loop.cpu_s,
            "why": why,
            "lanes": {
                number: {name: getattr(each, name) for name in Counts.__slots__} for number, each in found.items()
            },
        }

    def _running(self) -> tuple[Loop, Steps]:
        """Returns the thread, which starts with the first lane. Raises Refused."""
        if self._device is None or self._limits is None:
            raise Refused("this rank runs on no GPU", "cuda")
        if self._worker is None:
            raise Refused("the ranks are being rebuilt; open the lane again later", "lane")
        if self._worker.ranks.world_size > 1:
            raise Refused(NEED_ONE_RANK.format(self._worker.ranks.world_size), "lane")
        if self._loop is None:
            self._loop = self._started(self._device, self._limits)
            self.refresh()
        if self._failed:
            raise Refused(self._failed, "lane")
        return self._loop, self._worker

    def _started(self, device: Device, limits: Limits) -> Loop:
        finished = mmap.mmap(-1, mmap.PAGESIZE)
        here = _address(finished)
        try:
            check()
            there = cuda_memory.register_host(here, mmap.PAGESIZE)
            loop = Loop(
                context=cuda_memory.context(), stream=device.stream(), finished=(here, there), limits=limits,
                num_batches=NUM_BATCHES,
            )  # fmt: skip
        except (NoCompiler, cuda_memory.DriverError) as error:
            raise Refused(f"{PREFIX}{error}", "cuda") from None
        loop.start()
        self._finished, self._seen = finished, 0
        return loop

    def _most(self, loop: Loop, worker: Steps, layers: list[int]) -> int:
        """Returns the most tokens that every mode of these layers has a graph for. Raises Refused when there is none."""
        sizes = []
        for layer in layers:
            graphs = worker.kernels.of(layer).first.graphs
            sizes.append(graphs.buckets[:SIZES][-1] if graphs is not None else 0)
        if not min(sizes, default=0):
            reasons = "; ".join(worker.kernels.first.notes())
            raise Refused(f"the steps of this rank are no CUDA graphs (engine.cuda_graph_tokens): {reasons}", "cuda")
        return min(sizes)

    def _fill(self, loop: Loop, worker: Steps) -> None:
        """Fills the table of graphs."""
        assert self._device is not None
        loop.clear()
        if worker.ranks.world_size > 1:
            return
        before, self._batches = self._batches, {}
        for layer, placement in worker.placements.items():
            graphs: StepGraphs | None = worker.kernels.of(layer).first.graphs
            if graphs is None:
                continue
            for bucket in graphs.buckets[:SIZES]:
                for number, mode in enumerate(MODES):
                    found = graphs.captured((layer, placement.version, mode), bucket)
                    if found is not None:
                        batch, graph = found
                        loop.set_graph(
                            layer, number, self._number(loop, worker, batch, before), self._device.handle(graph)
                        )

    def _number(self, loop: Loop, worker: Steps, batch: StaticBatch, before: dict[int, tuple[LaneBatch, int]]) -> int:
        """Returns the number of a static batch, which has graphs of its own then."""
        if (found := self._batches.get(id(batch))) is not None:
            return found[1]
        assert self._device is not None
        kept, number = before.get(id(batch)), len(self._batches)
        assert number < NUM_BATCHES, "a kind of layers has at most SIZES batches, and there are few kinds"
        made = kept[0] if kept is not None and kept[0].batch is batch else LaneBatch(batch, worker.info.num_experts)
        if made.place is None:
            with torch.no_grad():
                made.capture(self._device.capture, self._device.handle)
        assert made.place is not None
        loop.set_batch(number, made.place)
        self._batches[id(batch)] = made, number
        return number


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
