"""The gate's kernels compiled for a GPU that is not there; and after warm-up no batch asks for another variant.

The hook that sees a missing variant vetoes its compilation, so that only keys are made.
"""

import dataclasses
import os
import random
import re

import pytest
import torch
import triton

from epserve.experts.kernels import gate as kernels
from epserve.experts.tiles.memory import Gpu
from epserve.experts.triton import gate as triton_gate
from epserve.modular_kernel import GateSpec, GateWeights
from tests.experts.triton_aot import fake_driver
from tests.experts.triton_aot.compiled import machine_code

CAPABILITY = int(os.environ.get("EPSERVE_TEST_CAPABILITY", "90"))
SHARED_MEMORY = Gpu.like((CAPABILITY // 10, CAPABILITY % 10)).shared_memory
PRODUCTS = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
fake_driver.install(CAPABILITY)
BF16, F32 = torch.bfloat16, torch.float32
DEEPSEEK = GateSpec(
    top_k=8, scoring="sigmoid", renormalise=True, renormalise_epsilon=1e-20, num_groups=8, top_groups=4, group_score="top2_sum",
    correction_bias=True, routed_scaling_factor=2.5, logits_float32=True,
)  # fmt: skip
QWEN = GateSpec(top_k=8, renormalise=True, round_weights=True)
GPT_OSS = GateSpec(top_k=4, scoring="softmax_of_topk", round_weights=True)
GATES = {  # experts, hidden, weight, spec
    "DeepSeek-V3": (256, 7168, BF16, DEEPSEEK),
    "a quarter of it": (64, 7168, BF16, DEEPSEEK),
    "float32 weight": (256, 7168, F32, DEEPSEEK),
    "Qwen3-235B": (128, 4096, BF16, QWEN),
    "gpt-oss-120b": (128, 2880, BF16, GPT_OSS),
    "512 experts": (512, 2048, BF16, dataclasses.replace(QWEN, top_k=10)),
}


def stub(num_experts: int, hidden: int, dtype: torch.dtype, spec: GateSpec) -> GateWeights:
    bias = torch.zeros(num_experts, dtype=dtype) if spec.scoring == "softmax_of_topk" else None
    correction = torch.zeros(num_experts) if spec.correction_bias else None
    return GateWeights(
        weight_EK=torch.zeros((num_experts, hidden), dtype=dtype), bias_E=bias, correction_bias_E=correction
    )


@pytest.mark.parametrize("name", GATES)
def test_tensor_cores_and_no_spills(name, monkeypatch):
    num_experts, hidden, dtype, spec = GATES[name]
    weights, found = stub(num_experts, hidden, dtype, spec), []

    def record(kernel, grid, *args, **constants):
        pdl = CAPABILITY >= 90
        found.append((kernel, kernel.warmup(*args, grid=(1,), PDL=pdl, **constants)))

    monkeypatch.setattr(triton_gate, "_launch", record)
    monkeypatch.setattr(triton_gate, "_capability", lambda device: divmod(CAPABILITY, 10))
    for tokens in (1, 128, 512):
        triton_gate.route(torch.zeros((tokens, hidden), dtype=BF16), weights, spec)
    products = [compiled for kernel, compiled in found if kernel is kernels.gate_logits]
    assert len(products) == 3 and len(found) == 6
    for kernel, compiled in found:
        code = machine_code(compiled)
        assert "STL" not in code and "LDL" not in code, f"{kernel.__name__} spills registers"
        assert compiled.metadata.shared <= SHARED_MEMORY, f"{kernel.__name__} does not fit"
        if kernel is kernels.gate_logits:
            kinds = set(re.findall(r"\b(HMMA|HGMMA|UTCHMMA|UTC\w*MMA)", code))
            assert kinds == {PRODUCTS[CAPABILITY]}, "products of one kind for any batch"


@pytest.mark.skipif(CAPABILITY != 90, reason="the keys are those of any GPU")
@pytest.mark.parametrize("name", GATES)
def test_batches_of_any_size_after_warm_up(name, monkeypatch):
    num_experts, hidden, dtype, spec = GATES[name]
    weights, asked = stub(num_experts, hidden, dtype, spec), set()

    def veto(*, key, fn, **other):
        asked.add((fn.name, key))
        return True

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", veto)
    monkeypatch.setattr(triton_gate.COUNTER, "install", lambda: None)
    triton_gate.warm_up(weights, spec, BF16)
    warm = set(asked)
    assert len(warm) == 6, "three sizes of tiles; two splits and bare logits"
    store = torch.zeros((1501, hidden), dtype=BF16)
    for tokens in [1, 2, 16, 32, 33, 256, 257, 1024, *random.Random(1).sample(range(1, 1500), 100)]:
        triton_gate.route(store[1 : 1 + tokens], weights, spec)  # rows of a larger batch
        logits = torch.zeros((tokens * num_experts + 1,), dtype=F32 if spec.logits_float32 else BF16)[1:]
        triton_gate.choose(logits.view(tokens, num_experts), weights.correction_bias_E, spec)
    assert asked == warm, {name for name, _ in asked - warm}
