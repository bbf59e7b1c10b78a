"""The DeepEP and NVSHMEM backends on CPU ranks, over a strict stand-in for the library; what a machine lacks is said."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from epserve import all2all
from epserve.all2all import deepep_ll, deepep_v2, nvshmem
from epserve.all2all.kernels import rows
from epserve.all2all.transport import deepep_library, symmetric
from epserve.errors import ConfigError, HandleError, Incompatible, TooLarge
from epserve.experts.batched_loop import BatchedLoopExperts
from epserve.experts.loop import LoopExperts
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    FusedMoEModularKernel,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNoOP,
    why_not,
)
from epserve.modular_kernel.quantization import dequantise_blocks, quantise_blocks
from tests.support.cases import CASES, TOLERANCE, make_inputs, reference
from tests.support.ranks import num_places, run_ranks

from . import fake_deep_ep
from .shared_files import SharedFiles

ROOT = Path(__file__).resolve().parent.parent.parent
EXPERTS = {"deepep_ht": LoopExperts, "deepep_ll": BatchedLoopExperts, "nvshmem": LoopExperts}
CASE_NAMES = ("bf16", "hidden_360", "bf16_holes", "bf16_repeats", "bf16_silent_owner", "bf16_lopsided", "bf16_rounds",
              "bf16_empty")  # fmt: skip


def case_of(name: str):
    base = {"bf16_holes": "holes", "bf16_repeats": "repeats", "bf16_silent_owner": "silent_owner",
            "bf16_lopsided": "lopsided", "bf16_rounds": "cap_on_one", "bf16_empty": "all_empty"}.get(name, name)  # fmt: skip
    return dataclasses.replace(CASES[base], dtype=torch.bfloat16)


def manager_on_cpu(name: str, ranks: RankContext):
    """The registered manager, its class told that it runs on the CPU, over the stand-in."""
    sys.modules["deep_ep"] = fake_deep_ep  # type: ignore[assignment]
    deepep_library.check_memory = lambda *_: None
    deepep_library.destroy = lambda buffer: buffer.destroy()
    manager = all2all.REGISTRY.get(name)
    pf = manager.prepare_finalize
    changed = {"capability": dataclasses.replace(pf.capability, devices=frozenset({"cpu"}))}
    if name == "nvshmem":
        changed |= {"provider": SharedFiles, "barrier": lambda self: dist.barrier(self.ranks.group)}
    return type(f"{manager.__name__}OnCpu", (manager,), {"prepare_finalize": type(pf.__name__, (pf,), changed)})(ranks)


def run_case(ranks: RankContext, name: str, case_name: str, asynchronous: bool):
    case = case_of(case_name)
    inputs = make_inputs(case, ranks.rank, ranks.world_size)
    manager = manager_on_cpu(name, ranks)
    spec = case.spec(ranks.world_size)
    kernel = FusedMoEModularKernel(
        manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=case.cap)), EXPERTS[name](spec)
    )
    shared = (lambda x: torch.zeros_like(x)) if asynchronous else None
    out = kernel.forward(inputs.x_MK, inputs.routing, weights=inputs.weights, shared_experts=shared)
    living = fake_deep_ep.Buffer.living
    manager.destroy()
    assert name == "nvshmem" or fake_deep_ep.Buffer.living == living - 1
    truth = reference(inputs.x_MK, inputs.routing, inputs.every)
    assert out.shape == inputs.x_MK.shape
    return float((out.double() - truth).square().sum()), float(truth.square().sum())


@pytest.mark.parametrize("case_name", CASE_NAMES)
@pytest.mark.parametrize("name", EXPERTS)
def test_equals_the_dense_reference(name, case_name):
    results = run_ranks(run_case, 2, name, case_name, case_name != "bf16")
    error, norm = (sum(part) for part in zip(*results, strict=True))
    assert error <= (TOLERANCE[torch.bfloat16] ** 2) * norm


def small_spec(hidden=256, scheme="none", ranks=2, num_experts=4, top_k=2, dtype=torch.bfloat16) -> LayerSpec:
    shape = ExpertShape(hidden=hidden, intermediate=128, num_experts=num_experts, top_k=top_k, dtype=dtype)
    return LayerSpec(shape=shape, layout=ExpertLayout.even(num_experts, ranks), quant=QuantConfig(scheme=scheme))


def batch(spec: LayerSpec, num_tokens: int, seed: int):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn((num_tokens, spec.shape.hidden), generator=gen).bfloat16()
    x[:, :128] *= 1000  # blocks of one row that differ by 1000x
    ids = torch.rand((num_tokens, spec.shape.num_experts), generator=gen).topk(spec.shape.top_k).indices  # int64
    return x, Routing(ids_Mt=ids.contiguous(), weights_Mt=torch.rand(ids.shape, generator=gen))


def quantised_round(ranks: RankContext, name: str, num_tokens: int, hosts: int = 1):
    """fp8 rows out, identity experts, bf16 home."""
    spec = small_spec(scheme="fp8_block")
    manager = manager_on_cpu(name, ranks)
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=8))
    if hosts > 1:  # hooks instead of the library's own stream
        pf.shared.one_host = False
    x, routing = batch(spec, num_tokens, ranks.rank)
    prepared = pf.prepare_no_receive(x, routing, quant=spec.quant)()
    assert prepared.x.dtype == torch.float8_e4m3fn and prepared.scales.dtype == torch.float32
    assert prepared.scales.shape == (*prepared.x.shape[:-1], spec.shape.hidden // 128)
    if prepared.routing is None:  # where the library put them
        columns = pf.hidden // 128
        assert prepared.scales.stride() == (prepared.x.shape[1] * columns, 1, prepared.x.shape[1])
    else:
        assert prepared.scales.is_contiguous()
    blocks = prepared.x.float().unflatten(-1, (-1, 128)) * prepared.scales[..., None]
    rows, out = blocks.flatten(-2).bfloat16(), torch.empty_like(x)
    if prepared.routing is None:
        y, reduce = rows, BatchedLoopExperts(spec).finalize_weight_and_reduce_impl()
    else:
        assert prepared.routing.ids_Mt.dtype == torch.int32
        y, reduce = rows[:, None].expand(-1, 2, -1), LoopExperts(spec).finalize_weight_and_reduce_impl()
    pf.finalize_no_wait(prepared.handle, y, reduce=reduce, out_MK=out)()
    manager.destroy()
    want = x.float() * routing.weights_Mt.sum(1, keepdim=True)
    return max(((out.float() - want)[:, part].norm() / want[:, part].norm().clamp(min=1e-6)).item()
               for part in (slice(0, 128), slice(128, 256)))  # fmt: skip


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize(("name", "hosts"), [("deepep_ht", 1), ("deepep_ll", 1), ("deepep_ll", 2)])
def test_fp8_rows_travel_with_their_scales(name, hosts, num_tokens):
    assert max(run_ranks(quantised_round, 2, name, num_tokens, hosts)) < 0.05


def ready_receiver(ranks: RankContext) -> bool:
    """The receiver of a backend that dispatches at once: the bits of `prepare`, one batch at a time, and one use."""
    spec = small_spec()
    manager = manager_on_cpu("nvshmem", ranks)
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=8))
    assert not pf.has_prepare_no_receive()
    x, routing = batch(spec, 5, ranks.rank)
    routing, outs = routing.with_ids(pf.topk_indices_dtype()), []
    for start in (pf.prepare, lambda *a, **k: pf.prepare_no_receive(*a, **k)()):
        prepared = start(x, routing, quant=spec.quant)
        y = prepared.x[:, None].expand(-1, 2, -1)
        home = pf.finalize_no_wait(
            prepared.handle, y, reduce=TopKWeightAndReduceContiguous(), out_MK=torch.empty_like(x)
        )
        outs.append(home())
        with pytest.raises(HandleError, match=r"receiver .* used twice"):
            home()
    receive = pf.prepare_no_receive(x, routing, quant=spec.quant)
    with pytest.raises(HandleError, match="a batch is in flight"):
        pf.prepare(x, routing, quant=spec.quant)
    prepared = receive()
    with pytest.raises(HandleError, match=r"receiver .* used twice"):
        receive()
    pf.finalize(prepared.handle, y, reduce=TopKWeightAndReduceContiguous(), out_MK=outs[1])
    manager.destroy()
    want = x.float() * routing.weights_Mt.sum(1, keepdim=True)
    return torch.equal(*outs) and float((outs[0].float() - want).norm() / want.norm()) < 2e-2


def test_nvshmem_has_receivers_that_are_ready():
    assert all(run_ranks(ready_receiver, 2))


def hold_three(ranks: RankContext):
    spec = small_spec()
    manager = manager_on_cpu("deepep_ll", ranks)
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=7))
    assert pf.max_num_tokens_per_rank() == 8  # rounded up on all ranks alike
    batches = [batch(spec, 3, seed) for seed in (1, 2)]
    held = [pf.prepare(x, routing, quant=spec.quant) for x, routing in batches]
    with pytest.raises(HandleError, match="2 results are outstanding"):
        pf.prepare(*batches[0], quant=spec.quant)
    with pytest.raises(TooLarge, match="max_tokens_per_rank is 8"):
        pf.prepare(*batch(spec, 9, 1), quant=spec.quant)
    worst = 0.0
    for (x, routing), prepared in zip(batches, held, strict=True):
        reduce = BatchedLoopExperts(spec).finalize_weight_and_reduce_impl()
        out = pf.finalize(prepared.handle, prepared.x, reduce=reduce, out_MK=torch.empty_like(x))
        want = x.float() * routing.weights_Mt.sum(1, keepdim=True)
        worst = max(worst, ((out.float() - want).norm() / want.norm()).item())
    manager.get_handle(small_spec(hidden=2100), PrepareFinalizeOptions(max_tokens_per_rank=7))  # grows the buffer
    again = pf.prepare(*batches[0], quant=spec.quant)
    pf.finalize(again.handle, again.x, reduce=reduce, out_MK=torch.empty_like(batches[0][0]))
    manager.destroy()
    return worst


def test_a_third_low_latency_result_is_refused():
    assert max(run_ranks(hold_three, 2)) < 1e-2


def odd_batch() -> tuple[LayerSpec, Routing]:
    """Uneven ranks; an expert twice in a row; a NaN weight where there is no expert; a row that goes nowhere."""
    spec = dataclasses.replace(small_spec(num_experts=5), layout=ExpertLayout(counts=(1, 4)))
    routing = Routing(
        ids_Mt=torch.tensor([[0, 1, 0], [4, -1, 4], [-1, -1, -1]]),
        weights_Mt=torch.tensor([[0.1, 0.2, 0.3], [0.5, float("nan"), 0.25], [float("nan")] * 3]),
    )
    return spec, routing


def test_ids_are_spread_and_named_once():
    spec, routing = odd_batch()
    sender = deepep_library.Sender(spec, torch.device("cpu"), layout=True)
    sent, _ = sender.ready(torch.ones((3, 256), dtype=torch.bfloat16), routing)
    assert sent.ids_Mt.dtype == torch.int64
    assert sent.ids_Mt.tolist() == [[0, 4, -1], [7, -1, -1], [-1, -1, -1]]
    torch.testing.assert_close(sent.weights_Mt, torch.tensor([[0.4, 0.2, 0], [0.75, 0, 0], [0, 0, 0]]))
    assert sent.in_rank.tolist() == [[True, True], [False, True], [False, False]]
    assert sent.per_rank.tolist() == [1, 2] and sent.per_expert.tolist() == [1, 0, 0, 0, 1, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_kernel_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/experts/triton_interpreter/check_rows.py"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def librarys_layout(ranks: RankContext) -> None:
    spec = dataclasses.replace(small_spec(hidden=2048, num_experts=16, top_k=4), device="cuda")
    manager = all2all.REGISTRY.get("deepep_ht")(ranks)
    pf = manager.get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=4096))
    for num_tokens in (0, 1, 33, 4096):
        x, routing = batch(spec, num_tokens, num_tokens + ranks.rank)
        routing.ids_Mt[torch.rand(routing.ids_Mt.shape) < 0.2] = -1
        routing = Routing(ids_Mt=routing.ids_Mt.to(ranks.device), weights_Mt=routing.weights_Mt.to(ranks.device))
        sent, _ = pf.sender.ready(x.to(ranks.device), routing)
        per_rank, _, per_expert, in_rank, _ = pf.buffer.get_dispatch_layout(sent.ids_Mt, pf.sender.total)
        assert torch.equal(sent.per_rank, per_rank) and torch.equal(sent.per_expert, per_expert)
        assert torch.equal(sent.in_rank, in_rank), num_tokens
    manager.destroy()


@pytest.mark.gpu
@pytest.mark.skipif(num_places() < 2, reason="needs two CUDA GPUs")
def test_our_layout_is_the_librarys():
    if missing := all2all.REGISTRY.get("deepep_ht").unavailable():
        pytest.skip(missing)
    run_ranks(librarys_layout, 2, device="cuda", timeout=120)


class Launches(dict):
    """In place of the kernel: counts its launches and does its work in torch."""

    def __getitem__(self, grid):
        return self.launch

    def launch(self, x, out, scales, ids, weights, shifts, named, shares, in_rank, counts, *scratch, **constants):
        self["ready"] = self.get("ready", 0) + 1
        with _disable_current_modes():
            done = deepep_library.name_once(Routing(ids_Mt=ids, weights_Mt=weights), shifts)
            named.copy_(done[0]), shares.copy_(done[1])
            where, *sums = deepep_library.lay_out(named, constants["RANKS"], constants["EACH"])
            in_rank.copy_(where), counts.copy_(torch.cat(sums))
            if constants["FP8"]:
                quantised = quantise_blocks(x)
                out.copy_(quantised[0]), scales.copy_(quantised[1])


def counted(calls: dict, name: str, real):
    def call(*args, **kwargs):
        calls[name] = calls.get(name, 0) + 1
        with _disable_current_modes():
            return real(*args, **kwargs)

    return call


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def counted_steps(ranks: RankContext, scheme: str):
    """torch's operations, launches and library calls of each of four steps, as on a GPU, with the right sums."""
    spec, calls = small_spec(scheme=scheme), Launches()
    pf = manager_on_cpu("deepep_ht", ranks).get_handle(spec, PrepareFinalizeOptions(max_tokens_per_rank=8))
    pf.sender.by_kernel, rows.ready = True, calls
    for name in ("capture", "get_dispatch_layout", "dispatch", "combine"):
        setattr(pf.buffer, name, counted(calls, name, getattr(pf.buffer, name)))
    found = []
    for step, num_tokens in enumerate((5, 5, 5, 3)):
        x, routing = batch(spec, num_tokens, 10 * step + ranks.rank)
        out, mode = torch.empty_like(x), Ops()
        calls.clear()
        with mode:
            receive = pf.prepare_no_receive(x, routing, quant=spec.quant, tokens_per_rank=(num_tokens,) * 2)
            prepared = receive()
        x_rows = prepared.x if prepared.scales is None else dequantise_blocks(prepared.x, prepared.scales)
        real = (prepared.routing.ids_Mt >= 0).float() * prepared.routing.weights_Mt.nan_to_num()
        y = (x_rows.float().nan_to_num() * real.sum(1, keepdim=True)).bfloat16()
        with mode:
            pf.finalize_no_wait(prepared.handle, y, reduce=TopKWeightAndReduceNoOP(), out_MK=out)()
        want = x.float() * routing.weights_Mt.sum(1, keepdim=True)
        assert (out.float() - want).norm() < 0.05 * want.norm()
        found.append((mode.seen, dict(calls)))
    return found


@pytest.mark.parametrize(("scheme", "fresh"), [("none", 5), ("fp8_block", 7)])
def test_what_the_host_does_in_a_high_throughput_step_is_bounded(scheme, fresh):
    """Every launch costs the host 10 to 80 us, and nothing but the host holds these steps up below 512 tokens. Steps of as many
    tokens as the one before allocate nothing; others `fresh` tensors, and two views of one of them."""
    for steps in run_ranks(counted_steps, 2, scheme):
        for index, (ops, calls) in enumerate(steps):
            assert calls == {"ready": 1, "dispatch": 1, "combine": 1}
            work = [op for op in ops if "empty" not in op and "slice" not in op and "alias" not in op]
            assert work == ["aten._to_copy.default", "aten.copy_.default"]  # ids to int32, the result home
            repeated = index in (1, 2)
            allocated = sum("empty" in op for op in ops)
            assert allocated <= (0 if repeated else fresh + 1) and len(ops) <= (3 if repeated else fresh + 6), ops


@pytest.mark.parametrize(
    ("name", "experts", "spec", "reason"),
    [
        ("deepep_ht", LoopExperts, small_spec(ranks=4, num_experts=3), None),
        ("deepep_ht", LoopExperts, small_spec(ranks=3), "3 ranks, not one of 2, 4, 8"),
        ("deepep_ht", LoopExperts, small_spec(dtype=torch.float16), "moves bfloat16, not float16"),
        ("deepep_ll", BatchedLoopExperts, small_spec(num_experts=16, top_k=12), "top-k 12, at most 11"),
        ("deepep_ll", BatchedLoopExperts, small_spec(hidden=8256), "hidden size 8256, at most 8192"),
        ("deepep_ll", BatchedLoopExperts, small_spec(hidden=2880), None),
        ("deepep_ll", LoopExperts, small_spec(), "prepare delivers BatchedExperts, the experts take Standard"),
    ],
)
def test_the_librarys_limits_are_data(name, experts, spec, reason):
    """Known before a weight is read, on a machine without the library too."""
    capability = all2all.REGISTRY.get(name).prepare_finalize.capability
    on_gpu = dataclasses.replace(spec, device="cuda")
    why = why_not(capability, experts.capability, on_gpu)
    assert why == () if reason is None else any(reason in text for text in why)


def test_hidden_sizes_are_padded_to_the_next_one_that_is_compiled():
    assert deepep_ll.padded_hidden(small_spec(hidden=2880)) == 3072
    assert deepep_ll.padded_hidden(small_spec(hidden=7168)) == 7168


def test_low_latency_buffers_are_bounded():
    ranks = RankContext(world_size=2)
    manager = deepep_ll.DeepEPLLAll2AllManager(ranks)
    with pytest.raises(ConfigError, match="max_tokens_per_rank 512 is above 508"):
        manager.make(small_spec(), PrepareFinalizeOptions(max_tokens_per_rank=512))
    spec, options = small_spec(hidden=7168, num_experts=256), PrepareFinalizeOptions(max_tokens_per_rank=128)
    packed = 128 * 2 * 128 * 7168 * 2
    assert packed < deepep_ll.DeepEPLLAll2AllManager.buffer_bytes(spec, options) < 5 * packed


def test_what_is_missing_is_said(monkeypatch):
    """No package; a package of another ABI; a package without the newer buffer; an old NCCL."""
    monkeypatch.setattr(deepep_library, "find_spec", lambda name: None)
    assert "not installed" in deepep_library.unavailable()
    monkeypatch.setattr(deepep_library, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "(8, 0)" in deepep_library.unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "does not load" in deepep_library.unavailable()
    old = types.SimpleNamespace(Buffer=fake_deep_ep.Buffer, __version__="1.2.1")
    monkeypatch.setitem(sys.modules, "deep_ep", old)
    assert deepep_library.unavailable() is None
    assert "1.2.1" in deepep_v2.DeepEPV2All2AllManager.unavailable()
    old.ElasticBuffer = object
    # torch's own answer is a constant of its build: the library that is loaded counts.
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(deepep_library, "nccl_version", lambda: (2, 28, 9))
    assert "NCCL 2.28.9 is loaded, DeepEP 2 needs 2.30" in deepep_v2.DeepEPV2All2AllManager.unavailable()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(deepep_library, "nccl_version", lambda: (2, 30, 7))
    assert deepep_v2.DeepEPV2All2AllManager.unavailable() is None


ASK_NCCL = """
import sys
from epserve.all2all.transport import deepep_library
print(deepep_library.nccl_version())
"""


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(tmp_path):
    """A stand-in for libnccl, loaded before all others as LD_PRELOAD does it, and none at all."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23007; return 0; }")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for preload, said in ((str(library), "(2, 30, 7)"), ("", None)):
        done = subprocess.run(
            [sys.executable, "-c", ASK_NCCL],
            env={**env, "LD_PRELOAD": preload},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        if said is not None or torch.version.cuda is None:
            assert done.stdout.strip() == (said or "()")


def test_orders_that_the_library_cannot_keep_are_refused():
    options = PrepareFinalizeOptions(combine_order="slot")
    for pf in (nvshmem.NvshmemPrepareAndFinalize, all2all.REGISTRY.get("deepep_ht").prepare_finalize):
        arguments = (RankContext(world_size=2), small_spec(), options, *([None] if "DeepEP" in pf.__name__ else []))
        with pytest.raises((ConfigError, Incompatible), match="combine_order"):
            pf(*arguments)


def refused_nvshmem(ranks, known):
    """What rank 0 and rank 1 are told when their processes run NVSHMEM as `known` has them."""
    symmetric.NvshmemHeap._set_up = known[ranks.rank]
    try:
        symmetric.NvshmemHeap.set_up(ranks)
    except ConfigError as error:
        return str(error)
    finally:
        symmetric.NvshmemHeap._set_up = None
    return "set up"


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (((0, 1), None), "NVSHMEM runs in the process of rank 0 as rank 0 of 1, asked for rank 0 of 2"),
        ((None, (1, 2)), "NVSHMEM runs in the processes of ranks [1] only, of 2"),
        (((0, 2), (1, 2)), "set up"),
    ],
)
def test_every_rank_learns_that_one_cannot_set_nvshmem_up(known, told):
    assert run_ranks(refused_nvshmem, 2, known) == [told, told]
