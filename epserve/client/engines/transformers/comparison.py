"""Compares a model of transformers with its service, and checks whether the service's gate can replace the model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from epserve.client.engines.comparison import Wanted, fingerprint_of, label_of, shared_keys, unequal
from epserve.errors import CheckpointError
from epserve.models.expert_modules import ExpertsLayer, top_k
from epserve.models.families import FAMILIES
from epserve.protocol.served_model import served_gate

# Families whose MoE block takes and returns only hidden states, so that the service can run it whole.
BLOCK_FAMILIES = ("deepseek_v3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


def differences(
    served: Any, model: PreTrainedModel, layers: tuple[ExpertsLayer, ...], dtype: torch.dtype, gate: str
) -> list[str]:
    """Returns every difference between a service's GetModelReply and a model's MoE layers. Empty: they fit.

    gate: "local" or "remote", the side that chooses the experts.
    """
    shape, name, config = layers[0].shape, str(model.config.name_or_path), model.config.get_text_config()
    wanted = Wanted(
        name=name,
        config=config.to_dict(),
        layers=[layer.layer for layer in layers],
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        dtype=str(dtype).removeprefix("torch."),
        top_k=max(top_k(model.config, model, layer) for layer in layers) if gate == "local" else None,
        activation=shape.activation,
        fingerprint=fingerprint_of(name, _find_config),
    )
    found = wanted.differences(served)
    return found + list(_of_gates(served, wanted, config)) if gate == "remote" else found


def _find_config(name: str) -> str | None:
    return transformers.utils.cached_file(name, "config.json", local_files_only=True)


def _of_gates(served: Any, wanted: Wanted, config: Any) -> Iterator[str]:
    """Yields the reasons why the service's gate and shared experts cannot replace the model's, one for each differing setting."""
    if served.family not in BLOCK_FAMILIES:
        known = ", ".join(BLOCK_FAMILIES)
        yield f"gate 'remote' is for {known}; of {served.family} only the experts can be remote"
        return
    theirs, family = served_gate(served), FAMILIES[served.family]
    if theirs is None:
        yield f"gate: a service of version {served.server_version} does not tell how it gates; upgrade it, or use gate='local'"
        return
    if served.family != config.model_type:
        yield f"gate: served is that of {served.family}, the model is of {config.model_type}"
        return
    if theirs.scoring == "client":
        yield f"gate: the service does not gate this model: {theirs.refusal}; use gate='local'"
        return
    if getattr(config, "output_router_logits", False):
        yield "output_router_logits: the router is in the service and returns no logits; set it to False, or use gate='local'"
    reader = wanted.reader()
    try:
        ours = reader.gate(family, served.num_experts)
        shared = reader.shared_intermediate(family)
    except CheckpointError as error:
        yield str(error)
        return
    if ours.refusal:
        yield f"gate: {ours.refusal}"
    else:
        for name in unequal(theirs, ours):
            yield f"{label_of(name, family.gate)}: served {getattr(theirs, name)}, the model has {getattr(ours, name)}"
    if shared != served.shared_intermediate:
        label = shared_keys(family)
        yield f"shared experts' intermediate size ({label}): served {served.shared_intermediate}, the model has {shared}"
