"""All-to-all backends: one manager and one prepare/finalize each. One registration line a backend."""

from epserve.modular_kernel.contracts import All2AllManager
from epserve.modular_kernel.registry import Registry

REGISTRY: Registry[All2AllManager] = Registry("all-to-all backend")


def _local():
    from .local import LocalAll2AllManager

    return LocalAll2AllManager


def _allgather_reducescatter():
    from .allgather_reducescatter import AllGatherReduceScatterManager

    return AllGatherReduceScatterManager


def _all_to_all():
    from .all_to_all import AllToAllManager

    return AllToAllManager


def _all_to_all_batched():
    from .all_to_all_batched import AllToAllBatchedManager

    return AllToAllBatchedManager


def _nvlink():
    from .nvlink import NvlinkAll2AllManager

    return NvlinkAll2AllManager


REGISTRY.register("local", "one rank, nothing to send", _local)
REGISTRY.register("all_to_all", "torch.distributed: a row to each rank that needs it", _all_to_all)
REGISTRY.register("all_to_all_batched", "torch.distributed: a row to each expert, fixed blocks", _all_to_all_batched)
REGISTRY.register("allgather_reducescatter", "torch.distributed: every row to every rank", _allgather_reducescatter)
REGISTRY.register("nvlink", "Triton kernels that store into peers' memory, inside one NVLink domain", _nvlink)
