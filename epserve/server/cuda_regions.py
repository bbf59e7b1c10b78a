"""Registers regions of GPU memory (CUDA IPC). The rank that computes on their GPU opens them.

This process holds no GPU. It keeps owner, name, bounds and lease, as for other regions, and checks the headers. The rank checks
the handle, the true size, the proof and the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epserve.config import ServerConfig
from epserve.engine.face import OpenedRegion, RegionOpener
from epserve.errors import InvalidRequest
from epserve.process.cuda_memory import HANDLE_BYTES
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import wire
from epserve.rank.device_memory import ALIGNMENT
from epserve.rank.step import RegionRows

from .region import Region, Slice
from .regions import Regions, check_proof, drawn_name

DTYPES = (pb.BF16, pb.FP16, pb.FP32)
"""The dtypes that the rank converts to the model's, and back, as it copies."""
LARGEST = 2**63 - 1
"""A rank counts bytes in int64."""


class CudaRegion(Region):
    """A window of an allocation on a GPU. `close` tells the rank, once the last call that uses the region is over."""

    def __init__(
        self, device: OpenedRegion, close: Callable[[Any], None], *, owner: str, name: str,
        lease_s: float | None, device_id: int = 0,
    ):  # fmt: skip
        super().__init__(owner=owner, name=name, key="", offset=device.offset, size=device.size, lease_s=lease_s, fd=-1)
        self.gpu_uuid = device.gpu_uuid
        self.device_id = device_id
        """The GPU's number as the client counts."""
        self._device, self._close = device, close

    def _release(self) -> None:
        self._close(self._device)

    def rows(self, offset: int, dtype: pb.DType) -> RegionRows:
        """Returns the place of rows, for the rank."""
        named = getattr(torch, wire.DTYPE_NAMES[dtype])
        return RegionRows(region=self._device.number, offset=offset, dtype=named)

    def overlaps(self, start: int, other: CudaRegion, other_start: int, nbytes: tuple[int, int]) -> bool:
        """Returns whether bytes of the two, from their own starts on, are the same memory, as far as their handles tell."""
        if self._device.handle != other._device.handle:
            return False
        mine, others = self.offset + start, other.offset + other_start
        return mine < others + nbytes[1] and others < mine + nbytes[0]


class CudaRegistry:
    """Registers regions for both protocols. `ranks`: the engine's ranks. None: it has none in this process."""

    def __init__(self, regions: Regions, limits: ServerConfig, ranks: Callable[[], RegionOpener | None]):
        self._regions, self._limits, self._ranks = regions, limits, ranks

    @property
    def offered(self) -> bool:
        ranks = self._ranks()
        return self._limits.regions and self._limits.cuda_regions and ranks is not None and ranks.offered

    async def register_proven(
        self, owner: str, *, memory: pb.CudaMemory, key: str, offset: int, size: int, proof: bytes
    ) -> CudaRegion:
        """Does the same as `Regions.register_proven`. Raises InvalidRequest, TooLarge, Overloaded, NotReady."""
        if key:
            text = f"key: {key[:100]!r} came with the handle of GPU memory; a region is of one or of the other"
            raise InvalidRequest(text, field="key")
        if not memory.gpu_uuid:
            raise InvalidRequest("gpu_uuid: missing; nvidia-smi -L lists them", field="gpu_uuid")
        check_proof(proof, size)
        ranks = self._checked(owner, memory.handle, offset, size)
        device = await ranks.open(handle=memory.handle, offset=offset, size=size, proof=proof, gpu_uuid=memory.gpu_uuid)
        return self._add(
            ranks.close, device, CudaRegion(device, ranks.close, owner=owner, name=drawn_name(), lease_s=None)
        )

    async def register_leased(self, owner: str, *, name: str, handle: bytes, device_id: int, size: int) -> CudaRegion:
        """Does the same as `Regions.register_leased`."""
        self._regions.check_name(owner, name)
        ranks = self._checked(owner, handle, 0, size)
        device = await ranks.open(handle=handle, offset=0, size=size, device_id=device_id)
        lease_s = self._limits.region_lease_s
        region = CudaRegion(device, ranks.close, owner=owner, name=name, lease_s=lease_s, device_id=max(device_id, 0))
        return self._add(ranks.close, device, region)

    def _checked(self, owner: str, handle: bytes, offset: int, size: int) -> RegionOpener:
        if not self._limits.cuda_regions:
            raise InvalidRequest("region: CUDA regions are switched off (server.cuda_regions)", field="region")
        ranks = self._ranks()
        if ranks is None:
            text = "region: no ranks are here that could share memory of a GPU; use a region of system memory"
            raise InvalidRequest(text, field="region")
        if len(handle) != HANDLE_BYTES:
            text = f"handle: {len(handle)} bytes, a cudaIpcMemHandle_t has {HANDLE_BYTES}"
            raise InvalidRequest(text, field="handle")
        if offset % ALIGNMENT or offset > LARGEST:
            text = f"offset: {offset}, must be a multiple of {ALIGNMENT} within the allocation"
            raise InvalidRequest(text, field="offset")
        self._regions.check_size(owner, size)
        return ranks

    def _add(self, close: Callable[[Any], None], device: Any, region: CudaRegion) -> CudaRegion:
        try:
            self._regions.add(region)  # it checks again, since the registry may have changed during the rank's answer
        except BaseException:
            close(device)
            raise
        return region


def check_host_only(inputs: dict[str, Slice], output: Slice | None) -> None:
    """Raises InvalidRequest where a tensor of a Backward lies on a GPU: ranks take those of Forward alone from there."""
    for name, each in (*inputs.items(), *(() if output is None else (("output", output),))):
        if each.on_gpu:
            text = (
                f"{name}: lies in region {each.region.name!r} on a GPU, where Backward has no tensors; send it with the message"
                " or in a region of system memory"
            )
            raise InvalidRequest(text, field=name)


def check_use(
    hidden: Slice | None, others: dict[str, Slice], output: Slice | None, dtypes: tuple[pb.DType, pb.DType]
) -> None:
    """Checks a request's use of regions on GPUs. dtypes: of hidden_states and of the reply. Raises InvalidRequest."""
    for name, each in others.items():
        if each.on_gpu:
            text = (
                f"{name}: lies in region {each.region.name!r} on a GPU, where only hidden_states and output may;"
                " send it with the message or in a region of system memory"
            )
            raise InvalidRequest(text, field=name)
    used = [each for each in (hidden, output) if each is not None and each.on_gpu]
    for where, dtype in ((hidden, dtypes[0]), (output, dtypes[1])):
        if where is None or not where.on_gpu:
            continue
        if dtype not in DTYPES:
            allowed = ", ".join(wire.DTYPE_NAMES[known] for known in DTYPES)
            text = f"{where.field}: {wire.DTYPE_NAMES[dtype]} in a region on a GPU (allowed there: {allowed})"
            raise InvalidRequest(text, field=where.field)
        if where.offset % (item := wire.ITEM_BYTES[dtype]):
            text = f"{where.field}: byte {where.offset} of region {where.region.name!r}, must be a multiple of {item}"
            raise InvalidRequest(text, field=where.field)
    if len(used) < 2:
        return
    assert hidden is not None
    assert output is not None
    first, second = hidden.region, output.region
    assert isinstance(first, CudaRegion)
    assert isinstance(second, CudaRegion)
    if first.gpu_uuid != second.gpu_uuid:
        text = f"output: on GPU {second.gpu_uuid}, hidden_states on {first.gpu_uuid}; both must be on one"
        raise InvalidRequest(text, field="output")
    if first.overlaps(hidden.offset, second, output.offset, (hidden.nbytes, output.nbytes)):
        text = (
            f"output: bytes {output.offset} to {output.offset + output.nbytes} of region {second.name!r} overlap"
            f" hidden_states, bytes {hidden.offset} to {hidden.offset + hidden.nbytes} of {first.name!r}; on a GPU they must"
            " not: a step is run again from its input when a rank fails"
        )
        raise InvalidRequest(text, field="output")
