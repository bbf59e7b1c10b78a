"""The contracts of the modular kernel, one rank: handles, workspaces, reduction, the fit check, rounds, the door."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from epserve import all2all, experts
from epserve.errors import ConfigError, HandleError, Incompatible, InvalidRequest, TooLarge
from epserve.modular_kernel import (
    UNQUANTIZED,
    Activation,
    Backends,
    DispatchHandle,
    ExpertLayout,
    FusedMoEActivationFormat,
    FusedMoEModularKernel,
    HandleBook,
    Prepared,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Receiver,
    Registry,
    Routing,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
    UnquantizedFusedMoEMethod,
    Workspaces,
    WorkspaceShapes,
    check_routing,
    weighted_sum,
    why_not,
)
from epserve.modular_kernel.quantization import dequantise_blocks, quantise_blocks
from tests.support.cases import CASES, make_inputs, reference


def _local_kernel(case, experts_name="loop", **options):
    spec = case.spec(1)
    options = PrepareFinalizeOptions(max_tokens_per_rank=case.cap, **options)
    pf = all2all.REGISTRY.get("local")(RankContext()).get_handle(spec, options)
    return FusedMoEModularKernel(pf, experts.REGISTRY.get(experts_name)(spec))


# --- handles and receivers ---------------------------------------------------------------------------------------


def test_a_handle_is_good_for_one_use_by_its_own_backend_before_close():
    book, other = HandleBook("ours"), HandleBook("theirs")
    handle = DispatchHandle(book, "state")
    with pytest.raises(HandleError, match="handle of ours given to theirs"):
        handle.take(other)
    assert len(book) == 1, "a refused use must not consume the handle"
    assert handle.take(book) == "state"
    with pytest.raises(HandleError, match="used twice"):
        handle.take(book)
    late = DispatchHandle(book, "state")
    with pytest.raises(HandleError, match="1 outstanding and never used"):
        book.close()
    with pytest.raises(HandleError, match="after close"):
        late.take(book)
    with pytest.raises(HandleError, match="is closed"):
        DispatchHandle(book, "state")


def test_a_receiver_is_called_once_even_when_it_fails():
    book, calls = HandleBook("ours"), []

    def finish():
        calls.append(1)
        raise OSError("lost")

    receive = Receiver(book, finish)
    with pytest.raises(OSError, match="lost"):
        receive()
    with pytest.raises(HandleError, match="receiver of ours used twice"):
        receive()
    assert calls == [1]
    book.close()


def test_abandoning_forgets_what_an_error_left_open():
    kernel = _local_kernel(CASES["plain"])
    inputs = make_inputs(CASES["plain"], 0, 1)
    kernel.prepare_finalize.prepare(inputs.x_MK, inputs.routing, quant=UNQUANTIZED)
    kernel.prepare_finalize.abandon()
    kernel.prepare_finalize.close()


# --- workspaces --------------------------------------------------------------------------------------------------


def _shapes(rows: int) -> WorkspaceShapes:
    return WorkspaceShapes(
        workspace13=(rows, 5), workspace2=(rows, 3), output=(rows, 7), dtype=torch.bfloat16, output_dtype=torch.float32
    )


def test_regions_are_apart_aligned_and_reused():
    spaces = Workspaces("cpu")
    for rows in (3, 300, 2, 0):
        part = spaces.carve(_shapes(rows))
        parts = (part.workspace13, part.workspace2, part.output)
        assert [tuple(p.shape) for p in parts] == [(rows, 5), (rows, 3), (rows, 7)]
        for number, region in enumerate(parts):
            assert (region.data_ptr() - spaces.carve(_shapes(rows)).workspace13.data_ptr()) % 256 == 0
            region.fill_(number)
        assert all((region == number).all() for number, region in enumerate(parts)), "regions overlap"
    assert spaces.nbytes == _shapes(300).nbytes, "a smaller request must reuse the allocation"


def test_poison_is_nan_in_every_float_type():
    spaces = Workspaces("cpu")
    spaces.reserve(_shapes(9))
    spaces.poison()
    part = spaces.carve(_shapes(9))
    assert part.workspace13.isnan().all() and part.output.isnan().all()


def test_after_warm_up_a_larger_batch_is_refused_with_both_sizes():
    spaces = Workspaces("cpu")
    spaces.reserve(_shapes(9))
    spaces.lock()
    spaces.carve(_shapes(8))
    sizes = rf"{_shapes(9000).nbytes} bytes .* {_shapes(9).nbytes} were reserved"
    with pytest.raises(TooLarge, match=sizes):
        spaces.carve(_shapes(9000))


def test_warm_up_reserves_for_the_largest_batch():
    case = CASES["cap_times_10"]
    kernel, inputs = _local_kernel(case), make_inputs(case, 0, 1)
    kernel.warm_up(inputs.weights)
    kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights)
    assert kernel.workspaces.locked and kernel.workspaces.nbytes == kernel.workspace_shapes().nbytes > 0


# --- weighting and reduction -------------------------------------------------------------------------------------


def test_weighted_sum_ignores_rows_and_weights_of_no_expert():
    y = torch.tensor([[[1.0], [math.nan], [10.0]], [[math.inf], [math.nan], [math.nan]]])
    ids = torch.tensor([[0, -1, 2], [-1, -1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, math.nan, 2.0], [1.0, 1.0, math.nan]])
    total = weighted_sum(y, Routing(ids_Mt=ids, weights_Mt=weights))
    assert total.dtype == torch.float32 and total.tolist() == [[20.5], [0.0]]


def test_sums_are_float32_in_slot_order():
    """Added in bf16, or in another order in float32, these values give something else."""
    y = torch.tensor([[[2.0**24], [1.0], [1.0]]], dtype=torch.bfloat16)
    routing = Routing(ids_Mt=torch.tensor([[0, 1, 2]], dtype=torch.int32), weights_Mt=torch.ones(1, 3))
    assert weighted_sum(y, routing).item() == 2.0**24  # 1 + 1 + 2**24 would be 2**24 + 2
    turned = Routing(ids_Mt=routing.ids_Mt.flip(1).contiguous(), weights_Mt=torch.ones(1, 3))
    assert weighted_sum(y.flip(1), turned).item() == 2.0**24 + 2


def test_the_reductions_agree_on_the_same_results():
    gen = torch.Generator().manual_seed(0)
    ids = torch.tensor([[2, 0], [0, -1], [-1, -1], [2, 1]], dtype=torch.int32)
    routing = Routing(ids_Mt=ids, weights_Mt=torch.rand((4, 2), generator=gen))
    rows = torch.randn((4, 2, 6), generator=gen)
    batched = torch.full((3, 4, 6), math.nan)
    fill = [0, 0, 0]
    for token in range(4):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                batched[expert, fill[expert]] = rows[token, slot]
                fill[expert] += 1
    want = TopKWeightAndReduceContiguous().apply(rows, routing, torch.empty(4, 6))
    assert want.abs().sum() > 0
    assert torch.equal(TopKWeightAndReduceNaiveBatched().apply(batched, routing, torch.empty(4, 6)), want)
    assert torch.equal(TopKWeightAndReduceNoOP().apply(want, routing, torch.empty(4, 6)), want)
    with pytest.raises(AssertionError, match="Delegate"):
        TopKWeightAndReduceDelegate().apply(rows, routing, torch.empty(4, 6))


@pytest.mark.parametrize(("experts_held", "capacity", "tokens"), [(3, 0, 2), (3, 4, 0), (0, 0, 0)])
def test_batched_reduction_of_nothing_is_zero(experts_held, capacity, tokens):
    ids = torch.full((tokens, 2), -1, dtype=torch.int32)
    routing = Routing(ids_Mt=ids, weights_Mt=torch.ones(tokens, 2))
    out = TopKWeightAndReduceNaiveBatched().apply(
        torch.empty(experts_held, capacity, 6), routing, torch.ones(tokens, 6)
    )
    assert out.shape == (tokens, 6) and not out.any()


# --- capabilities ------------------------------------------------------------------------------------------------

_PF = all2all.REGISTRY.get("all_to_all").prepare_finalize.capability
_EX = experts.REGISTRY.get("loop").capability
_SPEC = CASES["plain"].spec(2)
_CUDA, _BATCHED = frozenset({"cuda"}), frozenset({FusedMoEActivationFormat.BatchedExperts})


@pytest.mark.parametrize(
    ("pf", "ex", "spec", "reason"),
    [
        ({}, {"activation_formats": _BATCHED}, {}, "prepare delivers Standard, the experts take BatchedExperts"),
        ({"devices": _CUDA}, {"devices": frozenset({"cpu"})}, {}, "no common device: cuda against cpu"),
        ({"dtypes": frozenset({torch.bfloat16})}, {}, {}, "prepare/finalize moves bfloat16, not float32"),
        ({}, {"dtypes": frozenset({torch.bfloat16})}, {}, "the experts compute in bfloat16, not float32"),
        ({}, {}, {"quant": QuantConfig(scheme="mxfp4")}, "quantisation mxfp4: the experts have none"),
        ({}, {"activations": frozenset({"gelu"})}, {}, "activation silu: the experts have gelu"),
        ({}, {"ungated": False}, {"activation": Activation(gated=False)}, "the experts have no ungated form"),
        ({}, {"bias": False}, {"bias": True}, "the experts have no biases"),
        ({"max_ranks": 1}, {}, {}, "2 ranks, at most 1"),
        ({"max_top_k": 2}, {}, {}, "top-k 3, at most 2"),
        ({"hidden_sizes": frozenset({4096})}, {}, {}, "hidden size 80 is not one of 4096"),
        ({"hidden_multiple_of": 128}, {}, {}, "hidden size 80 is not a multiple of 128 (prepare/finalize)"),
        ({}, {"hidden_multiple_of": 128}, {}, "hidden size 80 is not a multiple of 128 (experts)"),
        ({}, {"intermediate_multiple_of": 32}, {}, "intermediate size 48 is not a multiple of 32 (experts)"),
        ({"uneven_experts": False}, {}, {"layout": ExpertLayout(counts=(5, 3))}, "uneven experts per rank (5, 3)"),
        ({}, {}, {"layout": ExpertLayout(counts=(4, 3))}, "the layout places 7 experts, the layer has 8"),
        ({}, {"supports_expert_map": False}, {}, "the experts cannot skip slots of other ranks (supports_expert_map)"),
        ({"cuda_graph": True}, {}, {"cuda_graph": True}, "CUDA graphs: the experts wait on the CPU"),
        ({}, {"cuda_graph": True}, {"cuda_graph": True}, "CUDA graphs: prepare/finalize waits on the CPU"),
    ],
)
def test_each_limit_is_a_reason_of_its_own(pf, ex, spec, reason):
    assert why_not(_PF, _EX, _SPEC) == ()
    changed = dataclasses.replace(_PF, **pf), dataclasses.replace(_EX, **ex), dataclasses.replace(_SPEC, **spec)
    assert why_not(*changed) == (reason,)


@pytest.mark.parametrize(
    ("device", "far", "order", "timed"),
    [
        ("cpu", False, "first second late far", "second late"),
        ("cpu", True, "first far second late", "second late"),
        ("cuda", False, "first late far second", "first"),
        ("cuda", True, "first late far second", "first"),
    ],
)
def test_a_row_says_when_auto_tries_its_backend_and_where_it_is_timed(device, far, order, timed):
    registry: Registry = Registry("experts backend")
    registry.register("late", "", lambda: object, timed=("cpu",))
    registry.register("first", "", lambda: object, early=("cpu", "cuda"), timed=("cuda",))
    registry.register("far", "", lambda: object, early_far=("cpu",))
    registry.register("second", "", lambda: object, early=("cpu",), timed=("cpu",))
    registry.register(
        "missing", "", lambda: object, early=("cpu", "cuda"), timed=("cpu", "cuda"), needs="no_such_package"
    )
    assert registry.in_order(device, far=far) == tuple(order.split())
    assert registry.timed(device) == tuple(timed.split())


def test_registry_names_what_is_known_and_what_was_meant():
    registry: Registry = Registry("experts backend")
    registry.register("loop", "a loop", lambda: int)
    assert registry.names() == ("loop",) and registry.get("loop") is int
    with pytest.raises(ConfigError, match=r"experts backend 'lop' is unknown; did you mean 'loop'\? \(known: loop\)"):
        registry.get("lop")
    with pytest.raises(AssertionError, match="registered twice"):
        registry.register("loop", "again", lambda: int)


def test_a_registry_imports_a_row_when_it_is_asked_for():
    registry: Registry = Registry("backend", package="email.mime")
    registry.register("text", "in the package", "text:MIMEText")
    registry.register("broken", "missing", "no_such_module:Class")
    assert registry.names() == ("text", "broken") and registry.get("text").__module__ == "email.mime.text"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.get("broken")


def test_layouts():
    layout = ExpertLayout.even(5, 3)
    assert layout.counts == (2, 2, 1) and [layout.rank_of(expert) for expert in range(5)] == [0, 0, 1, 1, 2]
    assert [ExpertLayout(counts=(0, 2, 0, 1)).rank_of(expert) for expert in range(3)] == [1, 1, 3]
    for counts in ((), (0, 0), (3, -1)):
        with pytest.raises(ConfigError, match="experts per rank"):
            ExpertLayout(counts=counts)


# --- method classes ----------------------------------------------------------------------------------------------


def test_the_method_joins_the_first_parts_that_fit():
    case = CASES["plain"]
    backends = Backends(
        all2all=all2all.REGISTRY,
        experts=experts.REGISTRY,
        prefer_all2all=("local",),
        prefer_experts=("batched_loop", "grouped_mm", "loop"),
    )
    method = UnquantizedFusedMoEMethod(case.spec(1), backends)
    kernel = method.init_prepare_finalize(RankContext(), PrepareFinalizeOptions())
    assert type(kernel.fused_experts).__name__ == "GroupedMMExperts", "batched_loop does not fit, grouped_mm is next"
    inputs = make_inputs(case, 0, 1)
    weights = method.process_weights_after_loading(inputs.weights)
    out = kernel.forward(inputs.x_MK, inputs.routing, weights=weights)
    torch.testing.assert_close(out.double(), reference(inputs.x_MK, inputs.routing, inputs.every), rtol=1e-4, atol=1e-5)


def test_the_method_lists_every_reason_when_nothing_fits():
    backends = Backends(all2all=all2all.REGISTRY, experts=experts.REGISTRY, prefer_experts=("grouped_mm", "loop"))
    spec = dataclasses.replace(CASES["hidden_67"].spec(1), quant=QuantConfig(scheme="nvfp4"))
    with pytest.raises(Incompatible) as caught:
        UnquantizedFusedMoEMethod(spec, backends).init_prepare_finalize(RankContext(), PrepareFinalizeOptions())
    text = str(caught.value)
    assert "local + grouped_mm: hidden size 67 is not a multiple of 8 (experts)" in text
    assert "all_to_all + loop: quantisation nvfp4: the experts have none" in text


# --- the kernel --------------------------------------------------------------------------------------------------


class _Recorder:
    """Wraps a prepare/finalize object and notes the sizes of the rounds."""

    def __init__(self, inner):
        self._inner, self.rounds = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def prepare(self, x_MK, routing, *, quant, tokens_per_rank=None) -> Prepared:
        self.rounds.append((x_MK.shape[0], tokens_per_rank))
        return self._inner.prepare(x_MK, routing, quant=quant, tokens_per_rank=tokens_per_rank)


@pytest.mark.parametrize(
    ("tokens", "counts", "rounds"),
    [
        (0, [0], [(0, [0])]),
        (8, [8], [(8, [8])]),
        (9, [9], [(8, [8]), (1, [1])]),
        (3, [3, 17], [(3, [3, 8]), (0, [0, 8]), (0, [0, 1])]),
        (20, None, [(8, None), (8, None), (4, None)]),
    ],
)
def test_rounds_follow_from_all_counts_and_the_cap(tokens, counts, rounds):
    """T3: a rank with few tokens enters as many rounds as the longest one."""
    case = dataclasses.replace(CASES["cap"], tokens=lambda rank, world: tokens)
    kernel, inputs = _local_kernel(case), make_inputs(case, 0, 1)
    kernel.prepare_finalize = recorder = _Recorder(kernel.prepare_finalize)
    out = kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights, tokens_per_rank=counts)
    assert recorder.rounds == rounds
    torch.testing.assert_close(out.double(), reference(inputs.x_MK, inputs.routing, inputs.every), rtol=1e-4, atol=1e-5)


def test_views_of_activations_and_expanded_ids_are_taken_as_they_read():
    """TX1: transposed, strided and expanded tensors."""
    case = CASES["plain"]
    kernel, inputs = _local_kernel(case), make_inputs(case, 0, 1)
    ids_Mt = torch.tensor([[1, 4, 6]]).expand(inputs.x_MK.shape[0], 3)
    weights_Mt = torch.rand(3).expand(inputs.x_MK.shape[0], 3)
    routing = check_routing(ids_Mt, weights_Mt, num_tokens=inputs.x_MK.shape[0], num_experts=8)
    want = kernel.forward(inputs.x_MK, routing, weights=inputs.weights)
    wide = torch.full((inputs.x_MK.shape[0], 2 * case.hidden), math.nan)
    wide[:, ::2] = inputs.x_MK
    for view in (inputs.x_MK.t().contiguous().t(), wide[:, ::2]):
        assert not view.is_contiguous()
        assert torch.equal(kernel.forward(view, routing, weights=inputs.weights), want)


def test_an_expert_named_twice_counts_with_both_weights():
    """TX2: ids [5, 5], weights [.3, .7] against ids [5, -1], weights [1, 0]."""
    case = dataclasses.replace(CASES["plain"], top_k=2, tokens=lambda rank, world: 1)
    inputs = make_inputs(case, 0, 1)
    for name in ("loop", "grouped_mm"):
        kernel = _local_kernel(case, name)
        outs = [
            kernel.forward(
                inputs.x_MK,
                check_routing(torch.tensor([ids]), torch.tensor([weights]), num_tokens=1, num_experts=8),
                weights=inputs.weights,
            )
            for ids, weights in (([5, 5], [0.3, 0.7]), ([5, -1], [1.0, 0.0]))
        ]
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-6)


# --- the door ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32])
def test_every_integer_type_of_ids_is_the_same_ids(dtype):
    """T10."""
    routing = check_routing(torch.tensor([[3, 1]]).to(dtype), torch.ones(1, 2), num_tokens=1, num_experts=8)
    assert routing.ids_Mt.dtype == torch.int32 and routing.ids_Mt.tolist() == [[3, 1]]


@pytest.mark.parametrize(
    ("ids", "weights", "field", "words"),
    [
        (torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), "topk_ids", "float32 is not an integer type"),  # T10
        (torch.tensor([[0, 8]]), torch.ones(1, 2), "topk_ids", "id 8 is outside 0..7"),  # T8
        (torch.tensor([[0, 2**31 - 1]]), torch.ones(1, 2), "topk_ids", "id 2147483647 is outside"),
        (torch.tensor([[0, 2**32 + 1]]), torch.ones(1, 2), "topk_ids", "id 4294967297 is outside"),
        (torch.tensor([[-2, 0]]), torch.ones(1, 2), "topk_ids", "id -2 is outside"),
        (torch.tensor([[0, 1], [0, 1]]), torch.ones(1, 2), "topk_ids", "has 1 tokens"),
        (torch.tensor([[0, 1]]), torch.ones(1, 3), "topk_weights", r"\(1, 3\) differs from topk_ids \(1, 2\)"),
        (torch.tensor([[0, 1]]), torch.ones(1, 2).int(), "topk_weights", "int32 is not a float type"),
        (torch.tensor([[0, 1]]), torch.tensor([[1.0, math.inf]]), "topk_weights", "not finite"),
        (torch.tensor([0, 1]), torch.ones(2), "topk_ids", "shape"),
    ],
)
def test_wrong_routing_is_refused_by_field(ids, weights, field, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_routing(ids, weights, num_tokens=1, num_experts=8)
    assert caught.value.field == field


# --- fp8 blocks --------------------------------------------------------------------------------------------------


def test_each_block_has_its_own_scale():
    """T14: neighbours a thousand times larger, zeros, and the largest value exactly."""
    x = torch.randn((4, 512), generator=torch.Generator().manual_seed(0))
    x[:, 128:256] *= 1000
    x[:, 256:384] = 0
    x[1] = torch.nan  # a poisoned row
    q, scales = quantise_blocks(x)
    assert q.dtype == torch.float8_e4m3fn and q.shape == x.shape and scales.shape == (4, 4)
    rows = [0, 2, 3]
    back = dequantise_blocks(q, scales)[rows]
    for start in range(0, 512, 128):
        block = slice(start, start + 128)
        assert (back - x[rows])[:, block].norm() <= 0.04 * x[rows][:, block].norm()
    torch.testing.assert_close(back.abs().amax(1), x[rows].abs().amax(1))
    assert back.isfinite().all() and not back[:, 256:384].any()
    assert all(part.shape[0] == 0 for part in quantise_blocks(x[:0]))
    with pytest.raises(ConfigError, match="hidden size 200 is not a multiple of 128"):
        quantise_blocks(x[:, :200])
