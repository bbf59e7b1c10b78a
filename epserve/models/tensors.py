"""Reads safetensors files: names, dtypes and shapes from the headers alone, and then exactly the requested bytes.

A file is 8 bytes of header length (little endian), a JSON header, and the data. Reads go through one small buffer rather
than a memory map: mapped pages count as this process's memory, and a load would peak at twice what it keeps.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_JSON_BYTES = MAX_HEADER_BYTES
"""The largest known index has 7 MB."""
MAX_CONFIG_BYTES = 16 << 20
"""Lists of matrices that are not quantised take a megabyte at most."""
MAX_JSON_DEPTH = 64
SHOWN_CHARACTERS = 100
MAX_DIMENSIONS = 64  # more than torch has
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Describes one tensor of a file. `offset`: the position of its first byte, from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_json(path: Path, *, most: int = MAX_JSON_BYTES) -> dict:
    """Returns a file's JSON object. Raises CheckpointError for any other JSON, and for a file too long or nested too deeply."""
    try:
        with open_regular(path) as file:
            text = file.read(most + 1)
        if len(text) > most:
            raise ValueError(f"it has more than {most} bytes")
        data = _parse(text)
        _check_depth(data)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError, and CheckpointError for a pipe or a device, which could block for ever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {KINDS.get(stat.S_IFMT(mode), 'no file')}; a regular file is needed")
    return path.open("rb")


def shown(value: Any) -> str:
    """Returns a value from a checkpoint in one short line, for messages."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def shown_name(name: str) -> str:
    """Returns a tensor's name as it is, unless it would break the line."""
    return name if 0 < len(name) <= 2 * SHOWN_CHARACTERS and name.isprintable() else shown(name)


def _parse(text: bytes, hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None) -> Any:
    """Parses JSON. hook: the `object_pairs_hook` of `json.loads`. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object. Raises ValueError for a repeated key: the format forbids it, and readers take different ones."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it has the key {shown(twice)} twice")
    return made


def _check_depth(data: Any) -> None:
    """Raises ValueError for JSON that is nested too deeply for recursive functions, ours and transformers'."""
    level = [data]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"its JSON is nested more than {MAX_JSON_DEPTH} deep")


def read_index(folder: Path) -> dict[str, TensorInfo]:
    """Returns every tensor of a checkpoint folder: of model.safetensors, or of the shards that its index names."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    shard_of = read_json(folder / INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard:
            raise CheckpointError(
                f"{folder / INDEX}: tensor {shown_name(name)} lies in {shown(shard)}, which is not a file name"
            )
        if shard not in headers:
            if not (folder / shard).exists():
                raise CheckpointError(
                    f"{folder / shard} does not exist, but {INDEX} places tensor {shown_name(name)} there"
                )
            headers[shard] = read_header(folder / shard)
        if name not in headers[shard]:
            raise CheckpointError(f"tensor {shown_name(name)} is not in {folder / shard}, where {INDEX} places it")
    found = {name: info for header in headers.values() for name, info in header.items()}
    return found | {name: headers[shard][name] for name, shard in shard_of.items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of one file, in the order of their data.

    Raises CheckpointError for a damaged header, for gaps or overlaps between tensors (which the safetensors library refuses
    too), and for a file shorter or longer than its header says.
    """
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; is it a safetensors file?"
                )
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path}: {size} bytes, too short for a header of {length} bytes; is it truncated?"
                )
            header = _parse(file.read(length), _without_duplicates)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    infos = sorted(
        (_info(path, name, entry, 8 + length) for name, entry in header.items()),
        key=lambda info: (info.offset, info.nbytes),
    )
    end, last = 8 + length, ""
    for info in infos:
        if info.offset != end:
            raise CheckpointError(f"{path}: {_misplaced(info, end, last, 8 + length)}")
        end, last = info.offset + info.nbytes, info.name
    if size != end:
        what = "is truncated" if size < end else "has surplus bytes"
        raise CheckpointError(f"{path} {what}: {size} bytes, its header describes {end}")
    return {info.name: info for info in infos}


def _misplaced(info: TensorInfo, end: int, last: str, data_start: int) -> str:
    """Returns the reason why a tensor does not follow the one before it."""
    begin, wanted = info.offset - data_start, end - data_start
    before = f"tensor {shown_name(last)} ends at {wanted}" if last else "the data begins at 0"
    what = "overlaps" if begin < wanted else "leaves a gap of unnamed bytes"
    return f"tensor {shown_name(info.name)}: data_offsets begin at {begin}, but {before}: it {what}"


def _info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Checks one entry of a header. Raises CheckpointError that names the tensor and the value."""

    def wrong(what: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown_name(name)}: {what} {shown(value)}, must be {wanted}")

    if not isinstance(entry, Mapping):
        raise wrong("entry", entry, "an object with dtype, shape and data_offsets")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise wrong("dtype", dtype, "a string")
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise wrong("shape", shape, f"a list of at most {MAX_DIMENSIONS} integers from 0 up")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets", offsets, "two integers from 0 up, in ascending order")
    nbytes = offsets[1] - offsets[0]
    if dtype in DTYPES and nbytes != math.prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(f"{path}: tensor {shown_name(name)} {dtype} {tuple(shape)} cannot have {nbytes} bytes")
    return TensorInfo(
        name=name, file=path, dtype=dtype, shape=tuple(shape), offset=data_start + offsets[0], nbytes=nbytes
    )


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)


class TensorReader:
    """Reads tensors of a checkpoint one at a time into a buffer, which grows to the largest of them.

    Use it as a context manager: it holds files open.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc_info) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, info: TensorInfo, index: int | None = None, *, buffer: str = "") -> torch.Tensor:
        """Returns the tensor, or `tensor[index]` along the first dimension, valid until the next `read` into this buffer."""
        if info.dtype not in DTYPES:
            raise CheckpointError(f"tensor {info.name} has dtype {info.dtype}; known: {', '.join(DTYPES)}")
        shape, offset, nbytes = info.shape, info.offset, info.nbytes
        if index is not None:
            nbytes //= shape[0]
            shape, offset = shape[1:], offset + index * nbytes
        room = self._buffers.get(buffer)
        if room is None or room.numel() < nbytes:
            room = self._buffers[buffer] = torch.empty(nbytes, dtype=torch.uint8)
        staged = room[:nbytes]
        self._fill(info, offset, staged.numpy().data)
        return staged.view(DTYPES[info.dtype]).view(shape)

    def copy(self, info: TensorInfo, target: torch.Tensor, index: int | None = None) -> None:
        """Reads into `target`, a view with the file's order of elements, and casts between floats.

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
    """Raises CheckpointError when `values` cannot become `dtype`, or holds a value that is not finite before or after."""
    if values.dtype == torch.float8_e8m0fnu and dtype == values.dtype:
        if bool((values.view(torch.uint8) == 0xFF).any()):  # its NaN
            raise CheckpointError(f"tensor {name} holds values that are not finite")
        return
    if values.dtype == FP8 and dtype == FP8:
        # The only NaN of e4m3, with either sign, is the largest value of its byte. e4m3 has no infinity.
        if values.numel() and (values.view(torch.int8).max() == 0x7F or values.view(torch.uint8).max() == 0xFF):
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
