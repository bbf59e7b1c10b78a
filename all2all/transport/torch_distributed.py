"""Rows between ranks over torch.distributed: what the portable backends share. The same calls run on gloo and on NCCL.

Legend of suffixes: M tokens of this rank, K hidden size, t top-k, R ranks, S rows sent, e experts of this rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from epserve.errors import ConfigError, Incompatible, RankFailed
from epserve.modular_kernel import (
    FusedMoEPrepareAndFinalizeModular,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Receiver,
    Routing,
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNoOP,
    weighted_sum,
)
from epserve.modular_kernel.quantization import BLOCK, quantise_blocks

# The newer name; the older one is deprecated from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transfer:
    """Collectives under way. `wait` once for what they brought; the send buffers live until then."""

    def __init__(self, ranks: RankContext, phase: str, received: tuple[torch.Tensor, ...], works=(), sent=()):
        self._ranks, self._phase, self._received, self._works, self._sent = ranks, phase, received, works, sent

    def wait(self, *, host: bool = False) -> tuple[torch.Tensor, ...]:
        """On CUDA only the stream waits, unless `host`: whoever reads results calls `wait_for_stream` first.

        Raises RankFailed when the other ranks do not answer in time, or when the connection to one of them broke.
        """
        on_cpu = self._ranks.device.type == "cpu"
        try:
            for work in self._works:
                work.wait(timedelta(seconds=self._ranks.timeout_s)) if on_cpu else work.wait()
        except RuntimeError as error:
            raise _failed(self._ranks, self._phase, error) from error
        if host and self._works and not on_cpu:
            wait_for_stream(self._ranks, phase=self._phase)
        self._works = self._sent = ()
        return self._received


def wait_for_stream(ranks: RankContext, *, phase: str) -> None:
    """Block the host until the current CUDA stream has done what it was given. Raises RankFailed at the deadline.

    NOTE: NCCL's own `wait(timeout)` takes the whole process down when it expires (torch 2.11), and synchronising has no
    deadline; an event can be asked. Afterwards the stream is still stuck: the process must end. The first contact of two
    ranks blocks inside NCCL, where no deadline of ours reaches: warm-up makes it, under its supervisor's deadline.
    """
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + ranks.timeout_s
    while not event.query():  # no sleep: it would cost more than the transfer
        if time.monotonic() > deadline:
            raise _failed(ranks, phase, "the device is still waiting")


def _failed(ranks: RankContext, phase: str, reason: object) -> RankFailed:
    where = f"rank {ranks.rank} of {ranks.world_size}"
    return RankFailed(f"{phase}: {where} got no answer from another rank (deadline {ranks.timeout_s:g} s): {reason}")


class Wire:
    """One process group. Rows travel as bytes, so that every dtype can (gloo knows no float8)."""

    def __init__(self, ranks: RankContext):
        if ranks.world_size > 1 and ranks.group is None:
            raise ConfigError(f"{ranks.world_size} ranks need an initialised process group, RankContext.group is None")
        self.ranks = ranks

    def exchange(
        self, parts: Sequence[torch.Tensor], sends: Sequence[int], receives: Sequence[int], *, phase: str
    ) -> Transfer:
        """Send the rows of each part, which lie in the order of their destinations; they arrive in that of their sources.

        sends, receives: rows for and from each rank, itself included.
        """
        if self.ranks.world_size == 1:
            return Transfer(self.ranks, phase, tuple(parts))
        received = tuple(part.new_empty((sum(receives), *part.shape[1:])) for part in parts)
        sent = tuple(part.contiguous() for part in parts)
        works = []
        for target, part in zip(received, sent, strict=True):
            works.append(
                dist.all_to_all_single(
                    _bytes(target), _bytes(part), list(receives), list(sends), group=self.ranks.group, async_op=True
                )
            )
        return Transfer(self.ranks, phase, received, works, sent)

    def gather(self, parts: Sequence[torch.Tensor], *, phase: str) -> Transfer:
        """Every rank's rows, in rank order; as many rows on each rank."""
        if self.ranks.world_size == 1:
            return Transfer(self.ranks, phase, tuple(parts))
        size = self.ranks.world_size
        received = tuple(part.new_empty((size * part.shape[0], *part.shape[1:])) for part in parts)
        sent = tuple(part.contiguous() for part in parts)
        works = []
        for target, part in zip(received, sent, strict=True):
            works.append(_all_gather(_bytes(target), _bytes(part), group=self.ranks.group, async_op=True))
        return Transfer(self.ranks, phase, received, works, sent)

    def swap_counts(self, sends_R: torch.Tensor, *, phase: str) -> tuple[list[int], list[int]]:
        """Rows for each rank -> (rows for, rows from each rank) on the host. int64 `(R,)`."""
        once = [1] * self.ranks.world_size
        (receives_R1,) = self.exchange([sends_R[:, None]], once, once, phase=phase).wait(host=True)
        return sends_R.tolist(), receives_R1[:, 0].tolist()


def _bytes(rows_SC: torch.Tensor) -> torch.Tensor:
    return rows_SC.view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows as they travel: `x` `(S, K)` in the model's dtype, or e4m3 as int32 `(S, K/4)` with float32 `scales`."""

    x: torch.Tensor
    scales: torch.Tensor | None = None

    def parts(self) -> list[torch.Tensor]:
        return [self.x] if self.scales is None else [self.x, self.scales]


def pack_beside(ids: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What travels beside the rows, as int32 `(S, t + t + K/128)`: one message instead of three."""
    parts = [ids, weights.view(torch.int32)]
    return torch.cat(parts if scales is None else [*parts, scales.view(torch.int32)], dim=1)


def unpack_beside(beside: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """ids, weights, scales as `pack_beside` took them."""
    ids, weights, scales = (part.contiguous() for part in beside.tensor_split((top_k, 2 * top_k), dim=1))
    return ids, weights.view(torch.float32), scales.view(torch.float32) if scales.shape[1] else None


def unpack(x: torch.Tensor, quantised: bool) -> torch.Tensor:
    """Undo the disguise of e4m3 rows, which few torch operators can index."""
    return x.view(torch.float8_e4m3fn) if quantised else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """What finalize must know of one Standard-format dispatch."""

    home: Routing
    """Of the tokens that this rank passed to prepare: physical ids."""
    local: Routing
    """Of the rows that came: local slots."""
    tokens_S: torch.Tensor | None
    """int64: which of this rank's tokens each sent row was, ascending within a destination; None: all to all ranks."""
    slots_St: torch.Tensor | None
    """bool: the slots of that token which its destination computes; None where only `combine_order="slot"` asks."""
    sends: list[int]
    receives: list[int]


class TorchDistributedPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Base of the portable backends. The synchronous calls are the asynchronous ones, received at once: same bits."""

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions):
        super().__init__(ranks, spec, options)
        if spec.layout.num_ranks != ranks.world_size:
            raise ConfigError(
                f"the layout places experts on {spec.layout.num_ranks} ranks, there are {ranks.world_size}"
            )
        self.wire = Wire(ranks)
        self.starts_R = torch.tensor(spec.layout.offsets[:-1], dtype=torch.int32, device=ranks.device)
        self.ends_R = torch.tensor(spec.layout.offsets[1:], dtype=torch.int32, device=ranks.device)

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        return self.prepare_no_receive(x_MK, routing, quant=quant, tokens_per_rank=tokens_per_rank)()

    def finalize(self, handle, y, *, reduce, out_MK):
        return self.finalize_no_wait(handle, y, reduce=reduce, out_MK=out_MK)()

    def why_not_reduce(self, reduce: TopKWeightAndReduce) -> str | None:
        if not isinstance(reduce, TopKWeightAndReduceNoOP | TopKWeightAndReduceContiguous):
            return f"the combine adds rows that are weighted already, {type(reduce).__name__} leaves that to it"
        if self.options.combine_order == "slot" and not isinstance(reduce, TopKWeightAndReduceContiguous):
            kind = type(reduce).__name__
            return f"combine_order 'slot' needs experts that leave one row a slot (Contiguous), these have {kind}"
        return None

    def rows_for_wire(self, x_MK: torch.Tensor, quant: QuantConfig) -> Rows:
        """Quantised where the scheme, the options and the hidden size (whole blocks) allow it."""
        cap = self.options.max_tokens_per_rank
        assert x_MK.shape[0] <= cap, f"{x_MK.shape[0]} rows in one round, the cap is {cap}: the kernel makes rounds"
        if not self.sends_quantised(quant):
            return Rows(x=x_MK)
        x, scales = quantise_blocks(x_MK)
        return Rows(x=x.view(torch.int32), scales=scales)

    def sends_quantised(self, quant: QuantConfig) -> bool:
        whole = self.spec.shape.hidden % BLOCK == 0
        return self.options.dispatch_quantised and quant.dispatch_dtype is not None and whole

    def owner(self, ids_Mt: torch.Tensor) -> torch.Tensor:
        """The rank of each slot's expert, -1 where there is none. Ranks without experts own nothing."""
        return torch.where(ids_Mt >= 0, torch.bucketize(ids_Mt, self.ends_R, right=True), -1)

    def combine(
        self, journey: Journey, y: torch.Tensor, reduce: TopKWeightAndReduce, out_MK: torch.Tensor
    ) -> Receiver[torch.Tensor]:
        """Send results home and add them in float32, in an order that `combine_order` fixes."""
        reason = self.why_not_reduce(reduce)
        if reason:
            raise Incompatible(reason)
        if self.options.combine_order == "slot":
            return self._combine_slots(journey, y, out_MK)
        partial_SK = reduce.apply(y, journey.local, out_MK.new_empty((sum(journey.receives), out_MK.shape[1])))
        transfer = self.wire.exchange([partial_SK], journey.receives, journey.sends, phase="combine")

        def finish() -> torch.Tensor:
            (rows_SK,) = transfer.wait()
            total_MK = torch.zeros(out_MK.shape, dtype=torch.float32, device=out_MK.device)
            pieces = rows_SK.split(journey.sends)  # in rank order
            if journey.tokens_S is None:
                for rows_MK in pieces:
                    total_MK += rows_MK
            else:
                for tokens, rows in zip(journey.tokens_S.split(journey.sends), pieces, strict=True):
                    total_MK.index_add_(0, tokens, rows.float())  # a token occurs once in a piece: no race
            return out_MK.copy_(total_MK)

        return Receiver(self.book, finish)

    def _combine_slots(self, journey: Journey, y_StK: torch.Tensor, out_MK: torch.Tensor) -> Receiver[torch.Tensor]:
        assert journey.slots_St is not None
        slots_St, tokens_S = journey.slots_St, journey.tokens_S
        mine_St = journey.local.ids_Mt >= 0
        sends = [int(piece.sum()) for piece in mine_St.split(journey.receives)]
        receives = [int(piece.sum()) for piece in slots_St.split(journey.sends)]
        transfer = self.wire.exchange([y_StK[mine_St]], sends, receives, phase="combine")

        def finish() -> torch.Tensor:
            (rows,) = transfer.wait()
            row, slot = slots_St.nonzero(as_tuple=True)
            token = row % max(out_MK.shape[0], 1) if tokens_S is None else tokens_S[row]
            slots_MtK = rows.new_empty((*journey.home.ids_Mt.shape, out_MK.shape[1]))
            slots_MtK[token, slot] = rows
            return out_MK.copy_(weighted_sum(slots_MtK, journey.home))

        return Receiver(self.book, finish)
