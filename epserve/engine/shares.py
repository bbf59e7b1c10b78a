"""Who computes which rows of a step, and how they get there and back: pure functions. No asyncio, no Ray.

Legend: M tokens, K hidden size, t = top-k.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epserve.errors import InvalidRequest
from epserve.rank.step import DeviceRows

from .planning import Item, JoinedStep, Piece


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


def not_finite(dtype: torch.dtype, row: int, column: int, value: str, field: str = "hidden_states") -> InvalidRequest:
    """dtype: the model's. value: what is there, and what it becomes."""
    name = str(dtype).removeprefix("torch.")
    return InvalidRequest(
        f"{field}: holds NaN or infinite values as {name}, the model's dtype; the first is in row {row}, column"
        f" {column}: {value}; send finite ones",
        field=field,
    )


def shards(step: JoinedStep, shares: Shares, empty: Callable[..., torch.Tensor] = plain) -> list[list[torch.Tensor]]:
    """What each rank gets: its rows of hidden states, of gradients in a backward step, and of ids and weights in a routed one.

    Hidden states in a region of the rank's GPU are not among them. empty: (shape, dtype) -> a tensor for the rows of several
    requests. A single one's are not copied.
    """
    _, mode, _, backward = step.key
    names = ("hidden", *(("gradient",) if backward else ()), *(("ids", "weights") if mode == "routed" else ()))
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
        batch = item.batch
        item.out_MK = torch.empty((batch.num_tokens, batch.columns), dtype=batch.hidden.dtype)
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
