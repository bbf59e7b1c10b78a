"""Ranks that share each expert by slices: slices of every storage, an all-to-all around another one, a rank that serves so."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epserve import all2all, experts
from epserve.all2all.tensor_parallel import TensorParallelManager
from epserve.config import parse_config
from epserve.errors import ConfigError, Incompatible, RankFailed
from epserve.models.demo import reference_block
from epserve.models.slices import check_slices, slice_experts
from epserve.modular_kernel import (
    Activation,
    Backends,
    ExpertLayout,
    ExpertWeights,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    UnquantizedFusedMoEMethod,
)
from epserve.modular_kernel.quantization import FP8
from epserve.modular_kernel.steps.in_flight import TwoInFlight
from epserve.rank.placement import Placement
from epserve.rank.setup.memory import plan_memory
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from tests.kernel.test_modular_kernel_combinations import poison_new_memory
from tests.rank.test_worker import make_config, make_worker, tokens
from tests.support.cases import CASES, TOLERANCE, make_inputs, reference
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import RankPool, num_places, run_ranks

N, K, E = 512, 256, 3
SCHEMES = ("none", "fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "int4", "mxfp4", "nvfp4")


# --- slices of weights -------------------------------------------------------------------------------------------


def stored(scheme: str, gated: bool) -> tuple[ExpertWeights, QuantConfig]:
    """Random codes and scales in the layout of `QuantConfig`."""
    quant, gen, wide = QuantConfig(scheme=scheme), torch.Generator().manual_seed(1), N * (2 if gated else 1)
    packed, group = (
        (2 if scheme in ("int4", "mxfp4", "nvfp4") else 1),
        {"int4": 128, "mxfp4": 32, "nvfp4": 16}.get(scheme),
    )

    def codes(*shape: int) -> torch.Tensor:
        raw = torch.randint(0, 100, (*shape[:-1], shape[-1] // packed), generator=gen)
        kind = {"none": torch.float32, "int8_channel": torch.int8}.get(scheme, torch.uint8 if packed == 2 else FP8)
        return raw.to(torch.uint8) if packed == 2 else raw.float().to(kind)

    def scales(rows: int, columns: int) -> torch.Tensor | None:
        shape = {"none": None, "fp8_tensor": (E,), "fp8_block": (E, rows // 128, columns // 128)}.get(scheme, (E, rows))
        if group is not None:
            shape = (E, rows, columns // group)
        return None if shape is None else torch.rand(shape, generator=gen)

    weights = ExpertWeights(
        w13_eNK=codes(E, wide, K), w2_eKN=codes(E, K, N), s13=scales(wide, K), s2=scales(K, N),
        b13=torch.rand((E, wide), generator=gen), b2=torch.rand((E, K), generator=gen),
        activation=Activation(kind="gelu", gated=gated),
    )  # fmt: skip
    return weights, quant


def spread(codes: torch.Tensor, scale: torch.Tensor | None, scheme: str) -> torch.Tensor:
    """`(e, rows, columns)` in float64 with every code's own scale: which scale belongs to which code, read naively."""
    if codes.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(2)
    value = codes.to(torch.float64) if codes.dtype != FP8 else codes.float().double()
    if scale is None:
        return value
    if scale.ndim == 1:
        return value * scale.double()[:, None, None]
    if scale.ndim == 2:
        return value * scale.double()[:, :, None]
    for dim in (1, 2):
        scale = scale.repeat_interleave(value.shape[dim] // scale.shape[dim], dim)
    return value * scale.double()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_slices_hold_the_same_numbers_as_the_whole(scheme, gated):
    whole, quant = stored(scheme, gated)
    check_slices(N, quant, whole.activation, 4)
    parts = [slice_experts(whole, quant, part, 4) for part in range(4)]
    w13 = [spread(part.w13_eNK, part.s13, scheme).unflatten(1, (2 if gated else 1, -1)) for part in parts]
    assert torch.equal(torch.cat(w13, 2).flatten(1, 2), spread(whole.w13_eNK, whole.s13, scheme))
    assert torch.equal(
        torch.cat([spread(p.w2_eKN, p.s2, scheme) for p in parts], 2), spread(whole.w2_eKN, whole.s2, scheme)
    )
    b13 = torch.cat([part.b13.unflatten(1, (2 if gated else 1, -1)) for part in parts], 2)
    assert torch.equal(b13.flatten(1), whole.b13)
    assert torch.equal(sum(part.b2 for part in parts), whole.b2), "the output's bias is added once"
    for part in parts:
        assert all(tensor.is_contiguous() for tensor in part.tensors().values())
        assert part.w13_eNK.untyped_storage().nbytes() * 4 <= whole.w13_eNK.untyped_storage().nbytes(), (
            "no whole is kept"
        )


@pytest.mark.parametrize(
    ("intermediate", "scheme", "slices", "text"),
    [
        (1408, "none", 3, "1408 does not divide into 3 slices; possible are 1, 2, 4, 8, 11, 16"),
        (1408, "fp8_block", 2, r"into 2 slices of whole groups of 128 \(fp8_block\); possible are 1, 11"),
        (2880, "mxfp4", 4, r"into 4 slices of whole groups of 32 \(mxfp4\); possible are 1, 2, 3, 5, 6, 9, 10, 15"),
        (2880, "nvfp4", 8, r"whole groups of 16 \(nvfp4\)"),
        (100, "int4", 1, None),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(intermediate, scheme, slices, text):
    if text is None:
        check_slices(intermediate, QuantConfig(scheme=scheme), Activation(), slices)
        return
    with pytest.raises(ConfigError, match=f"tensor_parallel {slices}: .*{text}"):
        check_slices(intermediate, QuantConfig(scheme=scheme), Activation(), slices)


def test_experts_that_normalise_their_outputs_are_refused():
    with pytest.raises(ConfigError, match="normalise their outputs"):
        check_slices(64, QuantConfig(), Activation(output_norm_eps=1e-6), 2)


# --- the all-to-all ----------------------------------------------------------------------------------------------

CASE_NAMES = ("plain", "bf16", "holes", "repeats", "silent_owner", "all_empty", "cap_on_one", "cap_times_10", "bias",
              "five_experts", "lopsided", "act_swigluoai")  # fmt: skip
LAYOUTS = {"TP2": (2, 2), "TP4": (4, 4), "EP2 x TP2": (4, 2)}  # ranks, of which so many share experts


POOLS: dict[tuple[int, str], RankPool] = {}


def on_ranks(fn, world: int, *arguments, device: str = "cpu", timeout: float = 150.0) -> list:
    """As `run_ranks`, on as many processes as there are ranks: the groups within are made by all processes together."""
    pool = POOLS.get((world, device))
    if pool is None or not pool.alive:
        pool = POOLS[world, device] = RankPool(world, device)
    return pool.run(fn, world, *arguments, timeout=timeout)


@pytest.fixture(scope="module", autouse=True)
def _no_pool_is_left():
    yield
    for pool in POOLS.values():
        if pool.alive:
            pool.close()
    POOLS.clear()


def make_sliced(ranks: RankContext, inner: str, case, slices: int, **options):
    """Through the method class, as the service does it: (kernel, this rank's inputs, its weights)."""
    entries = ranks.world_size // slices
    inputs = make_inputs(case, ranks.rank, ranks.world_size)
    spec = case.spec(entries, ranks.device.type)
    spec = dataclasses.replace(
        spec,
        layout=dataclasses.replace(spec.layout, slices=slices),
        shape=dataclasses.replace(spec.shape, intermediate=spec.shape.intermediate // slices),
    )
    record = all2all.REGISTRY.get(inner).prepare_finalize.capability
    name = "loop" if record.activation_format.name == "Standard" else "batched_loop"
    backends = Backends(
        all2all=all2all.REGISTRY, experts=experts.REGISTRY, prefer_all2all=(inner,), prefer_experts=(name,),
        by_slices=TensorParallelManager,
    )  # fmt: skip
    method = UnquantizedFusedMoEMethod(spec, backends)
    kernel = method.init_prepare_finalize(ranks, PrepareFinalizeOptions(max_tokens_per_rank=case.cap, **options))
    entry, part = divmod(ranks.rank, slices)
    start, stop = spec.layout.offsets[entry], spec.layout.offsets[entry + 1]
    held = {name: value[start:stop] for name, value in inputs.every.tensors().items()}
    weights = slice_experts(ExpertWeights(activation=case.activation, **held), spec.quant, part, slices)
    moved = {name: value.to(ranks.device) for name, value in weights.tensors().items()}
    return method, kernel, inputs, dataclasses.replace(weights, **moved)


def run_sliced(ranks: RankContext, inner: str, case_name: str, slices: int, known: bool) -> tuple[float, float]:
    poison_new_memory(ranks)
    method, kernel, inputs, weights = make_sliced(ranks, inner, CASES[case_name], slices)
    on_device = inputs.to(ranks.device)
    kernel.warm_up(weights)
    counts = inputs.tokens_per_rank if known else None
    outs = []
    for shared in (None, lambda x: torch.zeros_like(x)):  # the second way receives later where that is possible
        kernel.workspaces.poison()
        outs.append(
            kernel.forward(
                on_device.x_MK, on_device.routing, weights=weights, tokens_per_rank=counts, shared_experts=shared
            )
        )
    assert torch.equal(*outs)
    method.manager.destroy()
    truth = reference(inputs.x_MK, inputs.routing, inputs.every)
    out = outs[0].cpu()
    assert out.shape == truth.shape and torch.isfinite(out).all()
    return float((out.double() - truth).square().sum()), float(truth.square().sum())


def check(results, dtype) -> None:
    error, norm = (sum(part) for part in zip(*results, strict=True))
    assert error <= (1.5 * TOLERANCE[dtype]) ** 2 * norm, (error / max(norm, 1e-30)) ** 0.5


@pytest.mark.parametrize("case_name", CASE_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_dense_reference(layout, case_name):
    world, slices = LAYOUTS[layout]
    inner = "local" if world == slices else "all_to_all"
    check(on_ranks(run_sliced, world, inner, case_name, slices, case_name != "plain"), CASES[case_name].dtype)


@pytest.mark.parametrize("inner", ["allgather_reducescatter", "all_to_all_batched"])
@pytest.mark.parametrize("case_name", ["plain", "cap_on_one"])
def test_around_other_backends(inner, case_name):
    check(on_ranks(run_sliced, 4, inner, case_name, 2, True), CASES[case_name].dtype)


def two_in_flight(ranks: RankContext) -> None:
    method, kernel, inputs, weights = make_sliced(ranks, "all_to_all", CASES["plain"], 2, batches_in_flight=2)
    two = TwoInFlight(kernel)
    outs = [
        two.forward(
            inputs.x_MK, inputs.routing, weights=weights, tokens_per_rank=inputs.tokens_per_rank, overlap=overlap
        )
        for overlap in (True, False)
    ]
    assert torch.equal(*outs) and outs[0].abs().sum() > 0
    method.manager.destroy()


def test_two_batches_in_flight_are_bit_equal_here_too():
    on_ranks(two_in_flight, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "slices", "inner"), [(2, 2, "local"), (4, 2, "all_to_all"), (4, 2, "nvlink")])
@pytest.mark.parametrize("case_name", ["bf16", "plain", "cap_on_one", "silent_owner"])
def test_equals_the_dense_reference_on_gpus(world, slices, inner, case_name):
    if not torch.cuda.is_available() or num_places() < world:
        pytest.skip(f"needs {world} CUDA GPUs")
    check(on_ranks(run_sliced, world, inner, case_name, slices, True, device="cuda"), CASES[case_name].dtype)


def missing_slice(ranks: RankContext) -> str | None:
    ranks = dataclasses.replace(ranks, timeout_s=1.0)
    method, kernel, inputs, weights = make_sliced(ranks, "local", CASES["plain"], 2)
    if ranks.rank == 1:
        return None
    with pytest.raises(RankFailed) as caught:
        kernel.forward(inputs.x_MK, inputs.routing, weights=weights, tokens_per_rank=inputs.tokens_per_rank)
    method.manager.abandon()
    method.manager.destroy()
    return str(caught.value)


def test_a_slice_that_never_comes_is_an_error_within_the_deadline():
    pool = RankPool(2)
    try:
        text = pool.run(missing_slice, 2)[0]
    finally:
        pool.kill()
    assert text.startswith("gather of tokens") and "1 s" in text


def test_layouts_and_backends_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="3 ranks do not divide by tensor_parallel 2"):
        TensorParallelManager(RankContext(world_size=3), all2all.REGISTRY.get("local"), 2)
    with pytest.raises(ConfigError, match="group is None"):
        TensorParallelManager(RankContext(world_size=2), all2all.REGISTRY.get("local"), 2)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        ExpertLayout(counts=(1,), slices=0)
    spec = CASES["plain"].spec(1)
    spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, slices=2))
    backends = Backends(all2all=all2all.REGISTRY, experts=experts.REGISTRY)
    with pytest.raises(Incompatible, match="2 ranks share each expert"):
        UnquantizedFusedMoEMethod(spec, backends).init_prepare_finalize(RankContext(), PrepareFinalizeOptions())
    alone = TensorParallelManager(RankContext(), all2all.REGISTRY.get("local"), 1)
    with pytest.raises(ConfigError, match="experts on 2 groups of ranks, there are 1"):
        alone.get_handle(CASES["plain"].spec(2), PrepareFinalizeOptions())
    with pytest.raises(ConfigError, match="combine_order is 'slot'"):
        alone.get_handle(CASES["plain"].spec(1), PrepareFinalizeOptions(combine_order="slot"))


# --- on a rank ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("slices") / "deepseek", dtype=torch.float32)


def serve(ranks: RankContext, path, counts, engine):
    worker = make_worker(path, ranks, **engine)
    report = Worker(make_config(path, ranks=ranks.world_size, **engine), ranks).load()
    first = sum(counts[: ranks.rank])
    x = tokens(sum(counts))[first : first + counts[ranks.rank]]
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=tuple(counts))
    y = worker.step(plan, x, None, None)
    worker.regroup(ranks)
    worker.warm_up()
    assert torch.equal(y, worker.step(plan, x, None, None))
    worker.close()
    return y, report


SERVICES = {
    "TP2": ((5, 6), {"tensor_parallel": 2}),
    "TP2, one silent rank": ((0, 3), {"tensor_parallel": 2}),
    "EP2 x TP2": ((5, 0, 2, 9), {"tensor_parallel": 2}),
    "EP2 x TP2, rounds": ((9, 1, 2, 9), {"tensor_parallel": 2, "max_tokens_per_rank": 4}),
    "EP2 x TP2, uneven": ((3, 3, 3, 3), {"tensor_parallel": 2, "experts_per_rank": [3, 5]}),
    "EP2 x TP2, measured": (
        (3, 1, 2, 9),
        {"tensor_parallel": 2, "all2all": "measured", "all2all_candidates": ["all_to_all", "all_to_all_batched"]},
    ),
}


@pytest.mark.parametrize("name", SERVICES)
def test_block_equals_transformers(checkpoint, name):
    counts, engine = SERVICES[name]
    results = on_ranks(serve, len(counts), checkpoint, counts, engine)
    got = torch.cat([y for y, _ in results])
    want = reference_block(checkpoint, LAYER)(tokens(sum(counts)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    reports = [report for _, report in results]
    for first, second in zip(reports[::2], reports[1::2], strict=True):
        assert first.experts == second.experts, "a pair shares its experts"
    layers, K, N, item = 1, 64, 32, 4
    assert sum(report.weights_bytes for report in reports) == layers * 8 * 3 * K * N * item, "no byte is held twice"
    assert sorted(e for report in reports[::2] for e in report.experts) == list(range(8))


BAD = {
    "ranks that do not divide": ({"ranks": 3, "tensor_parallel": 2}, "ranks 3 do not divide by tensor_parallel 2"),
    "N that does not divide": (
        {"ranks": 3, "tensor_parallel": 3},
        "intermediate size 32 does not divide into 3 slices",
    ),
    "graphs": (
        {"ranks": 2, "tensor_parallel": 2, "cuda_graph_tokens": [1]},
        "run eagerly, so tensor_parallel must be 1",
    ),
    "slot order": ({"ranks": 2, "tensor_parallel": 2, "combine_order": "slot"}, "combine_order slot"),
    "counts a rank": (
        {"ranks": 4, "tensor_parallel": 2, "experts_per_rank": [2, 2, 2, 2]},
        "lists 4 ranks, engine.ranks is 4, of which 2 each share experts: 2 entries",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_configurations_are_refused_before_weights_are_read(checkpoint, name, monkeypatch):
    engine, text = BAD[name]
    monkeypatch.setattr("epserve.models.Checkpoint.load_layer", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=text):
        Worker(make_config(checkpoint, **engine), RankContext(world_size=engine["ranks"]))


def test_the_plan_knows_of_slices(checkpoint):
    def weights(**engine) -> list[int]:
        config = parse_config({"model": {"path": str(checkpoint)}, "engine": {"device": "cpu", **engine}})
        return [rank.weights for rank in plan_memory(config, memory=1 << 30).ranks]

    assert weights(ranks=4, tensor_parallel=2) == weights(ranks=4)
    (whole,) = weights(ranks=1)
    assert weights(ranks=2, tensor_parallel=2) == [whole // 2] * 2


def in_part_of_the_processes(ranks: RankContext) -> None:
    with pytest.raises(ConfigError, match="a process group of all 4 processes, it has 2"):
        TensorParallelManager(ranks, all2all.REGISTRY.get("local"), 2)


def test_a_group_of_some_processes_is_refused():
    run_ranks(in_part_of_the_processes, 2)


def test_placements_of_slices_are_never_partial():
    """Losing one of two ranks that share experts loses those experts, copies or not."""
    layout = ExpertLayout.even(8, 2, slices=2)
    placement = Placement.spread(4, layout)
    assert placement.without([3], version=1) is None
    assert [placement.experts_of(rank) for rank in (0, 2)] == [placement.experts_of(rank) for rank in (1, 3)]
    assert Placement.spread(4, dataclasses.replace(layout, slices=1)).without([1], version=1) is not None
