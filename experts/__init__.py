"""Experts backends: one class each. One registration line a backend."""

from epserve.modular_kernel.contracts import FusedMoEExpertsModular
from epserve.modular_kernel.registry import Registry

REGISTRY: Registry[FusedMoEExpertsModular] = Registry("experts backend")


def _loop():
    from .loop import LoopExperts

    return LoopExperts


REGISTRY.register("loop", "a loop over experts: the oracle, readable and slow", _loop)
