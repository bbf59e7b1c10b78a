"""The client's side of one forward call without I/O: a request to send, the frames of its reply to collect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from epserve.errors import InternalError, InvalidRequest
from epserve.serving import epserve_pb2 as pb
from epserve.serving import status, wire


class OutgoingRequest:
    """A forward call, encoded once however often it is sent."""

    def __init__(self, layer: int, hidden: Any, topk_ids: Any, topk_weights: Any, *, request_id: str):
        if (topk_ids is None) != (topk_weights is None):
            missing = "topk_ids" if topk_ids is None else "topk_weights"
            raise InvalidRequest(
                f"{missing}: missing; topk_ids and topk_weights come together, or neither", field=missing
            )
        values = {pb.HIDDEN_STATES: hidden, pb.TOPK_IDS: topk_ids, pb.TOPK_WEIGHTS: topk_weights}
        self.tensors = {
            which: wire.encode(value, wire.FIELDS[which]) for which, value in values.items() if value is not None
        }
        self.like = hidden
        self.header = pb.ForwardRequest(request_id=request_id, layer=layer)
        self.small = wire.fits_one_message(tuple(self.tensors.values()))

    def message(self) -> pb.ForwardRequest:
        return wire.request_message(self.tensors, self.header, inline=True)

    def frames(self, timeout_s: float, number: int = 0) -> Iterator[pb.RequestFrame]:
        self.header.timeout_ms = max(1, round(timeout_s * 1000))
        return wire.request_frames(number, self.tensors, self.header)

    def result(self, reply: pb.ForwardReply) -> Any:
        """Of a reply that is one message."""
        return self.decode(self.start_reply(reply))

    def start_reply(self, reply: pb.ForwardReply) -> wire.Assembly:
        """Raises InternalError for a reply that does not answer this request."""
        sent, got = self.tensors[pb.HIDDEN_STATES], reply.hidden_states
        if (got.dtype, tuple(got.shape)) != (sent.dtype, sent.shape):
            raise InternalError(
                f"the reply has shape {tuple(got.shape)} dtype {got.dtype}, sent {sent.shape} {sent.dtype}"
            )
        assembly = wire.Assembly({pb.HIDDEN_STATES: len(sent.data)})
        assembly.add(pb.HIDDEN_STATES, got.data)
        return assembly

    def decode(self, assembly: wire.Assembly) -> Any:
        """The kind, dtype, shape and device of what was sent."""
        buffer = assembly.finish().get(pb.HIDDEN_STATES, b"")
        header = self.tensors[pb.HIDDEN_STATES].header()
        if wire.is_torch(self.like):
            return wire.decode(buffer, header, as_torch=True).to(self.like.device)
        return wire.decode(buffer, header, as_torch=False)


class ReplyAssembly:
    """The frames of one reply."""

    def __init__(self, request: OutgoingRequest):
        self._request = request
        self._assembly: wire.Assembly | None = None

    def add(self, frame: pb.ReplyFrame) -> bool:
        """True when the reply is complete. Raises the failure that a frame brings."""
        kind = frame.WhichOneof("body")
        if kind == "failure":
            raise status.error_of(frame.failure)
        if kind == "begin" and self._assembly is None:
            self._assembly = self._request.start_reply(frame.begin)
        elif kind == "part" and self._assembly is not None:
            self._assembly.add(frame.part.field, frame.part.data)
        else:
            raise InternalError(f"an unexpected {kind or 'empty'} frame in the reply")
        return self._assembly.done

    def result(self) -> Any:
        assert self._assembly is not None
        return self._request.decode(self._assembly)
