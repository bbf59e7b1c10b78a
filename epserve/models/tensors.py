"""Safetensors files by their headers: names, dtypes and shapes without data, and reads of exactly the bytes asked for.

A file is 8 bytes of header length (little endian), a JSON header, and the data. Reads go through one small buffer rather
than a memory map: mapped pages count as this process's memory, and a load would peak at twice what it keeps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from epserve.errors import CheckpointError
from epserve.modular_kernel.quantization import FP8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file. `offset`: of its first byte, from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def read_index(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint folder: model.safetensors, or the shards that its index names."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    shard_of = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{folder / INDEX}: tensor {name} lies in {shard!r}, which is not a file name")
        if shard not in headers:
            if not (folder / shard).exists():
                raise CheckpointError(f"{folder / shard} does not exist, but {INDEX} places tensor {name} there")
            headers[shard] = read_header(folder / shard)
        if name not in headers[shard]:
            raise CheckpointError(f"tensor {name} is not in {folder / shard}, where {INDEX} places it")
    found = {name: info for header in headers.values() for name, info in header.items()}
    return found | {name: headers[shard][name] for name, shard in shard_of.items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file. Raises CheckpointError for a damaged header and for a file shorter or longer than it says."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: {size} bytes, too short for a header of {length} bytes; is it truncated?"
                )
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            infos = {name: _info(path, name, entry, 8 + length) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
    end = max((info.offset + info.nbytes for info in infos.values()), default=8 + length)
    if size != end:
        what = "is truncated" if size < end else "has surplus bytes"
        raise CheckpointError(f"{path} {what}: {size} bytes, its header describes {end}")
    return infos


def _info(path: Path, name: str, entry: Mapping, data_start: int) -> TensorInfo:
    (start, stop), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
    nbytes = stop - start
    if dtype in DTYPES and nbytes != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(f"{path}: tensor {name} {dtype} {shape} cannot have {nbytes} bytes")
    return TensorInfo(name=name, file=path, dtype=dtype, shape=shape, offset=data_start + start, nbytes=nbytes)


class TensorReader:
    """Reads tensors of a checkpoint one at a time into one buffer, which grows to the largest of them.

    Use it as a context manager: it holds files open.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc_info) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, info: TensorInfo, index: int | None = None) -> torch.Tensor:
        """The tensor, or `tensor[index]` along the first dimension. Valid until the next `read`."""
        if info.dtype not in DTYPES:
            raise CheckpointError(f"tensor {info.name} has dtype {info.dtype}; known: {', '.join(DTYPES)}")
        shape, offset, nbytes = info.shape, info.offset, info.nbytes
        if index is not None:
            nbytes //= shape[0]
            shape, offset = shape[1:], offset + index * nbytes
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        staged = self._buffer[:nbytes]
        self._fill(info, offset, staged.numpy().data)
        return staged.view(DTYPES[info.dtype]).view(shape)

    def copy(self, info: TensorInfo, target: torch.Tensor, index: int | None = None) -> None:
        """Read into `target`, a view with the file's order of elements, casting between floats.

        Raises CheckpointError for values that are not finite, before or after the cast.
        """
        staged = self.read(info, index)
        check_values(info.name if index is None else f"{info.name}[{index}]", staged, target.dtype)
        target.copy_(staged.view(target.shape))

    def _fill(self, info: TensorInfo, offset: int, view: memoryview) -> None:
        if info.file not in self._files:
            self._files[info.file] = info.file.open("rb", buffering=0)
        file = self._files[info.file]
        file.seek(offset)
        filled = 0
        while filled < len(view):  # a single read stops at 2 GiB
            count = file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{info.file} ended within tensor {info.name}; it was cut after it was opened")
            filled += count


def check_values(name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises CheckpointError where `values` cannot become `dtype`, or holds a value that is not finite before or after."""
    if values.dtype == FP8 and dtype == FP8:
        if bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):  # the one NaN pattern of e4m3; it has no infinity
            raise CheckpointError(f"tensor {name} holds values that are not finite")
        return
    if values.dtype not in FLOATS or dtype not in FLOATS:
        found, wanted = (str(kind).removeprefix("torch.") for kind in (values.dtype, dtype))
        raise CheckpointError(f"tensor {name} is {found}, {wanted} is needed")
    extremes = torch.stack(torch.aminmax(values))  # NaN propagates and casts keep order: the extremes speak for all
    if not bool(torch.isfinite(extremes).all()):
        raise CheckpointError(f"tensor {name} holds values that are not finite")
    if not bool(torch.isfinite(extremes.to(dtype)).all()):
        low, high = extremes.tolist()
        wanted = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"tensor {name} holds values of {low:.3g} .. {high:.3g}, more than {wanted} can hold")
