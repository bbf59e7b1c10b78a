"""FlashInfer's CUTLASS experts and their prepare/finalize, over a strict stand-in of it; what a machine lacks is said."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

from epserve import all2all, experts
from epserve.all2all import flashinfer_cutlass as around
from epserve.errors import Incompatible
from epserve.experts import flashinfer_cutlass as within
from epserve.modular_kernel import (
    Activation,
    ExpertWeights,
    FusedMoEModularKernel,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    why_not,
)
from tests.support.cases import CASES, TOLERANCE, make_inputs, reference
from tests.support.ranks import run_ranks

from . import fake_flashinfer

NAME = "flashinfer_cutlass"
CASE_NAMES = ("bf16", "holes", "repeats", "silent_owner", "all_empty", "cap_on_one", "lopsided", "oai", "limited")


def case_of(name: str):
    changes = {"oai": Activation(kind="swigluoai", limit=0.7), "limited": Activation(kind="silu", limit=0.5)}
    base = CASES["plain" if name in changes else name]
    return dataclasses.replace(base, dtype=torch.bfloat16, activation=changes.get(name, base.activation))


def on_cpu(ranks: RankContext):
    """Both registered classes, told that they run on the CPU, over the stand-in."""
    fake_flashinfer.install()
    cpu = {"devices": frozenset({"cpu"})}
    manager, backend = all2all.REGISTRY.get(NAME), experts.REGISTRY.get(NAME)
    pf = manager.prepare_finalize
    own = type(pf.__name__, (pf,), {"capability": dataclasses.replace(pf.capability, **cpu)})
    inside = type(backend.__name__, (backend,), {"capability": dataclasses.replace(backend.capability, **cpu)})
    return type("OnCpu", (manager,), {"prepare_finalize": own})(ranks), inside


def run_case(ranks: RankContext, name: str) -> tuple[float, float]:
    case = case_of(name)
    inputs = make_inputs(case, ranks.rank, ranks.world_size)
    manager, backend = on_cpu(ranks)
    spec = case.spec(ranks.world_size)
    kernel = FusedMoEModularKernel(
        manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=case.cap)), backend(spec)
    )
    weights = kernel.fused_experts.prepare_weights(inputs.weights)
    assert kernel.fused_experts.prepare_weights(weights).derived[NAME] is weights.derived[NAME], "made once"
    kernel.warm_up(weights)
    outs = []
    for shared in (None, lambda x: torch.zeros_like(x)):
        kernel.workspaces.poison()
        outs.append(kernel.forward(inputs.x_MK, inputs.routing, weights=weights, shared_experts=shared))
    assert torch.equal(*outs) and outs[0].isfinite().all()
    manager.destroy()
    truth = reference(inputs.x_MK, inputs.routing, inputs.every)
    return float((outs[0].double() - truth).square().sum()), float(truth.square().sum())


@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize("world", [1, 2])
def test_equals_the_dense_reference(name, world):
    error, norm = (sum(part) for part in zip(*run_ranks(run_case, world, name), strict=True))
    assert error <= TOLERANCE[torch.bfloat16] ** 2 * norm, (error / max(norm, 1e-30)) ** 0.5


def block_scaled(ranks: RankContext) -> float:
    """fp8 weights in blocks; rows travel in bf16 and the library is told to quantise."""
    case = dataclasses.replace(
        CASES["plain"], dtype=torch.bfloat16, hidden=256, intermediate=128, num_experts=4, top_k=2
    )
    inputs = make_inputs(case, ranks.rank, ranks.world_size)
    gen = torch.Generator().manual_seed(4)
    scales = {"s13": torch.rand((4, 2, 2), generator=gen), "s2": torch.rand((4, 2, 1), generator=gen)}
    codes = {name: tensor.float().mul(64).to(torch.float8_e4m3fn) for name, tensor in inputs.every.tensors().items()}
    rows = slice(*case.spec(ranks.world_size).layout.offsets[ranks.rank : ranks.rank + 2])
    weights = ExpertWeights(**{name: tensor[rows].contiguous() for name, tensor in {**codes, **scales}.items()})
    wide = {
        name: fake_flashinfer._blocks(codes[name], scales[scale]).double()
        for name, scale in (("w13_eNK", "s13"), ("w2_eKN", "s2"))
    }
    manager, backend = on_cpu(ranks)
    spec = dataclasses.replace(case.spec(ranks.world_size), quant=QuantConfig(scheme="fp8_block", dynamic=True))
    kernel = FusedMoEModularKernel(
        manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=64)), backend(spec)
    )
    out = kernel.forward(inputs.x_MK, inputs.routing, weights=weights)
    manager.destroy()
    truth = reference(inputs.x_MK, inputs.routing, ExpertWeights(**wide))
    return float((out.double() - truth).norm() / truth.norm())


def test_block_scales_are_swapped_with_their_rows():
    assert max(run_ranks(block_scaled, 2)) < 1e-2


def test_what_is_missing_is_said(monkeypatch):
    """No package, no GPU, an old GPU, another build, an old version: in the registry, `epserve compat` and `epserve doctor`."""
    for module in (around, within):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    manager, backend = all2all.REGISTRY.get(NAME), experts.REGISTRY.get(NAME)
    for part in (manager, backend):
        assert part.unavailable() == "the package flashinfer is not installed: pip install flashinfer-python"
    for module in (around, within):
        monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert manager.unavailable() == backend.unavailable() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "(8, 0)" in manager.unavailable() and "(8, 0)" in backend.unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "does not load" in manager.unavailable()
    old = types.ModuleType("flashinfer")
    old.fused_moe = types.ModuleType("flashinfer.fused_moe")
    monkeypatch.setitem(sys.modules, "flashinfer", old)
    assert manager.unavailable() == "the installed flashinfer has no cutlass_fused_moe"
    old.fused_moe.cutlass_fused_moe = print
    assert manager.unavailable() is None and backend.unavailable() is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": torch.float32}, "moves bfloat16, float16, not float32"),
        ({"activation": Activation(kind="gelu")}, "activation gelu: the experts have silu, swigluoai"),
        ({"activation": Activation(kind="silu", gated=False)}, "no ungated form"),
        ({"bias": True}, "no biases"),
        ({"hidden": 88}, "hidden size 88 is not a multiple of 16"),
    ],
)
def test_its_limits_are_data(changes, text):
    spec = dataclasses.replace(CASES["bf16"], **changes).spec(2, "cuda")
    pf, backend = all2all.REGISTRY.get(NAME).prepare_finalize, experts.REGISTRY.get(NAME)
    assert any(text in reason for reason in why_not(pf.capability, backend.capability, spec))
    assert why_not(pf.capability, backend.capability, CASES["bf16"].spec(2, "cuda")) == ()


def test_block_scales_need_bfloat16():
    spec = dataclasses.replace(CASES["plain"], dtype=torch.float16).spec(1, "cuda")
    with pytest.raises(Incompatible, match="takes bfloat16 rows"):
        experts.REGISTRY.get(NAME)(dataclasses.replace(spec, quant=QuantConfig(scheme="fp8_block")))
