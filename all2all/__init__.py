"""All-to-all backends: one manager and one prepare/finalize each. One registration line a backend."""

from epserve.modular_kernel.contracts import All2AllManager
from epserve.modular_kernel.registry import Registry

REGISTRY: Registry[All2AllManager] = Registry("all-to-all backend", package=__name__)

CUDA, ALL = ("cuda",), ("cpu", "cuda")

# Rows in order of preference.
REGISTRY.register("local", "one rank, nothing to send", "local:LocalAll2AllManager", early=ALL, timed=ALL)
REGISTRY.register(
    "nvlink",
    "Triton kernels that store into peers' memory, inside one NVLink domain",
    "nvlink:NvlinkAll2AllManager",
    early=CUDA,
    timed=CUDA,
)
REGISTRY.register(
    "deepep_v2",
    "DeepEP 2's ElasticBuffer",
    "deepep_v2:DeepEPV2All2AllManager",
    note="tested with a stand-in for the library, which has not run",
    early_far=CUDA,
    timed=CUDA,
)
REGISTRY.register(
    "deepep_ht",
    "DeepEP high throughput: a row to each rank that needs it",
    "deepep_ht:DeepEPHTAll2AllManager",
    early_far=CUDA,
    timed=CUDA,
)
REGISTRY.register(
    "all_to_all_by_host",
    "torch.distributed: a row to each host that needs it, then within",
    "all_to_all_by_host:AllToAllByHostManager",
    early_far=ALL,
    timed=ALL,
)
REGISTRY.register(
    "all_to_all",
    "torch.distributed: a row to each rank that needs it",
    "all_to_all:AllToAllManager",
    early=ALL,
    timed=ALL,
)
REGISTRY.register(
    "allgather_reducescatter",
    "torch.distributed: every row to every rank",
    "allgather_reducescatter:AllGatherReduceScatterManager",
    early=ALL,
    timed=ALL,
)
REGISTRY.register(
    "all_to_all_batched",
    "torch.distributed: a row to each expert, fixed blocks",
    "all_to_all_batched:AllToAllBatchedManager",
)
REGISTRY.register(
    "nvlink_batched",
    "`nvlink`, laid out in fixed blocks on the rank that received",
    "nvlink_batched:NvlinkBatchedAll2AllManager",
)
REGISTRY.register(
    "deepep_ll",
    "DeepEP low latency: a row to each expert, fixed blocks",
    "deepep_ll:DeepEPLLAll2AllManager",
    timed=CUDA,
)
REGISTRY.register(
    "nvshmem",
    "nvshmem4py: plain reads from peers' symmetric memory",
    "nvshmem:NvshmemAll2AllManager",
    note="the reference for `nvlink`, which only a configuration that names it gets",
)
REGISTRY.register(
    "flashinfer_cutlass",
    "all rows to all ranks, for FlashInfer's CUTLASS experts",
    "flashinfer_cutlass:FlashInferCutlassManager",
    note="tested with a stand-in for FlashInfer, which has not run",
)
