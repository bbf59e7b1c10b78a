"""Row transfers over torch.distributed, shared by the portable backends. The same calls run on gloo and on NCCL.

Legend of suffixes: M tokens of this rank, K hidden size, t top-k, R ranks, S rows sent, e experts of this rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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

# torch 2.13 deprecates the older name, `all_gather_into_tensor`.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


MEET_S = 30.0  # limit to make a group: ranks arrive after loading their weights at their own pace


def subgroups(ranks: RankContext, members: list[list[int]]) -> list[Any]:
    """Makes a process group of each list of ranks, or None for a list of one. Collective.

    NOTE: every process makes every group, in one order. torch can also let the members alone make one, but names it after
    the number of groups that a process knows, which may differ.
    """
    if ranks.group is None and ranks.world_size > 1:
        raise ConfigError(f"{ranks.world_size} ranks need an initialised process group, RankContext.group is None")
    if ranks.world_size > 1 and dist.get_world_size() != ranks.world_size:
        raise ConfigError(
            f"groups of some ranks need a process group of all {dist.get_world_size()} processes, it has {ranks.world_size}"
        )
    world = dist.get_process_group_ranks(ranks.group) if ranks.world_size > 1 else [0]
    backend, timeout = (
        "nccl" if ranks.device.type == "cuda" else "gloo",
        timedelta(seconds=max(ranks.timeout_s, MEET_S)),
    )

    def one(part: list[int]) -> Any:
        return dist.new_group([world[each] for each in part], timeout=timeout, backend=backend)

    return [one(part) if len(part) > 1 else None for part in members]


class Transfer:
    """Holds collectives in progress. The caller calls `wait` once for the results. The send buffers live until then."""

    def __init__(self, ranks: RankContext, phase: str, received: tuple[torch.Tensor, ...], works=(), sent=()):
        self._ranks, self._phase, self._received, self._works, self._sent = ranks, phase, received, works, sent

    def wait(self, *, host: bool = False) -> tuple[torch.Tensor, ...]:
        """Waits for the collectives and returns the received tensors.

        On CUDA only the stream waits, so a caller that reads results on the host calls `wait_for_stream` first.

        Args:
            host: block the host on CUDA too.

        Raises:
            RankFailed: the other ranks do not answer in time, or the connection to one of them broke.
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
    """Blocks the host until the current CUDA stream has finished its work. Raises RankFailed at the deadline.

    NOTE: NCCL's own `wait(timeout)` ends the whole process when it expires (torch 2.11), and synchronising has no deadline.
    So this function polls an event. After the deadline the stream is still stuck, and the process must end. The first
    contact of two ranks blocks inside NCCL, where this deadline has no effect. Warm-up makes that contact under its
    supervisor's deadline.
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
    """Sends rows through one process group. Rows travel as bytes, which carries every dtype (gloo has no float8)."""

    def __init__(self, ranks: RankContext):
        if ranks.world_size > 1 and ranks.group is None:
            raise ConfigError(f"{ranks.world_size} ranks need an initialised process group, RankContext.group is None")
        self.ranks = ranks
        mine = ranks.hosts[ranks.rank] if ranks.hosts else None
        self._elsewhere = [rank for rank, host in enumerate(ranks.hosts) if host != mine]
        self.network_bytes = 0
        """Bytes that this rank has sent to ranks of other hosts, without the protocols' own."""

    def _count(self, part: torch.Tensor, sends: Sequence[int]) -> None:
        row = part[:1].nbytes if part.shape[0] else 0
        self.network_bytes += row * sum(sends[rank] for rank in self._elsewhere)

    def exchange(
        self, parts: Sequence[torch.Tensor], sends: Sequence[int], receives: Sequence[int], *, phase: str
    ) -> Transfer:
        """Sends the rows of each part, which lie in the order of their destinations. They arrive in the order of their sources.

        Args:
            sends: number of rows for each rank, this rank included.
            receives: number of rows from each rank, this rank included.
        """
        if self.ranks.world_size == 1:
            return Transfer(self.ranks, phase, tuple(parts))
        received = tuple(part.new_empty((sum(receives), *part.shape[1:])) for part in parts)
        sent = tuple(part.contiguous() for part in parts)
        works = []
        for target, part in zip(received, sent, strict=True):
            self._count(part, sends)
            works.append(
                dist.all_to_all_single(
                    _bytes(target), _bytes(part), list(receives), list(sends), group=self.ranks.group, async_op=True
                )
            )
        return Transfer(self.ranks, phase, received, works, sent)

    def gather(self, parts: Sequence[torch.Tensor], *, phase: str) -> Transfer:
        """Gathers every rank's rows in rank order. Every rank passes the same number of rows."""
        if self.ranks.world_size == 1:
            return Transfer(self.ranks, phase, tuple(parts))
        size = self.ranks.world_size
        received = tuple(part.new_empty((size * part.shape[0], *part.shape[1:])) for part in parts)
        sent = tuple(part.contiguous() for part in parts)
        works = []
        for target, part in zip(received, sent, strict=True):
            self._count(part, [part.shape[0]] * size)
            works.append(_all_gather(_bytes(target), _bytes(part), group=self.ranks.group, async_op=True))
        return Transfer(self.ranks, phase, received, works, sent)

    def swap_counts(self, sends_R: torch.Tensor, *, phase: str) -> tuple[list[int], list[int]]:
        """Exchanges row counts. Takes the rows for each rank, int64 `(R,)`, and returns the rows for and from each rank."""
        once = [1] * self.ranks.world_size
        (receives_R1,) = self.exchange([sends_R[:, None]], once, once, phase=phase).wait(host=True)
        return sends_R.tolist(), receives_R1[:, 0].tolist()


def _bytes(rows_SC: torch.Tensor) -> torch.Tensor:
    return rows_SC.view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Holds rows as they travel: `x` `(S, K)` in the model's dtype, or e4m3 as int32 `(S, K/4)` with float32 `scales`."""

    x: torch.Tensor
    scales: torch.Tensor | None = None

    def parts(self) -> list[torch.Tensor]:
        return [self.x] if self.scales is None else [self.x, self.scales]

    def followed_by(self, x: torch.Tensor, scales: torch.Tensor | None) -> Rows:
        """Returns these rows and further ones of the same form behind them."""
        both = None if self.scales is None or scales is None else torch.cat([self.scales, scales])
        return Rows(x=torch.cat([self.x, x]), scales=both)


def pack_beside(ids: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Packs ids, weights and scales as int32 `(S, t + t + K/128)`, so that one message carries them instead of three."""
    parts = [ids, weights.view(torch.int32)]
    return torch.cat(parts if scales is None else [*parts, scales.view(torch.int32)], dim=1)


def unpack_beside(beside: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the ids, weights and scales that `pack_beside` packed."""
    ids, weights, scales = (part.contiguous() for part in beside.tensor_split((top_k, 2 * top_k), dim=1))
    return ids, weights.view(torch.float32), scales.view(torch.float32) if scales.shape[1] else None


def unpack(x: torch.Tensor, quantised: bool) -> torch.Tensor:
    """Returns rows in their real dtype. e4m3 rows travel as int32, because few torch operators can index e4m3."""
    return x.view(torch.float8_e4m3fn) if quantised else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """Carries the state of one Standard-format dispatch from prepare to finalize."""

    home: Routing
    """Routing, by physical ids, of the tokens that this rank passed to prepare."""
    local: Routing
    """Routing, by local slots, of the received rows."""
    tokens_S: torch.Tensor | None
    """int64: index of this rank's token of each sent row, ascending within a destination. None: all tokens go to all ranks."""
    slots_St: torch.Tensor | None
    """bool: the slots of that token which its destination computes. It may be None unless `combine_order` is "slot"."""
    sends: list[int]
    receives: list[int]


class TorchDistributedPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Base of the portable backends. A synchronous call is the asynchronous call, received at once, with the same bits."""

    def __init__(self, ranks: RankContext, spec: LayerSpec, options: PrepareFinalizeOptions):
        super().__init__(ranks, spec, options)
        if spec.layout.num_ranks * self.slices != ranks.world_size:
            raise ConfigError(
                f"the layout places experts on {spec.layout.num_ranks} ranks, there are {ranks.world_size}"
            )
        self.wire = Wire(ranks)
        self.starts_R = torch.tensor(spec.layout.offsets[:-1], dtype=torch.int32, device=ranks.device)
        self.ends_R = torch.tensor(spec.layout.offsets[1:], dtype=torch.int32, device=ranks.device)

    @property
    def slices(self) -> int:
        """Returns the number of ranks that share an entry of the layout and that this object joins."""
        return 1

    def network_bytes(self) -> int:
        return self.wire.network_bytes

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
        """Returns the rows, quantised if the scheme, the options and the hidden size (whole blocks) allow it."""
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
        """Returns the rank of each slot's expert, or -1 for a slot without an expert. Ranks without experts own no slot."""
        return torch.where(ids_Mt >= 0, torch.bucketize(ids_Mt, self.ends_R, right=True), -1)

    def combine(
        self, journey: Journey, y: torch.Tensor, reduce: TopKWeightAndReduce, out_MK: torch.Tensor
    ) -> Receiver[torch.Tensor]:
        """Sends results home and adds them in float32, in the order that `combine_order` fixes."""
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
