"""A rank's view of GPU memory that clients of its host share. The engine numbers regions. The rank opens, bounds and copies.

The engine's frames (link/transport.py) bring openings and closings in one order with the steps, so that a region is there for
each step that was sent before its closing. No step computes on a client's memory. The rank copies rows into its own memory
first, so that the check of their values stays valid, and copies results into the region last.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from epserve.process import cuda_memory

from .step import PartRows, RegionRows

log = logging.getLogger(__name__)

ALIGNMENT = 16
"""Alignment of a region's start in bytes, so that rows of any dtype at a multiple of their size are aligned."""


class Refused(Exception):
    """A registration is refused. `field` names the registration's wrong field."""

    def __init__(self, text: str, field: str):
        super().__init__(text)
        self.field = field


class Opened(Protocol):
    """Memory of another process. `bytes` is a uint8 tensor from the handle's address to the end of the allocation."""

    @property
    def bytes(self) -> torch.Tensor: ...

    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """Opens handles on a rank's device."""

    def open(self, handle: bytes) -> Opened:
        """Opens a handle. Raises Refused."""
        ...


class CudaMemory:
    """Opens CUDA IPC handles on one GPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def open(self, handle: bytes) -> _OpenedCuda:
        torch.cuda.synchronize(self._device)  # makes its context this thread's, which the driver's calls need
        return _OpenedCuda(handle, self._device)


class _OpenedCuda:
    def __init__(self, handle: bytes, device: torch.device):
        try:
            self._address = cuda_memory.open_handle(handle)
        except cuda_memory.DriverError as error:
            raise Refused(
                f"the driver cannot open this handle ({error}); it must come from cudaIpcGetMemHandle in a process that lives,"
                " for memory of cudaMalloc (neither expandable segments nor a pool's) on this GPU",
                "handle",
            ) from None
        try:
            base, size = cuda_memory.extent(self._address)
            here = cuda_memory.ordinal_of(self._address)
            if here != device.index:
                raise Refused(
                    f"the memory lies on GPU {here} as this rank counts, the rank is on {device.index}", "gpu_uuid"
                )
            memory = cuda_memory.Bytes(self._address, base + size - self._address)
            self.bytes = cuda_memory.tensor(memory, device)
        except cuda_memory.DriverError as error:
            self.close()
            raise Refused(f"the driver does not say what this handle opens ({error})", "handle") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the memory after the copies that are under way."""
        torch.cuda.synchronize()
        cuda_memory.close_handle(self._address)


@dataclass(slots=True)
class _Region:
    memory: Opened
    bytes: torch.Tensor


class LaneOpener(Protocol):
    """Serves lanes whose slots lie in regions (`RankLanes`)."""

    def open(self, number: int, rows: torch.Tensor, asked: dict[str, Any]) -> int:
        """Returns the most tokens of one call. Raises Refused."""
        ...

    def close(self, number: int) -> None: ...


class RankRegions:
    """The regions of one rank, for its step thread only. `memory` None: the rank runs on a CPU and has no GPU memory."""

    def __init__(self, memory: DeviceMemory | None, lanes: LaneOpener | None = None):
        self._memory, self._lanes = memory, lanes
        self._regions: dict[int, _Region] = {}

    def told(self, header: dict[str, Any]) -> dict[str, Any]:
        """Serves {"open": number, handle, offset, size, proof} or {"close": number} of the engine. Returns the answer.

        A region with a "lane" holds the slots of a lane, which opens and closes with it.
        """
        if "close" in header:
            self._close(header["close"])
            return {}
        try:
            handle, proof = bytes.fromhex(header["handle"]), bytes.fromhex(header["proof"])
            region = self._regions[header["open"]] = self._open(handle, header["offset"], header["size"], proof)
        except Refused as error:
            return {"refused": {"text": str(error), "field": error.field}}
        return self._lane(header["open"], region, header["lane"]) if "lane" in header else {}

    def _lane(self, number: int, region: _Region, asked: dict[str, Any]) -> dict[str, Any]:
        """Serves a lane in a region. Returns the most tokens of a call, or 0 and the reason why this rank does not serve it."""
        try:
            if self._lanes is None:
                raise Refused("this rank serves no lanes", "lane")
            return {"most": self._lanes.open(number, region.bytes, asked)}
        except Refused as error:
            return {"most": 0, "why": str(error)}

    def _close(self, number: int) -> None:
        if (region := self._regions.pop(number, None)) is not None:
            if self._lanes is not None:
                self._lanes.close(number)
            _close(region.memory)

    def _open(self, handle: bytes, offset: int, size: int, proof: bytes) -> _Region:
        if self._memory is None:
            raise Refused("this rank runs on no GPU", "gpu_uuid")
        memory = self._memory.open(handle)
        try:
            there = memory.bytes.nbytes
            if offset + size > there:
                raise Refused(
                    f"{offset} + {size} bytes, but the allocation that the handle opens has {there}", "byte_size"
                )
            window = memory.bytes[offset : offset + size]
            if proof and not hmac.compare_digest(bytes(window[: len(proof)].cpu().tolist()), proof):
                raise Refused("the region does not start with these bytes", "proof")
        except BaseException:
            _close(memory)
            raise
        return _Region(memory=memory, bytes=window)

    def close_all(self) -> None:
        for number in list(self._regions):
            self._close(number)

    def view(self, where: RegionRows, rows: int, columns: int) -> torch.Tensor:
        """Returns `(rows, columns)` in a region. Raises Refused for a closed region. The front end has checked all else."""
        region = self._regions.get(where.region)
        if region is None:
            raise Refused("the region was unregistered meanwhile", "region")
        size, stop = region.bytes.nbytes, where.offset + rows * columns * where.dtype.itemsize
        if where.offset < 0 or stop > size or where.offset % where.dtype.itemsize:
            raise Refused(f"bytes {where.offset} to {stop} of a region of {size}", "region")
        return region.bytes[where.offset : stop].view(where.dtype).view(rows, columns)


class StepRows:
    """One step's rows on this rank, some of them in regions.

    `to` copies all rows into the rank's memory, `put` copies the results out, `finish` reads the device's findings.
    For `Worker.step` the object stands for the hidden states `(m, K)`: shape, dtype and `to`.
    """

    def __init__(self, regions: RankRegions, parts: Sequence[PartRows], host_MK: torch.Tensor):
        """`host_MK` holds the rows of the parts without a source."""
        self._regions, self._parts, self._host_MK = regions, parts, host_MK
        self.shape = (sum(part.rows for part in parts), host_MK.shape[1])
        self.dtype = host_MK.dtype
        self.refused: dict[int, dict[str, Any]] = {}
        """Part -> the error of its request."""
        self.not_finite: dict[int, list[int]] = {}
        """Part whose result went into a region -> its rows that hold NaN or infinity there."""
        self._x_MK: torch.Tensor | None = None
        self._sums: dict[int, torch.Tensor] = {}
        self._largest: dict[int, torch.Tensor] = {}
        self._found = torch.empty(0)
        """The sums, then the largest values of each part, in host memory."""

    def to(self, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        x_MK = self._x_MK = torch.empty(self.shape, dtype=self.dtype, device=device)
        host = 0
        for number, (part, rows_MK) in enumerate(self._rows_of(x_MK)):
            if part.source is None:
                rows_MK.copy_(self._host_MK[host : host + part.rows], non_blocking=non_blocking)
                host += part.rows
                continue
            try:
                rows_MK.copy_(self._regions.view(part.source, *rows_MK.shape), non_blocking=True)
                self._sums[number] = rows_MK.sum(dtype=torch.float32)
            except Refused as error:
                self._refuse(number, error)
                rows_MK.zero_()
        return x_MK

    def put(self, y_MK: torch.Tensor, out_MK: torch.Tensor | None) -> torch.Tensor:
        """Copies results into their regions, and returns the others in `out_MK` or new memory, without waiting."""
        home = [rows_MK for part, rows_MK in self._rows_of(y_MK) if part.target is None]
        for number, (part, rows_MK) in enumerate(self._rows_of(y_MK)):
            if part.target is not None and number not in self.refused:
                try:
                    made_MK = rows_MK.to(part.target.dtype)
                    self._regions.view(part.target, *rows_MK.shape).copy_(made_MK, non_blocking=True)
                    self._largest[number] = _largest(made_MK)
                except Refused as error:
                    self._refuse(number, error)
        if out_MK is None:
            rows = sum(map(len, home))
            pinned = y_MK.device.type == "cuda" and rows > 0
            out_MK = torch.empty((rows, y_MK.shape[1]), dtype=y_MK.dtype, pin_memory=pinned)
        at = 0
        for rows_MK in home:
            out_MK[at : at + len(rows_MK)].copy_(rows_MK, non_blocking=True)
            at += len(rows_MK)
        if found := [each.reshape(1) for each in self._sums.values()] + list(self._largest.values()):
            self._found = _to_host(torch.cat(found))  # one copy for all
        return out_MK

    def finish(self) -> None:
        """Fills `refused` with rows that are not finite, and `not_finite` with such rows of results.

        The caller has waited for the results.
        """
        wrong = self._found.isfinite().logical_not_()
        if not wrong.any():
            return
        of_sums, *of_rows = wrong.split([len(self._sums), *map(len, self._largest.values())])
        for number, suspect in zip(self._sums, of_sums.tolist(), strict=True):
            if suspect:
                self._look_at(number)
        for number, wrong_M in zip(self._largest, of_rows, strict=True):
            if rows := wrong_M.nonzero().flatten().tolist():
                self.not_finite[number] = rows

    def _look_at(self, number: int) -> None:
        """Checks each value when a sum is not finite, since the sum itself may have passed the largest number."""
        assert self._x_MK is not None
        rows_MK = next(rows for index, (_, rows) in enumerate(self._rows_of(self._x_MK)) if index == number)
        wrong = torch.isfinite(rows_MK).logical_not().nonzero()
        if not len(wrong):
            return
        row, column = wrong[0].tolist()
        self.refused[number] = {"row": row, "column": column, "value": str(rows_MK[row, column].item())}

    def _refuse(self, number: int, error: Refused) -> None:
        self.refused[number] = {"text": str(error), "field": error.field}

    def _rows_of(self, tensor_MK: torch.Tensor):
        first = 0
        for part in self._parts:
            yield part, tensor_MK[first : first + part.rows]
            first += part.rows


def _largest(rows_MK: torch.Tensor) -> torch.Tensor:
    """Returns `(M,)`: the largest magnitude of each row, or NaN or infinity if the row holds them. One pass."""
    return torch.linalg.vector_norm(rows_MK, math.inf, dim=1)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Copies from a GPU through pinned memory without waiting."""
    if values.device.type != "cuda":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _close(memory: Opened) -> None:
    try:
        memory.close()
    except Exception:
        # The region is gone in any case. Memory that a failed driver keeps goes with the process.
        log.exception("closing a client's memory")
