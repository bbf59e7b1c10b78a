"""Compares a model, as an engine has configured it, with a service, and lists every difference. It imports no engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from epserve.errors import CheckpointError
from epserve.models.families import FAMILIES, Family, Key
from epserve.models.info import ConfigReader
from epserve.models.tensors import read_index, read_json
from epserve.models.weights import fingerprint
from epserve.modular_kernel import Activation, GateSpec
from epserve.protocol.served_model import served_activation
from epserve.protocol.wire import DTYPE_NAMES

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Describes a model's requirements on its service.

    Args:
        name: the path or name of the checkpoint, for messages.
        config: the configuration of the text model as in config.json, with its `model_type`.
        top_k: the most experts of a token. None: the service's gate chooses.
        activation: the non-linearity of the engine's experts. None: only `config` describes it.
        fingerprint: the checkpoint's fingerprint. None: it is unknown.
    """

    name: str
    config: Mapping[str, Any]
    layers: Collection[int]
    hidden: int
    intermediate: int
    num_experts: int
    dtype: str
    top_k: int | None
    activation: Activation | None
    fingerprint: str | None

    def differences(self, served: Any) -> list[str]:
        """Returns every difference between this model and a service's GetModelReply. Empty: they fit."""
        missing = sorted(set(self.layers) - set(served.layers))
        dtype, own = DTYPE_NAMES[served.dtype], self.fingerprint
        checks = [
            (not missing, f"layers {missing} are not served (served: {list(served.layers)})"),
            (served.hidden == self.hidden, f"hidden size: served {served.hidden}, the model has {self.hidden}"),
            (served.intermediate == self.intermediate,
             f"intermediate size: served {served.intermediate}, the model has {self.intermediate}"),
            (served.num_experts == self.num_experts,
             f"experts: served {served.num_experts}, the model has {self.num_experts}"),
            (dtype == self.dtype, f"dtype: served {dtype}, the model is loaded as {self.dtype}; pass dtype={dtype!r}"),
            (own is None or own == served.fingerprint,
             f"fingerprint: served {served.fingerprint[:12]}, {self.name} has {(own or '')[:12]}:"
             " another revision or configuration"),
        ]  # fmt: skip
        found = [text for fits, text in checks if not fits] + self._of_activations(served)
        if self.top_k is not None and self.top_k > served.top_k:
            found.append(
                f"experts a token (num_experts_per_tok): the model has {self.top_k}, at most {served.top_k} are served"
            )
        return found

    def reader(self) -> ConfigReader:
        return ConfigReader(dict(self.config), "the model's configuration")

    def _of_activations(self, served: Any) -> list[str]:
        """Compares the served experts' functions between and after their products with the engine and the configuration."""
        theirs = served_activation(served)
        ours = [self.activation] if self.activation is not None else []
        if theirs is None:
            wrong = [each.kind for each in ours if each.kind != served.activation]
            return [f"activation: served {served.activation}, the model has {kind}" for kind in wrong]
        family = FAMILIES.get(served.family)
        found: dict[str, None] = {}
        if family is not None and served.family == self.config.get("model_type"):
            try:
                ours.append(self.reader().activation(family))
            except CheckpointError as error:
                found[str(error)] = None
        for each in ours:
            for name in unequal(theirs, each):
                label = label_of(name, family.activation if family else {"kind": Key("hidden_act")})
                found[f"{label}: served {getattr(theirs, name)}, the model has {getattr(each, name)}"] = None
        return list(found)


def fingerprint_of(name: str, find_config: Callable[[str], str | None]) -> str | None:
    """Returns the fingerprint of the checkpoint that is being loaded.

    Returns None, with a warning, if its files are not safetensors in a folder. find_config: maps the name to the place of its
    config.json on this machine.
    """
    try:
        folder = Path(str(find_config(name))).parent
        return fingerprint(read_json(folder / "config.json"), read_index(folder))
    except (CheckpointError, OSError, TypeError) as error:
        log.warning("%s: not compared with the service, only shapes are: %s", name, error)
        return None


def unequal(one: GateSpec | Activation, other: GateSpec | Activation) -> list[str]:
    return [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]


def label_of(name: str, table: Any) -> str:
    """Returns the key of config.json by which a user knows this field, or the field's own name."""
    if name == "top_k":
        return "num_experts_per_tok"
    return table[name].names if isinstance(table.get(name), Key) else name


def shared_keys(family: Family) -> str:
    return ", ".join(key.names for key in family.shared.intermediate) if family.shared else "none"
