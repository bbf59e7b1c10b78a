"""The split of a step over the ranks, and the way of rows to the ranks and back: pure functions. No asyncio, no Ray.

Legend: M tokens, K hidden size, t = top-k.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from epserve.errors import InvalidRequest
from epserve.rank.step import PartRows

from .planning import Batch, Item, Piece, Step


def share_parts(parts: Sequence[int], tokens_per_rank: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns the (part, rows) pairs of each rank's share, in order."""
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


Shares = tuple[tuple[Piece, ...], ...]
"""The pieces that each rank computes, in the order of its rows."""


def spread(step: Step, num_ranks: int, pins: Sequence[int | None] = ()) -> Shares:
    """Splits the pieces of a step over the ranks.

    Args:
        step: the pieces.
        num_ranks: number of ranks.
        pins: for each piece the rank that it is tied to, or None. Empty: no piece is tied.

    Returns:
        Without pins, contiguous shares that are as even as possible. Tied pieces come first on their rank, and the others even
        the ranks out.
    """
    pins = pins or (None,) * len(step)
    tied = [0] * num_ranks
    for piece, rank in zip(step, pins, strict=True):
        if rank is not None:
            tied[rank] += piece.num_tokens
    free = [piece for piece, rank in zip(step, pins, strict=True) if rank is None]
    rows = [piece.num_tokens for piece in free]
    first = [piece.start for piece in free]
    shares: list[tuple[Piece, ...]] = []
    for rank, parts in enumerate(share_parts(rows, fill(sum(rows), tied))):
        mine = [piece for piece, at in zip(step, pins, strict=True) if at == rank]
        for index, count in parts:
            mine.append(replace(free[index], start=first[index], stop=first[index] + count))
            first[index] += count
        shares.append(tuple(mine))
    return tuple(shares)


def fill(num_tokens: int, held: Sequence[int]) -> tuple[int, ...]:
    """Returns each rank's part of `num_tokens`. With `held`, all ranks then have as nearly the same number as possible."""
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


def part_rows(share: Sequence[Piece]) -> tuple[PartRows, ...]:
    """Returns the rows of a rank's share by request, with their places in regions."""
    found = []
    for piece in share:
        batch, columns = piece.item.batch, piece.item.batch.hidden.shape[1]
        source = batch.source.row(piece.start, columns) if batch.source is not None else None
        target = batch.target.row(piece.start, columns) if batch.target is not None else None
        found.append(PartRows(part=piece.part, rows=piece.num_tokens, source=source, target=target))
    return tuple(found)


def refusal(piece: Piece, why: Mapping[str, Any]) -> InvalidRequest:
    """Returns the error of a request whose rows a rank could not read from, or write to, a region of its GPU."""
    if "row" not in why:
        return InvalidRequest(f"{why['field']}: {why['text']}", field=why["field"])
    return not_finite(piece.item.batch.hidden.dtype, piece.start + why["row"], why["column"], why["value"])


def not_finite(dtype: torch.dtype, row: int, column: int, value: str, field: str = "hidden_states") -> InvalidRequest:
    """Returns the error for a value that is not finite.

    Args:
        dtype: the model's dtype.
        row: row of the value.
        column: column of the value.
        value: the value as it was sent, and as it becomes in that dtype.
        field: the tensor of the value.
    """
    name = str(dtype).removeprefix("torch.")
    return InvalidRequest(
        f"{field}: holds NaN or infinite values as {name}, the model's dtype; the first is in row {row}, column"
        f" {column}: {value}; send finite ones",
        field=field,
    )


def shards(step: Step, shares: Shares, empty: Callable[..., torch.Tensor] = plain) -> list[list[torch.Tensor]]:
    """Returns the tensors of each rank: its rows of hidden states, of gradients (backward), and of ids and weights ("routed").

    Hidden states in a region of the rank's GPU are not among them. The rows of a single request are not copied.

    Args:
        step: the pieces.
        shares: their split over the ranks.
        empty: (shape, dtype) -> a tensor for the rows of several requests.
    """
    like = step[0].item.batch
    gradient, routed = ("gradient",) if like.backward else (), ("ids", "weights") if like.mode == "routed" else ()
    names = ("hidden", *gradient, *routed)
    return [[_gather(like, mine, name, empty) for name in names] for mine in shares]


def hand_out(step: Step, out_MK: torch.Tensor, shares: Shares) -> list[Item]:
    """Gives each request its rows of the step's result. Returns the requests that are complete now.

    out_MK: rows of all shares whose result comes to the host, in the order of ranks and shares.
    """
    found: dict[int, list[torch.Tensor]] = {}
    first = 0
    for share in itertools.chain.from_iterable(shares):
        if share.item.batch.target is None:
            found.setdefault(share.part, []).append(out_MK[first : first + share.num_tokens])
            first += share.num_tokens
    complete = []
    for piece in step:
        item = piece.item
        if piece.attempt != item.attempts:
            continue  # another step of the request failed meanwhile: it starts anew
        if item.batch.target is not None:
            item.out_MK = torch.empty(item.batch.hidden.shape, dtype=item.batch.hidden.dtype, device="meta")
        else:
            _put(piece, found.get(piece.part, []))
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
    """Returns the chunks as one tensor if they lie one behind the other, else None. Tied rows of others may lie between them."""
    first = chunks[0]
    end = first.data_ptr()
    for chunk in chunks:
        if chunk.data_ptr() != end:
            return None
        end += chunk.nbytes
    return first.as_strided((sum(map(len, chunks)), first.shape[1]), first.stride())


def _gather(like: Batch, share: Sequence[Piece], name: str, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
    parts = []
    for piece in share:
        batch = piece.item.batch
        if name == "hidden" and batch.source is not None:
            continue  # on the rank's GPU already
        parts.append(getattr(batch, name)[piece.start : piece.stop])
    if not parts:
        tensor = getattr(like, name)
        return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
    if len(parts) == 1:
        return parts[0].contiguous()
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=empty(shape, parts[0].dtype))
