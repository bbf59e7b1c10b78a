"""The NVLink all-to-all: its kernels on CPU ranks in Triton's interpreter, its protocol as a model, its device code as
compiled for sm_90, its memory as arithmetic. `nvlink_stress.py --device cuda` runs the same steps on GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epserve.all2all.nvlink import NvlinkAll2AllManager, NvlinkPrepareAndFinalize
from epserve.all2all.transport import symmetric
from epserve.all2all.transport.nvlink_heap import Heap, Layout, _explain
from epserve.errors import ConfigError, HandleError
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
)

from .nvlink_model import Protocol, alternating, search, two_in_flight
from .shared_files import SharedFiles

ROOT = Path(__file__).resolve().parent.parent.parent


def program(name: str, *arguments: object, interpreted: bool) -> str:
    """Standard output of a program beside this file; the interpreter is chosen before Triton is imported."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    if interpreted:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(ROOT / "tests" / "all2all" / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


STRESS = [
    pytest.param(["--world", 2, "--in-flight", 2, "--steps", 5], id="two_ranks"),
    pytest.param(["--world", 3, "--in-flight", 2, "--steps", 3, "--counts", 0, 5, 2], id="three_ranks_uneven"),
    pytest.param(
        ["--world", 2, "--steps", 3, "--hidden", 71, "--top-k", 12, "--first-step", 2**31 - 3], id="odd_sizes"
    ),
    pytest.param(["--world", 2, "--steps", 4, "--fp8", "--tolerance", 0.05, "--first-step", 2**19 - 3], id="fp8"),
    pytest.param(["--world", 1, "--steps", 3, "--dtype", "bfloat16", "--tolerance", 0.02, "--top-k", 1], id="alone"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", STRESS)
def test_random_steps(arguments, tmp_path):
    """Zero to cap tokens, known or not, -1 ids with NaN weights, delays at every call, poisoned buffers, both receivers.

    --first-step: the counters of combine (2**31 - 3) or the flags of dispatch (2**19 - 3) pass 2**31 on the way.
    """
    out = program("nvlink_stress.py", *arguments, "--meet", tmp_path / "meet", interpreted=True)
    assert out.count("worst error") == arguments[1]


CASE_NAMES = ("bf16", "hidden_67", "all_empty", "silent_owner", "cap_on_one", "holes", "repeats", "lopsided")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nvlink", "nvlink_batched"])
def test_cases_of_the_modular_kernel(backend, tmp_path):
    """Rounds, silent ranks, holes, odd sizes, uneven experts: through the kernel, with the experts that leave rows a slot."""
    out = program("nvlink_cases.py", "--backend", backend, "--meet", tmp_path / "meet", *CASE_NAMES, interpreted=True)
    assert out.count(": right") == len(CASE_NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "phase"), [(3, "dispatch"), (2, "combine")])
def test_a_dead_rank_is_named_within_the_limit(world, phase, tmp_path):
    """The others return (no trap, no hang), refuse the next batch, and serve again as a smaller group."""
    arguments = ("--world", world, "--lose", phase, "--timeout-s", 8, "--slack-s", 60, "--meet", tmp_path / "meet")
    out = program("nvlink_stress.py", *arguments, interpreted=True)
    assert out.count(f"{phase}: rank {world - 1} did not reach step 5 within 8 s") == world - 1


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_who_waits_for_a_dead_rank_can_be_told_to_stop(phase, tmp_path):
    """Long before the limit: what the supervisor does when a process has ended."""
    arguments = ["--world", 2, "--lose", phase, "--timeout-s", 200, "--interrupt-s", 1, "--slack-s", 60]
    out = program("nvlink_stress.py", *arguments, "--meet", tmp_path / "meet", interpreted=True)
    assert out.count("interrupted: another rank is gone, says rank 0 of 2") == 1


@pytest.mark.parametrize(
    "schedule", [alternating(3), two_in_flight(2)], ids=["one_batch_in_flight", "two_batches_in_flight"]
)
def test_every_order_of_the_protocol_is_safe(schedule):
    states, wrong = search(2, schedule, Protocol())
    assert wrong is None and states > 5000


@pytest.mark.slow
def test_three_ranks_are_safe_too():
    assert search(3, alternating(1), Protocol())[1] is None


@pytest.mark.parametrize(
    ("change", "schedule"),
    [
        ({"waits_for_rows": False}, alternating(1)),
        ({"full_share_first": True}, alternating(1)),
        ({"signals_after_experts": False}, alternating(1)),
        ({"waits_for_sums": False}, alternating(1)),
        ({"steps_counted": False}, alternating(2)),
        ({}, [(phase, 0, step) for phase, _, step in two_in_flight(2)]),
    ],
    ids=[
        "reads_early",
        "share_before_store",
        "signal_before_sums",
        "sums_early",
        "steps_not_counted",
        "one_slot_for_two",
    ],
)
def test_the_search_finds_what_is_wrong(change, schedule):
    assert search(2, schedule, dataclasses.replace(Protocol(), **change))[1] is not None


@pytest.mark.slow
def test_device_code_for_hopper():
    """16-byte accesses, (next to) no spills, no trap, and no barrier in a loop that warps leave one by one."""
    made = json.loads(program("nvlink_compile.py", interpreted=False).splitlines()[-1])
    assert len(made) > 15
    for kernel in made:
        name = kernel["name"]
        assert kernel["spilled"] <= 16 and kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
        assert kernel["traps"] == kernel["multimem"] == 0, kernel
        if not name.startswith("ready"):
            assert kernel["acquires"] >= 2 and kernel["barriers_in_wait_loop"] == 0, kernel
        if name.startswith("dispatch_fp8"):
            assert kernel["wide_loads"] and (kernel["wide_stores"] or kernel["half_stores"]), kernel
        elif name.startswith(("dispatch R", "combine")):
            assert kernel["wide_loads"] and kernel["wide_stores"], kernel


def spec_of(hidden=7168, num_experts=256, ranks=2, scheme="none", dtype=torch.bfloat16) -> LayerSpec:
    shape = ExpertShape(hidden=hidden, intermediate=128, num_experts=num_experts, top_k=8, dtype=dtype)
    layout = ExpertLayout.even(num_experts, ranks)
    return LayerSpec(shape=shape, layout=layout, device="cuda", quant=QuantConfig(scheme=scheme))


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
@pytest.mark.parametrize(("hidden", "ranks", "cap", "slots"), [(7168, 2, 4096, 1), (71, 3, 5, 2), (2880, 64, 1, 3)])
def test_parts_do_not_overlap_and_memory_is_stated(hidden, ranks, cap, slots, scheme):
    options = PrepareFinalizeOptions(max_tokens_per_rank=cap, batches_in_flight=slots)
    spec = spec_of(hidden=hidden, ranks=ranks, scheme=scheme)
    layout = Layout.of(spec, options)
    starts = [layout.part(slot, name) for slot in range(slots) for name in layout.parts]
    assert starts == sorted(starts) and starts[0] >= layout.flag(slots - 1, 1, ranks - 1) + 128
    assert all(start % 128 == 0 for start in starts)
    rows = ranks * cap * hidden
    fp8 = scheme == "fp8_block" and hidden % 128 == 0
    least = slots * (rows * (1 if fp8 else 2) + rows * 2)
    total = NvlinkAll2AllManager.buffer_bytes(spec, options)
    assert total == layout.num_bytes and least <= total <= least * 1.05 + slots * (8192 + ranks * cap * 100)


@pytest.mark.parametrize(
    ("ranks", "options", "text"),
    [
        (3, PrepareFinalizeOptions(), "experts on 2 ranks, there are 3"),
        (2, PrepareFinalizeOptions(combine_order="slot"), "combine_order is 'slot'"),
        (2, PrepareFinalizeOptions(batches_in_flight=0), "batches_in_flight must be at least 1"),
    ],
)
def test_impossible_options_are_refused_before_memory_is_taken(ranks, options, text):
    with pytest.raises(ConfigError, match=text):
        NvlinkPrepareAndFinalize(RankContext(world_size=ranks), spec_of(), options)


def test_an_expired_wait_says_who_where_and_how_long():
    ranks = RankContext(rank=1, world_size=4, timeout_s=2.5)
    code = (1 * 128 + 3 + 1) << 32 | 77
    assert _explain(code, ranks) == "combine: rank 3 did not reach step 77 within 2.5 s, says rank 1 of 4"
    assert "another rank" in _explain((4 + 1) << 32 | 7, ranks)


class _Broken(SharedFiles):
    name = "broken"

    @classmethod
    def allocate(cls, ranks, num_bytes):
        raise RuntimeError("out of luck")


class _Missing(SharedFiles):
    name = "missing"

    @classmethod
    def unavailable(cls):
        return "no such package"


def test_symmetric_memory_comes_from_the_first_provider_that_works():
    ranks = RankContext()
    region = symmetric.allocate(ranks, 4096, (_Missing, _Broken, SharedFiles))
    assert region.provider == "shared files" and region.addresses == (region.mine.data_ptr(),)
    assert not region.mine.any()
    region.release(True)
    with pytest.raises(ConfigError) as caught:
        symmetric.allocate(ranks, 4096, (_Missing, _Broken))
    for text in ("4096 bytes", "missing, rank 0: no such package", "broken, rank 0: RuntimeError: out of luck"):
        assert text in str(caught.value)


def test_too_little_memory_is_said_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 4 << 30))
    ranks = RankContext(device=torch.device("cuda", 0))
    text = symmetric._too_little(ranks, 3 << 30)
    assert text == "3.00 GiB asked, 1.00 of 4.00 GiB free; lower max_tokens_per_rank or batches_in_flight"
    assert symmetric._too_little(ranks, 1 << 30) is None
    text = symmetric._too_little(dataclasses.replace(ranks, sharers=2), 1 << 30)
    assert text is not None and text.startswith("1.00 GiB asked by each of 2 ranks, 1.00 of 4.00 GiB free")


def test_slots_do_not_depend_on_what_was_in_flight_before():
    """Ranks capture graphs at moments of their own: the same graph must have the same slots on each."""
    options = PrepareFinalizeOptions(max_tokens_per_rank=2, batches_in_flight=2)
    heap = Heap(RankContext(), spec_of(hidden=16, num_experts=8, ranks=1), options, (SharedFiles,))
    for order in ((0, 1), (1, 0)):
        taken = [heap.take(), heap.take()]
        assert [slot.index for slot in taken] == [0, 1]
        with pytest.raises(HandleError, match="2 batches are in flight"):
            heap.take()
        for index in order:
            heap.give_back(taken[index])
    heap.close(collective=True)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [[], ["--fp8", "--tolerance", 0.05], ["--lose", "dispatch", "--timeout-s", 1.5]])
def test_on_two_gpus(arguments, tmp_path):
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    sizes = ("--dtype", "bfloat16", "--hidden", 7168, "--experts", 64, "--top-k", 8, "--cap", 512, "--steps", 30)
    program("nvlink_stress.py", "--device", "cuda", *sizes, "--tolerance", 0.01, *arguments, "--meet", tmp_path / "meet",
            interpreted=False)  # fmt: skip
