"""Checks the requested layers and experts, and groups layers by their storage, for the tables and the generic path alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from epserve.errors import CheckpointError

from .info import ModelInfo
from .stored.declared import Declared
from .stored.experts import StoredExperts, check_declared, groups


def check_wanted(info: ModelInfo, layer: int, experts: Sequence[int]) -> None:
    """Raises CheckpointError for an unknown layer or expert."""
    if layer not in info.layers:
        raise CheckpointError(f"layer {layer} is not a loaded MoE layer of {info.name}; those are {info.layers}")
    wrong = [expert for expert in experts if not 0 <= expert < info.num_experts]
    if wrong:
        raise CheckpointError(f"experts {wrong} are outside 0..{info.num_experts - 1}")


def with_stored(info: ModelInfo, experts: Mapping[int, StoredExperts], said: Declared) -> ModelInfo:
    """Returns `info` with its layers grouped by their storage.

    Raises CheckpointError when quantised experts are declared and none are there.
    """
    check_declared(experts.values(), said)
    kinds = {layer: (each.describe(), each.scheme(info.sizes)) for layer, each in experts.items()}
    stored = groups(kinds, said.method)
    return replace(info, stored=stored, quant=stored[0].quant)
