"""All-to-all inside one NVLink domain: Triton kernels that store straight into the memory of peers, and load from it.

Dispatch pushes a token once to each rank that holds one of its experts. Combine pulls the ranks' partial sums and adds
them in rank order. The host never waits for the device. The device code is in `kernels/nvlink.py` and the memory in
`all2all/transport/nvlink_heap.py`. `docs/all2all.md` describes the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epserve.errors import ConfigError, Incompatible, TooLarge
from epserve.modular_kernel import (
    All2AllManager,
    DispatchHandle,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalizeModular,
    LayerSpec,
    Prepared,
    PrepareFinalizeCapability,
    PrepareFinalizeOptions,
    RankContext,
    Receiver,
    Routing,
    TopKWeightAndReduceNoOP,
)
from epserve.modular_kernel.gathering import gather

from .transport.nvlink_heap import Heap, Layout, Slot
from .transport.symmetric import CUDA_PROVIDERS, Provider

MAX_RANKS = 64  # addresses in a row of the kernels' table
WARM_UP_LIMIT_S = 120.0  # least limit of the first round, because the ranks compile at their own pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Describes how a kernel cuts its work. `programs` is the most programs that run, at most 4096."""

    programs: int
    warps: int
    block: int
    """Columns of a tile, a power of two."""
    tile: int = 1
    """Rows of a tile, a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tilings:
    """Holds the tilings by phase and batch size, as `benchmarks/tune_nvlink.py` measured them on two H200s at hidden 7,168.

    `narrow`, for the no-wait calls, leaves 100 of 132 multiprocessors to the kernels beside it.
    """

    few_tokens: int = 256
    dispatch_few: Tiling = Tiling(programs=264, warps=1, block=256)
    dispatch_many: Tiling = Tiling(programs=1056, warps=16, block=4096, tile=2)
    dispatch_many_fp8: Tiling = Tiling(programs=1056, warps=4, block=1024)
    combine_few: Tiling = Tiling(programs=132, warps=4, block=2048)
    combine_many: Tiling = Tiling(programs=264, warps=8, block=4096)
    dispatch_narrow: Tiling = Tiling(programs=32, warps=32, block=8192)
    combine_narrow: Tiling = Tiling(programs=32, warps=16, block=1024, tile=16)
    launch_early: bool = True
    """Programmatic dependent launch: a kernel is set up while the one before it drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Carries the state of one dispatch from prepare to finalize."""

    slot: Slot
    home: Routing
    local: Routing
    dense: bool
    """Rows of all ranks lie one behind the other, instead of at multiples of the cap."""
    first_row: int
    """Index of this rank's first token in every rank's rows."""
    num_rows: int


class NvlinkPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Prepares in Standard format. `Prepared.x` is a view of the receive buffer, valid until its handle is finalised.

    With `tokens_per_rank` the rows of all ranks lie one behind the other and M' is their sum. Without it the ranks
    exchange nothing first either: each rank's rows start at a multiple of the cap, M' is R times the cap, and the ids of
    rows that no rank sent are -1.

    Experts that reduce should write to `Prepared.output`: peers read it there without a copy.

    A CUDA graph that holds as many combines as dispatches can be replayed any number of times.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        devices=frozenset({"cuda"}),
        quant_dispatch=frozenset({"fp8_block"}),
        max_ranks=MAX_RANKS,
        reach="nvlink",
        async_receive=True,
        cuda_graph=True,
        combine_orders=frozenset({"rank"}),
    )
    providers: Sequence[type[Provider]] = CUDA_PROVIDERS
    tilings = Tilings()

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions):
        super().__init__(ranks, spec, options)
        if spec.layout.num_ranks != ranks.world_size or ranks.world_size > MAX_RANKS:
            raise ConfigError(
                f"nvlink: the layout places experts on {spec.layout.num_ranks} ranks, there are {ranks.world_size}"
                f" (at most {MAX_RANKS})"
            )
        if options.combine_order != "rank":
            raise ConfigError(
                f"nvlink adds partial sums in rank order, combine_order is {options.combine_order!r}:"
                " set it to 'rank', or all2all to 'all_to_all'"
            )
        if options.batches_in_flight < 1:
            raise ConfigError(f"batches_in_flight must be at least 1, got {options.batches_in_flight}")
        self.heap = Heap(ranks, spec, options, self.providers)
        self._many = self.tilings.dispatch_many_fp8 if self.heap.fp8 else self.tilings.dispatch_many
        self._broken = False
        self._side: torch.cuda.Stream | None = None
        self._limit_ns = int(max(WARM_UP_LIMIT_S, ranks.timeout_s) * 1e9)
        self._meet()
        self._limit_ns = int(ranks.timeout_s * 1e9)

    def _meet(self) -> None:
        """Runs an empty round with each tiling, which compiles every kernel and shows that every rank reaches every other."""
        shape, device = self.spec.shape, self.ranks.device
        x = torch.empty((0, shape.hidden), dtype=shape.dtype, device=device)
        none = Routing(
            ids_Mt=torch.empty((0, shape.top_k), dtype=torch.int32, device=device),
            weights_Mt=torch.empty((0, shape.top_k), dtype=torch.float32, device=device),
        )
        tilings = self.tilings
        rounds = (
            (tilings.dispatch_few, tilings.combine_few, True),
            (self._many, tilings.combine_many, True),
            (tilings.dispatch_narrow, tilings.combine_narrow, False),
        )
        for tiling_out, tiling_home, wait in rounds:
            flight = self._flight(none, None, 0)
            self._dispatch(flight, x, tiling_out, wait=wait)
            if not wait:
                self._dispatch_wait(flight)
            self._combine(flight, x, tiling_home)
            self.heap.give_back(flight.slot)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.heap.check()
        gather(self.ranks, None)

    def max_rows(self) -> int:
        return self.heap.slots[0].x.shape[0]

    def check(self) -> None:
        """Raises RankFailed when a wait of an earlier step has expired. Never blocks."""
        self.heap.check()

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        flight = self._flight(routing, tokens_per_rank, x_MK.shape[0])
        few = x_MK.shape[0] <= self.tilings.few_tokens
        self._dispatch(flight, x_MK, self.tilings.dispatch_few if few else self._many, wait=True)
        return self._prepared(flight)

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        flight = self._flight(routing, tokens_per_rank, x_MK.shape[0])
        sent = self._beside(lambda: self._dispatch(flight, x_MK, self.tilings.dispatch_narrow, wait=False))

        def finish() -> Prepared:
            sent()
            self._dispatch_wait(flight)
            return self._prepared(flight)

        return Receiver(self.book, finish)

    def finalize(self, handle, y, *, reduce, out_MK):
        flight: Flight = handle.take(self.book)
        self._place(flight, y, reduce)
        few = out_MK.shape[0] <= self.tilings.few_tokens
        self._combine(flight, out_MK, self.tilings.combine_few if few else self.tilings.combine_many)
        self.heap.give_back(flight.slot)
        self.heap.check()
        return out_MK

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        flight: Flight = handle.take(self.book)
        self._place(flight, y, reduce)
        combined = self._beside(lambda: self._combine(flight, out_MK, self.tilings.combine_narrow))

        def finish() -> torch.Tensor:
            combined()
            self.heap.give_back(flight.slot)
            self.heap.check()
            return out_MK

        return Receiver(self.book, finish)

    def interrupt(self) -> None:
        self.heap.interrupt()

    def abandon(self) -> None:
        super().abandon()
        self._broken = True
        self.heap.reset()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.heap.close(collective=not self._broken)

    def _flight(self, routing: Routing, tokens_per_rank: Sequence[int] | None, num_tokens: int) -> Flight:
        self.heap.check()
        cap, rank = self.options.max_tokens_per_rank, self.ranks.rank
        if num_tokens > cap:
            raise TooLarge(f"{num_tokens} tokens in one round, max_tokens_per_rank is {cap}")
        if tokens_per_rank is None:
            first, num_rows = rank * cap, self.max_rows()
        else:
            if len(tokens_per_rank) != self.ranks.world_size or tokens_per_rank[rank] != num_tokens:
                raise ConfigError(f"tokens_per_rank {tuple(tokens_per_rank)}: rank {rank} brings {num_tokens} tokens")
            first, num_rows = sum(tokens_per_rank[:rank]), sum(tokens_per_rank)
        slot, dense = self.heap.take(), tokens_per_rank is not None
        local = Routing(ids_Mt=slot.ids[dense][:num_rows], weights_Mt=slot.weights[:num_rows])
        return Flight(slot=slot, home=routing, local=local, dense=dense, first_row=first, num_rows=num_rows)

    def _prepared(self, flight: Flight) -> Prepared:
        slot, rows = flight.slot, flight.num_rows
        return Prepared(
            x=slot.x[:rows],
            scales=None if slot.scales is None else slot.scales[:rows],
            routing=flight.local,
            output=slot.y[:rows],
            handle=DispatchHandle(self.book, flight),
        )

    def _place(self, flight: Flight, y: torch.Tensor, reduce) -> None:
        """Copies partial sums to the memory that peers read, unless the experts wrote them there."""
        there = flight.slot.y[: flight.num_rows]
        if isinstance(reduce, TopKWeightAndReduceNoOP) and y.data_ptr() == there.data_ptr():
            return
        if y.shape[0] != flight.num_rows:
            raise Incompatible(f"nvlink: the experts returned {tuple(y.shape)} for {flight.num_rows} rows")
        reduce.apply(y, flight.local, there)

    def _beside(self, launch):
        """Runs `launch` on a stream beside the current one. The returned call makes the then current stream wait for it."""
        if self.ranks.device.type != "cuda":
            launch()
            return lambda: None
        if self._side is None:
            self._side = torch.cuda.Stream(self.ranks.device, priority=-1)  # before the programs of a large GEMM
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self.ranks.device))
        with torch.cuda.stream(side):
            launch()
            done = side.record_event()
        return lambda: torch.cuda.current_stream(self.ranks.device).wait_event(done)

    def _grid(self, num_tokens: int, tiling: Tiling) -> tuple[int]:
        tiles = -(-num_tokens // tiling.tile) * -(-self.spec.shape.hidden // tiling.block)
        return (max(1, min(tiling.programs, tiles)),)

    def _sizes(self, tiling: Tiling) -> dict[str, Any]:
        # NOTE: a programmatic launch must not follow another stream's work, as the no-wait calls do.
        beside = tiling in (self.tilings.dispatch_narrow, self.tilings.combine_narrow)
        shape = self.spec.shape
        early = self.tilings.launch_early and self.ranks.device.type == "cuda" and not beside
        sizes = {"H": shape.hidden, "K": shape.top_k, "W": self.ranks.world_size, "TILE": tiling.tile}
        sizes |= {"BLOCK": tiling.block, "PDL": early, "num_warps": tiling.warps}
        return sizes | ({"launch_pdl": True} if early else {})

    def _dispatch(self, flight: Flight, x_MK: torch.Tensor, tiling: Tiling, *, wait: bool) -> None:
        from .kernels import nvlink as kernels

        heap, slot, home = self.heap, flight.slot, flight.home
        assert x_MK.is_contiguous() and x_MK.dtype is self.spec.shape.dtype
        kernels.dispatch[self._grid(x_MK.shape[0], tiling)](
            x_MK, home.ids_Mt, home.weights_Mt, slot.table, slot.flags[0], slot.ctl, heap.failed, heap.offsets,
            x_MK.shape[0], flight.first_row, self._limit_ns, int(flight.dense),
            FP8=heap.fp8, WAIT=wait, **self._sizes(tiling),
        )  # fmt: skip

    def _dispatch_wait(self, flight: Flight) -> None:
        from .kernels import nvlink as kernels

        slot = flight.slot
        kernels.dispatch_wait[(1,)](
            slot.table,
            slot.flags[0],
            slot.ctl,
            self.heap.failed,
            flight.home.ids_Mt.shape[0],
            self._limit_ns,
            int(flight.dense),
            W=self.ranks.world_size,
            num_warps=1,
        )

    def _combine(self, flight: Flight, out_MK: torch.Tensor, tiling: Tiling) -> None:
        from .kernels import nvlink as kernels

        heap, slot = self.heap, flight.slot
        assert out_MK.is_contiguous() and out_MK.dtype is self.spec.shape.dtype
        kernels.combine[self._grid(out_MK.shape[0], tiling)](
            out_MK, flight.home.ids_Mt, slot.table, slot.flags[1], slot.ctl, heap.failed, heap.offsets,
            out_MK.shape[0], flight.first_row, self._limit_ns, **self._sizes(tiling),
        )  # fmt: skip


class NvlinkAll2AllManager(All2AllManager):
    prepare_finalize = NvlinkPrepareAndFinalize

    @classmethod
    def unavailable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        reasons = [provider.unavailable() for provider in cls.prepare_finalize.providers]
        return None if None in reasons else "; ".join(str(reason) for reason in reasons)

    @classmethod
    def buffer_bytes(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
        return Layout.of(spec, options).num_bytes
