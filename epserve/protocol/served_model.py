"""Turns a description of the served model into a message, and the message back into data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from epserve import __version__
from epserve.modular_kernel import Activation, GateSpec

from . import epserve_pb2 as pb
from . import wire


def model_reply(info: Any, layers: Sequence[int], limits: Any) -> pb.GetModelReply:
    """Describes a ModelInfo, the layers that are served, and a ServerConfig's limits of a request."""
    return pb.GetModelReply(
        family=info.family,
        name=info.name,
        hidden=info.hidden,
        intermediate=info.intermediate,
        num_experts=info.num_experts,
        top_k=info.top_k,
        dtype=wire.DTYPES[str(info.dtype).removeprefix("torch.")],
        layers=layers,
        activation=info.activation.kind,
        scoring=info.gate.scoring,
        shared_intermediate=info.shared_intermediate,
        quantisation=info.quant.scheme,
        fingerprint=info.fingerprint,
        max_tokens_per_request=limits.max_tokens_per_request,
        max_message_bytes=limits.max_message_bytes,
        server_version=__version__,
        gate=pb.Gate(**asdict(info.gate)),
        expert_activation=pb.Activation(**asdict(info.activation)),
    )


def served_gate(reply: pb.GetModelReply) -> GateSpec | None:
    """Returns the gate of the service, or None when an older service does not tell it."""
    if not reply.HasField("gate"):
        return None
    return GateSpec(**{field.name: getattr(reply.gate, field.name) for field in fields(GateSpec)})


def served_activation(reply: pb.GetModelReply) -> Activation | None:
    """Returns the non-linearity of the service's experts, or None when an older service does not tell it."""
    if not reply.HasField("expert_activation"):
        return None
    told = reply.expert_activation
    return Activation(
        kind=told.kind,
        gated=told.gated,
        limit=told.limit if told.HasField("limit") else None,
        alpha=told.alpha,
        output_norm_eps=told.output_norm_eps if told.HasField("output_norm_eps") else None,
    )
