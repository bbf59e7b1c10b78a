"""DeepEP's high-throughput kernels: Standard format, a row to each rank that needs it.

If the numbers of tokens are known, the library gets an upper bound of the rows that arrive and the host never waits.
Otherwise the host waits in dispatch for the number of rows. Neither way can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epserve.errors import ConfigError
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

from .transport import deepep_library as library

RANKS = (2, 4, 8)  # the library compiles its kernels inside one node for these numbers of ranks
NUM_SMS = {2: 64}
"""Multiprocessors of the library's kernels by number of ranks. Other numbers of ranks get the library's default, 20. At two
ranks each channel has half of them: dispatch and combine of 4,096 rows took 1,024 us with 20, 667 with 32, 540 with 48, 522
with 64."""
DEFAULT_SMS = 20
ROW_BYTES = 32  # rows are moved in two halves of int4
MAX_HIDDEN = 8176  # half a bf16 row and 8 bytes must fit in the 8 KiB that a warp of its kernels has
RECEIVE_TOKENS = 256  # tokens of one channel, from the library's tuned configurations for up to 8 ranks
ROW_RECORD_BYTES = (
    128 * (8 + 4 + 4) + 64
)  # most ids, weights and scales of a row in the library's buffer, and its source


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Carries the state of one dispatch from prepare to finalize."""

    library_handle: Any
    local: Routing
    sent: library.Outgoing
    """The buffers of the dispatch stay alive until the rows are home."""
    buffers: library.Buffers | None


class DeepEPHTPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Sends rows as bf16 or as fp8 in 1x128 blocks, and returns them as bf16. The library adds partial sums in float32."""

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        quant_dispatch=frozenset({"fp8_block"}),
        rank_counts=frozenset(RANKS),
        max_hidden=MAX_HIDDEN,
        reach="host",
        async_receive=True,
        combine_orders=frozenset({"rank"}),
        interruptible=False,
    )
    configured = True
    """Whether the library's calls take a configuration (multiprocessors, sizes of the pieces) and the layout of the tokens."""

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions, buffer: Any):
        super().__init__(ranks, spec, options)
        if options.combine_order != "rank":
            raise ConfigError(f"{type(self).__name__} adds partial sums by rank: set combine_order to 'rank'")
        self.buffer = buffer
        self.configs = configs(ranks.world_size) if self.configured else (None, None)
        self.quantised = library.sends_quantised(spec, options.dispatch_quantised)
        self.sender = library.Sender(spec, ranks.device, quantised=self.quantised, layout=self.configured)
        self.hidden = padded_hidden(spec)

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int64

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        return self._start(x_MK, routing, most_rows(tokens_per_rank), beside=False)()

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        return Receiver(self.book, self._start(x_MK, routing, most_rows(tokens_per_rank), beside=True))

    def _start(self, x_MK: torch.Tensor, routing: Routing, most: int, *, beside: bool):
        """Starts a dispatch.

        Args:
            most: upper bound of the rows that arrive. With 0 (unknown) the host waits for their number.
            beside: the current stream does not wait for the rows.
        """
        if x_MK.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"{type(self).__name__}: the host takes part in its dispatch (it waits for the number of rows where the"
                " numbers of tokens are unknown), so no CUDA graph is made of it"
            )
        sent, buffers = self.sender.ready(library.pad(x_MK, self.hidden), routing)
        received, ids, weights, handle, done = self._send(sent, most, beside)

        def finish() -> Prepared:
            if beside:
                done.current_stream_wait()
            rows, scales = received if self.quantised else (library.unpad(received, x_MK.shape[1]), None)
            local = Routing(ids_Mt=ids.int(), weights_Mt=weights)
            flight = Flight(library_handle=handle, local=local, sent=sent, buffers=buffers)
            return Prepared(x=rows, scales=scales, routing=local, handle=DispatchHandle(self.book, flight))

        return finish

    def _send(self, sent: library.Outgoing, most: int, beside: bool):
        """Calls the library's dispatch.

        Returns:
            The rows (or rows and scales), ids, weights, the library's handle and its event. If `most` is not 0, exactly
            `most` rows come back. Rows behind the last real one are undefined and have ids of -1.
        """
        if most:
            self.buffer.unwaited = True
        elif getattr(self.buffer, "unwaited", False):
            # The host did not wait for the number of rows of an earlier dispatch. It must not be taken for this one's.
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize(self.ranks.device)
            self.buffer.unwaited = False
        received, ids, weights, _, handle, done = self.buffer.dispatch(
            sent.x,
            num_tokens_per_rank=sent.per_rank,
            is_token_in_rank=sent.in_rank,
            num_tokens_per_expert=sent.per_expert,
            topk_idx=sent.ids_Mt,
            topk_weights=sent.weights_Mt,
            num_worst_tokens=most,
            config=self.configs[0],
            async_finish=beside,
        )
        return received, ids, weights, handle, done

    def _send_home(self, y: torch.Tensor, handle: Any, beside: bool):
        # An asynchronous call runs on the library's own stream, after all work that the current stream holds now.
        combined, _, done = self.buffer.combine(y, handle, config=self.configs[1], async_finish=beside)
        return combined, done

    def finalize(self, handle, y, *, reduce, out_MK):
        return self._combine(handle, y, reduce, out_MK, beside=False)()

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        return Receiver(self.book, self._combine(handle, y, reduce, out_MK, beside=True))

    def _combine(self, handle, y, reduce, out_MK, *, beside: bool):
        flight: Flight = handle.take(self.book)
        hidden = out_MK.shape[1]
        if not isinstance(reduce, TopKWeightAndReduceNoOP):
            y = reduce.apply(y, flight.local, out_MK.new_empty((flight.local.ids_Mt.shape[0], hidden)))
        y = library.pad(y, self.hidden).contiguous()
        combined, done = self._send_home(y, flight.library_handle, beside)
        sent = (y, flight)

        def finish() -> torch.Tensor:
            if beside:
                done.current_stream_wait()
            assert sent  # alive until the library's stream is done with it
            self.sender.give_back(flight.buffers)
            return out_MK.copy_(combined if hidden == self.hidden else combined[:, :hidden])

        return finish


def most_rows(tokens_per_rank: Sequence[int] | None) -> int:
    """Returns an upper bound of the rows that arrive at a rank, or 0 if the numbers of tokens are unknown.

    A known bound is at least 1, because the library takes 0 as unknown.
    """
    return 0 if tokens_per_rank is None else max(1, sum(tokens_per_rank))


def configs(num_ranks: int) -> tuple[Any, Any]:
    """Returns the library's configurations of dispatch and of combine, with the number of multiprocessors from `NUM_SMS`."""
    from deep_ep import Buffer

    others = Buffer.num_sms
    Buffer.set_num_sms(NUM_SMS.get(num_ranks, DEFAULT_SMS))
    try:
        return Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)
    finally:
        Buffer.set_num_sms(others)


def padded_hidden(spec: LayerSpec) -> int:
    unit = ROW_BYTES // spec.shape.dtype.itemsize
    return -(-spec.shape.hidden // unit) * unit


class DeepEPHTAll2AllManager(All2AllManager):
    """Keeps one buffer for all configurations. The buffer grows, collectively, when a configuration needs a larger one."""

    prepare_finalize = DeepEPHTPrepareAndFinalize

    def __init__(self, ranks: RankContext):
        super().__init__(ranks)
        self._buffer: Any = None

    @classmethod
    def unavailable(cls) -> str | None:
        return library.unavailable()

    @classmethod
    def buffer_bytes(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
        """Returns the bytes of the buffer. Channels have a fixed length, so the number of tokens does not matter."""
        row = padded_hidden(spec) * spec.shape.dtype.itemsize + ROW_RECORD_BYTES
        channels = NUM_SMS.get(spec.layout.num_ranks, DEFAULT_SMS) // 2
        return channels * spec.layout.num_ranks * (RECEIVE_TOKENS * row + 32)

    def make(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> DeepEPHTPrepareAndFinalize:
        ranks = self.ranks
        if ranks.world_size not in RANKS:
            raise ConfigError(
                f"deepep_ht runs on {', '.join(map(str, RANKS))} ranks of one host, not on {ranks.world_size}"
            )
        from deep_ep import Buffer

        row = padded_hidden(spec) * spec.shape.dtype.itemsize
        needed = max(config.get_nvl_buffer_size_hint(row, ranks.world_size) for config in configs(ranks.world_size))
        needed = max(needed, self.buffer_bytes(spec, options))
        if self._buffer is None or self._buffer.num_nvl_bytes < needed:
            library.check_memory(ranks, needed, "deepep_ht")
            if self._buffer is not None:
                library.destroy(self._buffer)
            self._buffer = Buffer(ranks.group, needed, 0, explicitly_destroy=True)
            for made in self._made.values():
                made.buffer = self._buffer  # type: ignore[attr-defined]
        return self.prepare_finalize(ranks, spec, options, self._buffer)

    def abandon(self) -> None:
        super().abandon()
        self._buffer = None  # destroying is collective and the group is broken: process exit frees it

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            if self._buffer is not None:
                library.destroy(self._buffer)
                self._buffer = None
