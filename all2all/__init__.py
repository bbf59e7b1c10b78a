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


def _deepep_ht():
    from .deepep_ht import DeepEPHTAll2AllManager

    return DeepEPHTAll2AllManager


def _deepep_ll():
    from .deepep_ll import DeepEPLLAll2AllManager

    return DeepEPLLAll2AllManager


def _deepep_v2():
    from .deepep_v2 import DeepEPV2All2AllManager

    return DeepEPV2All2AllManager


def _nvshmem():
    from .nvshmem import NvshmemAll2AllManager

    return NvshmemAll2AllManager


def _nvlink():
    from .nvlink import NvlinkAll2AllManager

    return NvlinkAll2AllManager


def _nvlink_batched():
    from .nvlink_batched import NvlinkBatchedAll2AllManager

    return NvlinkBatchedAll2AllManager


def _flashinfer_cutlass():
    from .flashinfer_cutlass import FlashInferCutlassManager

    return FlashInferCutlassManager


REGISTRY.register("local", "one rank, nothing to send", _local)
REGISTRY.register("all_to_all", "torch.distributed: a row to each rank that needs it", _all_to_all)
REGISTRY.register("all_to_all_batched", "torch.distributed: a row to each expert, fixed blocks", _all_to_all_batched)
REGISTRY.register("allgather_reducescatter", "torch.distributed: every row to every rank", _allgather_reducescatter)
REGISTRY.register("nvlink", "Triton kernels that store into peers' memory, inside one NVLink domain", _nvlink)
REGISTRY.register("nvlink_batched", "the same, laid out in fixed blocks on the rank that received", _nvlink_batched)
REGISTRY.register("deepep_ht", "DeepEP high throughput: a row to each rank that needs it", _deepep_ht)
REGISTRY.register("deepep_ll", "DeepEP low latency: a row to each expert, fixed blocks", _deepep_ll)
REGISTRY.register(
    "deepep_v2",
    "DeepEP 2's ElasticBuffer",
    _deepep_v2,
    note="tested with a stand-in for the library, which has not run",
)
REGISTRY.register(
    "nvshmem", "nvshmem4py: plain reads from peers' symmetric memory", _nvshmem,
    note="the reference for `nvlink`, which only a configuration that names it gets",
)  # fmt: skip
REGISTRY.register(
    "flashinfer_cutlass", "all rows to all ranks, for FlashInfer's CUTLASS experts", _flashinfer_cutlass,
    note="tested with a stand-in for FlashInfer, which has not run",
)  # fmt: skip
