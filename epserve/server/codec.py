"""This module checks requests in full, and turns bytes into tensors.

`Door.check` sees headers only and costs microseconds, so that a request that cannot be served allocates nothing.
`Door.decode` looks at values. Both raise CallerError whose message names the field, both numbers and the remedy.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epserve.config import ServerConfig
from epserve.engine.budgets import Claim
from epserve.engine.planning import Batch, Priority
from epserve.engine.shares import not_finite
from epserve.errors import InvalidRequest, TooLarge, UnknownLayer
from epserve.models import ModelInfo
from epserve.modular_kernel import check_routing
from epserve.modular_kernel.quantization import BLOCK
from epserve.process import ranges
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import fp8, wire
from epserve.rank.step import RegionRows

from .cuda_regions import CudaRegion, check_host_only, check_use
from .finite import all_finite
from .region import Region, Slice

GRADIENT_DTYPES = (pb.BF16, pb.FP16, pb.FP32)
HIDDEN_DTYPES = (*GRADIENT_DTYPES, pb.FP8_E4M3)
ID_DTYPES = (pb.INT8, pb.INT16, pb.INT32, pb.INT64, pb.UINT8, pb.UINT16, pb.UINT32)
WEIGHT_DTYPES = (pb.FP32, pb.FP16, pb.BF16)
MAX_ID_CHARS = 128
_ID_CHARS = frozenset(string.ascii_letters + string.digits + string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A checked request is a header that passed. `sizes`: field -> bytes that must come. `slices`: field -> region
    bytes instead.

    `output` is the place for the result outside the reply, or None.
    """

    request_id: str
    layer: int
    tokens: int
    headers: Mapping[pb.Field, pb.Tensor]
    sizes: Mapping[pb.Field, int]
    slices: Mapping[pb.Field, Slice]
    output: Slice | None
    reply_dtype: pb.DType
    backward: bool = False
    keep_not_finite: bool = False
    priority: Priority = Priority.NORMAL

    nbytes: int
    """The bytes of all tensors that come in."""
    reply_bytes: int = 0
    """The bytes of the result, or 0 when it does not go out with the reply."""

    @property
    def regions(self) -> set[Region]:
        """Returns the regions of the request's tensors and of its result."""
        slices = self.slices.values() if self.output is None else (*self.slices.values(), self.output)
        return {each.region for each in slices}

    @property
    def source(self) -> RegionRows | None:
        """Returns the place of the hidden states on a GPU, or None when they come to this process."""
        return _on_gpu(self.slices.get(pb.HIDDEN_STATES), self.headers[pb.HIDDEN_STATES].dtype)

    @property
    def target(self) -> RegionRows | None:
        """Returns the place of the result on a GPU, or None when it comes to this process."""
        return _on_gpu(self.output, self.reply_dtype)

    @property
    def work(self) -> int:
        """Returns the bytes that this process reads or converts before the ranks compute."""
        hidden = self.slices.get(pb.HIDDEN_STATES)
        return self.nbytes - (hidden.nbytes if hidden is not None and hidden.on_gpu else 0)


Resolve = Callable[[pb.RegionSlice, int, str], Slice]
"""Maps (slice, bytes that it must have, name of the field) to the place in a region. Raises CallerError."""


def no_regions(wanted: pb.RegionSlice, nbytes: int, field: str) -> Slice:
    raise InvalidRequest(f"{field}: shared-memory regions are not served to this client", field=field)


class Door:
    """The door checks and decodes requests for `layers`, the served ones, perhaps not all of the model's."""

    def __init__(
        self,
        info: ModelInfo,
        layers: tuple[int, ...],
        limits: ServerConfig,
        *,
        make_buffer: wire.MakeBuffer = wire.plain_buffer,
    ):
        """Keeps `make_buffer` for the tensors of requests. Memory that the ranks share saves a copy."""
        self.info, self.layers, self.limits = info, layers, limits
        self._make_buffer = make_buffer

    def check(
        self,
        request: pb.ForwardRequest,
        request_id: str,
        resolve: Resolve = no_regions,
        *,
        priority: Priority = Priority.NORMAL,
    ) -> CheckedRequest:
        """Checks the header. Raises UnknownLayer, TooLarge, or InvalidRequest with the field. resolve: finds the
        tensors' regions."""
        if request.layer not in self.layers:
            served = ranges.shown(self.layers)
            raise UnknownLayer(
                f"layer: {request.layer} is not a served MoE layer of {self.info.name} (served: {served})",
                field="layer",
            )
        if not request.HasField("hidden_states"):
            raise InvalidRequest("hidden_states: missing; send (tokens, hidden) activations", field="hidden_states")
        headers = wire.declared(request)
        tokens = self._check_hidden(headers[pb.HIDDEN_STATES])
        self._check_scales(headers, tokens)
        backward = pb.OUTPUT_GRADIENTS in headers
        if backward:
            self._check_gradients(headers[pb.OUTPUT_GRADIENTS], tokens)
        reply_dtype = self._checked_reply_dtype(request)
        if (pb.TOPK_IDS in headers) != (pb.TOPK_WEIGHTS in headers):
            there, missing = ("topk_ids", "topk_weights") if pb.TOPK_IDS in headers else ("topk_weights", "topk_ids")
            text = f"{missing}: missing while {there} came; send both, or neither to let the layer's gate choose"
            raise InvalidRequest(text, field=missing)
        if pb.TOPK_IDS in headers:
            self._check_routing_headers(headers, tokens)
        nbytes = {which: wire.num_bytes(tensor) for which, tensor in headers.items()}
        total, limit = sum(nbytes.values()), self.limits.max_message_bytes
        if total > limit:
            raise TooLarge(
                f"request: {tokens} tokens make {total} bytes, at most {limit} are allowed"
                " (server.max_message_bytes); send fewer tokens a request",
                field="hidden_states",
            )
        slices = {
            which: resolve(tensor.region, nbytes[which], wire.FIELDS[which])
            for which, tensor in headers.items()
            if _lies_in_region(tensor, wire.FIELDS[which])
        }
        output = None
        reply_bytes = tokens * self.info.hidden * wire.ITEM_BYTES[reply_dtype]
        if request.HasField("output"):
            output = resolve(request.output, reply_bytes, "output")
        if backward:
            check_host_only({wire.FIELDS[which]: each for which, each in slices.items()}, output)
        others = {wire.FIELDS[which]: each for which, each in slices.items() if which != pb.HIDDEN_STATES}
        dtypes = request.hidden_states.dtype, reply_dtype
        check_use(slices.get(pb.HIDDEN_STATES), others, output, dtypes)
        return CheckedRequest(
            request_id=request_id,
            layer=request.layer,
            tokens=tokens,
            headers=headers,
            sizes={which: size for which, size in nbytes.items() if which not in slices},
            slices=slices,
            output=output,
            reply_dtype=reply_dtype,
            backward=backward,
            keep_not_finite=request.keep_not_finite,
            priority=priority,
            nbytes=total,
            reply_bytes=(0 if output is not None else reply_bytes) + _weights_bytes(headers, backward),
        )

    def _check_hidden(self, tensor: pb.Tensor) -> int:
        name = "hidden_states"
        _check_dtype(name, tensor, HIDDEN_DTYPES)
        tokens, hidden = _two_dims(name, tensor, "(tokens, hidden)")
        if hidden != self.info.hidden:
            text = f"{name}: hidden size {hidden}, but {self.info.name} has {self.info.hidden}"
            raise InvalidRequest(text, field=name)
        limit = self.limits.max_tokens_per_request
        if tokens > limit:
            raise TooLarge(
                f"{name}: {tokens} tokens, at most {limit} are allowed (server.max_tokens_per_request);"
                " split them over several requests",
                field=name,
            )
        return tokens

    def _check_scales(self, headers: Mapping[pb.Field, pb.Tensor], tokens: int) -> None:
        name, wanted = "hidden_scales", headers[pb.HIDDEN_STATES].dtype == pb.FP8_E4M3
        if wanted != (pb.HIDDEN_SCALES in headers):
            text = (
                "missing; float8_e4m3fn hidden_states need them" if wanted else "only for float8_e4m3fn hidden_states"
            )
            raise InvalidRequest(f"{name}: {text}", field=name)
        if wanted:
            self._check_blocks("hidden_states")
            _check_dtype(name, headers[pb.HIDDEN_SCALES], (pb.FP32,))
            got, must = tuple(headers[pb.HIDDEN_SCALES].shape), (tokens, self.info.hidden // BLOCK)
            if got != must:
                raise InvalidRequest(f"{name}: shape {got}, must be {must}: one for each 1x{BLOCK} block", field=name)

    def _check_gradients(self, tensor: pb.Tensor, tokens: int) -> None:
        name = "output_gradients"
        _check_dtype(name, tensor, GRADIENT_DTYPES)
        if (got := tuple(tensor.shape)) != (must := (tokens, self.info.hidden)):
            raise InvalidRequest(f"{name}: shape {got}, must be {must}, that of hidden_states", field=name)

    def _check_blocks(self, name: str) -> None:
        if self.info.hidden % BLOCK:
            text = (
                f"{name}: hidden size {self.info.hidden} is not a multiple of {BLOCK}; float8_e4m3fn needs whole blocks"
            )
            raise InvalidRequest(text, field=name)

    def _checked_reply_dtype(self, request: pb.ForwardRequest) -> pb.DType:
        name, dtype = "reply_dtype", request.reply_dtype
        if not dtype:
            sent = request.hidden_states.dtype
            return pb.BF16 if sent == pb.FP8_E4M3 else sent
        if dtype not in HIDDEN_DTYPES:
            raise InvalidRequest(f"{name}: {_dtype_name(dtype)} (allowed: {_dtype_names(HIDDEN_DTYPES)})", field=name)
        if dtype == pb.FP8_E4M3:
            if request.HasField("output_gradients"):
                text = f"{name}: float8_e4m3fn is too coarse for gradients (allowed: {_dtype_names(GRADIENT_DTYPES)})"
                raise InvalidRequest(text, field=name)
            self._check_blocks(name)
            if request.HasField("output"):
                raise InvalidRequest(
                    f"{name}: float8_e4m3fn does not go with output; its scales have no place", field=name
                )
        return dtype

    def _check_routing_headers(self, headers: Mapping[pb.Field, pb.Tensor], tokens: int) -> None:
        _check_dtype("topk_ids", headers[pb.TOPK_IDS], ID_DTYPES)
        _check_dtype("topk_weights", headers[pb.TOPK_WEIGHTS], WEIGHT_DTYPES)
        for which in (pb.TOPK_IDS, pb.TOPK_WEIGHTS):
            name = wire.FIELDS[which]
            rows, width = _two_dims(name, headers[which], "(tokens, top_k)")
            if rows != tokens:
                raise InvalidRequest(f"{name}: {rows} rows, but hidden_states has {tokens} tokens", field=name)
            if not 1 <= width <= self.info.top_k:
                text = f"{name}: {width} experts a token, {self.info.name} allows 1 to {self.info.top_k}"
                raise InvalidRequest(text, field=name)
        ids, weights = tuple(headers[pb.TOPK_IDS].shape), tuple(headers[pb.TOPK_WEIGHTS].shape)
        if ids != weights:
            text = f"topk_weights: shape {weights} differs from the shape {ids} of topk_ids"
            raise InvalidRequest(text, field="topk_weights")

    def assembly(self, checked: CheckedRequest) -> wire.Assembly:
        """Returns an assembly for the bytes that come with a request or after it."""
        return wire.Assembly(checked.sizes, self._make_buffer)

    def decode(
        self,
        checked: CheckedRequest,
        buffers: Mapping[pb.Field, Any],
        *,
        deadline: float = math.inf,
        client: str = "",
        trace: Any = None,
        claim: Claim | None = None,
    ) -> Batch:
        """Turns bytes into a batch whose tensors own their memory, and reads the bytes in regions.

        The keyword arguments go into the batch. Ids have the width top_k, so that all requests can be joined into one step.

        Raises:
            InvalidRequest: values are not finite or out of range.
        """
        read = {which: each.read(self._make_buffer) for which, each in checked.slices.items() if not each.on_gpu}
        buffers = {**buffers, **read}
        if checked.source is not None and checked.tokens:
            shape = (checked.tokens, self.info.hidden)
            hidden = torch.empty(
                shape, dtype=self.info.dtype, device="meta"
            )  # the rank has the values, and checks them
        else:
            hidden = self._hidden(checked, buffers)
        ids, weights = self._routing(checked, buffers) if pb.TOPK_IDS in checked.headers else (None, None)
        return Batch(
            layer=checked.layer,
            hidden=hidden,
            ids=ids,
            weights=weights,
            gradient=self._finite(checked, buffers, pb.OUTPUT_GRADIENTS) if checked.backward else None,
            deadline=deadline,
            request_id=checked.request_id,
            client=client,
            priority=checked.priority,
            trace=trace,
            claim=claim,
            routing_checked=True,
            source=checked.source,
            target=checked.target,
        )

    def _routing(self, checked: CheckedRequest, buffers: Mapping[pb.Field, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._tensor(checked, buffers, pb.TOPK_IDS)
        weights = self._tensor(checked, buffers, pb.TOPK_WEIGHTS)
        routing = check_routing(ids, weights, num_tokens=checked.tokens, num_experts=self.info.num_experts)
        ids, weights = routing.ids_Mt, routing.weights_Mt
        if missing := self.info.top_k - ids.shape[1]:
            ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
            weights = torch.nn.functional.pad(weights, (0, missing))
        return ids, weights

    def _hidden(self, checked: CheckedRequest, buffers: Mapping[pb.Field, Any]) -> torch.Tensor:
        """Returns the hidden states in the model's dtype. Raises InvalidRequest unless they are finite."""
        if pb.HIDDEN_SCALES not in checked.headers:
            return self._finite(checked, buffers, pb.HIDDEN_STATES)
        rows, scales = (self._tensor(checked, buffers, which) for which in (pb.HIDDEN_STATES, pb.HIDDEN_SCALES))
        hidden = fp8.dequantise(rows, scales, self.info.dtype)
        return self._checked_values(hidden, hidden, pb.HIDDEN_STATES)

    def _finite(self, checked: CheckedRequest, buffers: Mapping[pb.Field, Any], which: pb.Field) -> torch.Tensor:
        """Returns a tensor in the model's dtype. Raises InvalidRequest unless it is finite there."""
        sent = self._tensor(checked, buffers, which)
        return self._checked_values(sent.to(self.info.dtype), sent, which)

    def _checked_values(self, made: torch.Tensor, sent: torch.Tensor, which: pb.Field) -> torch.Tensor:
        if not all_finite(made):
            row, column = torch.isfinite(made).logical_not().nonzero()[0].tolist()
            value = sent[row, column].item()
            became = f"{value}, which becomes {made[row, column].item()}" if math.isfinite(value) else f"{value}"
            raise not_finite(self.info.dtype, row, column, became, field=wire.FIELDS[which])
        return made

    def _tensor(self, checked: CheckedRequest, buffers: Mapping[pb.Field, Any], which: pb.Field) -> torch.Tensor:
        return wire.decode(
            buffers.get(which, b""), checked.headers[which], as_torch=True, make_buffer=self._make_buffer
        )


def _on_gpu(where: Slice | None, dtype: pb.DType) -> RegionRows | None:
    if where is None or not isinstance(where.region, CudaRegion):
        return None
    return where.region.rows(where.offset, dtype)


def checked_request_id(request_id: str) -> str:
    """Returns the id, which goes into logs. Raises InvalidRequest for control characters, spaces, or one that is too
    long."""
    if len(request_id) > MAX_ID_CHARS or not _ID_CHARS.issuperset(request_id):
        text = f"request_id: {len(request_id)} characters; at most {MAX_ID_CHARS} printable ASCII ones without spaces"
        raise InvalidRequest(text, field="request_id")
    return request_id


def _check_dtype(name: str, tensor: pb.Tensor, allowed: tuple[Any, ...]) -> None:
    if tensor.dtype not in allowed:
        text = f"{name}: dtype {_dtype_name(tensor.dtype)} is not allowed here (allowed: {_dtype_names(allowed)})"
        raise InvalidRequest(text, field=name)


def _dtype_name(dtype: int) -> str:
    return wire.DTYPE_NAMES.get(dtype, f"number {dtype}" if dtype else "unset")  # type: ignore[call-overload]


def _dtype_names(allowed: tuple[Any, ...]) -> str:
    return ", ".join(wire.DTYPE_NAMES[dtype] for dtype in allowed)


def _weights_bytes(headers: Mapping[pb.Field, pb.Tensor], backward: bool) -> int:
    """Returns the bytes of the gradient of routing weights in a reply."""
    if not backward or pb.TOPK_WEIGHTS not in headers:
        return 0
    return math.prod(headers[pb.TOPK_WEIGHTS].shape) * wire.ITEM_BYTES[pb.FP32]


def _lies_in_region(tensor: pb.Tensor, name: str) -> bool:
    if tensor.HasField("region") and tensor.data:
        text = f"{name}: has {len(tensor.data)} bytes of data and names a region; one of the two"
        raise InvalidRequest(text, field=name)
    return tensor.HasField("region")


def _two_dims(name: str, tensor: pb.Tensor, meaning: str) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        text = f"{name}: {len(tensor.shape)} dimensions, must be 2: {meaning}"
        raise InvalidRequest(text, field=name)
    rows, columns = tensor.shape
    if rows < 0 or columns < 0:
        raise InvalidRequest(f"{name}: shape ({rows}, {columns}) has a negative dimension", field=name)
    return rows, columns
