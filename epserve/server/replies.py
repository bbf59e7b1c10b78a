"""Encodes a result for its reply: in the requested dtype, at the requested place, and finite unless told otherwise.

Legend: M tokens, K hidden size, t experts a token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from epserve.errors import NotFinite
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import fp8, wire
from epserve.rank.step import split_gradients

from .finite import rows_not_finite

if TYPE_CHECKING:
    from .codec import CheckedRequest
    from .region import Slice

SHOWN_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Holds an encoded result. `not_finite`: the rows that hold NaN or infinity, for a request that keeps them."""

    tensors: dict[pb.Field, wire.WireTensor]
    not_finite: tuple[int, ...] = ()


def encode_reply(out: torch.Tensor, checked: CheckedRequest, not_finite: Collection[int] = ()) -> Encoded:
    """Returns the result `(M, K)` in the dtype that the request asks for. It is written to the request's region, if there is one.

    The result of a Backward has the gradients of routing weights behind those of the rows, if the request has weights.

    not_finite: the rows that a rank found in a result on a GPU. Other results are checked here. Raises NotFinite.
    """
    if checked.backward and pb.TOPK_WEIGHTS in checked.headers:
        return _encode_both(out, checked)
    return _encode(out, checked, not_finite)


def _encode_both(out: torch.Tensor, checked: CheckedRequest) -> Encoded:
    dx_MK, dw_Mt = split_gradients(out, checked.headers[pb.HIDDEN_STATES].shape[1])
    dw_Mt = dw_Mt[:, : checked.headers[pb.TOPK_WEIGHTS].shape[1]]  # requests were padded to one width
    encoded = _encode(dx_MK, checked, rows_not_finite(dw_Mt))
    return replace(encoded, tensors={**encoded.tensors, pb.TOPK_WEIGHTS: wire.encode(dw_Mt, "topk_weights")})


def _encode(out: torch.Tensor, checked: CheckedRequest, not_finite: Collection[int]) -> Encoded:
    where = checked.output
    if where is not None and where.on_gpu:  # the rank has already written the result
        tensor = wire.WireTensor(dtype=checked.reply_dtype, shape=tuple(out.shape), data=memoryview(b""))
        rows = _kept(sorted(not_finite), checked, out.dtype)
        return Encoded(tensors={pb.HIDDEN_STATES: _placed(tensor, where)}, not_finite=rows)
    quantised = checked.reply_dtype == pb.FP8_E4M3
    made = out if quantised else out.to(getattr(torch, wire.DTYPE_NAMES[checked.reply_dtype]))
    # The check precedes any write to a region.
    rows = _kept(sorted({*rows_not_finite(made), *not_finite}), checked, out.dtype)
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


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _kept(rows: list[int], checked: CheckedRequest, computed: torch.dtype) -> tuple[int, ...]:
    """Returns `rows`. Raises NotFinite unless the request keeps them."""
    if not rows or checked.keep_not_finite:
        return tuple(rows)
    shown = ", ".join(map(str, rows[:SHOWN_ROWS])) + (", ..." if len(rows) > SHOWN_ROWS else "")
    model, reply = str(computed).removeprefix("torch."), wire.DTYPE_NAMES[checked.reply_dtype]
    narrow = checked.reply_dtype != pb.FP8_E4M3 and _largest(getattr(torch, reply)) < _largest(computed)
    wider = f", a wider reply_dtype than {reply} (the model computes in {model})" if narrow else ""
    if checked.backward:
        raise NotFinite(
            f"output_gradients: layer {checked.layer} makes NaN or infinity of {len(rows)} of {checked.tokens} gradients (rows"
            f" {shown}): values pass the largest number on the way; send smaller output_gradients (a smaller scale of the"
            f" loss){wider}, or keep the rows (keep_not_finite; in Python not_finite_rows=[])",
            field="output_gradients",
        )
    raise NotFinite(
        f"hidden_states: layer {checked.layer} makes NaN or infinity of {len(rows)} of {checked.tokens} tokens (rows {shown}):"
        f" values pass the largest number on the way; send smaller hidden_states or topk_weights{wider}, serve the model in a"
        " wider dtype (model.dtype), or keep the rows (keep_not_finite; in Python not_finite_rows=[])",
        field="hidden_states",
    )
