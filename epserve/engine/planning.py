"""The way of queued requests into a step: pure functions and the values that they pass. No asyncio, no Ray.

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
    """Priority of a request. Larger ones come sooner.

    The numbers are weights: in a full queue, HIGH tokens of a client get eight times the share of its NORMAL ones. No class waits
    until another one is empty, so none starves.
    """

    LOW = 1
    NORMAL = 8
    HIGH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One request.

    Attributes:
        layer: number of the MoE layer.
        hidden: `(M, K)` on the CPU in the model's dtype. With a `source` it has no values (device meta).
        ids: `(M, t)` int32 logical ids, or None: the service gates and adds the shared experts.
        weights: `(M, t)` float32. It comes with `ids`.
        gradient: gradients of the results, `(M, K)` in the model's dtype. With it the request is a backward one, and its result
            is gradients.
        deadline: in seconds of time.monotonic().
        request_id: goes into logs and traces.
        client: name of the client whose share of the queue the request uses.
        priority: its priority in that share.
        trace: comes back in the records of the request's steps, unread.
        claim: its use of the client's limits, counted where the steps are ordered. This process's door has counted it.
        routing_checked: `check_routing` has seen ids and weights for this model. Otherwise the engine reads them.
        source: place of the hidden states on the GPU of one rank. All rows then go to that rank, which checks their values.
        target: place of the result on the same GPU. The answer then has no values (device meta).
    """

    layer: int
    hidden: torch.Tensor
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    deadline: float
    request_id: str = ""
    client: str = ""
    priority: Priority = Priority.NORMAL
    trace: Any = None
    claim: Claim | None = None
    routing_checked: bool = False
    source: RegionRows | None = None
    target: RegionRows | None = None

    @property
    def region(self) -> int | None:
        """Returns the number of a region that ties the request to the rank that has it open."""
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
        """Returns the columns of the result. Behind the gradients of rows come those of routing weights (`joined_gradients`)."""
        hidden = self.hidden.shape[1]
        if self.gradient is None or self.ids is None:
            return hidden
        return gradient_columns(hidden, self.ids.shape[1], self.hidden.dtype)

    @property
    def share(self) -> float:
        """Returns the weight of a token in the flow's clock. A backward token takes about as long as two others."""
        return self.priority / (BACKWARD_COST if self.backward else 1)

    @property
    def key(self) -> Key:
        """Requests with equal keys can share a step."""
        return self.layer, self.mode, 0 if self.ids is None else self.ids.shape[1], self.backward

    @property
    def flow(self) -> Flow:
        return self.client, self.priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of one request.

    Attributes:
        out_MK: the result, `(M, K)` in the model's dtype. With a `target` it has no values (device meta). A backward request gets
            gradients, in mode "routed" as `joined_gradients`.
        left_out: experts that were on no rank and added nothing (engine.when_experts_missing).
        not_finite: rows of a result in a `target` that are not finite. The door looks at other results.
    """

    out_MK: torch.Tensor
    left_out: frozenset[int] = frozenset()
    not_finite: frozenset[int] = frozenset()


Key = tuple[int, str, int, bool]
Flow = tuple[str, Priority]
"""A client's requests of one priority. Flows have fair shares of the queue."""


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """A request in the queue.

    Attributes:
        batch: the request.
        future: gets its Answer.
        taken: rows before this one are in steps already.
        done: number of finished rows.
        attempts: number of steps that failed with it.
        out_MK: the result as far as it is there.
        left_out, not_finite: as in Answer, so far.
        start: time of its first token in the queue's virtual time, if every flow had its share.
        queued: time when it was accepted.
    """

    batch: Batch
    future: Any
    taken: int = 0
    done: int = 0
    attempts: int = 0
    out_MK: torch.Tensor | None = None
    left_out: set[int] = field(default_factory=set)
    not_finite: set[int] = field(default_factory=set)
    start: float = 0.0
    queued: float = field(default_factory=time.monotonic)

    @property
    def waiting(self) -> int:
        return self.batch.num_tokens - self.taken

    def start_anew(self) -> None:
        """Forgets the rows of finished steps, since another step of the request has failed."""
        self.taken = self.done = 0
        self.out_MK = None
        self.left_out.clear()
        self.not_finite.clear()

    def answer(self) -> Answer:
        assert self.out_MK is not None
        left_out, not_finite = frozenset(self.left_out), frozenset(self.not_finite)
        return Answer(out_MK=self.out_MK, left_out=left_out, not_finite=not_finite)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows start .. stop-1 of a request, in one of its attempts.

    `part` is the number of the piece in its step. The pieces of a rank's share have the numbers of the pieces that they are cut
    from.
    """

    item: Item
    start: int
    stop: int
    attempt: int = 0
    part: int = 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


Step = tuple[Piece, ...]
"""Pieces of requests with one key, in the order of the queue."""


class StepQueue:
    """Keeps requests in the order of their turn: fair queueing by tokens over flows, all layers together.

    Each flow has a virtual clock. Tokens move it on by their number over the flow's weight. The request whose *last* token is due
    first is next (self-clocked fair queueing, which has the effect of deficit round robin without its rounds). A client with ten
    thousand tokens in the queue therefore delays one with sixteen by those sixteen and the step that runs. Requests with the
    same key may join the step of the next request, in the same order.
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
        """Returns the numbers of requests and tokens of the next step, if its size were not limited."""
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
        """Puts requests to the front in their order, since they have waited longest."""
        again = list(items)
        moved = {id(item) for item in again}
        self._keep(lambda item: id(item) not in moved)  # the rest of a long one still lay here
        self._again.extendleft(reversed(again))
        self._size += len(again)

    def drop_finished(self) -> None:
        """Forgets requests whose callers are gone: cancelled, or past their deadline."""
        if any(item.future.done() for item in self):
            self._keep(lambda item: not item.future.done())

    def take(self, max_tokens: int) -> Step:
        """Returns the next step, of at most `max_tokens` tokens. Empty: no request waits.

        A longer request leaves its rest at the front. A request whose step failed before goes alone, so that a request that
        breaks ranks takes no other one along.
        """
        self.drop_finished()
        if self._again:
            item = self._again[0]
            piece = _cut(item, max_tokens)
            if not item.waiting:
                self._again.popleft()
                self._size -= 1
            return (piece,)
        lane = self._next_lane()
        if lane is None:
            return ()
        head, room = lane[0][2], max_tokens
        pieces: list[Piece] = []
        while lane and room > 0:
            item = lane[0][2]
            pieces.append(_cut(item, room, part=len(pieces)))
            room -= pieces[-1].num_tokens
            if not item.waiting:
                heapq.heappop(lane)
                self._size -= 1
        # The clock goes on to the end of the request whose turn it was. The others joined ahead of their turn.
        self._now = max(self._now, head.start + head.taken / head.batch.share)
        self._forget_clocks()
        return tuple(pieces)

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
        """Forgets flows that are back at the present. There are as many as there have been connections."""
        self._lanes = {key: lane for key, lane in self._lanes.items() if lane}
        if not self._size:
            self._clocks.clear()
            self._now = 0.0
        elif len(self._clocks) > 2 * self._size + 64:
            self._clocks = {flow: clock for flow, clock in self._clocks.items() if clock > self._now}


def _cut(item: Item, room: int, part: int = 0) -> Piece:
    """Takes up to `room` rows."""
    start = item.taken
    item.taken += min(item.waiting, room)
    return Piece(item=item, start=start, stop=item.taken, attempt=item.attempts, part=part)


def last_in(waiting: Iterable[Item], newcomer: Batch, needed: int) -> list[Item]:
    """Returns the requests that have to leave a full queue, so that `newcomer` finds room for `needed` tokens.

    They belong to flows that then still hold more than the newcomer's own, by tokens over weight. The last that came go first.
    A request that a step has begun stays.

    Args:
        waiting: requests of one layer, in the order of arrival.
        newcomer: the request that has no room.
        needed: number of tokens.

    Returns:
        Empty when no flow holds too much. The newcomer is refused then.
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
