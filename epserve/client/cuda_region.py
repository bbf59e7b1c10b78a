"""This module is the client's side of a region on a GPU: the memory that the rank there reads and writes, and the
tensors in it."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from typing import Any

from epserve.errors import CallerError, InvalidRequest
from epserve.process import cuda_memory
from epserve.process.blocks import ALIGNMENT, Spans
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import wire

from .checks import LARGEST_INT64, shape_of, whole_number
from .region import Registration

PROOF_BYTES = 32


class GpuMemory:
    """An allocation of this process on one GPU lives until the last object that holds it, or the last tensor over it,
    is gone."""

    def __init__(self, size: int, device: Any):
        """Allocates. Raises InvalidRequest when the GPU or the memory is not available."""
        try:
            import torch
        except ImportError as error:
            raise InvalidRequest(
                f"device: memory of a GPU needs torch on the client: {error}", field="device"
            ) from None
        try:
            wanted = torch.device("cuda" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise InvalidRequest(f"device: {device!r} is none: {str(error).splitlines()[0]}", field="device") from None
        if wanted.type != "cuda" or not torch.cuda.is_available():
            seen = f"this process sees {torch.cuda.device_count()} GPUs"
            raise InvalidRequest(f"device: {wanted} is not a GPU that this process can use ({seen})", field="device")
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= torch.cuda.device_count():
            text = f"device: cuda:{index}, but this process sees {torch.cuda.device_count()} GPUs"
            raise InvalidRequest(text, field="device")
        self.device = torch.device("cuda", index)
        try:
            with torch.cuda.device(self.device):
                torch.zeros(1, device=self.device)  # makes the context
                self._address = cuda_memory.allocate(size)
                self.free = weakref.finalize(self, _free, self._address, index)
                self.free.atexit = False
                self.handle = cuda_memory.export(self._address)
                self.gpu_uuid = cuda_memory.gpu_uuid(index)
        except cuda_memory.DriverError as error:
            raise InvalidRequest(
                f"size: no {size} bytes of GPU memory that can be shared: {error}", field="size"
            ) from None
        self.size = size

    def piece(self, offset: int, nbytes: int) -> tuple[Any, Any]:
        """Returns an object, and a uint8 tensor over those bytes that holds it."""
        holder = cuda_memory.Bytes(self._address + offset, nbytes)
        holder.memory = self  # type: ignore[attr-defined]  # keeps the memory alive
        return holder, cuda_memory.tensor(holder, self.device)

    def offset_of(self, tensor: Any) -> int | None:
        """Returns a tensor's offset, or None when it lies elsewhere or is not contiguous."""
        offset = tensor.data_ptr() - self._address
        inside = tensor.device == self.device and 0 <= offset <= self.size - tensor.nbytes
        return offset if inside and tensor.is_contiguous() else None

    def finish(self) -> None:
        """Waits for the work that this thread's current stream has queued, since the rank's stream knows nothing of it."""
        import torch

        torch.cuda.current_stream(self.device).synchronize()


class GpuBlock:
    """A block is a piece of a region. It is free again when the last tensor over it is gone."""

    __slots__ = ("bytes", "offset")

    def __init__(self, data: Any, offset: int):
        self.bytes, self.offset = data, offset

    def __len__(self) -> int:
        return self.bytes.nbytes


class CudaClientRegion(Registration):
    """The region is `size` bytes of a GPU that this process and the rank there share. `Client.register_cuda_region`
    makes it.

    Tensors made here keep their memory for as long as they live, even when the region is closed first.
    """

    def __init__(self, size: int, device: Any = None):
        """Allocates the memory. Raises InvalidRequest when it is not available."""
        number = whole_number(size)
        if number is None or not ALIGNMENT <= number <= LARGEST_INT64:
            text = f"size: {size!r} is not a whole number of bytes, {ALIGNMENT} or more (64 << 20 is 64 MiB)"
            raise InvalidRequest(text, field="size")
        super().__init__()
        self.size = number
        self._memory: GpuMemory | None = GpuMemory(number, device)
        self.device = self._memory.device
        self._spans = Spans(number)
        self._proof = secrets.token_bytes(PROOF_BYTES)
        import torch

        _, start = self._memory.piece(0, PROOF_BYTES)
        start.copy_(torch.tensor(list(self._proof), dtype=torch.uint8))
        self._memory.finish()

    def request(self) -> pb.HoldRegionRequest:
        memory = self._present()
        cuda = pb.CudaMemory(handle=memory.handle, gpu_uuid=memory.gpu_uuid)
        return pb.HoldRegionRequest(byte_size=self.size, proof=self._proof, cuda=cuda)

    def close(self) -> None:
        super().close()
        self._memory = None

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Returns a torch tensor in the region, on its GPU, with undefined values. Raises InvalidRequest."""
        shape, name = shape_of(shape), str(dtype).removeprefix("torch.")
        if not str(dtype).startswith("torch.") or name not in wire.DTYPES:
            raise InvalidRequest(f"dtype: {dtype} is no torch dtype that can be sent", field="dtype")
        header = pb.Tensor(dtype=wire.DTYPES[name], shape=shape)
        return self.view(self.block(wire.num_bytes(header)), header)

    def view(self, block: GpuBlock, header: pb.Tensor) -> Any:
        """Returns the tensor of a block."""
        import torch

        count = wire.num_bytes(header)
        return block.bytes[:count].view(getattr(torch, wire.DTYPE_NAMES[header.dtype])).view(tuple(header.shape))

    def block(self, nbytes: int) -> GpuBlock:
        memory = self._present()
        offset = self._spans.take(nbytes)
        if offset is None:
            free, largest = self._spans.room()
            text = f"region: {nbytes} bytes are wanted, {free} of {self.size} are free, {largest} of them in one piece"
            raise InvalidRequest(f"{text}; register a larger region, or let go of tensors", field="region")
        holder, data = memory.piece(offset, max(nbytes, 1))
        self._spans.free_with(holder, offset, nbytes)
        return GpuBlock(data, offset)

    def place(self, hidden: Any) -> tuple[Any, wire.WireTensor]:
        """Returns the tensor of hidden states in the region, which the caller must keep, and the description to send.

        It copies a tensor that lies elsewhere. All work that this thread's current stream has queued has ended when it
        returns. Raises InvalidRequest.
        """
        self.check_registered()
        memory = self._present()
        header, tensor = wire.described(hidden, "hidden_states")
        offset, kept = memory.offset_of(tensor), tensor
        if offset is None:
            block = self.block(wire.num_bytes(header))
            offset = block.offset
            kept = self.view(block, header)
            kept.copy_(tensor)
        memory.finish()
        where = pb.RegionSlice(region=self.name, offset=offset, byte_size=wire.num_bytes(header))
        described = wire.WireTensor(dtype=header.dtype, shape=tuple(header.shape), data=memoryview(b""))
        return kept, described.placed(where)

    def slice_of_block(self, block: GpuBlock, nbytes: int) -> pb.RegionSlice:
        return pb.RegionSlice(region=self.name, offset=block.offset, byte_size=nbytes)

    def _present(self) -> GpuMemory:
        if self._memory is None:
            raise CallerError("the region is closed")
        return self._memory


def _free(address: int, index: int) -> None:
    """Frees the allocation, in any thread that drops the last holder."""
    import torch

    with contextlib.suppress(cuda_memory.DriverError, RuntimeError), torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        cuda_memory.free(address)
