"""All-to-all backends: one manager and one prepare/finalize each. One registration line a backend."""

from epserve.modular_kernel.contracts import All2AllManager
from epserve.modular_kernel.registry import Registry

REGISTRY: Registry[All2AllManager] = Registry("all-to-all backend")


def _local():
    from .local import LocalAll2AllManager

    return LocalAll2AllManager


REGISTRY.register("local", "one rank, nothing to send", _local)
