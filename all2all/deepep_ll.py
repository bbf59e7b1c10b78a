"""DeepEP's low-latency kernels: BatchedExperts format, a row to each expert, nothing waits on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from epserve.errors import ConfigError, HandleError, Incompatible, TooLarge
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
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
)
from epserve.modular_kernel.quantization import BLOCK

from .transport import deepep_library as library
from .transport.symmetric import one_host

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # the library compiles its kernels for these
MAX_TOP_K = 11
MAX_OUTSTANDING = 2  # the library has two buffers in turn: a third dispatch overwrites the first one's result
MAX_BYTES = 32 << 30
QUEUE_DEPTH = 1024  # the library's queues must hold twice the tokens plus two


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """Carries the state of one dispatch from prepare to finalize."""

    library_handle: Any
    home: library.Outgoing
    """The sent batch: combine reads its ids and weights again."""


class DeepEPLLPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Sends rows as bf16 or as fp8 in 1x128 blocks, and returns them as bf16. The library's combine weights and adds.

    Hidden sizes that the library lacks are padded with zeros to the next size that it has. The cap is rounded up so that
    a rank can receive a multiple of 4 rows. At most two results may be outstanding, over all configurations of a manager.

    The no-wait calls use the library's receive hooks over a network, where a hook takes no multiprocessor while it waits.
    On one host the sending kernel copies the rows itself, and with a hook it would do so before any other work. There the
    whole call runs on the library's own stream, beside the caller's. Measured with 128 tokens in bf16 and a shared expert
    of 34 us: 120 us one after the other, 125 us with hooks, 98 us on the library's stream.
    """

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.BatchedExperts,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        quant_dispatch=frozenset({"fp8_block"}),
        max_top_k=MAX_TOP_K,
        max_hidden=HIDDEN_SIZES[-1],
        reach="rdma",
        async_receive=True,
        cuda_graph=True,
        most_tokens=QUEUE_DEPTH // 2 - 4,
        interruptible=False,
    )

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions, shared: SharedBuffer):
        super().__init__(ranks, spec, rounded(options, spec))
        self.shared = shared
        self.sender = library.Sender(spec, ranks.device)
        self.quantised = library.sends_quantised(spec, options.dispatch_quantised)
        self.hidden = padded_hidden(spec)
        self.layout = (self.options.max_tokens_per_rank, self.hidden, self.sender.total)

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int64

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        return self._start(x_MK, routing, beside=False)()

    def prepare_no_receive(self, x_MK, routing, *, quant, tokens_per_rank=None):
        return Receiver(self.book, self._start(x_MK, routing, beside=True))

    def _timing(self, beside: bool) -> dict[str, bool]:
        local = self.shared.one_host
        return {"async_finish": beside and local, "return_recv_hook": beside and not local}

    def _start(self, x_MK: torch.Tensor, routing: Routing, *, beside: bool):
        cap = self.options.max_tokens_per_rank
        if x_MK.shape[0] > cap:
            raise TooLarge(f"{x_MK.shape[0]} tokens in one round, max_tokens_per_rank is {cap}")
        buffer = self.shared.take(self.layout)
        hidden, local = x_MK.shape[1], self.spec.layout.counts[self.ranks.rank]
        x = library.pad(x_MK, self.hidden)
        # NOTE: buffers are not given back for another step: a CUDA graph goes on to write memory allocated during its capture.
        home, _ = self.sender.ready(x, routing)
        received, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, home.ids_Mt, cap, self.sender.total, use_fp8=self.quantised, **self._timing(beside)
        )
        sent = (x, home)

        def finish() -> Prepared:
            if beside:
                (event.current_stream_wait if self.shared.one_host else hook)()
            assert sent  # stays alive until the library's stream has finished with it
            rows, scales = received if self.quantised else (received, None)
            if scales is not None:  # as the library leaves them: column by column, of the padded hidden size
                scales = scales[:local, :, : hidden // BLOCK]
            return Prepared(
                x=library.unpad(rows[:local], hidden),
                scales=scales,
                expert_num_tokens=counts[:local],
                handle=DispatchHandle(self.book, Flight(library_handle=handle, home=home)),
            )

        return finish

    def finalize(self, handle, y, *, reduce, out_MK):
        return self._combine(handle, y, reduce, out_MK, beside=False)()

    def finalize_no_wait(self, handle, y, *, reduce, out_MK):
        return Receiver(self.book, self._combine(handle, y, reduce, out_MK, beside=True))

    def _combine(self, handle, y, reduce, out_MK, *, beside: bool):
        if not isinstance(reduce, TopKWeightAndReduceDelegate | TopKWeightAndReduceNaiveBatched):
            raise Incompatible(f"deepep_ll weights and adds (e, T, K) itself, the experts say {type(reduce).__name__}")
        flight: Flight = handle.take(self.book)
        hidden, exact = out_MK.shape[1], out_MK.shape[1] == self.hidden
        y = library.pad(y, self.hidden)
        if y.shape[0] < self.sender.per_rank:  # this rank holds fewer experts than others: their rows are never read
            y = torch.cat([y, y.new_empty((self.sender.per_rank - y.shape[0], *y.shape[1:]))])
        y = y.contiguous()
        combined, event, hook = self.shared.buffer.low_latency_combine(
            y,
            flight.home.ids_Mt,
            flight.home.weights_Mt,
            flight.library_handle,
            **self._timing(beside),
            out=out_MK if exact else None,
        )
        sent = (y, flight)

        def finish() -> torch.Tensor:
            if beside:
                (event.current_stream_wait if self.shared.one_host else hook)()
            assert sent
            self.shared.give_back()
            return combined if exact else out_MK.copy_(combined[:, :hidden])

        return finish

    def abandon(self) -> None:
        super().abandon()
        self.shared.outstanding = 0


def padded_hidden(spec: LayerSpec) -> int:
    return next((size for size in HIDDEN_SIZES if size >= spec.shape.hidden), spec.shape.hidden)


def rounded(options: PrepareFinalizeOptions, spec: LayerSpec) -> PrepareFinalizeOptions:
    """Returns the options with a cap for which the number of rows that a rank can receive is a multiple of 4."""
    return replace(options, max_tokens_per_rank=-(-options.max_tokens_per_rank // 4) * 4)


class SharedBuffer:
    """Owns the one `deep_ep.Buffer` of all configurations of a process. NVSHMEM underneath is set up once.

    The zeroed areas lie elsewhere in each configuration, so a change of configuration cleans the buffer, collectively.
    """

    def __init__(self, ranks: RankContext):
        self.ranks, self.outstanding, self.one_host = ranks, 0, True
        self.buffer: Any = None
        self._num_bytes, self._queues = 0, 0
        self._layout: tuple[int, int, int] | None = None

    def ensure(self, num_bytes: int, queues: int) -> None:
        """Grows the buffer to at least `num_bytes` and `queues` where it is smaller. Collective."""
        if num_bytes <= self._num_bytes and queues <= self._queues:
            return
        if self.outstanding:
            raise HandleError("deepep_ll: a larger configuration cannot be added while results are outstanding")
        library.check_memory(self.ranks, num_bytes - self._num_bytes, "deepep_ll")
        self.destroy()
        from deep_ep import Buffer

        self.one_host = one_host(self.ranks)
        self._num_bytes, self._queues = max(num_bytes, self._num_bytes), max(queues, self._queues)
        self.buffer = Buffer(
            self.ranks.group,
            0,
            self._num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=self._queues,
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
        )

    def take(self, layout: tuple[int, int, int]) -> Any:
        if self.outstanding == MAX_OUTSTANDING:
            raise HandleError(
                f"deepep_ll: {MAX_OUTSTANDING} results are outstanding, and the library keeps no more: finalize one first"
            )
        if layout != self._layout:
            if self.outstanding:
                raise HandleError("deepep_ll: another configuration's result is outstanding: finalize it first")
            self.buffer.clean_low_latency_buffer(*layout)
            self._layout = layout
        self.outstanding += 1
        return self.buffer

    def give_back(self) -> None:
        self.outstanding -= 1

    def destroy(self) -> None:
        if self.buffer is not None:
            library.destroy(self.buffer)
        self.buffer, self._layout = None, None


class DeepEPLLAll2AllManager(All2AllManager):
    prepare_finalize = DeepEPLLPrepareAndFinalize

    def __init__(self, ranks: RankContext):
        super().__init__(ranks)
        self.shared = SharedBuffer(ranks)

    @classmethod
    def unavailable(cls) -> str | None:
        return library.unavailable()

    @classmethod
    def buffer_bytes(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
        """Returns the bytes of two buffers used in turn. Each holds the sent and the received rows, a row to each expert."""
        cap, hidden = rounded(options, spec).max_tokens_per_rank, padded_hidden(spec)
        experts = max(spec.layout.counts) * spec.layout.num_ranks
        message = 16 + max(hidden * 2, hidden + hidden // 128 * 4)
        sent, returned = cap * message, experts * cap * message
        return 2 * (max(sent, returned) + max(experts * cap * message, returned) + experts * 4) + 128

    def make(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> DeepEPLLPrepareAndFinalize:
        cap, experts = rounded(options, spec).max_tokens_per_rank, max(spec.layout.counts) * spec.layout.num_ranks
        if (cap + 1) * 2 > QUEUE_DEPTH:
            raise ConfigError(f"deepep_ll: max_tokens_per_rank {cap} is above {QUEUE_DEPTH // 2 - 4}; lower it")
        if options.batches_in_flight > MAX_OUTSTANDING:
            raise ConfigError(
                f"deepep_ll: batches_in_flight {options.batches_in_flight} is above {MAX_OUTSTANDING}, what the library holds"
            )
        from deep_ep import Buffer

        hint = Buffer.get_low_latency_rdma_size_hint(cap, padded_hidden(spec), spec.layout.num_ranks, experts)
        needed = max(hint, self.buffer_bytes(spec, options))
        if needed > MAX_BYTES:
            raise ConfigError(
                f"deepep_ll needs {needed / library.GIB:.1f} GiB for {cap} tokens a rank and {experts} experts, the library"
                f" takes at most {MAX_BYTES / library.GIB:.0f}; lower max_tokens_per_rank"
            )
        self.shared.ensure(needed, max(spec.layout.counts))
        return self.prepare_finalize(self.ranks, spec, options, self.shared)

    def abandon(self) -> None:
        super().abandon()
        self.shared.buffer = None  # destroying is collective and the group is broken: process exit frees it

    def destroy(self) -> None:
        try:
            super().destroy()
        finally:
            self.shared.destroy()
