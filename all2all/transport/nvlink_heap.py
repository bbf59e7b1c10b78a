"""The symmetric heap of the NVLink all-to-all: its layout, its slots and its failure word.

A slot holds one batch in flight: the rows that peers send, their routing records, and `y`, which peers read. Within one
slot dispatches and combines alternate, and each of them is a barrier of all ranks. One buffer a slot is therefore enough.
A rank that sends step n+1 has combined step n, so every peer has finished with the rows of step n. A rank that overwrites
`y` in step n+1 has received every peer's rows of step n+1, and each peer sent them after it had read `y` of step n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epserve.errors import HandleError, RankFailed
from epserve.modular_kernel import LayerSpec, PrepareFinalizeOptions, RankContext
from epserve.modular_kernel.quantization import BLOCK, FP8

from .symmetric import Provider, allocate

FLAG_BYTES = 128
TABLE_WIDTH = 64
PHASES = ("dispatch", "combine")


def dispatches_fp8(spec: LayerSpec, options: PrepareFinalizeOptions) -> bool:
    """Returns whether rows travel as e4m3 with a scale for each 1x128 block."""
    whole = spec.shape.hidden % BLOCK == 0
    return options.dispatch_quantised and spec.quant.dispatch_dtype is not None and whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Holds byte offsets in every rank's region. The flags `[slot][phase][source]` come first, then the slots."""

    parts: dict[str, int]
    """Offset of each part within a slot."""
    slot_bytes: int
    num_slots: int
    num_ranks: int

    @classmethod
    def of(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> Layout:
        ranks, hidden, top_k = spec.layout.num_ranks, spec.shape.hidden, spec.shape.top_k
        rows = ranks * options.max_tokens_per_rank
        fp8, item = dispatches_fp8(spec, options), spec.shape.dtype.itemsize
        sizes = {
            "rows": rows * hidden * (1 if fp8 else item),
            "scales": rows * hidden // BLOCK * 4 if fp8 else 0,
            "weights": rows * top_k * 4,
            "y": rows * hidden * item,
            "ids": rows * top_k * 4,
            "dense_ids": rows * top_k * 4,
        }
        parts, total = {}, 0
        for name, size in sizes.items():
            parts[name] = total
            total += -(-size // 1024) * 1024
        return cls(parts=parts, slot_bytes=total, num_slots=options.batches_in_flight, num_ranks=ranks)

    @property
    def flag_bytes(self) -> int:
        return self.num_slots * len(PHASES) * self.num_ranks * FLAG_BYTES

    @property
    def num_bytes(self) -> int:
        return self.flag_bytes + self.num_slots * self.slot_bytes

    def flag(self, slot: int, phase: int, source: int) -> int:
        return ((slot * len(PHASES) + phase) * self.num_ranks + source) * FLAG_BYTES

    def part(self, slot: int, name: str) -> int:
        return self.flag_bytes + slot * self.slot_bytes + self.parts[name]


INTERRUPTED = -1  # value of the host's status (the device's codes are positive)
FUTURE = 1 << 20  # beyond any step that can be in flight, because flags wrap and only their distance counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Holds this rank's view of one slot. Rows are counted over all sources."""

    index: int
    table: torch.Tensor
    """int64 `(9, 64)`: addresses of each part at every rank. `kernels/nvlink.py` names the rows."""
    flags: tuple[torch.Tensor, torch.Tensor]
    """This rank's flags of dispatch and of combine, int32 `(R, 32)`."""
    ctl: torch.Tensor
    """int32 `(32,)`: the device's counters."""
    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor
    y: torch.Tensor
    ids: tuple[torch.Tensor, torch.Tensor]
    """Received ids in the spaced and in the dense layout."""


class Heap:
    """Owns the region and hands out its slots. Making and closing a heap are collective."""

    def __init__(
        self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions, providers: Sequence[type[Provider]]
    ):
        self.ranks, self.layout = ranks, Layout.of(spec, options)
        self.fp8 = dispatches_fp8(spec, options)
        self.region = allocate(ranks, self.layout.num_bytes, providers)
        cuda = ranks.device.type == "cuda"
        self.failed = torch.zeros(1, dtype=torch.int64, device=ranks.device)
        self.status = torch.zeros(1, dtype=torch.int64, pin_memory=cuda)  # the device writes, the host reads
        self.offsets = torch.tensor(spec.layout.offsets, dtype=torch.int32, device=ranks.device)
        self.slots = tuple(self._slot(index, spec, options) for index in range(self.layout.num_slots))
        self._free = list(reversed(self.slots))
        self._last_use: dict[int, tuple[torch.cuda.Stream, bool]] = {}
        # The stream is made now: a process gets its first stream, and pinned memory, only while the device is idle, and
        # `interrupt` runs while it is busy. No stream of the high-priority pool waits for the stream that computes.
        self._rescue = torch.cuda.Stream(ranks.device, priority=-1) if cuda else None
        self._futures = [
            torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            for slot in self.slots
            for flags in slot.flags
            if cuda
        ]

    def _slot(self, index: int, spec: LayerSpec, options: PrepareFinalizeOptions) -> Slot:
        layout, device, shape = self.layout, self.ranks.device, spec.shape
        rows = self.ranks.world_size * options.max_tokens_per_rank
        names = ("rows", "scales", "weights", "y")
        table = [[base + layout.part(index, name) for base in self.region.addresses] for name in names]
        for phase in range(len(PHASES)):
            table.append([base + layout.flag(index, phase, self.ranks.rank) for base in self.region.addresses])
        table.append([self.status.data_ptr()])
        for name in ("ids", "dense_ids"):
            table.append([base + layout.part(index, name) for base in self.region.addresses])
        padded = [row + [0] * (TABLE_WIDTH - len(row)) for row in table]

        def view(start: int, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            stop = start + torch.Size(sizes).numel() * dtype.itemsize
            return self.region.mine[start:stop].view(dtype).view(sizes)

        ids = tuple(view(layout.part(index, name), torch.int32, rows, shape.top_k) for name in ("ids", "dense_ids"))
        for part in ids:
            part.fill_(-1)
        flags = tuple(
            view(layout.flag(index, phase, 0), torch.int32, self.ranks.world_size, FLAG_BYTES // 4)
            for phase in range(len(PHASES))
        )
        return Slot(
            index=index,
            table=torch.tensor(padded, dtype=torch.int64).to(device),
            flags=flags,  # type: ignore[arg-type]
            ctl=torch.zeros(32, dtype=torch.int32, device=device),
            x=view(layout.part(index, "rows"), FP8 if self.fp8 else shape.dtype, rows, shape.hidden),
            scales=view(layout.part(index, "scales"), torch.float32, rows, shape.hidden // BLOCK) if self.fp8 else None,
            weights=view(layout.part(index, "weights"), torch.float32, rows, shape.top_k),
            y=view(layout.part(index, "y"), shape.dtype, rows, shape.hidden),
            ids=ids,  # type: ignore[arg-type]
        )

    def take(self) -> Slot:
        """Returns the first free slot. All ranks take and give back slots in the same order.

        Raises:
            HandleError: all slots are in use.

        NOTE: it takes the first slot and not the last one used, so that a CUDA graph has the same slots at any capture.
        """
        if not self._free:
            count = self.layout.num_slots
            raise HandleError(
                f"nvlink: {count} batches are in flight and not finalised, as many as batches_in_flight = {count} allows"
            )
        slot = self._free.pop()
        last = self._last_use.pop(slot.index, None)
        if last is not None:
            stream, captured = last
            current = torch.cuda.current_stream(self.ranks.device)
            # NOTE: a stream under capture cannot wait for a stream outside the capture. The caller orders graph replays.
            if stream != current and captured == torch.cuda.is_current_stream_capturing():
                current.wait_stream(stream)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Frees a slot. The current stream must be the one on which the slot's combine runs."""
        if self.ranks.device.type == "cuda":
            stream = torch.cuda.current_stream(self.ranks.device)
            self._last_use[slot.index] = (stream, torch.cuda.is_current_stream_capturing())
        self._free.append(slot)
        self._free.sort(key=lambda each: -each.index)

    def reset(self) -> None:
        self._free = list(reversed(self.slots))

    def check(self) -> None:
        """Raises RankFailed when a wait has expired. Never blocks, so it misses failures that the device has not reached yet."""
        code = int(self.status[0])
        if code == INTERRUPTED:
            raise RankFailed(
                f"interrupted: another rank is gone, says rank {self.ranks.rank} of {self.ranks.world_size}"
            )
        if code:
            raise RankFailed(_explain(code, self.ranks))

    def interrupt(self) -> None:
        """Ends the waits of running kernels from another thread. They see flags of the future and go on with undefined rows.

        NOTE: it uses copies on a stream of their own instead of kernels, because waiting kernels may hold every
        multiprocessor. A live rank may still write its flag over this one, and then its flag ends the wait.
        """
        self.status[0] = INTERRUPTED  # set first, so that the host takes no undefined rows for a result
        every = [flags for slot in self.slots for flags in slot.flags]
        if self._rescue is None:
            for flags in every:
                flags.copy_(flags + FUTURE)
            return
        with torch.cuda.device(self.ranks.device), torch.cuda.stream(self._rescue):
            for flags, future in zip(every, self._futures, strict=True):
                future.copy_(flags, non_blocking=True)
            self._rescue.synchronize()
            for flags, future in zip(every, self._futures, strict=True):
                flags.copy_(future.add_(FUTURE), non_blocking=True)
            self._rescue.synchronize()

    def close(self, *, collective: bool) -> None:
        self.region.release(collective)


def _explain(code: int, ranks: RankContext) -> str:
    phase, late = divmod((code >> 32) - 1, 128)
    step = code & 0xFFFFFFFF
    who = f"rank {late}" if late < ranks.world_size else "another rank"
    return (
        f"{PHASES[phase]}: {who} did not reach step {step} within {ranks.timeout_s:g} s,"
        f" says rank {ranks.rank} of {ranks.world_size}"
    )
