"""This module is the client's side of one forward call without I/O: a request to send, and the frames of its reply to
collect."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from epserve.errors import CallerError, InternalError, InvalidRequest, NotFinite, Overloaded
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import status, wire
from epserve.protocol.frames import begin_frame, begun, part_frame
from epserve.protocol.messages import Outgoing, Received

from .checks import check_both, check_no_gradient, check_request_id, whole_number
from .cuda_region import CudaClientRegion
from .region import WORTH_BYTES, ClientRegion
from .ring import AsyncBell, Bell

log = logging.getLogger("epserve.client")

WireFormat = Literal["plain", "fp8", "fp8_request"]
"""The format of hidden states in messages. plain: unchanged. fp8: float8_e4m3fn with one factor for each 1x128 block,
half the bytes of bfloat16, both ways. fp8_request: fp8 for the request only. fp8 costs precision: e4m3 has three bits
of mantissa."""


PRIORITIES = {"": pb.PRIORITY_UNSPECIFIED, "low": pb.LOW, "normal": pb.NORMAL, "high": pb.HIGH}
LARGEST_LAYER = 2**31 - 1  # the range of the message's int32


def _layer(layer: Any) -> int:
    """Returns the layer's number. Raises InvalidRequest, since protobuf takes None for 0 and has its own errors for the
    rest."""
    number = whole_number(layer)
    if number is None or not 0 <= number <= LARGEST_LAYER:
        raise InvalidRequest(f"layer: {layer!r} is not a layer number, 0..{LARGEST_LAYER}", field="layer")
    return number


def priority_of(name: str) -> pb.Priority:
    """Returns the priority's number. Raises InvalidRequest."""
    if name not in PRIORITIES:
        known = ", ".join(filter(None, PRIORITIES))
        raise InvalidRequest(f"priority: {name!r} is none of {known}", field="priority")
    return PRIORITIES[name]


class OutgoingRequest:
    """An outgoing request is a forward or backward call, encoded once for all attempts. As a context it settles the region
    memory at its end.

    Args:
        region: the request names inputs in it and copies the others into it. The result is a tensor in it.
        gradient: the gradient of the result, for a backward call. The result is then the gradients of `hidden` and of
            `topk_weights`.
    """

    def __init__(
        self, layer: int, hidden: Any, topk_ids: Any, topk_weights: Any, *, request_id: str,
        region: ClientRegion | CudaClientRegion | None = None, wire_format: WireFormat = "plain", priority: str = "",
        not_finite_rows: list[int] | None = None, gradient: Any = None,
    ):  # fmt: skip
        check_both(topk_ids, topk_weights)
        if wire_format not in ("plain", "fp8", "fp8_request"):
            raise InvalidRequest(f"wire_format: {wire_format!r} is not plain, fp8 or fp8_request", field="wire_format")
        if wire_format != "plain" and region is not None:
            raise InvalidRequest(
                "wire_format: fp8 saves bytes on the wire, and a region sends none", field="wire_format"
            )
        check_request_id(request_id)
        if region is not None and not isinstance(region, ClientRegion | CudaClientRegion):
            text = f"region: must be what register_region or register_cuda_region gives, got {type(region).__name__}"
            raise InvalidRequest(text, field="region")
        self.method = "Forward" if gradient is None else "Backward"
        for which, value in ((pb.HIDDEN_STATES, hidden), (pb.TOPK_WEIGHTS, topk_weights)):
            if gradient is None:
                check_no_gradient(value, wire.FIELDS[which])
        if gradient is not None and isinstance(region, CudaClientRegion):
            raise InvalidRequest("region: Backward takes a region of system memory, not one of a GPU", field="region")
        self._inputs: list[Any] = []
        if isinstance(region, CudaClientRegion):
            kept, plain = region.place(hidden)
            self._inputs.append(kept)
        else:
            plain = wire.encode(hidden, "hidden_states")
        self.tensors = {pb.HIDDEN_STATES: plain} if wire_format == "plain" else _quantised(hidden)
        others = (pb.TOPK_IDS, topk_ids), (pb.TOPK_WEIGHTS, topk_weights), (pb.OUTPUT_GRADIENTS, gradient)
        for which, value in others:
            if value is not None:
                self.tensors[which] = wire.encode(value, wire.FIELDS[which])
        self.like = hidden
        self.header = pb.ForwardRequest(request_id=request_id, layer=_layer(layer), priority=priority_of(priority))
        if not_finite_rows is not None and not isinstance(not_finite_rows, list):
            text = f"not_finite_rows: must be a list, which the reply fills, got {type(not_finite_rows).__name__}"
            raise InvalidRequest(text, field="not_finite_rows")
        self._not_finite_rows = not_finite_rows
        self.header.keep_not_finite = not_finite_rows is not None
        self.reply_dtype = pb.FP8_E4M3 if wire_format == "fp8" else plain.dtype
        if wire_format != "plain":
            self.header.reply_dtype = self.reply_dtype
        self._shape = plain.shape
        self._weights: Any = topk_weights if gradient is not None else None
        self._region = region
        self._output: Any = None
        self._unsettled = False
        if isinstance(region, CudaClientRegion):
            if plain.nbytes:
                self._output = region.block(plain.nbytes)
                self.header.output.CopyFrom(region.slice_of_block(self._output, plain.nbytes))
        elif region is not None:
            self._place(region, plain.nbytes)
        # The gradient of weights comes in the reply, wherever the weights lie.
        weights_bytes = self._weights_header().nbytes if self._weights is not None else 0
        self.small = wire.fits_one_message(tuple(self.tensors.values())) and weights_bytes <= wire.FRAME_BYTES // 2

    def _place(self, region: ClientRegion, reply_bytes: int) -> None:
        for which, tensor in self.tensors.items():
            where = region.slice_of(tensor.data)
            if where is None and len(tensor.data) > WORTH_BYTES:
                block, where = region.copied(tensor.data)
                self._inputs.append(block)  # kept until the call is over
            if where is not None:
                self.tensors[which] = tensor.placed(where)
        if reply_bytes:
            self._output = region.block(reply_bytes)
            self.header.output.CopyFrom(region.slice_of_block(self._output))

    def __enter__(self) -> OutgoingRequest:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is not None:
            self.failed(error)
        if self._unsettled and self._output is not None and self._region is not None:
            self._region.quarantine(self._output)
        self._inputs, self._output = [], None

    def failed(self, error: Any) -> Any:
        """Takes the error of an attempt. Unless the service refused it, it may still write to the region, even after a
        later attempt."""
        self._unsettled = self._unsettled or not isinstance(error, CallerError | Overloaded)
        return error

    def give_up(self) -> None:
        """Settles the region memory of a call whose result is not wanted any more."""
        self._unsettled = True
        self.__exit__(None, None, None)

    @property
    def span(self) -> str:
        """Returns the name of the call in traces."""
        return f"epserve.{self.method.lower()}"

    def check_region(self) -> None:
        """Raises NotReady when the service has forgotten the region since the request was made. Only another region
        helps."""
        if self._region is not None:
            self._region.check_registered()

    @property
    def bell(self) -> Bell | None:
        """Returns the doorbell, the quickest way for a request whose tensors all lie in a region, or None."""
        bell = self._region.bell if self._region is not None else None
        return bell if bell is not None and bell.usable else None

    @property
    def async_bell(self) -> AsyncBell | None:
        bell = self._region.async_bell if self._region is not None else None
        return bell if bell is not None and bell.usable else None

    def frame(self, timeout_s: float, number: int = 0) -> Any:
        """Returns the whole request as one frame, when it is small."""
        (frame,) = self.frames(timeout_s, number)
        return frame

    def answer(self, frame: Any) -> Any:
        """Returns the result in a single frame, or raises its error."""
        assembly = ReplyAssembly(self)
        if not assembly.add(frame):
            raise InternalError("the reply is not complete in its only frame")
        return assembly.result()

    def message(self) -> Outgoing:
        """Returns the whole request for a call of its own, whose deadline is gRPC's."""
        return Outgoing(self.header, self.tensors)

    def frames(self, timeout_s: float, number: int = 0) -> Iterator[Any]:
        """Yields the frames of one attempt. timeout_s: counts from the service's receipt of the header. number: the
        call's, on a stream of many."""
        self.header.timeout_ms = max(1, round(timeout_s * 1000))
        return wire.request_frames(number, self.tensors, self.header, part_frame, begin_frame)

    def result(self, reply: Received) -> Any:
        """Returns the result of a reply that is one message."""
        return self.decode(self.start_reply(reply))

    def start_reply(self, message: Received) -> wire.Assembly:
        """Starts to collect a reply. Raises InternalError for a reply that does not answer this request."""
        reply = message.header
        if reply.left_out_experts:
            experts = ", ".join(map(str, reply.left_out_experts))
            log.warning("request %s: answered without experts %s, which are on no rank now", reply.request_id, experts)
        if self._not_finite_rows is not None:
            self._not_finite_rows[:] = reply.not_finite_rows
        if reply.gradients != (self.method == "Backward"):
            raise InternalError(
                f"the service answered a {self.method} with another result; it may be of an older version"
            )
        got = reply.hidden_states
        if (got.dtype, tuple(got.shape)) != (self.reply_dtype, self._shape):
            wanted = f"{self._shape} {self.reply_dtype}"
            raise InternalError(f"the reply has shape {tuple(got.shape)} dtype {got.dtype}, expected {wanted}")
        if self._output is not None and got.region != self.header.output:
            raise InternalError("the reply lies elsewhere than in the region that was named")
        sizes = {} if self._output is not None else {pb.HIDDEN_STATES: wire.num_bytes(got)}
        if self._weights is not None:
            must, came = self._weights_header(), reply.topk_weights
            if (came.dtype, tuple(came.shape)) != (must.dtype, must.shape):
                raise InternalError(f"the reply's weights have shape {tuple(came.shape)}, expected {must.shape}")
            sizes[pb.TOPK_WEIGHTS] = wire.num_bytes(came)
        if self.reply_dtype == pb.FP8_E4M3:
            scales = reply.hidden_scales
            if scales.dtype != pb.FP32 or tuple(scales.shape) != (self._shape[0], self._shape[1] // 128):
                raise InternalError(f"the reply's scales have shape {tuple(scales.shape)} dtype {scales.dtype}")
            sizes[pb.HIDDEN_SCALES] = wire.num_bytes(scales)
        assembly = wire.Assembly(sizes)
        for which in sizes:
            assembly.add(which, message.bytes_of(which))
        return assembly

    def decode(self, assembly: wire.Assembly) -> Any:
        """Returns the result with the kind, dtype, shape and device of the sent tensor. A backward call gives two results,
        the second one None without weights."""
        buffers = assembly.finish()
        result = self._rows(buffers)
        if self.method == "Forward":
            return result
        if self._weights is None:
            return result, None
        header, as_torch = self._weights_header().header(), wire.is_torch(self._weights)
        weights = wire.decode(buffers.get(pb.TOPK_WEIGHTS, b""), header, as_torch=as_torch)
        return result, weights.to(self._weights.device) if as_torch else weights

    def _weights_header(self) -> wire.WireTensor:
        return wire.WireTensor(dtype=pb.FP32, shape=tuple(self._weights.shape), data=memoryview(b""))

    def _rows(self, buffers: Mapping[pb.Field, Any]) -> Any:
        header = pb.Tensor(dtype=self.reply_dtype, shape=self._shape)
        as_torch = wire.is_torch(self.like)
        if self._output is not None and isinstance(self._region, CudaClientRegion):
            on_gpu = self._region.view(self._output, header)
            if self._unsettled:
                on_gpu = on_gpu.clone()
            return on_gpu.to(self.like.device) if as_torch else on_gpu.cpu().numpy()
        if self._output is not None:
            result = wire.view(self._output, header, as_torch=as_torch)
            if self._unsettled:  # an earlier attempt may still write there
                return result.clone() if as_torch else result.copy()
            return result.to(self.like.device) if as_torch else result
        buffer = buffers.get(pb.HIDDEN_STATES, b"")
        if self.reply_dtype == pb.FP8_E4M3:
            return self._dequantised(buffer, buffers.get(pb.HIDDEN_SCALES, b""), header)
        if as_torch:
            return wire.decode(buffer, header, as_torch=True).to(self.like.device)
        return wire.decode(buffer, header, as_torch=False)

    def _dequantised(self, buffer: Any, scales: Any, header: pb.Tensor) -> Any:
        import torch

        from epserve.protocol import fp8

        scales_header = pb.Tensor(dtype=pb.FP32, shape=(self._shape[0], self._shape[1] // 128))
        rows = wire.decode(buffer, header, as_torch=True)
        as_torch = wire.is_torch(self.like)
        dtype = self.like.dtype if as_torch else getattr(torch, self.like.dtype.name)
        result = fp8.dequantise(rows, wire.decode(scales, scales_header, as_torch=True), dtype)
        self._look_at(result)
        return result.to(self.like.device) if as_torch else result.numpy()

    def _look_at(self, result: Any) -> None:
        """Raises NotFinite for values that got another dtype here, which the service has not seen."""
        wrong = result.isfinite().all(1).logical_not().nonzero().flatten().tolist()
        if self._not_finite_rows is not None:
            self._not_finite_rows[:] = sorted({*self._not_finite_rows, *wrong})
        elif wrong:
            raise NotFinite(
                f"hidden_states: layer {self.header.layer} gives values above the largest {result.dtype} in {len(wrong)} rows,"
                f" the first is row {wrong[0]}; send a wider dtype, or keep the rows (not_finite_rows=[])",
                field="hidden_states",
            )


def _quantised(hidden: Any) -> dict[pb.Field, wire.WireTensor]:
    """Returns float8_e4m3fn rows and their scales. Raises InvalidRequest."""
    try:
        import torch

        from epserve.modular_kernel.quantization import BLOCK
        from epserve.protocol import fp8
    except ImportError as error:
        raise InvalidRequest(f"wire_format: fp8 needs torch on the client too: {error}", field="wire_format") from None
    x = hidden if wire.is_torch(hidden) else torch.from_numpy(hidden)
    if x.ndim != 2 or x.shape[1] % BLOCK or not x.is_floating_point():
        text = f"wire_format: fp8 is for floats (tokens, a multiple of {BLOCK}), hidden has {tuple(x.shape)} {x.dtype}"
        raise InvalidRequest(text, field="hidden_states")
    rows, scales = fp8.quantise(x.detach().cpu())
    return {
        pb.HIDDEN_STATES: wire.encode(rows, "hidden_states"),
        pb.HIDDEN_SCALES: wire.encode(scales, "hidden_scales"),
    }


class ReplyAssembly:
    """A reply assembly collects the frames of one reply."""

    def __init__(self, request: OutgoingRequest):
        self._request = request
        self._assembly: wire.Assembly | None = None

    def add(self, frame: Any) -> bool:
        """Adds a frame, and returns True when the reply is complete. Raises the failure that a frame brings."""
        kind = frame.WhichOneof("body")
        if kind == "failure":
            raise status.error_of(frame.failure)
        if kind == "begin" and self._assembly is None:
            self._assembly = self._request.start_reply(begun(frame))
        elif kind == "part" and self._assembly is not None:
            self._assembly.add(frame.part.field, frame.part.data)
        else:
            raise InternalError(f"an unexpected {kind or 'empty'} frame in the reply")
        return self._assembly.done

    def result(self) -> Any:
        assert self._assembly is not None
        return self._request.decode(self._assembly)
