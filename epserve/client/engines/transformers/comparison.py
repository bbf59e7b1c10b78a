"""Whether a model, as it is configured in this process, fits the service: every difference, before a weight is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from epserve.errors import CheckpointError
from epserve.models.expert_modules import ExpertsLayer, top_k
from epserve.models.families import FAMILIES, Family, Key
from epserve.models.info import ConfigReader
from epserve.models.tensors import read_index, read_json
from epserve.models.weights import fingerprint
from epserve.modular_kernel import Activation, GateSpec
from epserve.protocol.served_model import served_activation, served_gate
from epserve.protocol.wire import DTYPE_NAMES

# Families whose MoE block takes hidden states and returns them, nothing else: the service can run it whole.
BLOCK_FAMILIES = ("deepseek_v3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

log = logging.getLogger(__name__)


def differences(
    served: Any, model: PreTrainedModel, layers: tuple[ExpertsLayer, ...], dtype: torch.dtype, gate: str
) -> list[str]:
    """What differs between a service's GetModelReply and a model's MoE layers. Empty: they fit.

    gate: "local" or "remote", who chooses the experts.
    """
    shape, path = layers[0].shape, str(model.config.name_or_path)
    missing = sorted({layer.layer for layer in layers} - set(served.layers))
    names = DTYPE_NAMES[served.dtype], str(dtype).removeprefix("torch.")
    own = local_fingerprint(path)
    checks = [
        (not missing, f"layers {missing} are not served (served: {list(served.layers)})"),
        (served.hidden == shape.hidden, f"hidden size: served {served.hidden}, the model has {shape.hidden}"),
        (served.intermediate == shape.intermediate,
         f"intermediate size: served {served.intermediate}, the model has {shape.intermediate}"),
        (served.num_experts == shape.num_experts,
         f"experts: served {served.num_experts}, the model has {shape.num_experts}"),
        (names[0] == names[1], f"dtype: served {names[0]}, the model is loaded as {names[1]}; pass dtype={names[0]!r}"),
        (own is None or own == served.fingerprint,
         f"fingerprint: served {served.fingerprint[:12]}, {path} has {(own or '')[:12]}: another revision or configuration"),
    ]  # fmt: skip
    found = [text for fits, text in checks if not fits]
    config = model.config.get_text_config()
    found += _of_activations(served, config, shape.activation)
    if gate == "remote":
        return found + list(_of_gates(served, config))
    most = max(top_k(model.config, model, layer) for layer in layers)
    if most > served.top_k:
        found.append(f"experts a token (num_experts_per_tok): the model has {most}, at most {served.top_k} are served")
    return found


def local_fingerprint(path: str) -> str | None:
    """Returns that of the checkpoint that is being loaded.

    None, with a warning, where its files are not safetensors in a folder.
    """
    try:
        found = transformers.utils.cached_file(path, "config.json", local_files_only=True)
        folder = Path(str(found)).parent
        return fingerprint(read_json(folder / "config.json"), read_index(folder))
    except (CheckpointError, OSError, TypeError) as error:
        log.warning("%s: not compared with the service, only shapes are: %s", path, error)
        return None


def _of_activations(served: Any, config: Any, computed: Activation) -> list[str]:
    """What the experts compute between and after their products: as served, against the modules and the configuration here."""
    theirs = served_activation(served)
    if theirs is None:
        kinds = served.activation, computed.kind
        return [] if kinds[0] == kinds[1] else [f"activation: served {kinds[0]}, the model has {kinds[1]}"]
    family, ours = FAMILIES.get(served.family), [computed]
    found: dict[str, None] = {}
    if family is not None and served.family == config.model_type:
        try:
            ours.append(_reader(config).activation(family))
        except CheckpointError as error:
            found[str(error)] = None
    for each in ours:
        for name in _unequal(theirs, each):
            label = _label(name, family.activation if family else {"kind": Key("hidden_act")})
            found[f"{label}: served {getattr(theirs, name)}, the model has {getattr(each, name)}"] = None
    return list(found)


def _of_gates(served: Any, config: Any) -> Iterator[str]:
    """Why the service's gate and shared experts cannot stand for the model's: one reason for each setting that differs."""
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
    reader = _reader(config)
    try:
        ours = reader.gate(family, served.num_experts)
        shared = reader.shared_intermediate(family)
    except CheckpointError as error:
        yield str(error)
        return
    if ours.refusal:
        yield f"gate: {ours.refusal}"
    else:
        for name in _unequal(theirs, ours):
            yield f"{_label(name, family.gate)}: served {getattr(theirs, name)}, the model has {getattr(ours, name)}"
    if shared != served.shared_intermediate:
        label = _keys(family)
        yield f"shared experts' intermediate size ({label}): served {served.shared_intermediate}, the model has {shared}"


def _reader(config: Any) -> ConfigReader:
    return ConfigReader(config.to_dict(), "the model's configuration")


def _unequal(one: GateSpec | Activation, other: GateSpec | Activation) -> list[str]:
    return [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]


def _label(name: str, table: Any) -> str:
    """The key of config.json by which a user knows this field, or the field's own name."""
    if name == "top_k":
        return "num_experts_per_tok"
    return table[name].names if isinstance(table.get(name), Key) else name


def _keys(family: Family) -> str:
    return ", ".join(key.names for key in family.shared.intermediate) if family.shared else "none"
