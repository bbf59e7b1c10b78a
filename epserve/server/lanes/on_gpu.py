"""This module is the server's part of a lane whose rows lie on a rank's GPU. The rank's own thread serves its calls where it
can, and else they go through the queue. Here the lane opens and closes, and its rights, counts and losses are looked at.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from epserve.engine.planning import Answer, Batch
from epserve.errors import EpserveError, InvalidRequest, NotReady
from epserve.modular_kernel import check_routing
from epserve.process.cuda_memory import HANDLE_BYTES
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import lane_words as lw
from epserve.rank.step import RegionRows
from epserve.server.calls import Calls
from epserve.server.regions import check_proof

from .lane import Call, Lane, status_word

log = logging.getLogger("epserve.server")

LOOK_S = 0.25
"""The pause between two looks at the lanes: rights, losses and counts are so old at most."""
COUNTS = ("calls", "tokens", "joined", "refused", "failed", "busy_ns")


@dataclass(slots=True, eq=False)
class GpuLane(Lane):
    """The words of a lane, its ids and weights. `region`: its rows, as the engine knows them. `own_thread`: the rank's thread
    serves it. Else the calls go through the queue, as requests whose rows lie in a region."""

    quick: ClassVar[bool] = False
    silent: ClassVar[bool] = True

    region: Any = None
    own_thread: bool = False
    counted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    @property
    def through_poller(self) -> bool:
        return not self.own_thread

    @property
    def busy(self) -> bool:
        return bool(self._waiting())

    def batch(self, call: Call, memory: Callable[[int], Any]) -> Batch:
        """Returns the request of a call. The rank checks its rows. Raises InvalidRequest."""
        slot, routing = self.slots[call.slot], None
        if call.mode == lw.ROUTED:
            given = (each[: call.tokens].clone() for each in (slot.ids, slot.weights))
            routing = check_routing(*given, num_tokens=call.tokens, num_experts=self.info.num_experts)
        hidden = torch.empty((call.tokens, self.info.hidden), dtype=self.info.dtype, device="meta")
        source, target = (
            RegionRows(region=self.region.number, offset=self.layout.part(call.slot, name)[0], dtype=self.info.dtype)
            for name in "xy"
        )
        return Batch(
            layer=call.layer, hidden=hidden, ids=routing.ids_Mt if routing else None,
            weights=routing.weights_Mt if routing else None, deadline=call.deadline, client=self.caller.name,
            request_id=call.request_id, priority=self.priority, routing_checked=True, source=source, target=target,
        )  # fmt: skip

    def finish(self, call: Call, answer: Answer) -> None:
        self._check_finite(call, sorted(answer.not_finite))
        self._say(call.slot, call.number, lw.OK)

    def refuse(self, slot: int, number: int, error: BaseException, tokens: int = 0) -> str:
        """Answers with the error. The lane ends when its rows are on no rank any more."""
        if isinstance(error, InvalidRequest) and error.field == "region":
            self.why = NotReady(f"lane: {error}; open another")
            self.ended.set()  # only the queue says so, and it answers in the loop
            error = self.why
        return Lane.refuse(self, slot, number, error, tokens)

    def end(self, error: BaseException) -> None:
        """Answers the calls that wait, with this error. No rank looks at the words any more."""
        for slot in range(self.layout.slots):  # for calls that come too late as well
            self._explain(slot, 0, error)
        for slot, number in self._waiting():
            self._say(slot, number, status_word(error))

    def _say(self, slot: int, number: int, value: int) -> None:
        Lane._say(self, slot, number, value)
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

    def check(self, request: pb.OpenLaneRequest) -> None:
        """Raises InvalidRequest where such a lane cannot be opened at all."""
        if not self._calls.limits.gpu_lanes:
            raise InvalidRequest("cuda: lanes on GPUs are switched off (server.gpu_lanes)", field="cuda")
        if len(request.cuda.handle) != HANDLE_BYTES:
            text = f"handle: {len(request.cuda.handle)} bytes, a cudaIpcMemHandle_t has {HANDLE_BYTES}"
            raise InvalidRequest(text, field="handle")
        if not request.cuda.gpu_uuid:
            raise InvalidRequest("gpu_uuid: missing; nvidia-smi -L lists them", field="gpu_uuid")
        if self._calls.engine.device_regions is None:
            raise InvalidRequest("cuda: no ranks are here whose GPU could be shared", field="cuda")

    async def open(self, lane: GpuLane, request: pb.OpenLaneRequest, key: Callable[[], tuple[str, str]]) -> int:
        """Opens the lane's rows on the rank of their GPU. Returns the most tokens of a call. Raises InvalidRequest, NotReady.

        The rank's own thread serves the lane where it can, and where no call needs to be counted or traced here.

        key: returns the socket that hands the words out, and a key for it.
        """
        layout, opener = lane.layout, self._calls.engine.lane_opener
        check_proof(request.proof, layout.gpu_bytes)
        parts = {name: layout.part(0, name)[0] for name in ("x", "y", "ids", "weights")}

        def told() -> dict[str, Any]:
            socket, drawn = key()
            return {
                "socket": socket, "key": drawn, "size": layout.shared, "slots": layout.slots, "most": layout.cap,
                "layers": sorted(lane.layers),
                "slot": {**parts, "bytes": layout.slot_bytes, "routing_bytes": layout.routing_bytes},
            }  # fmt: skip

        asked: dict[str, Any] = {
            "handle": request.cuda.handle, "offset": 0, "size": layout.gpu_bytes, "proof": request.proof,
            "gpu_uuid": request.cuda.gpu_uuid,
        }  # fmt: skip
        if opener is not None and lane.caller.account.claim(0) is None and not self._calls.observer.tracing.on:
            lane.region = await opener.open(**asked, lane=told)
            lane.own_thread = lane.region.most > 0
            if not lane.own_thread:
                log.info("%s goes through the queue: %s", lane.name, lane.region.why)
        else:
            regions = self._calls.engine.device_regions
            assert regions is not None
            lane.region = await regions.open(**asked)
        self._lanes.add(lane)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return lane.region.most if lane.own_thread else layout.cap

    def close(self, lane: GpuLane, error: BaseException) -> None:
        """Ends a lane. Calls that wait are answered with the error."""
        if lane.region is not None and (regions := self._calls.engine.device_regions) is not None:
            regions.close(lane.region)
        if lane in self._lanes:
            self._lanes.discard(lane)
            lane.end(error)

    async def stop(self) -> None:
        for lane in list(self._lanes):
            self.close(lane, NotReady("the server is stopping; open the lane at another one, or again later"))
            lane.close()
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for lane in list(self._lanes):
                lane.beat(int(time.monotonic() / LOOK_S))
                try:
                    lane.caller.account.current()
                    if getattr(lane.region, "lost", ""):
                        raise NotReady(f"lane: no rank serves it any more ({lane.region.lost}); open another")
                except EpserveError as error:
                    lane.why = error
                    lane.ended.set()
            if any(lane.own_thread for lane in self._lanes) and (opener := self._calls.engine.lane_opener) is not None:
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
