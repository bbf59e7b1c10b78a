"""Every prepare/finalize crossed with every experts class and every quantisation that fits both, on GPUs.

The truth is float64 of what the stored weights mean. A shared expert that returns zeros makes the same step go through
the receivers, and must change no bit. Also runs alone, for one pair:

    python -m tests.kernel.test_quantised_combinations --pf-type nvlink --experts-type triton --world-size 2
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import pytest
import torch

from epserve import all2all, experts
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertWeights,
    FusedMoEModularKernel,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
)
from tests.support import triton_cases
from tests.support.ranks import num_places, own_pool, run_ranks

from .test_modular_kernel_combinations import GPU_WORLDS, PAIRS, add_pair, missing, reasons

EXPERTS, TOKENS, CAP = 8, 37, 16  # three rounds
SCHEMES = [*((scheme, False) for scheme in QuantConfig.SCHEMES), ("fp8_tensor", True)]
"""(scheme, whether a tensor's scale comes from the batch)."""


def case_of(scheme: str, dynamic: bool, rank: int, ranks: int) -> tuple[triton_cases.Case, LayerSpec]:
    tokens = TOKENS + 5 * rank
    case = triton_cases.Case(why=f"{scheme}{' dynamic' if dynamic else ''}", tokens=tokens, scheme=scheme, dynamic=dynamic,
                             local=EXPERTS, total=EXPERTS, hidden=256, intermediate=256, top_k=2)  # fmt: skip
    return case, dataclasses.replace(case.spec, layout=ExpertLayout.even(EXPERTS, ranks), device="cuda")


def run_scheme(ranks: RankContext, pf_name: str, experts_name: str, scheme: str, dynamic: bool) -> tuple[float, float]:
    """On one rank: (squared error, squared norm of the truth)."""
    case, spec = case_of(scheme, dynamic, ranks.rank, ranks.world_size)
    every, meaning = triton_cases.make_weights(case, "cpu")
    x, _ = triton_cases.make_input(case, "cpu", seed=30 + ranks.rank)
    routing = triton_cases.make_routing(case, "cpu", seed=20 + ranks.rank)
    routing.ids_Mt[::5, 1] = -1
    want = triton_cases.truth(case, meaning, every, x, None, routing)

    start, stop = spec.layout.offsets[ranks.rank], spec.layout.offsets[ranks.rank + 1]
    shared = ("a1", "a2")  # of all experts together
    mine: dict[str, Any] = {
        name: (value if name in shared else value[start:stop]).contiguous().to(ranks.device)
        for name, value in every.tensors().items()
    }
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=CAP))
    kernel = FusedMoEModularKernel(pf, experts.REGISTRY.get(experts_name)(spec))
    weights = kernel.fused_experts.prepare_weights(ExpertWeights(activation=every.activation, **mine))
    kernel.warm_up(weights)
    on_device = Routing(ids_Mt=routing.ids_Mt.to(ranks.device), weights_Mt=routing.weights_Mt.to(ranks.device))
    counts = tuple(TOKENS + 5 * rank for rank in range(ranks.world_size))
    outputs = []
    for shared_experts in (None, torch.zeros_like):
        kernel.workspaces.poison()
        out = kernel.forward(x.to(ranks.device), on_device, weights=weights, tokens_per_rank=counts,
                             shared_experts=shared_experts)  # fmt: skip
        outputs.append(out.cpu())
    manager.destroy()
    assert torch.isfinite(outputs[0]).all(), "undefined memory leaked into the output"
    assert torch.equal(*outputs), "a step through the receivers has other bits"
    return float((outputs[0].double() - want).square().sum()), float(want.square().sum())


def fitting(pf_name: str, experts_name: str, world: int) -> list[tuple[str, bool]]:
    return [pair for pair in SCHEMES if not reasons(pf_name, experts_name, case_of(*pair, 0, world)[1])]


def check_scheme(pf_name: str, experts_name: str, scheme: str, dynamic: bool, world: int) -> float:
    args, pool = (pf_name, experts_name, scheme, dynamic), own_pool(pf_name, world)
    results = run_ranks(run_scheme, world, *args, device="cuda", pool=pool)
    error, norm = (sum(part) for part in zip(*results, strict=True))
    relative = (error / norm) ** 0.5
    limit = triton_cases.tolerance(case_of(scheme, dynamic, 0, world)[0])
    assert relative <= limit, f"relative L2 error {relative:.2e}, at most {limit:.0e}"
    return relative


@pytest.mark.gpu
@pytest.mark.parametrize("world", GPU_WORLDS)
@pytest.mark.parametrize(("pf_name", "experts_name"), [pair for pair in PAIRS if not reasons(*pair)])
def test_every_quantisation_that_fits_on_gpus(pf_name, experts_name, world):
    if not torch.cuda.is_available() or num_places() < world:
        pytest.skip(f"needs {world} CUDA GPUs")
    if text := missing(pf_name, experts_name, "cuda"):
        pytest.skip(text)
    schemes = fitting(pf_name, experts_name, world)
    if not schemes:
        pytest.skip("; ".join(reasons(pf_name, experts_name, case_of("none", False, 0, world)[1])))
    for scheme, dynamic in schemes:
        check_scheme(pf_name, experts_name, scheme, dynamic, world)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_some_pair_takes_each_scheme(scheme):
    """A scheme that no pair fits would be left out above without a word."""
    assert any(scheme in fitting(*pair, 2) for pair in PAIRS if not reasons(*pair))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every quantisation that fits one pair.")
    add_pair(parser)
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args(arguments)
    pair = (options.pf_type, options.experts_type)
    if text := "; ".join(reasons(*pair)) or missing(*pair, "cuda"):
        print(f"cannot run: {text}")
        return 1
    failed = 0
    for scheme, dynamic in SCHEMES:
        name = f"{scheme}{' dynamic' if dynamic else ''}"
        if why := reasons(*pair, case_of(scheme, dynamic, 0, options.world_size)[1]):
            print(f"{name:20} refused  {'; '.join(why)}")
            continue
        try:
            print(f"{name:20} {check_scheme(*pair, scheme, dynamic, options.world_size):8.1e}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name:20} FAILED   {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
