"""Encodes a result for its reply: in the requested dtype, at the requested place, and finite unless told otherwise.

Legend: M tokens, K hidden size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from epserve.errors import NotFinite
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import fp8, wire

from .finite import rows_not_finite

if TYPE_CHECKING:
    from .codec import CheckedRequest
    from .regions import Slice

SHOWN_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Holds an encoded result. `not_finite`: the rows that hold NaN or infinity, for a request that keeps them."""

    tensors: dict[pb.Field, wire.WireTensor]
    not_finite: tuple[int, ...] = ()


def encode_reply(out: torch.Tensor, checked: CheckedRequest, not_finite: Collection[int] = ()) -> Encoded:
    """Returns the result `(M, K)` in the dtype that the request asks for. It is written to the request's region, if there is one.

    not_finite: the rows that a rank found in a result on a GPU. Other results are checked here. Raises NotFinite.
    """
    where = checked.output
    if where is not None and where.on_gpu:  # the rank has already written the result
        tensor = wire.WireTensor(dtype=checked.reply_dtype, shape=tuple(out.shape), data=memoryview(b""))
        rows = _kept(sorted(not_finite), checked, out.dtype)
        return Encoded(tensors={pb.HIDDEN_STATES: _placed(tensor, where)}, not_finite=rows)
    quantised = checked.reply_dtype == pb.FP8_E4M3
    made = out if quantised else out.to(getattr(torch, wire.DTYPE_NAMES[checked.reply_dtype]))
    rows = _kept(rows_not_finite(made), checked, out.dtype)  # the check precedes any write to a region
    if quantised:
        values, scales = fp8.quantise(out)
        tensors = {
            pb.HIDDEN_STATES: wire.encode(values, "hidden_states"),
            pb.HIDDEN_SCALES: wire.encode(scales, "hidden_scales"),
        }
        return Encoded(tensors=tensors, not_finite=rows)
    tensor = wire.encode(made, "hidden_states")
    if where is not None:
        where.write(tensor.data)
        tensor = _placed(tensor, where)
    return Encoded(tensors={pb.HIDDEN_STATES: tensor}, not_finite=rows)


def _placed(tensor: wire.WireTensor, where: Slice) -> wire.WireTensor:
    return tensor.placed(pb.RegionSlice(region=where.region.name, offset=where.offset, byte_size=where.nbytes))


def _kept(rows: list[int], checked: CheckedRequest, computed: torch.dtype) -> tuple[int, ...]:
    """Returns `rows`. Raises NotFinite unless the request keeps them."""
    if not rows or checked.keep_not_finite:
        return tuple(rows)
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", ..." if len(rows) > SHOWN_ROWS else "")
    model, reply = str(computed).removeprefix("torch."), wire.DTYPE_NAMES[checked.reply_dtype]
    wider = (
        ""
        if reply in (model, "float8_e4m3fn")
        else f", a wider reply_dtype than {reply} (the model computes in {model})"
    )
    raise NotFinite(
        f"hidden_states: layer {checked.layer} makes NaN or infinity of {len(rows)} of {checked.tokens} tokens (rows {shown}):"
        f" values pass the largest number on the way; send smaller hidden_states or topk_weights{wider}, serve the model in a"
        " wider dtype (model.dtype), or keep the rows (keep_not_finite; in Python not_finite_rows=[])",
        field="hidden_states",
    )
