"""GPU memory of the clients of a joined front end: opened through the process with the ranks, named by number.

`RemoteDeviceRegions` takes the place of `DeviceRegions` in the front end. `GuestRegions` has one front end's regions in the
process with the ranks. They end with the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from epserve.engine.face import OpenedRegion, RegionOpener
from epserve.engine.planning import Batch
from epserve.errors import InvalidRequest
from epserve.rank.step import RegionRows


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDeviceRegion:
    """The part of a `DeviceRegion` that a front end needs."""

    number: int
    handle: bytes
    offset: int
    size: int
    gpu_uuid: str


class RemoteDeviceRegions:
    """Opens regions for one `RemoteEngine`."""

    def __init__(
        self,
        change: Callable[..., Coroutine[Any, Any, Any]],
        tell: Callable[[dict[str, Any]], object],
        offered: Callable[[], bool],
    ):
        """Opens nothing yet.

        Args:
            change: asks the other process for a change and returns its answer.
            tell: sends the other process a message.
            offered: returns whether the other process may have ranks on this host's GPUs.
        """
        self._change, self._tell, self._offered = change, tell, offered
        self._asking: set[asyncio.Task[Any]] = set()

    @property
    def offered(self) -> bool:
        return self._offered()

    async def open(
        self,
        *,
        handle: bytes,
        offset: int,
        size: int,
        proof: bytes = b"",
        gpu_uuid: str = "",
        device_id: int | None = None,
    ) -> RemoteDeviceRegion:
        """Opens a region through the other process. Raises as `DeviceRegions.open`."""
        asked = {
            "handle": handle.hex(), "offset": offset, "size": size, "proof": proof.hex(), "gpu_uuid": gpu_uuid,
            "device_id": device_id,
        }  # fmt: skip
        asking = asyncio.ensure_future(self._change("open_region", asked))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            opened = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._unwanted)
            raise
        return RemoteDeviceRegion(
            number=opened["number"], handle=handle, offset=offset, size=size, gpu_uuid=opened["gpu_uuid"]
        )

    def close(self, region: RemoteDeviceRegion) -> None:
        self._tell({"kind": "close_region", "number": region.number})

    def _unwanted(self, asking: asyncio.Task[Any]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._tell({"kind": "close_region", "number": asking.result()["number"]})


class GuestRegions:
    """Keeps the regions of one front end, in the process with the ranks."""

    def __init__(self, ranks: Callable[[], RegionOpener | None], same_host: Callable[[], bool]):
        self._ranks, self._same_host = ranks, same_host
        self._regions: dict[int, tuple[RegionOpener, OpenedRegion]] = {}

    async def open(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Opens a region. Raises as `DeviceRegions.open`, and KeyError or ValueError for a wrong message."""
        ranks = self._ranks()
        if ranks is None or not self._same_host():
            text = "region: this front end runs on another host than the ranks, whose GPUs its clients cannot share memory of"
            raise InvalidRequest(text, field="region")
        region = await ranks.open(
            handle=bytes.fromhex(asked["handle"]),
            offset=int(asked["offset"]),
            size=int(asked["size"]),
            proof=bytes.fromhex(asked["proof"]),
            gpu_uuid=str(asked["gpu_uuid"]),
            device_id=asked["device_id"],
        )
        self._regions[region.number] = ranks, region
        return {"number": region.number, "gpu_uuid": region.gpu_uuid}

    def close(self, number: int) -> None:
        if (found := self._regions.pop(number, None)) is not None:
            found[0].close(found[1])

    def close_all(self) -> None:
        for number in list(self._regions):
            self.close(number)

    def rows(self, value: list[Any] | None) -> RegionRows | None:
        """Reads a place of rows. Raises InvalidRequest for a region that this connection has not opened."""
        if value is None:
            return None
        rows = RegionRows.from_json(value)
        if rows.region not in self._regions:
            text = "region: the connection to the ranks was lost since it was registered; register it again"
            raise InvalidRequest(text, field="region")
        return rows


def as_json(batch: Batch) -> dict[str, Any]:
    """Returns a header's entry on rows on a GPU, empty when there are none. Rows of a source are not sent."""
    if batch.region is None:
        return {}

    source, target = (None if rows is None else rows.as_json() for rows in (batch.source, batch.target))
    return {"device": {"rows": batch.num_tokens, "source": source, "target": target}}


def somewhere(rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor without values for hidden states, or results, that lie on a GPU."""
    return torch.empty((rows, hidden), dtype=dtype, device="meta")
