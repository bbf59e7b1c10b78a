"""Every prepare/finalize crossed with every experts class that fits it, the case table and several numbers of ranks.

The registries and the capability records decide what is run: a new backend is tested by being registered.
Also runs alone, and says why a pair does not fit:

    python -m tests.kernel.test_modular_kernel_combinations --pf-type all_to_all --experts-type loop --world-size 2 --device cpu
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys

import pytest
import torch

from epserve import all2all, experts
from epserve.cli.compat import backend_name, listing
from epserve.errors import ConfigError, Incompatible
from epserve.modular_kernel import (
    FusedMoEModularKernel,
    LayerSpec,
    PrepareFinalizeOptions,
    RankContext,
    why_not,
)
from tests.experts.mixing_products import MixingProducts
from tests.support.cases import CASES, TOLERANCE, Case, make_inputs, reference
from tests.support.ranks import num_places, own_pool, run_ranks

WORLD_SIZES = (1, 2, 4)
PAIRS = tuple(itertools.product(all2all.REGISTRY.names(), experts.REGISTRY.names()))


def reasons(pf_name: str, experts_name: str, spec: LayerSpec | None = None) -> tuple[str, ...]:
    """Why the pair cannot serve `spec`, by the capability records; without a spec: why it never can."""
    pf = all2all.REGISTRY.get(pf_name).prepare_finalize
    return why_not(pf.capability, experts.REGISTRY.get(experts_name).capability, spec)


def missing(pf_name: str, experts_name: str, device: str) -> str | None:
    """Why this machine cannot run the pair, though the two fit."""
    manager, chosen = all2all.REGISTRY.get(pf_name), experts.REGISTRY.get(experts_name)
    for name, part, capability in (
        (pf_name, manager, manager.prepare_finalize.capability),
        (experts_name, chosen, chosen.capability),
    ):
        if device not in capability.devices:
            return f"{name} needs {' or '.join(sorted(capability.devices))}"
        if text := part.unavailable():
            return f"{name}: {text}"
    return None


def on(case: Case, device: str) -> Case:
    """The case as a device's backends take it: GPU libraries move two-byte floats only."""
    return dataclasses.replace(case, dtype=torch.bfloat16) if (device, case.dtype) == ("cuda", torch.float32) else case


def run_case(
    ranks: RankContext, pf_name: str, experts_name: str, case_name: str, tokens_known: bool = True
) -> tuple[float, float]:
    """On one rank: two passes over poisoned memory; returns (squared error, squared norm) of the reference's rows."""
    poison_new_memory(ranks)
    case = on(CASES[case_name], ranks.device.type)
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    kernel, inputs = make_kernel(manager, experts_name, case, ranks)
    truth = reference(inputs.x_MK, inputs.routing, inputs.every)
    on_device = inputs.to(ranks.device)
    weights = kernel.fused_experts.prepare_weights(on_device.weights)
    kernel.warm_up(weights)
    known = inputs.tokens_per_rank if tokens_known else None
    outputs = []
    for _ in range(2):
        kernel.workspaces.poison()
        with MixingProducts():
            out = kernel.forward(on_device.x_MK, on_device.routing, weights=weights, tokens_per_rank=known)
        outputs.append(out.cpu())
    manager.destroy()
    assert outputs[0].shape == inputs.x_MK.shape and outputs[0].dtype == case.dtype
    for number, out in enumerate(outputs, 1):  # before the two are compared: NaN differs from itself
        wrong = out.isfinite().all(1).logical_not().nonzero().flatten().tolist()
        assert not wrong, (
            f"pass {number}: rows {wrong[:10]} of {len(out)} are not finite: undefined memory leaked into them"
        )
    assert torch.equal(outputs[0], outputs[1]), "the second pass over the same inputs differs, both finite"
    return float((outputs[0].double() - truth).square().sum()), float(truth.square().sum())


def make_kernel(manager, experts_name: str, case: Case, ranks: RankContext, **options):
    spec = case.spec(ranks.world_size, ranks.device.type)
    chosen = PrepareFinalizeOptions(max_tokens_per_rank=case.cap, **options)
    kernel = FusedMoEModularKernel(manager.get_handle(spec, chosen), experts.REGISTRY.get(experts_name)(spec))
    return kernel, make_inputs(case, ranks.rank, ranks.world_size)


def poison_new_memory(ranks: RankContext) -> None:
    """torch.empty then yields NaN and the largest integers: receive buffers cannot look right by luck."""
    if ranks.device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True


def check_case(pf_name: str, experts_name: str, case_name: str, world: int, device: str) -> float:
    """Relative L2 error over all ranks; AssertionError above the dtype's tolerance."""
    worst = 0.0
    for known in (True, False) if device == "cuda" else (world != 2,):
        args, pool = (pf_name, experts_name, case_name, known), own_pool(pf_name, world)
        results = run_ranks(run_case, world, *args, device=device, pool=pool)
        error, norm = (sum(part) for part in zip(*results, strict=True))
        relative = (error / norm) ** 0.5 if norm else error
        limit = TOLERANCE[on(CASES[case_name], device).dtype]
        assert relative <= limit, f"relative L2 error {relative:.2e}, at most {limit:.0e} ({CASES[case_name].why})"
        worst = max(worst, relative)
    return worst


def _runs():
    """(pf, experts, world size) that some case fits; a pair that this machine lacks a part of is one visible skip."""
    for pf_name, experts_name in PAIRS:
        if reasons(pf_name, experts_name):
            continue
        if text := missing(pf_name, experts_name, "cpu"):
            yield pytest.param(pf_name, experts_name, 1, "plain", marks=pytest.mark.skip(reason=text))
            continue
        for world, case in itertools.product(WORLD_SIZES, CASES.values()):
            if not reasons(pf_name, experts_name, case.spec(world)):
                yield pytest.param(pf_name, experts_name, world, case.name)


@pytest.mark.parametrize(("pf_name", "experts_name", "world", "case_name"), list(_runs()))
def test_equals_the_dense_reference(pf_name, experts_name, world, case_name):
    check_case(pf_name, experts_name, case_name, world, "cpu")


@pytest.mark.parametrize(("pf_name", "experts_name"), PAIRS)
def test_unfit_layers_are_refused_with_every_reason(pf_name, experts_name):
    """What the records rule out is refused when the kernel is made: before any weight is read."""
    chosen, manager = experts.REGISTRY.get(experts_name), all2all.REGISTRY.get(pf_name)
    for case in CASES.values():
        spec = case.spec(1)
        why = reasons(pf_name, experts_name, spec)
        if not why:
            continue
        pf = _Shell(manager.prepare_finalize, spec)
        with pytest.raises(Incompatible) as caught:
            FusedMoEModularKernel(pf, chosen.__new__(chosen))
        assert caught.value.reasons == why
        assert all(reason in str(caught.value) for reason in why)


class _Shell:
    """A prepare/finalize object as far as the fit check looks at it: no device, no library."""

    def __init__(self, cls, spec):
        self.capability, self.spec = cls.capability, spec


GPU_WORLDS = (1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("world", GPU_WORLDS)
@pytest.mark.parametrize(("pf_name", "experts_name"), [pair for pair in PAIRS if not reasons(*pair)])
def test_equals_the_dense_reference_on_gpus(pf_name, experts_name, world):
    if not torch.cuda.is_available() or num_places() < world:
        pytest.skip(f"needs {world} CUDA GPUs")
    if text := missing(pf_name, experts_name, "cuda"):
        pytest.skip(text)
    fitting = [
        name for name, case in CASES.items() if not reasons(pf_name, experts_name, on(case, "cuda").spec(world, "cuda"))
    ]
    if not fitting:
        pytest.skip("; ".join(reasons(pf_name, experts_name, CASES["bf16"].spec(world, "cuda"))))
    for case_name in fitting:
        check_case(pf_name, experts_name, case_name, world, "cuda")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Backends by their names or their classes; --list prints every pair that fits."""

    def of(registry):
        def name(text: str) -> str:
            try:
                return backend_name(registry, text)
            except ConfigError as error:
                raise argparse.ArgumentTypeError(str(error)) from None

        return name

    class Listing(argparse.Action):
        def __call__(self, parser, *_):
            print("\n".join(listing()))
            parser.exit()

    parser.add_argument("--list", action=Listing, nargs=0, help="print every pair that fits, and end")
    parser.add_argument("--pf-type", required=True, type=of(all2all.REGISTRY))
    parser.add_argument("--experts-type", required=True, type=of(experts.REGISTRY))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the case table for one pair.")
    add_pair(parser)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="only these cases")
    options = parser.parse_args(arguments)
    pair, device = (options.pf_type, options.experts_type), options.device
    if why := reasons(*pair):
        print(f"{pair[0]} and {pair[1]} do not fit: {'; '.join(why)}")
        return 1
    if text := missing(*pair, device):
        print(f"cannot run here: {text}")
        return 1
    failed = 0
    for name in options.case or CASES:
        case = on(CASES[name], device)
        why = reasons(*pair, case.spec(options.world_size, device))
        if why:
            print(f"{name:18} refused  {'; '.join(why)}")
            continue
        try:
            print(f"{name:18} {check_case(*pair, name, options.world_size, device):8.1e}  {case.why}")
        except AssertionError as error:
            failed += 1
            print(f"{name:18} FAILED   {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
