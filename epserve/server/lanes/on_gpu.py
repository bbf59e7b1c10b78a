"""This module is the server's part of a lane whose rows lie on a rank's GPU. The rank's own thread serves its calls. Here
the lane opens and closes, its rights and counts are looked at once in a while, and its calls end when no rank serves it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from epserve.engine.face import LaneOpener
from epserve.errors import EpserveError, InvalidRequest, NotReady
from epserve.process.cuda_memory import HANDLE_BYTES
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import lane_words as lw
from epserve.server.calls import Calls
from epserve.server.regions import check_proof

from .lane import Lane, status_word

log = logging.getLogger("epserve.server")

LOOK_S = 0.25
"""The pause between two looks at the lanes: rights, losses and counts are so old at most."""
COUNTS = ("calls", "tokens", "joined", "refused", "failed", "busy_ns")


@dataclass(slots=True, eq=False)
class GpuLane(Lane):
    """The words of a lane. `region`: its rows, as the engine knows them."""

    region: Any = None
    counted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    @property
    def busy(self) -> bool:
        return bool(self._waiting())

    def end(self, error: BaseException) -> None:
        """Answers the calls that wait, with this error. No rank looks at the words any more."""
        for slot in range(self.layout.slots):  # for calls that come too late as well
            self._explain(slot, 0, error)
        for slot, number in self._waiting():
            self._words.store(lw.answer_at(slot), number, status_word(error))
            self._words.store_half(lw.answer_at(slot) + lw.ARRIVED_AT, 1)

    def _waiting(self) -> list[tuple[int, int]]:
        """Returns the slots with a bell and no answer, and the bell's number."""
        load = self._words.load
        bells = ((slot, load(lw.bell_at(slot)) >> 32) for slot in range(self.layout.slots))
        return [(slot, number) for slot, number in bells if load(lw.answer_at(slot)) >> 32 != number]


class GpuLanes:
    """All of them, in the server's loop. `calls`, `joined` and `refused` count since the start."""

    def __init__(self, calls: Calls):
        self._calls = calls
        self._lanes: set[GpuLane] = set()
        self._looking: asyncio.Task[None] | None = None
        self._cpu = (0.0, 0.0)
        self.calls = self.joined = self.refused = 0
        self.polling_share = 0.0

    @property
    def lanes(self) -> Collection[GpuLane]:
        return self._lanes

    def check(self, request: pb.OpenLaneRequest, caller: Any) -> None:
        """Raises InvalidRequest where such a lane cannot be opened at all."""
        if not self._calls.limits.gpu_lanes:
            raise InvalidRequest("cuda: lanes on GPUs are switched off (server.gpu_lanes)", field="cuda")
        if len(request.cuda.handle) != HANDLE_BYTES:
            text = f"handle: {len(request.cuda.handle)} bytes, a cudaIpcMemHandle_t has {HANDLE_BYTES}"
            raise InvalidRequest(text, field="handle")
        if not request.cuda.gpu_uuid:
            raise InvalidRequest("gpu_uuid: missing; nvidia-smi -L lists them", field="gpu_uuid")
        if caller.account.claim(0) is not None:
            text = f"cuda: client {caller.name} has limits, which lanes on GPUs do not count; use a region on the GPU"
            raise InvalidRequest(text, field="cuda")
        self._opener()

    async def open(self, lane: GpuLane, request: pb.OpenLaneRequest, key: Callable[[], tuple[str, str]]) -> int:
        """Lets the rank of the memory's GPU serve the lane. Returns the most tokens of a call. Raises InvalidRequest, NotReady.

        key: returns the socket that hands the words out, and a key for it.
        """
        layout = lane.layout
        check_proof(request.proof, layout.total)
        parts = {name: layout.part(0, name)[0] for name in ("x", "y", "ids", "weights")}

        def told() -> dict[str, Any]:
            socket, drawn = key()
            return {
                "socket": socket, "key": drawn, "size": layout.shared, "slots": layout.slots, "most": layout.cap,
                "layers": sorted(lane.layers), "slot": {**parts, "bytes": layout.slot_bytes},
            }  # fmt: skip

        lane.region = await self._opener().open(
            handle=request.cuda.handle, offset=0, size=layout.total, proof=request.proof,
            gpu_uuid=request.cuda.gpu_uuid, lane=told,
        )  # fmt: skip
        self._lanes.add(lane)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return lane.region.most

    def close(self, lane: GpuLane, error: BaseException) -> None:
        """Ends a lane. Calls that wait are answered with the error."""
        if lane.region is not None and (opener := self._calls.engine.lane_opener) is not None:
            opener.close(lane.region)
        if lane in self._lanes:
            self._lanes.discard(lane)
            lane.end(error)
        lane.close()

    async def stop(self) -> None:
        for lane in list(self._lanes):
            self.close(lane, NotReady("the server is stopping; open the lane at another one, or again later"))
        if self._looking is not None:
            self._looking.cancel()

    def _opener(self) -> LaneOpener:
        if (opener := self._calls.engine.lane_opener) is None:
            text = "cuda: no ranks are in this process that could serve lanes on a GPU; use a region of system memory"
            raise InvalidRequest(text, field="cuda")
        return opener

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for lane in list(self._lanes):
                lane.beat(int(time.monotonic() / LOOK_S))
                try:
                    lane.caller.account.current()
                    if lane.region.lost:
                        raise NotReady(f"lane: no rank serves it any more ({lane.region.lost}); open another")
                except EpserveError as error:
                    lane.why = error
                    lane.ended.set()
            if self._lanes and (opener := self._calls.engine.lane_opener) is not None:
                try:
                    self._count(await opener.lanes())
                except Exception:  # a defect must not end the look at rights
                    log.exception("counting the calls of lanes on GPUs")

    def _count(self, told: dict[int, dict[str, Any]]) -> None:
        """Adds what ranks have done since the last look to the metrics."""
        cpu_s = max((each["cpu_s"] for each in told.values()), default=0.0)
        now, (before, then) = time.monotonic(), self._cpu
        self.polling_share, self._cpu = max(cpu_s - before, 0.0) / max(now - then, 1e-9), (cpu_s, now)
        for lane in self._lanes:
            if (counts := told.get(lane.region.number)) is None:
                continue
            if counts["why"]:
                lane.why = NotReady(f"lane: {counts['why']}")
                lane.ended.set()
            fresh = {name: counts[name] - lane.counted[name] for name in COUNTS}
            if fresh["calls"] < 0:  # another rank serves it, and counts from 0
                fresh = {name: counts[name] for name in COUNTS}
            lane.counted = {name: counts[name] for name in COUNTS}
            self._tell(lane, fresh)

    def _tell(self, lane: GpuLane, fresh: dict[str, int]) -> None:
        self.calls += fresh["calls"]
        self.joined += fresh["joined"]
        wrong = fresh["refused"] + fresh["failed"]
        self.refused += wrong
        done = fresh["calls"] - fresh["refused"]
        if done:
            observer, seconds, tokens = self._calls.observer, fresh["busy_ns"] / done / 1e9, fresh["tokens"] // done
            size = tokens * lane.layout.hidden * lane.layout.itemsize
            for index in range(done):
                name = "INVALID_ARGUMENT" if index < fresh["failed"] else "OK"
                observer.metrics.request(name, seconds, tokens=tokens, received=size, sent=size)
                observer.history.request(seconds)
        for _ in range(wrong):
            self._calls.observer.error("INVALID_ARGUMENT")
