"""How queued requests become a step: pure functions and the values they pass. No asyncio, no Ray.

Legend: M tokens, K hidden size, t = top-k.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from epserve.errors import InvalidRequest
from epserve.step import DeviceRows, RegionRows

from .budgets import Claim


class Priority(IntEnum):
    """The larger, the sooner. The numbers are weights: where the queue is full, a client's HIGH tokens get eight times the
    share of its NORMAL ones. No class ever waits for another one to be empty, so none starves."""

    LOW = 1
    NORMAL = 8
    HIGH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One request. `hidden` `(M, K)` on the CPU in the model's dtype; with a `source` it has no values (device meta).

    ids `(M, t)` int32 logical and weights `(M, t)` float32: both, or neither (then the service gates and adds the shared
    experts). deadline: in time.monotonic() seconds.
    """

    layer: int
    hidden: torch.Tensor
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    deadline: float
    request_id: str = ""
    client: str = ""
    """Whose share of the queue it uses."""
    priority: Priority = Priority.NORMAL
    trace: Any = None
    """Comes back in the records of the request's steps, unread."""
    claim: Claim | None = None
    """What it counts against its client's limits where the steps are ordered; the door has counted it in this process."""
    routing_checked: bool = False
    """`check_routing` has seen ids and weights, as this model's. The engine reads them all itself where it has not."""
    left_out: set[int] = field(default_factory=set, compare=False)
    """Filled while it is served: experts that the answer had to do without (engine.when_experts_missing)."""
    source: RegionRows | None = None
    """Where the hidden states lie, on the GPU of one rank: all rows then go to that rank, which checks their values."""
    target: RegionRows | None = None
    """Where the rank puts the result: the answer then has no values (device meta). On the same GPU as `source`."""

    @property
    def region(self) -> int | None:
        """A region that ties the request to the rank that has it open."""
        where = self.source or self.target
        return where.region if where is not None else None

    @property
    def mode(self) -> str:
        return "block" if self.ids is None else "routed"

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[0]

    @property
    def key(self) -> Key:
        """Requests with equal keys can share a step."""
        return self.layer, self.mode, 0 if self.ids is None else self.ids.shape[1]

    @property
    def flow(self) -> Flow:
        return self.client, self.priority


Key = tuple[int, str, int]
Flow = tuple[str, Priority]
"""A client's requests of one priority: what gets a fair share."""


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """A request in the queue. Rows before `taken` are in steps already; `done` counts finished rows.

    start: in the queue's virtual time, when its first token would be served if every flow had its share.
    """

    batch: Batch
    future: Any
    taken: int = 0
    done: int = 0
    attempts: int = 0
    out_MK: torch.Tensor | None = None
    start: float = 0.0
    queued: float = field(default_factory=time.monotonic)

    @property
    def waiting(self) -> int:
        return self.batch.num_tokens - self.taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows start .. stop-1 of a request, in one of its attempts."""

    item: Item
    start: int
    stop: int
    attempt: int = 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """Pieces of requests with one key, in the order of the queue."""

    pieces: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def key(self) -> tuple[int, str, int]:
        return self.pieces[0].item.batch.key


class StepQueue:
    """Requests in the order of their turn: fair queueing by tokens over flows, all layers together.

    Each flow has a virtual clock that its tokens move on, by their number over its weight; the request whose *last* token is
    due first is next (self-clocked fair queueing, which does what deficit round robin does without its rounds). A client
    with ten thousand tokens in the queue therefore delays one with sixteen by those sixteen and the step that runs.
    What has the same key may join the step of the next one, in the same order.
    """

    def __init__(self) -> None:
        self._lanes: dict[Key, list[tuple[float, int, Item]]] = {}
        self._again: deque[Item] = deque()  # of failed steps: before all others, each alone
        self._clocks: dict[Flow, float] = {}
        self._now = 0.0  # virtual time
        self._numbers = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        yield from self._again
        for lane in self._lanes.values():
            yield from (item for _, _, item in lane)

    def next_joins(self) -> tuple[int, int]:
        """Requests and tokens that the next step could have, were its size not limited."""
        if self._again:
            return 1, self._again[0].waiting
        lane = self._next_lane() or ()
        return len(lane), sum(item.waiting for _, _, item in lane)

    def add(self, item: Item) -> None:
        batch = item.batch
        item.start = max(self._now, self._clocks.get(batch.flow, 0.0))
        due = self._clocks[batch.flow] = item.start + batch.num_tokens / batch.priority
        heapq.heappush(self._lanes.setdefault(batch.key, []), (due, next(self._numbers), item))
        self._size += 1

    def put_back(self, items: Iterable[Item]) -> None:
        """To the front, in their order: they have waited longest."""
        again = list(items)
        moved = {id(item) for item in again}
        self._keep(lambda item: id(item) not in moved)  # the rest of a long one still lay here
        self._again.extendleft(reversed(again))
        self._size += len(again)

    def drop_finished(self) -> None:
        """Forget requests whose callers are gone: cancelled, or past their deadline."""
        if any(item.future.done() for item in self):
            self._keep(lambda item: not item.future.done())

    def take(self, max_tokens: int) -> JoinedStep | None:
        """The next step, of at most `max_tokens` tokens. A longer request leaves its rest at the front.

        A request whose step failed before goes alone, so that one that breaks ranks takes no other one along.
        """
        self.drop_finished()
        if self._again:
            item = self._again[0]
            piece = _cut(item, max_tokens)
            if not item.waiting:
                self._again.popleft()
                self._size -= 1
            return JoinedStep(pieces=(piece,))
        lane = self._next_lane()
        if lane is None:
            return None
        head, room = lane[0][2], max_tokens
        pieces: list[Piece] = []
        while lane and room > 0:
            item = lane[0][2]
            pieces.append(_cut(item, room))
            room -= pieces[-1].num_tokens
            if not item.waiting:
                heapq.heappop(lane)
                self._size -= 1
        # Up to where the one whose turn it was got; those that joined it were ahead of theirs.
        self._now = max(self._now, head.start + head.taken / head.batch.priority)
        self._forget_clocks()
        return JoinedStep(pieces=tuple(pieces))

    def _next_lane(self) -> list[tuple[float, int, Item]] | None:
        lanes = [lane for lane in self._lanes.values() if lane]
        return min(lanes, key=lambda lane: lane[0][:2]) if lanes else None

    def _keep(self, wanted) -> None:
        self._again = deque(filter(wanted, self._again))
        for lane in self._lanes.values():
            kept = [entry for entry in lane if wanted(entry[2])]
            if len(kept) < len(lane):
                heapq.heapify(kept)
                lane[:] = kept
        self._size = len(self._again) + sum(map(len, self._lanes.values()))

    def _forget_clocks(self) -> None:
        """Of flows that are back at the present: there are as many as there have been connections."""
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane}
        if not self._size:
            self._clocks.clear()
            self._now = 0.0
        elif len(self._clocks) > 2 * self._size + 64:
            self._clocks = {flow: clock for flow, clock in self._clocks.items() if clock > self._now}


def _cut(item: Item, room: int) -> Piece:
    """Takes up to `room` rows."""
    start = item.taken
    item.taken += min(item.waiting, room)
    return Piece(item=item, start=start, stop=item.taken, attempt=item.attempts)


def last_in(waiting: Iterable[Item], newcomer: Batch, needed: int) -> list[Item]:
    """Those that have to go so that `newcomer` finds `needed` tokens' place in a full queue; the last that came go first.

    Of flows that would still hold more than the newcomer's own then, by tokens over weight; never what a step has begun.
    `waiting`: of one layer, in the order of arrival. Empty when nobody holds too much: the newcomer is refused.
    """
    held: dict[Flow, float] = {}
    queues: dict[Flow, list[Item]] = {}
    for item in waiting:
        batch = item.batch
        held[batch.flow] = held.get(batch.flow, 0.0) + batch.num_tokens / batch.priority
        if not item.taken and not item.attempts and not item.future.done():
            queues.setdefault(batch.flow, []).append(item)
    mine = held.get(newcomer.flow, 0.0) + newcomer.num_tokens / newcomer.priority
    going: list[Item] = []
    while needed > 0:
        flow = max((flow for flow in queues if queues[flow]), key=lambda flow: held[flow], default=None)
        if flow is None or flow == newcomer.flow:
            return []
        item = queues[flow].pop()
        held[flow] -= item.batch.num_tokens / item.batch.priority
        if held[flow] < mine:
            return []
        going.append(item)
        needed -= item.batch.num_tokens
    return going


def share_parts(parts: Sequence[int], tokens_per_rank: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each rank the (part, rows) that make up its share, in order."""
    shares: list[list[tuple[int, int]]] = []
    part, used = 0, 0
    for room in tokens_per_rank:
        share: list[tuple[int, int]] = []
        while room:
            count = min(parts[part] - used, room)
            if count:
                share.append((part, count))
            room, used = room - count, used + count
            if used == parts[part]:
                part, used = part + 1, 0
        shares.append(share)
    return shares


def plain(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Rows start .. stop-1 of a step's part (the number of its piece), counted from the piece's first row."""

    part: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


Shares = tuple[tuple[Share, ...], ...]
"""What each rank computes, in the order of its rows."""


def spread(step: JoinedStep, num_ranks: int, pins: Sequence[int | None] = ()) -> Shares:
    """Who computes what. pins: for each piece the rank that it is tied to, or None; empty: none is.

    Without pins: contiguous and as even as it gets. What is tied comes first on its rank, and the rest evens the ranks out.
    """
    pins = pins or (None,) * len(step.pieces)
    tied = [0] * num_ranks
    for piece, rank in zip(step.pieces, pins, strict=True):
        if rank is not None:
            tied[rank] += piece.num_tokens
    free = [part for part, rank in enumerate(pins) if rank is None]
    rows = [step.pieces[part].num_tokens for part in free]
    used = dict.fromkeys(free, 0)
    shares: list[tuple[Share, ...]] = []
    for rank, parts in enumerate(share_parts(rows, fill(sum(rows), tied))):
        mine = [
            Share(part=part, start=0, stop=step.pieces[part].num_tokens) for part, at in enumerate(pins) if at == rank
        ]
        for index, count in parts:
            part = free[index]
            mine.append(Share(part=part, start=used[part], stop=used[part] + count))
            used[part] += count
        shares.append(tuple(mine))
    return tuple(shares)


def fill(num_tokens: int, held: Sequence[int]) -> tuple[int, ...]:
    """How many of `num_tokens` each rank gets beside what it holds, so that all have as nearly the same as possible."""
    open_ranks = list(range(len(held)))
    while True:
        base, extra = divmod(num_tokens + sum(held[rank] for rank in open_ranks), len(open_ranks))
        below = [rank for rank in open_ranks if held[rank] <= base]
        if len(below) == len(open_ranks):
            break
        open_ranks = below
    rooms = [0] * len(held)
    for number, rank in enumerate(open_ranks):
        rooms[rank] = base + (number < extra) - held[rank]
    return tuple(rooms)


def device_rows(step: JoinedStep, shares: Sequence[Share]) -> tuple[DeviceRows, ...]:
    """For a rank: where the rows of each of its shares come from and go to; empty where all are the host's."""
    if all(step.pieces[share.part].item.batch.region is None for share in shares):
        return ()
    found = []
    for share in shares:
        piece = step.pieces[share.part]
        batch, first = piece.item.batch, piece.start + share.start
        source = batch.source.row(first, batch.hidden.shape[1]) if batch.source is not None else None
        target = batch.target.row(first, batch.hidden.shape[1]) if batch.target is not None else None
        found.append(DeviceRows(rows=share.num_tokens, source=source, target=target))
    return tuple(found)


def refusal(piece: Piece, why: Mapping[str, Any]) -> InvalidRequest:
    """What a request is told of which a rank could not take rows from, or put some into, a region of its GPU."""
    if "row" not in why:
        return InvalidRequest(f"{why['field']}: {why['text']}", field=why["field"])
    return not_finite(piece.item.batch.hidden.dtype, piece.start + why["row"], why["column"], why["value"])


def not_finite(dtype: torch.dtype, row: int, column: int, value: str) -> InvalidRequest:
    """dtype: the model's. value: what is there, and what it becomes."""
    name = str(dtype).removeprefix("torch.")
    return InvalidRequest(
        f"hidden_states: holds NaN or infinite values as {name}, the model's dtype; the first is in row {row}, column"
        f" {column}: {value}; send finite ones",
        field="hidden_states",
    )


def shards(step: JoinedStep, shares: Shares, empty: Callable[..., torch.Tensor] = plain) -> list[list[torch.Tensor]]:
    """What each rank gets: its rows of hidden states, and of ids and weights where the step is routed.

    Hidden states in a region of the rank's GPU are not among them. empty: (shape, dtype) -> a tensor for the rows of several
    requests. A single one's are not copied.
    """
    names = ("hidden",) if step.key[1] == "block" else ("hidden", "ids", "weights")
    return [[_gather(step, mine, name, empty) for name in names] for mine in shares]


def hand_out(step: JoinedStep, out_MK: torch.Tensor, shares: Shares) -> list[Item]:
    """Give each request its rows of the step's result; returns the requests that are complete now.

    out_MK: rows of all shares whose result comes to the host, in the order of ranks and shares.
    """
    found: dict[int, list[torch.Tensor]] = {}
    first = 0
    for share in itertools.chain.from_iterable(shares):
        if step.pieces[share.part].item.batch.target is None:
            found.setdefault(share.part, []).append(out_MK[first : first + share.num_tokens])
            first += share.num_tokens
    complete = []
    for part, piece in enumerate(step.pieces):
        item = piece.item
        if piece.attempt != item.attempts:
            continue  # another step of the request failed meanwhile: it starts anew
        if item.batch.target is not None:
            item.out_MK = torch.empty(item.batch.hidden.shape, dtype=item.batch.hidden.dtype, device="meta")
        else:
            _put(piece, found.get(part, []))
        item.done += piece.num_tokens
        if item.done == item.batch.num_tokens:
            complete.append(item)
    return complete


def _put(piece: Piece, chunks: Sequence[torch.Tensor]) -> None:
    item = piece.item
    rows = _joined(chunks)
    if piece.num_tokens == item.batch.num_tokens and rows is not None:
        item.out_MK = rows
        return
    if item.out_MK is None:
        hidden = item.batch.hidden
        item.out_MK = torch.empty(hidden.shape, dtype=hidden.dtype)
    at = piece.start
    for chunk in chunks:
        item.out_MK[at : at + len(chunk)] = chunk
        at += len(chunk)


def _joined(chunks: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The chunks as one tensor where they lie one behind the other, which is so unless other rows are tied to their ranks."""
    first = chunks[0]
    end = first.data_ptr()
    for chunk in chunks:
        if chunk.data_ptr() != end:
            return None
        end += chunk.nbytes
    return first.as_strided((sum(map(len, chunks)), first.shape[1]), first.stride())


def _gather(step: JoinedStep, shares: Sequence[Share], name: str, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
    parts = []
    for share in shares:
        piece = step.pieces[share.part]
        batch = piece.item.batch
        if name == "hidden" and batch.source is not None:
            continue  # on the rank's GPU already
        parts.append(getattr(batch, name)[piece.start + share.start : piece.start + share.stop])
    if not parts:
        like = getattr(step.pieces[0].item.batch, name)
        return torch.empty((0, *like.shape[1:]), dtype=like.dtype)
    if len(parts) == 1:
        return parts[0].contiguous()
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=empty(shape, parts[0].dtype))
