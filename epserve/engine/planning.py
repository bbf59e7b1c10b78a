"""How queued requests become a step: pure functions and the values they pass. No asyncio, no Ray.

Legend: M tokens, K hidden size, t = top-k.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from epserve.rank.step import RegionRows, gradient_columns

from .budgets import Claim

BACKWARD_COST = 2
"""Time of a backward token over that of a forward one, about (benchmarks/gradients.py)."""


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
    experts). gradient: of the results, `(M, K)` in the model's dtype. With it the request is a backward one, and its result is
    gradients. deadline: in time.monotonic() seconds.
    """

    layer: int
    hidden: torch.Tensor
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
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
    not_finite: set[int] = field(default_factory=set, compare=False)
    """Filled while it is served, with a `target` only: rows of the result that are not finite. Others are looked at here."""
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
    def backward(self) -> bool:
        return self.gradient is not None

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[0]

    @property
    def columns(self) -> int:
        """Of the result. Behind the gradients of rows come those of routing weights (`joined_gradients`)."""
        hidden = self.hidden.shape[1]
        if self.gradient is None or self.ids is None:
            return hidden
        return gradient_columns(hidden, self.ids.shape[1], self.hidden.dtype)

    @property
    def share(self) -> float:
        """What the flow's clock divides tokens by: a backward token takes about as long as two others."""
        return self.priority / (BACKWARD_COST if self.backward else 1)

    @property
    def key(self) -> Key:
        """Requests with equal keys can share a step."""
        return self.layer, self.mode, 0 if self.ids is None else self.ids.shape[1], self.backward

    @property
    def flow(self) -> Flow:
        return self.client, self.priority


Key = tuple[int, str, int, bool]
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
    def key(self) -> Key:
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
        due = self._clocks[batch.flow] = item.start + batch.num_tokens / batch.share
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
        self._now = max(self._now, head.start + head.taken / head.batch.share)
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
