"""Ids of the gate have the dtype that the step's prepare/finalize takes, and no backend converts them again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from epserve import all2all
from epserve.all2all.local import LocalPrepareAndFinalize
from epserve.all2all.tensor_parallel import TensorParallelManager
from epserve.experts.batched_loop import BatchedLoopExperts
from epserve.experts.loop import LoopExperts
from epserve.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEModularKernel,
    GateSpec,
    GateWeights,
    PrepareFinalizeOptions,
    RankContext,
    Routing,
)
from epserve.rank.gate import route
from epserve.rank.placement import Placement, to_physical
from epserve.rank.step import StepPlan
from tests.all2all.test_deepep import case_of, manager_on_cpu
from tests.rank.test_worker import make_worker, tokens
from tests.support.cases import CASES, TOLERANCE, make_inputs, reference
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks

DTYPES = {
    "local": torch.int32, "all_to_all": torch.int32, "all_to_all_batched": torch.int32, "all_to_all_by_host": torch.int32,
    "allgather_reducescatter": torch.int32, "nvlink": torch.int32, "nvlink_batched": torch.int32,
    "deepep_ht": torch.int64, "deepep_ll": torch.int64, "deepep_v2": torch.int64, "nvshmem": torch.int32,
    "flashinfer_cutlass": torch.int32,
}  # fmt: skip
"""What each library takes: DeepEP int64, all others int32."""
STAND_INS = ("deepep_ht", "deepep_ll", "nvshmem")
ON_CPU = ("all_to_all", "all_to_all_batched", "allgather_reducescatter", *STAND_INS)


def test_every_backend_names_its_dtype():
    named = {name: all2all.REGISTRY.get(name).prepare_finalize for name in all2all.REGISTRY.names()}
    assert {name: pf.topk_indices_dtype(object.__new__(pf)) for name, pf in named.items()} == DTYPES


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_topk"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_the_gate_and_the_placement_keep_the_dtype(ids_dtype, scoring):
    gen = torch.Generator().manual_seed(0)
    x, weights = torch.randn((9, 16), generator=gen), GateWeights(weight_EK=torch.randn((6, 16), generator=gen))
    spec = GateSpec(top_k=3, scoring=scoring)
    routing = route(x, weights, spec, ids_dtype=ids_dtype)
    assert routing.ids_Mt.dtype == ids_dtype and routing.ids_Mt.is_contiguous()
    assert torch.equal(routing.ids_Mt.int(), route(x, weights, spec).ids_Mt)
    placement = Placement(
        physical_to_logical=(5, 4, 3, 2, 1, 0, 5, 4), num_logical=6, layout=CASES["plain"].spec(2).layout
    )
    physical = to_physical(routing, placement)
    assert physical.ids_Mt.dtype == ids_dtype
    assert torch.equal(physical.ids_Mt.int(), to_physical(routing.with_ids(torch.int32), placement).ids_Mt)


class Conversions(TorchDispatchMode):
    """Notes every conversion of integers that have as many columns as a token has slots."""

    def __init__(self, num_slots: int):
        super().__init__()
        self.num_slots, self.seen = num_slots, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].shape[-1:] == (self.num_slots,):
            before, after = args[0].dtype, out.dtype
            if before != after and not (
                before.is_floating_point or after.is_floating_point or torch.bool in (before, after)
            ):
                self.seen.append((before, after))
        return out


def _gated_step(ranks: RankContext, name: str) -> tuple[list, float, float]:
    case = case_of("bf16")
    manager = manager_on_cpu(name, ranks) if name in STAND_INS else all2all.REGISTRY.get(name)(ranks)
    pf = manager.get_handle(case.spec(ranks.world_size), PrepareFinalizeOptions(max_tokens_per_rank=case.cap))
    batched = pf.activation_format() is FusedMoEActivationFormat.BatchedExperts
    kernel = FusedMoEModularKernel(pf, (BatchedLoopExperts if batched else LoopExperts)(pf.spec))
    inputs, seen = make_inputs(case, ranks.rank, ranks.world_size), []
    gate = GateWeights(weight_EK=torch.randn((case.num_experts, case.hidden)).to(case.dtype))
    routing = route(inputs.x_MK, gate, GateSpec(top_k=case.top_k), ids_dtype=pf.topk_indices_dtype())
    for start in ("prepare", "prepare_no_receive"):
        if start == "prepare_no_receive" and not pf.has_prepare_no_receive():
            continue
        with Conversions(case.top_k) as mode:
            prepared = getattr(pf, start)(inputs.x_MK, routing, quant=kernel.quant)
            prepared = prepared if start == "prepare" else prepared()
        seen += [each for each in mode.seen if each[1] == torch.int64]
        out = torch.empty_like(inputs.x_MK)
        y = kernel.run_experts(prepared, inputs.weights, kernel.workspaces)
        reduce = kernel.fused_experts.finalize_weight_and_reduce_impl()
        pf.finalize(prepared.handle, y, reduce=reduce, out_MK=out)
    manager.destroy()
    truth = reference(inputs.x_MK, routing.with_ids(torch.int32), inputs.every)
    return seen, float((out.double() - truth).square().sum()), float(truth.square().sum())


@pytest.mark.parametrize("name", ON_CPU)
def test_no_backend_widens_the_gates_ids(name):
    seen, errors, norms = zip(*run_ranks(_gated_step, 2, name), strict=True)
    assert not any(seen), "ids widened in prepare"
    assert sum(errors) <= TOLERANCE[torch.bfloat16] ** 2 * sum(norms)


def _wide_slices(ranks: RankContext) -> list[torch.dtype]:
    """Slices around a backend that takes int64: the inner backend gets int64 although ids travel as int32."""
    case, got = dataclasses.replace(CASES["plain"], counts=lambda experts, world: (8,)), []

    class Wide(LocalPrepareAndFinalize):
        def topk_indices_dtype(self):
            return torch.int64

        def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
            got.append(routing.ids_Mt.dtype)
            return super().prepare(x_MK, routing.with_ids(torch.int32), quant=quant, tokens_per_rank=tokens_per_rank)

    local = all2all.REGISTRY.get("local")
    manager = TensorParallelManager(ranks, type("Wide", (local,), {"prepare_finalize": Wide}), ranks.world_size)
    pf = manager.get_handle(case.spec(1), PrepareFinalizeOptions(max_tokens_per_rank=case.cap))
    assert pf.topk_indices_dtype() == torch.int32
    inputs = make_inputs(case, ranks.rank, ranks.world_size) if ranks.world_size == 1 else make_inputs(case, 0, 1)
    FusedMoEModularKernel(pf, LoopExperts(pf.spec)).forward(inputs.x_MK, inputs.routing, weights=inputs.weights)
    manager.destroy()
    return got


def test_slices_hand_on_the_inner_backends_dtype():
    assert run_ranks(_wide_slices, 1) == [[torch.int64]]


@pytest.mark.parametrize("mode", ["block", "routed"])
def test_a_service_step_brings_ids_of_the_backends_dtype(mode, tmp_path, monkeypatch):
    """The worker asks the all-to-all of the step's path, for ids of its own gate and for a client's."""
    got, before = [], LocalPrepareAndFinalize.prepare

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None):
        got.append(routing.ids_Mt.dtype)
        return before(self, x_MK, routing.with_ids(torch.int32), quant=quant, tokens_per_rank=tokens_per_rank)

    monkeypatch.setattr(LocalPrepareAndFinalize, "prepare", prepare)
    monkeypatch.setattr(LocalPrepareAndFinalize, "topk_indices_dtype", lambda self: torch.int64)
    converted, with_ids = [], Routing.with_ids
    monkeypatch.setattr(
        Routing, "with_ids", lambda self, dtype: converted.append(self.ids_Mt.dtype) or with_ids(self, dtype)
    )
    worker = make_worker(write("mixtral", tmp_path / "mixtral", dtype=torch.float32), RankContext(), all2all="local")
    got.clear(), converted.clear()
    given = (torch.zeros((5, 2), dtype=torch.int32), torch.ones(5, 2)) if mode == "routed" else (None, None)
    worker.step(StepPlan(step=0, layer=LAYER, mode=mode, tokens_per_rank=(5,)), tokens(5), *given)
    worker.close()
    assert set(got) == {torch.int64}
    assert set(converted) == {torch.int64}, (
        "the kernel found ids of the right dtype: the gate or the copy in wrote them"
    )
