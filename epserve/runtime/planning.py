"""How queued requests become a step: pure functions and the values they pass. No asyncio, no Ray.

Legend: M tokens, K hidden size, t = top-k.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One request. `hidden` `(M, K)` on the CPU in the model's dtype.

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
    trace: Any = None
    """Comes back in the records of the request's steps, unread."""

    @property
    def mode(self) -> str:
        return "block" if self.ids is None else "routed"

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[0]

    @property
    def key(self) -> tuple[int, str, int]:
        """Requests with equal keys can share a step."""
        return self.layer, self.mode, 0 if self.ids is None else self.ids.shape[1]


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """A request in the queue. Rows before `taken` are in steps already; `done` counts finished rows."""

    batch: Batch
    future: Any
    taken: int = 0
    done: int = 0
    attempts: int = 0
    out_MK: torch.Tensor | None = None
    queued: float = field(default_factory=time.monotonic)

    @property
    def waiting(self) -> int:
        return self.batch.num_tokens - self.taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows start .. stop-1 of a request."""

    item: Item
    start: int
    stop: int

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


def split_evenly(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Contiguous shares, as even as it gets: the first ranks take one more."""
    base, extra = divmod(num_tokens, num_ranks)
    return tuple(base + (rank < extra) for rank in range(num_ranks))


@dataclass(slots=True)
class StepQueue:
    """First in, first out over all layers and clients; what follows the head with the same key may join its step."""

    items: deque[Item] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: Item) -> None:
        self.items.append(item)

    def put_back(self, items: Iterable[Item]) -> None:
        """To the front, in their order: they have waited longest."""
        known = {id(item) for item in self.items}
        self.items.extendleft(reversed([item for item in items if id(item) not in known]))

    def drop_finished(self) -> None:
        """Forget requests whose callers are gone: cancelled, or past their deadline."""
        if any(item.future.done() for item in self.items):
            self.items = deque(item for item in self.items if not item.future.done())

    def take(self, max_tokens: int) -> JoinedStep | None:
        """The next step, of at most `max_tokens` tokens. A longer request leaves its rest at the front.

        A request whose step failed before goes alone, so that one that breaks ranks takes no other one along.
        """
        self.drop_finished()
        if not self.items:
            return None
        head = self.items[0]
        key, alone, room = head.batch.key, head.attempts > 0, max_tokens
        pieces: list[Piece] = []
        rest: deque[Item] = deque()
        for item in self.items:
            joins = item is head or (not alone and item.attempts == 0 and item.batch.key == key and room > 0)
            if not joins:
                rest.append(item)
                continue
            count = min(item.waiting, room)
            pieces.append(Piece(item=item, start=item.taken, stop=item.taken + count))
            item.taken += count
            room -= count
            if item.waiting:
                rest.append(item)
        self.items = rest
        return JoinedStep(pieces=tuple(pieces))


def shards(step: JoinedStep, tokens_per_rank: Sequence[int]) -> list[list[torch.Tensor]]:
    """What each rank gets: its rows of hidden states, and of ids and weights where the step is routed."""
    names = ("hidden",) if step.key[1] == "block" else ("hidden", "ids", "weights")
    per_rank: list[list[torch.Tensor]] = []
    first = 0
    for count in tokens_per_rank:
        rows = list(_rows(step.pieces, first, first + count))
        per_rank.append([_gather(step, rows, name) for name in names])
        first += count
    return per_rank


def hand_out(step: JoinedStep, out_MK: torch.Tensor) -> list[Item]:
    """Give each request its rows of the step's result; returns the requests that are complete now."""
    complete, first = [], 0
    for piece in step.pieces:
        item, rows = piece.item, out_MK[first : first + piece.num_tokens]
        first += piece.num_tokens
        if piece.num_tokens == item.batch.num_tokens:
            item.out_MK = rows
        else:
            if item.out_MK is None:
                item.out_MK = torch.empty_like(item.batch.hidden)
            item.out_MK[piece.start : piece.stop] = rows
        item.done += piece.num_tokens
        if item.done == item.batch.num_tokens:
            complete.append(item)
    return complete


def _rows(pieces: Sequence[Piece], start: int, stop: int):
    """(batch, first row, last row + 1) of what lies at start .. stop-1 of the joined rows."""
    offset = 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(stop - offset, piece.num_tokens)
        if low < high:
            yield piece.item.batch, piece.start + low, piece.start + high
        offset += piece.num_tokens


def _gather(step: JoinedStep, rows, name: str) -> torch.Tensor:
    parts = [getattr(batch, name)[low:high] for batch, low, high in rows]
    if not parts:
        return getattr(step.pieces[0].item.batch, name)[:0].contiguous()
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
