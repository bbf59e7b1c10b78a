"""What the all-to-all backends promise beyond right sums: the same bits, single use, quantised rows, deadlines."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from epserve import all2all, experts
from epserve.errors import ConfigError, HandleError, Incompatible, RankFailed
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertsCapability,
    ExpertShape,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    FusedMoEModularKernel,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    WorkspaceShapes,
)
from epserve.modular_kernel.quantization import dequantise_blocks, quantise_blocks
from tests.kernel.test_modular_kernel_combinations import make_kernel, poison_new_memory
from tests.support.cases import CASES, distinct, make_inputs, make_weights, reference
from tests.support.ranks import GROUP_TIMEOUT_S, RankPool, RanksFailed, run_ranks

STANDARD, BATCHED = FusedMoEActivationFormat.Standard, FusedMoEActivationFormat.BatchedExperts


def _backends(*, several_ranks: bool = True, **wanted) -> list[str]:
    """Registered backends that run on CPU ranks here and whose record has these values."""
    names = []
    for name in all2all.REGISTRY.names():
        manager = all2all.REGISTRY.get(name)
        record = manager.prepare_finalize.capability
        fits = all(getattr(record, key) == value for key, value in wanted.items())
        if "cpu" in record.devices and fits and not manager.unavailable() and (record.max_ranks != 1) >= several_ranks:
            names.append(name)
    return names


def _loop_for(pf_name: str) -> str:
    record = all2all.REGISTRY.get(pf_name).prepare_finalize.capability
    return "loop" if record.activation_format is STANDARD else "batched_loop"


# --- the same bits -----------------------------------------------------------------------------------------------


def _forward_share(ranks: RankContext, pf_name: str, dtype: torch.dtype, counts: tuple[int, ...]) -> torch.Tensor:
    """This rank's share of one batch that is cut into as many pieces as there are ranks."""
    poison_new_memory(ranks)
    case = dataclasses.replace(CASES["plain"], dtype=dtype, counts=lambda experts, world: counts)
    gen = torch.Generator().manual_seed(3)
    x_MK = torch.randn((37, case.hidden), generator=gen).to(dtype)
    layout = ExpertLayout(counts=counts)
    ids_Mt = distinct(gen, 37, case, layout, 0).int()
    ids_Mt[5, 1] = ids_Mt[5, 0]  # an expert twice
    ids_Mt[6] = -1
    weights_Mt = torch.rand(ids_Mt.shape, generator=gen)
    rows = torch.arange(37).tensor_split(ranks.world_size)[ranks.rank]
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    kernel, inputs = make_kernel(manager, _loop_for(pf_name), case, ranks, combine_order="slot")
    routing = Routing(ids_Mt=ids_Mt[rows], weights_Mt=weights_Mt[rows])
    out = kernel.forward(x_MK[rows], routing, weights=inputs.weights)
    manager.destroy()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pf_name", _backends())
def test_slot_order_gives_the_same_bits_on_any_number_of_ranks(pf_name, dtype):
    layouts = [(8,), (4, 4), (1, 7), (3, 0, 5), (2, 2, 2, 2), (0, 5, 0, 3), (1,) * 8]
    one, *others = [torch.cat(run_ranks(_forward_share, len(counts), pf_name, dtype, counts)) for counts in layouts]
    assert one.abs().sum() > 0
    for counts, out in zip(layouts[1:], others, strict=True):
        assert torch.equal(one, out), f"{counts} experts on the ranks: other bits than one rank"


def test_slot_order_needs_a_row_a_slot():
    spec = CASES["plain"].spec(1)
    options = PrepareFinalizeOptions(combine_order="slot")
    pf = all2all.REGISTRY.get("all_to_all")(RankContext()).get_handle(spec, options)
    with pytest.raises(Incompatible, match=r"combine_order 'slot' needs .* \(Contiguous\), these have .*NoOP"):
        FusedMoEModularKernel(pf, experts.REGISTRY.get("grouped_mm")(spec))


# --- receivers and handles ---------------------------------------------------------------------------------------


def _real_rows(prepared) -> list[torch.Tensor]:
    """Everything that prepare defines, undefined rows left out."""
    if prepared.expert_num_tokens is None:
        return [prepared.x, prepared.routing.ids_Mt, prepared.routing.weights_Mt]
    counts = prepared.expert_num_tokens
    return [counts, *(block[:count] for block, count in zip(prepared.x, counts.tolist(), strict=True))]


def _two_ways(ranks: RankContext, pf_name: str) -> None:
    """Synchronous and asynchronous halves agree; two batches in flight, finished in the other order; misuse raises."""
    poison_new_memory(ranks)
    case = CASES["plain"]
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    kernel, inputs = make_kernel(manager, _loop_for(pf_name), case, ranks)
    pf, chosen = kernel.prepare_finalize, kernel.fused_experts
    reduce = chosen.finalize_weight_and_reduce_impl()

    def compute(prepared):
        shapes = kernel.workspace_shapes(prepared)
        output = torch.empty(shapes.output, dtype=shapes.output_dtype)
        return chosen.apply(output, prepared, weights=inputs.weights, workspace=kernel.workspaces.carve(shapes))

    known = pf.prepare(inputs.x_MK, inputs.routing, quant=kernel.quant, tokens_per_rank=inputs.tokens_per_rank)
    doubled = (inputs.x_MK * 2).contiguous()
    receive_a = pf.prepare_no_receive(inputs.x_MK, inputs.routing, quant=kernel.quant)
    receive_b = pf.prepare_no_receive(doubled, inputs.routing, quant=kernel.quant)
    a, b = receive_a(), receive_b()
    for sync, started in zip(_real_rows(known), _real_rows(a), strict=True):
        assert torch.equal(sync, started)
    with pytest.raises(HandleError, match=r"receiver .* used twice"):
        receive_a()

    outs = [torch.empty_like(inputs.x_MK) for _ in range(3)]
    y_known, y_a, y_b = compute(known), compute(a), compute(b)
    pf.finalize(known.handle, y_known, reduce=reduce, out_MK=outs[0])
    receive_b = pf.finalize_no_wait(b.handle, y_b, reduce=reduce, out_MK=outs[2])
    receive_a = pf.finalize_no_wait(a.handle, y_a, reduce=reduce, out_MK=outs[1])
    assert receive_b() is outs[2] and receive_a() is outs[1]
    assert torch.equal(outs[0], outs[1])
    for out, x_MK in ((outs[0], inputs.x_MK), (outs[2], doubled)):
        torch.testing.assert_close(out.double(), reference(x_MK, inputs.routing, inputs.every), rtol=1e-4, atol=1e-5)
    with pytest.raises(HandleError, match=r"dispatch handle .* used twice"):
        pf.finalize(a.handle, y_a, reduce=reduce, out_MK=outs[1])

    left = pf.prepare(inputs.x_MK, inputs.routing, quant=kernel.quant)
    with pytest.raises(HandleError, match="1 outstanding and never used"):
        manager.destroy()
    with pytest.raises(HandleError, match="after close"):
        pf.finalize(left.handle, compute(left), reduce=reduce, out_MK=outs[0])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("pf_name", _backends(async_receive=True))
def test_asynchronous_halves_equal_the_synchronous_ones_and_are_single_use(pf_name, world):
    run_ranks(_two_ways, world, pf_name)


def test_the_receivers_of_one_rank_are_ready_and_single_use():
    """Nothing travels, and callers still have one way for every backend."""
    assert not all2all.REGISTRY.get("local").prepare_finalize.capability.async_receive
    _two_ways(RankContext(), "local")


def _shared_inside(ranks: RankContext, pf_name: str, case_name: str) -> None:
    case = CASES[case_name]
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    kernel, inputs = make_kernel(manager, _loop_for(pf_name), case, ranks)
    gen = torch.Generator().manual_seed(11)
    w_KK = torch.randn((case.hidden, case.hidden), generator=gen).to(case.dtype)

    def shared(x_MK):
        return torch.tanh(x_MK @ w_KK)

    inside = kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights, shared_experts=shared)
    sequential = kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights)
    for start in range(0, sequential.shape[0], case.cap):
        sequential[start : start + case.cap] += shared(inputs.x_MK[start : start + case.cap])
    assert torch.equal(inside, sequential)
    manager.destroy()


@pytest.mark.parametrize("case_name", ["bf16", "cap_on_one", "all_empty"])
@pytest.mark.parametrize("pf_name", _backends())
def test_shared_experts_inside_the_receiver_window_change_no_bit(pf_name, case_name):
    run_ranks(_shared_inside, 2, pf_name, case_name)


# --- quantised dispatch ------------------------------------------------------------------------------------------


class IdentityExperts(FusedMoEExpertsModular):
    """Gives back what arrived, dequantised; everything undefined becomes NaN. For either format."""

    capability = ExpertsCapability(
        activation_formats=frozenset({STANDARD, BATCHED}),
        devices=frozenset({"cpu"}),
        quant_schemes=frozenset({"fp8_block"}),
    )

    def __init__(self, spec, batched: bool):
        super().__init__(spec)
        self.batched, self.arrived = batched, []

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        rows = (num_experts, capacity) if self.batched else (num_rows, top_k)
        output, dtype = (*rows, self.spec.shape.hidden), self.spec.shape.dtype
        return WorkspaceShapes(workspace13=(0,), workspace2=(0,), output=output, dtype=dtype, output_dtype=dtype)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate() if self.batched else TopKWeightAndReduceContiguous()

    def apply(self, output, prepared, *, weights, workspace):
        self.arrived.append(prepared.x.dtype)
        x = prepared.x if prepared.scales is None else dequantise_blocks(prepared.x, prepared.scales)
        if self.batched:
            real = torch.arange(x.shape[1]) < prepared.expert_num_tokens[:, None]
        else:
            real, x = prepared.routing.ids_Mt >= 0, x[:, None]
        return output.copy_(torch.where(real[..., None], x, torch.nan))


def _quantised(ranks: RankContext, pf_name: str, quantised: bool, hidden: int) -> None:
    poison_new_memory(ranks)
    case = dataclasses.replace(CASES["holes"], hidden=hidden, cap=8)  # two rounds on rank 2 and 3
    tokens = 5 * ranks.rank  # none on rank 0
    shape = ExpertShape(hidden=hidden, intermediate=48, num_experts=8, top_k=3, dtype=torch.bfloat16)
    layout = ExpertLayout.even(8, ranks.world_size)
    spec = LayerSpec(shape=shape, layout=layout, quant=QuantConfig(scheme="fp8_block"))
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=case.cap, dispatch_quantised=quantised))
    chosen = IdentityExperts(spec, pf.activation_format() is BATCHED)
    gen = torch.Generator().manual_seed(ranks.rank)
    x_MK = torch.randn((tokens, hidden), generator=gen)
    x_MK[:, :100] *= 1000
    x_MK = x_MK.bfloat16()
    ids_Mt = case.route(gen, tokens, case, layout, ranks.rank).int()
    routing = Routing(ids_Mt=ids_Mt, weights_Mt=torch.rand(ids_Mt.shape, generator=gen))
    out = FusedMoEModularKernel(pf, chosen).forward(x_MK, routing, weights=make_weights(case))
    manager.destroy()

    sent = x_MK.double()
    if quantised and hidden % 128 == 0:
        assert set(chosen.arrived) == {torch.float8_e4m3fn}
        sent = dequantise_blocks(*quantise_blocks(x_MK)).bfloat16().double()
        small = slice(128, None)  # the neighbours of blocks a thousand times larger
        assert (sent - x_MK)[:, small].norm() <= 0.04 * x_MK[:, small].norm()
    else:
        assert set(chosen.arrived) == {torch.bfloat16}
    assert out.shape == x_MK.shape and out.dtype == torch.bfloat16
    share = torch.where(ids_Mt >= 0, routing.weights_Mt, 0).sum(1, keepdim=True)
    torch.testing.assert_close(out.double(), share * sent, rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("quantised", "hidden", "why"),
    [
        (True, 256, "T14: blocks that differ by 1000x, each with its own scale; M = 0 on one rank"),
        (False, 256, "the option turns it off: rows travel in the model's dtype"),
        (True, 200, "T14: K is no multiple of 128: rows travel in the model's dtype"),
    ],
)
@pytest.mark.parametrize("pf_name", _backends(quant_dispatch=frozenset({"fp8_block"})))
def test_rows_travel_quantised_with_their_scales(pf_name, quantised, hidden, why):
    run_ranks(_quantised, 4, pf_name, quantised, hidden)


# --- ranks that do not come --------------------------------------------------------------------------------------


def _missing_rank(ranks: RankContext, pf_name: str) -> tuple[str, float] | None:
    if ranks.rank == 1:
        return None
    ranks = dataclasses.replace(ranks, timeout_s=1.0)
    manager = all2all.REGISTRY.get(pf_name)(ranks)
    kernel, inputs = make_kernel(manager, _loop_for(pf_name), CASES["plain"], ranks)
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights, tokens_per_rank=inputs.tokens_per_rank)
    manager.abandon()
    manager.destroy()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("pf_name", _backends())
def test_a_rank_that_never_comes_is_an_error_within_the_deadline(pf_name):
    pool = RankPool(2)
    try:
        text, waited = pool.run(_missing_rank, 2, pf_name)[0]
    finally:
        pool.kill()
    assert text.startswith("dispatch") and "rank 0 of 2" in text and "1 s" in text
    assert 0.9 <= waited <= GROUP_TIMEOUT_S / 2, "the group's own deadline, which is longer, did not end it"


def _fails_on_one(ranks: RankContext) -> None:
    if ranks.rank == 1:
        raise ValueError("the root cause")
    torch.distributed.barrier(group=ranks.group)


def test_the_harness_reports_the_root_cause_first_and_stops_the_others():
    pool = RankPool(2)
    with pytest.raises(RanksFailed, match=r"\Arank 1: (.|\n)*the root cause(.|\n)*rank 0: no answer"):
        pool.run(_fails_on_one, 2)
    assert not any(process.is_alive() for process in pool.processes)


def test_a_layout_for_another_number_of_ranks_is_refused():
    for name in _backends():
        with pytest.raises(ConfigError, match="experts on 2 ranks, there are 1"):
            all2all.REGISTRY.get(name)(RankContext()).get_handle(CASES["plain"].spec(2), PrepareFinalizeOptions())
        with pytest.raises(ConfigError, match="group is None"):
            all2all.REGISTRY.get(name)(RankContext(world_size=2)).get_handle(
                CASES["plain"].spec(2), PrepareFinalizeOptions()
            )


def test_every_registered_case_has_distinct_inputs_on_each_rank():
    """The table would prove little if ranks sent the same rows."""
    shares = [make_inputs(CASES["zipf"], rank, 2).x_MK for rank in range(2)]
    assert not torch.equal(*shares)
