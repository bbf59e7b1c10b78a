"""Experts backends: one class each. One registration line a backend."""

from epserve.modular_kernel.contracts import FusedMoEExpertsModular
from epserve.modular_kernel.registry import Registry

REGISTRY: Registry[FusedMoEExpertsModular] = Registry("experts backend")


def _loop():
    from .loop import LoopExperts

    return LoopExperts


def _grouped_mm():
    from .grouped_mm import GroupedMMExperts

    return GroupedMMExperts


def _batched_loop():
    from .batched_loop import BatchedLoopExperts

    return BatchedLoopExperts


REGISTRY.register("loop", "a loop over experts: the oracle, readable and slow", _loop)
REGISTRY.register("grouped_mm", "torch's grouped matrix product over sorted slots", _grouped_mm)
REGISTRY.register("batched_loop", "a loop over experts on batched rows: the oracle of that format", _batched_loop)
