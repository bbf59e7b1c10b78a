"""Turns tensors into bytes, and cuts requests and replies into frames. Client and server share it. It does not import torch.

A *buffer* is a bytes-like object of a tensor's elements: row-major, little-endian, unpadded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epserve.errors import InvalidRequest

from . import epserve_pb2 as pb

FRAME_BYTES = 1 << 20
"""The most tensor bytes in one message. Measured on an echo of 16 MB: frames of 256 KiB to 4 MiB are about equal, 64 KiB frames
and a single message are several times slower."""
HTTP2_FRAME_BYTES = 1 << 20
"""The frame size in place of HTTP/2's 16 KiB: 16 MiB in both directions then take about a quarter less time."""
OVERHEAD_BYTES = 64 << 10
"""The room in one message for everything but the tensors."""

FIELDS = {
    pb.HIDDEN_STATES: "hidden_states", pb.HIDDEN_SCALES: "hidden_scales",
    pb.TOPK_IDS: "topk_ids", pb.TOPK_WEIGHTS: "topk_weights", pb.OUTPUT_GRADIENTS: "output_gradients",
}  # fmt: skip
DTYPE_NAMES = {
    pb.BF16: "bfloat16", pb.FP16: "float16", pb.FP32: "float32", pb.FP64: "float64",
    pb.INT8: "int8", pb.INT16: "int16", pb.INT32: "int32", pb.INT64: "int64",
    pb.UINT8: "uint8", pb.UINT16: "uint16", pb.UINT32: "uint32", pb.FP8_E4M3: "float8_e4m3fn",
}  # fmt: skip
"""The dtypes by torch's names. NumPy has the same names, except bfloat16 and float8_e4m3fn."""
ITEM_BYTES = {
    pb.BF16: 2, pb.FP16: 2, pb.FP32: 4, pb.FP64: 8, pb.INT8: 1, pb.INT16: 2, pb.INT32: 4, pb.INT64: 8,
    pb.UINT8: 1, pb.UINT16: 2, pb.UINT32: 4, pb.FP8_E4M3: 1,
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """Holds a tensor to send. With a `region` its bytes lie there, and `data` is empty."""

    dtype: pb.DType
    shape: tuple[int, ...]
    data: memoryview = field(repr=False)
    region: pb.RegionSlice | None = None

    def header(self) -> pb.Tensor:
        return pb.Tensor(dtype=self.dtype, shape=self.shape, region=self.region)

    def message(self) -> pb.Tensor:
        return pb.Tensor(dtype=self.dtype, shape=self.shape, region=self.region, data=bytes(self.data))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def placed(self, region: pb.RegionSlice) -> WireTensor:
        """Returns the same tensor with its bytes in a region that already holds them."""
        return WireTensor(dtype=self.dtype, shape=self.shape, data=memoryview(b""), region=region)


def encode(value: Any, name: str) -> WireTensor:
    """Encodes a torch tensor on any device or a NumPy array, of any strides. Raises InvalidRequest for any other value."""
    dtype = _dtype_of(value, name)
    data = memoryview(_torch_bytes(value) if is_torch(value) else _numpy_bytes(value))
    return WireTensor(dtype=dtype, shape=tuple(value.shape), data=data)


def described(value: Any, name: str) -> tuple[pb.Tensor, Any]:
    """Does the same as `encode`, without the bytes. Returns the header, and the value as a torch tensor without a copy."""
    header = pb.Tensor(dtype=_dtype_of(value, name), shape=tuple(value.shape))
    if is_torch(value):
        return header, value.detach().resolve_neg()
    import torch

    try:
        return header, torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    except TypeError:
        text = (
            f"{name}: numpy's {value.dtype.name} is not known to torch, which moves it to the GPU; send a torch tensor"
        )
        raise InvalidRequest(text, field=name) from None


def _dtype_of(value: Any, name: str) -> pb.DType:
    """Returns the tensor's dtype. Raises InvalidRequest for a value that is not a tensor of numbers that can be sent."""
    torch_kind = is_torch(value)
    if not torch_kind and not (type(value).__module__ == "numpy" and hasattr(value, "dtype")):
        got = f"{type(value).__module__}.{type(value).__qualname__}"
        raise InvalidRequest(f"{name}: must be a torch tensor or a numpy array, got {got}", field=name)
    if torch_kind:
        _check_readable(value, name)
    dtype_name = str(value.dtype).removeprefix("torch.") if torch_kind else value.dtype.name  # without byte order
    if dtype_name not in DTYPES:
        allowed = ", ".join(DTYPES)
        raise InvalidRequest(f"{name}: dtype {dtype_name} cannot be sent (allowed: {allowed})", field=name)
    return DTYPES[dtype_name]


def _check_readable(value: Any, name: str) -> None:
    """Raises InvalidRequest for tensors that are not rows of values in memory. torch's own errors do not name the tensor."""
    layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    if layout != "strided":
        remedy = "to_padded_tensor(0)" if value.is_nested else "to_dense()"
        raise InvalidRequest(f"{name}: a {layout} tensor, must be a dense one; send {name}.{remedy}", field=name)
    if value.is_meta:
        raise InvalidRequest(f"{name}: on the device meta, where tensors have no values; send one that has", field=name)


def _torch_bytes(value: Any) -> Any:
    import torch

    flat = value.detach().resolve_neg().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def _numpy_bytes(value: Any) -> Any:
    import numpy as np

    flat = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8) if flat.size else b""


MakeBuffer = Callable[[int], Any]
"""A function that takes a number of bytes and returns a writable buffer of that size, in plain or shared memory."""


def plain_buffer(nbytes: int) -> Any:
    """Returns memory that is not set to zero. For large tensors, zeroing takes as long as the copy into it."""
    if nbytes < FRAME_BYTES:
        return bytearray(nbytes)
    import numpy as np

    return np.empty(nbytes, np.uint8)


def decode(buffer: Any, tensor: pb.Tensor, *, as_torch: bool, make_buffer: MakeBuffer = plain_buffer) -> Any:
    """Returns the tensor whose header is `tensor`, in its own dtype and writable. `bytes` are copied to a buffer of their own."""
    if isinstance(buffer, bytes) or (isinstance(buffer, memoryview) and buffer.readonly):
        owned = make_buffer(len(buffer))
        memoryview(owned).cast("B")[:] = buffer
        buffer = owned
    return view(buffer, tensor, as_torch=as_torch)


def view(buffer: Any, tensor: pb.Tensor, *, as_torch: bool) -> Any:
    """Does the same as `decode` without a copy. The result keeps `buffer` alive."""
    name, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if as_torch:
        import torch

        dtype = getattr(torch, name)
        return torch.frombuffer(buffer, dtype=dtype).view(shape) if 0 not in shape else torch.empty(shape, dtype=dtype)
    import numpy as np

    return np.frombuffer(buffer, dtype=np.dtype(name).newbyteorder("<")).reshape(shape)


def is_torch(value: Any) -> bool:
    """Returns whether it is a torch tensor, without importing torch: a process that holds one has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def num_bytes(tensor: pb.Tensor) -> int:
    """Returns the size that the header promises. Python's integers do not overflow. The dtype must be a known one."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


class Assembly:
    """Collects the bytes of the tensors of one message. Sizes come from a checked header and are never exceeded."""

    def __init__(self, sizes: Mapping[pb.Field, int], make_buffer: MakeBuffer = plain_buffer):
        self._sizes, self._make_buffer = dict(sizes), make_buffer
        self._buffers: dict[pb.Field, Any] = {}
        self._filled = dict.fromkeys(sizes, 0)

    @property
    def done(self) -> bool:
        return self._filled == self._sizes

    def add(self, which: pb.Field, data: bytes | memoryview) -> None:
        """Appends to one tensor. Raises InvalidRequest for bytes that the header did not declare."""
        name = FIELDS.get(which, f"field {which}")
        if which not in self._sizes:
            raise InvalidRequest(f"{name}: {len(data)} bytes came for a tensor that was not declared", field=name)
        start, size = self._filled[which], self._sizes[which]
        stop = start + len(data)
        if stop > size:
            raise InvalidRequest(f"{name}: {stop} bytes came, its shape and dtype make {size}", field=name)
        if start == 0 and stop == size:
            self._buffers[which] = data  # a whole tensor is kept without a copy
        elif data:
            if start == 0:
                self._buffers[which] = self._make_buffer(size)
            memoryview(self._buffers[which]).cast("B")[start:stop] = data
        self._filled[which] = stop

    def finish(self) -> dict[pb.Field, Any]:
        """Returns field -> buffer. Raises InvalidRequest when bytes are missing."""
        for which, size in self._sizes.items():
            if self._filled[which] != size:
                name = FIELDS[which]
                text = f"{name}: {self._filled[which]} bytes came, its shape and dtype make {size}"
                raise InvalidRequest(text, field=name)
        return self._buffers


def fits_one_message(tensors: Sequence[WireTensor]) -> bool:
    """Returns whether the tensors go in one message rather than in parts. Bytes in regions do not count, as they are not sent."""
    return sum(len(tensor.data) for tensor in tensors) <= FRAME_BYTES


def pieces(tensors: Mapping[pb.Field, WireTensor]) -> Iterator[tuple[pb.Field, memoryview]]:
    """Yields the bytes of all tensors in pieces of at most FRAME_BYTES."""
    for which, tensor in tensors.items():
        for start in range(0, len(tensor.data), FRAME_BYTES):
            yield which, tensor.data[start : start + FRAME_BYTES]


MakePart = Callable[[int, pb.Field, memoryview], Any]
"""A function that takes (call, field, data) and returns a frame."""
MakeBegin = Callable[[int, Any, Mapping[pb.Field, WireTensor]], Any]
"""A function that takes (call, header without tensors, tensors) and returns a frame with all of it."""


def _request_part(call: int, which: pb.Field, data: memoryview) -> pb.RequestFrame:
    return pb.RequestFrame(call=call, part=pb.Part(field=which, data=bytes(data)))


def _request_begin(call: int, header: pb.ForwardRequest, tensors: Mapping[pb.Field, WireTensor]) -> pb.RequestFrame:
    return pb.RequestFrame(call=call, begin=request_message(tensors, header, inline=True))


def request_message(
    tensors: Mapping[pb.Field, WireTensor], header: pb.ForwardRequest, *, inline: bool
) -> pb.ForwardRequest:
    """Returns `header` (id, layer, timeout) with its tensors. `inline` false: without their bytes, which follow in parts."""
    message = pb.ForwardRequest()
    message.CopyFrom(header)
    for which, tensor in tensors.items():
        getattr(message, FIELDS[which]).CopyFrom(tensor.message() if inline else tensor.header())
    return message


def request_frames(
    call: int,
    tensors: Mapping[pb.Field, WireTensor],
    header: pb.ForwardRequest,
    make_part: MakePart = _request_part,
    make_begin: MakeBegin = _request_begin,
) -> Iterator[Any]:
    """Yields one frame with everything, or one with the headers and then the tensors' bytes. Frames are made on demand."""
    if fits_one_message(tuple(tensors.values())):
        yield make_begin(call, header, tensors)
        return
    yield pb.RequestFrame(call=call, begin=request_message(tensors, header, inline=False))
    for which, data in pieces(tensors):
        yield make_part(call, which, data)


def reply_message(tensors: Mapping[pb.Field, WireTensor], reply: pb.ForwardReply, *, inline: bool) -> pb.ForwardReply:
    """Returns `reply` (id, timings) with its tensors, or with their headers only."""
    for which, tensor in tensors.items():
        getattr(reply, FIELDS[which]).CopyFrom(tensor.message() if inline else tensor.header())
    return reply


def reply_frames(
    call: int,
    tensors: Mapping[pb.Field, WireTensor],
    reply: pb.ForwardReply,
    make_part: MakePart,
    make_begin: MakeBegin,
) -> Iterator[Any]:
    """Yields frames of a reply, as `request_frames` does for a request."""
    if fits_one_message(tuple(tensors.values())):
        yield make_begin(call, reply, tensors)
        return
    yield pb.ReplyFrame(call=call, begin=reply_message(tensors, reply, inline=False))
    for which, data in pieces(tensors):
        yield make_part(call, which, data)


def declared(request: pb.ForwardRequest) -> dict[pb.Field, pb.Tensor]:
    """Returns field -> tensor message, for the tensors that are there."""
    return {which: getattr(request, name) for which, name in FIELDS.items() if request.HasField(name)}
