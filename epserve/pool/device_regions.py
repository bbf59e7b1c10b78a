"""GPU memory of clients, as the engine sees it: the rank that has it open, also after that rank is replaced.

The engine's process touches no GPU. It passes a handle on to the rank of this host on whose GPU the memory lies, over the link of
its steps. The rank opens it, learns its true size, and refuses memory that does not fit (rank/device_memory.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epserve.errors import InvalidRequest, NotReady
from epserve.link.failure import RankLost

if TYPE_CHECKING:
    from .members import Member

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
"""Seconds for a rank to open a handle. It takes milliseconds, behind the steps that it has been sent."""


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceRegion:
    """A client's region.

    Attributes:
        number: number of the region in steps.
        member: the rank that has it open, or None.
        lane: gives what the rank needs for the lane whose slots lie in the region. None: it holds none.
        most: most tokens of one call of that lane. 0: the rank serves none, and `why` has its reason.
        lost: the reason why no rank can open it again.
    """

    number: int
    handle: bytes
    offset: int
    size: int
    gpu_uuid: str
    member: Member | None
    lane: Callable[[], dict[str, Any]] | None = None
    most: int = 0
    why: str = ""
    lost: str = ""


class DeviceRegions:
    """Opens and closes the regions of one pool, in its event loop."""

    def __init__(self, members: Callable[[], Sequence[Member]], serving: asyncio.Event):
        """members: returns the present ranks. serving: is set while they serve."""
        self._members, self._serving = members, serving
        self._regions: dict[int, DeviceRegion] = {}
        self._numbers = itertools.count(1)

    async def open(
        self,
        *,
        handle: bytes,
        offset: int,
        size: int,
        proof: bytes = b"",
        gpu_uuid: str = "",
        device_id: int | None = None,
        lane: Callable[[], dict[str, Any]] | None = None,
    ) -> DeviceRegion:
        """Opens a region on the rank of its GPU.

        Args:
            handle: a cudaIpcMemHandle_t.
            offset: first byte of the region in the allocation.
            size: bytes of the region.
            proof: bytes that the region must start with.
            gpu_uuid: the GPU of the region. Without it each rank of this host tries, since a client may number GPUs differently.
            device_id: the rank with this number tries first.
            lane: is called for what a rank needs to serve a lane whose slots lie in the region, each time that one opens it.

        Raises:
            InvalidRequest: the rank refuses it, with its reason.
            NotReady: no rank can be asked now.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._serving.wait()
        except TimeoutError:
            raise NotReady("the ranks are being rebuilt; register the region again later") from None
        members = self._candidates(gpu_uuid, device_id)
        if not members:
            raise InvalidRequest(self._nobody(gpu_uuid), field="gpu_uuid")
        asked = {"handle": handle.hex(), "offset": offset, "size": size}
        refusals = []
        for member in members:
            number = next(self._numbers)
            answer = await self._ask(member, {**asked, **_of_lane(lane), "open": number, "proof": proof.hex()})
            if "refused" not in answer:
                uuid = member.facts.gpu_uuid if member.facts is not None else ""
                most = answer.get("most", 0)
                region = self._regions[number] = DeviceRegion(
                    number=number, handle=handle, offset=offset, size=size, gpu_uuid=uuid, member=member,
                    lane=lane if most else None, most=most, why=answer.get("why", ""),
                )  # fmt: skip
                return region
            refusals.append(answer["refused"])
        # A rank that could open the handle has the best reason.
        best = next((each for each in refusals if each["field"] not in ("handle", "gpu_uuid")), refusals[0])
        raise InvalidRequest(f"{best['field']}: {best['text']}", field=best["field"])

    def close(self, region: DeviceRegion) -> None:
        """Closes a region. The rank does so after the steps that it has been sent. A second call does nothing."""
        if self._regions.pop(region.number, None) is not None and region.member is not None:
            self._tell_closed(region.member, region.number)

    def rank_of(self, number: int) -> int:
        """Returns the rank that has a region open. Raises InvalidRequest if none ever will, NotReady if none has it now."""
        region = self._regions.get(number)
        if region is None:
            raise InvalidRequest("region: it was unregistered meanwhile", field="region")
        if region.lost:
            text = f"region: it cannot be opened again after a rank was replaced ({region.lost}); register it again"
            raise InvalidRequest(text, field="region")
        if region.member is None or region.member not in self._members():
            raise NotReady(f"region: no rank computes on GPU {region.gpu_uuid} now; send the request again later")
        return self._members().index(region.member)

    async def reopen(self) -> None:
        """Lets new ranks open the regions of their GPUs, after ranks have changed. Raises RankLost."""
        for region in list(self._regions.values()):
            if region.lost or (region.member in self._members() and region.member is not None):
                continue
            region.member = None
            for member in self._candidates(region.gpu_uuid, None):
                asked = {
                    "open": region.number,
                    "handle": region.handle.hex(),
                    "offset": region.offset,
                    "size": region.size,
                }
                answer = await self._ask(member, {**asked, **_of_lane(region.lane), "proof": ""})
                if region.number not in self._regions:
                    self._tell_closed(member, region.number)  # it was unregistered meanwhile
                elif "refused" in answer or (region.lane is not None and not answer.get("most")):
                    region.lost = answer["refused"]["text"] if "refused" in answer else answer.get("why", "")
                    if "refused" not in answer:
                        self._tell_closed(member, region.number)
                    log.warning("region %d of GPU %s: %s", region.number, region.gpu_uuid, region.lost)
                else:
                    region.member = member
                break

    async def lanes(self) -> dict[int, dict[str, Any]]:
        """Returns what each lane has done, by the number of its region. The ranks that can be asked tell."""
        found: dict[int, dict[str, Any]] = {}
        for member in {region.member for region in self._regions.values() if region.lane is not None}:
            if member is None or member.link is None or member.link.lost:
                continue
            with contextlib.suppress(TimeoutError, RankLost):
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    answer = await asyncio.shield(member.link.ask({"lanes": True}))
                found |= {
                    int(number): {**each, "cpu_s": answer["cpu_s"], "why": answer["why"]}
                    for number, each in answer["lanes"].items()
                }
        return found

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def offered(self) -> bool:
        """Whether any rank of this host computes on a GPU."""
        return bool(self._candidates("", None))

    def _candidates(self, gpu_uuid: str, device_id: int | None) -> Sequence[Member]:
        wanted = gpu_uuid.lower().removeprefix("gpu-")
        found = []
        for member in self._members():
            facts = member.facts
            if facts is None or not facts.gpu_uuid or member.link is None or not member.link.local or not member.alive:
                continue
            if not wanted or facts.gpu_uuid.lower().removeprefix("gpu-") == wanted:
                found.append(member)
        found.sort(key=lambda member: member.facts is None or member.facts.visible != str(device_id))
        return found[:1] if wanted else found

    def _nobody(self, gpu_uuid: str) -> str:
        here = sorted({each.facts.gpu_uuid for each in self._candidates("", None) if each.facts is not None})
        which = f"GPU {gpu_uuid[:60]}" if gpu_uuid else "a GPU"
        there = f"those here compute on {', '.join(here)}" if here else "those here compute on none"
        return f"gpu_uuid: no rank of this host computes on {which} ({there}); use a region of system memory"

    async def _ask(self, member: Member, asked: dict[str, Any]) -> dict[str, Any]:
        """Asks a rank to open a region. Returns its answer, with "refused" when it has not opened it. Raises NotReady."""
        assert member.link is not None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                answer = await asyncio.shield(member.link.ask({"region": asked}))
        except RankLost as error:
            raise NotReady(f"region: the rank that was to open it is gone ({error}); register it again later") from None
        except BaseException as error:
            self._tell_closed(member, asked["open"])  # it may open it later
            if isinstance(error, TimeoutError):
                text = (
                    f"region: rank {member.rank} has not opened it within {OPEN_TIMEOUT_S:g} s; register it again later"
                )
                raise NotReady(text) from None
            raise
        return answer

    def _tell_closed(self, member: Member, number: int) -> None:
        if member.link is not None and not member.link.lost:
            asked = member.link.ask({"region": {"close": number}})
            asked.add_done_callback(
                lambda each: each.cancelled() or each.exception()
            )  # the end of a link is told elsewhere


def _of_lane(lane: Callable[[], dict[str, Any]] | None) -> dict[str, Any]:
    return {} if lane is None else {"lane": lane()}
