"""Compiled for compute capability 9.0 and looked at: which matrix instructions, and that no register is spilled. Others: that
they compile and fit. Every default tile's fit: `check_shared_memory.py`.
"""

import dataclasses
import os
import re

import pytest

from epserve.experts.tiles.memory import Gpu
from tests.experts.triton_aot import fake_driver
from tests.experts.triton_aot.compiled import kernels, loops_with_products, machine_code, spills_in_products
from tests.support.triton_cases import Case, special, thick, thin

CAPABILITY = int(os.environ.get("EPSERVE_TEST_CAPABILITY", "90"))
fake_driver.install(CAPABILITY)
SHARED_MEMORY = Gpu.like((CAPABILITY // 10, CAPABILITY % 10)).shared_memory
SIZES = {"hidden": 1024, "intermediate": 512, "local": 8, "total": 8}
THIN, THICK = thin(16), thick(128, wide=True, expand=True, warps=8)
THICK_BLOCK = thick(64, expand=True, warps=8, bk=128)
EVERY = {"by_expert": True, "split": 2, "group": 8}
MMA = {
    "none": "HGMMA",
    "int8_channel": "IGMMA",
    "int4": "HGMMA",
    "mxfp4": "HGMMA",
    "nvfp4": "HGMMA",
}  # the e4m3 kinds: QGMMA

CASES = [
    Case(why="16 tokens, swapped, bf16", tokens=8, tiles=THIN, **SIZES),
    Case(why="16 tokens, swapped, static fp8", tokens=8, scheme="fp8_tensor", tiles=THIN, **SIZES),
    Case(why="16 tokens, swapped, dynamic fp8", tokens=8, scheme="fp8_tensor", dynamic=True, tiles=THIN, **SIZES),
    Case(why="16 tokens, swapped, fp8 channel", tokens=8, scheme="fp8_channel", tiles=THIN, **SIZES),
    Case(why="16 tokens, swapped, fp8 blocks", tokens=8, scheme="fp8_block", tiles=THIN, **SIZES),
    Case(why="16 tokens, swapped, int8", tokens=8, scheme="int8_channel", tiles=THIN, **SIZES),
    Case(why="thick, bf16, one accumulator", tokens=600, tiles=THICK, **SIZES),
    Case(why="thick, fp8 channel", tokens=600, scheme="fp8_channel", tiles=THICK, **SIZES),
    Case(why="thick, fp8 blocks", tokens=600, scheme="fp8_block", tiles=THICK_BLOCK, **SIZES),
    Case(why="16 tokens, swapped, int4 weights", tokens=8, scheme="int4", **SIZES),
    Case(why="16 tokens, swapped, mxfp4 weights and biases", tokens=8, scheme="mxfp4", bias=True, **SIZES),
    Case(why="16 tokens, swapped, nvfp4 weights", tokens=8, scheme="nvfp4", **SIZES),
    Case(why="specialised, bf16", tokens=600, tiles=special(), **SIZES),
    Case(why="specialised, static fp8", tokens=600, scheme="fp8_tensor", tiles=special(bk=128), **SIZES),
    Case(why="specialised, fp8 blocks", tokens=600, scheme="fp8_block", tiles=special(bk=128), **SIZES),
    Case(why="specialised, bf16, every option", tokens=600, tiles=special(lag=2, **EVERY), **SIZES),
    Case(why="specialised, bf16, 192 rows, every option", tokens=600, tiles=special(bm=192, lag=2, **EVERY), **SIZES),
    Case(why="specialised, static fp8, 192 rows, every option", tokens=600, scheme="fp8_tensor",
         tiles=special(bm=192, bk=128, lag=2, **EVERY), **SIZES),
    Case(why="specialised, fp8 blocks, every option", tokens=600, scheme="fp8_block",
         tiles=special(bk=128, lag=1, **EVERY), **SIZES),
    Case(why="specialised, fp8 blocks, narrow products", tokens=600, scheme="fp8_block",
         tiles=special(bk=128, narrow=True, lag=2, **EVERY), **SIZES),
]  # fmt: skip
FP8 = ("fp8_tensor", "fp8_channel", "fp8_block")
ELSEWHERE = [case for case in CASES if "specialised" not in case.why and (CAPABILITY >= 89 or case.scheme not in FP8)]


LAYOUTS = {"standard": {}, "batched": {"batched": True}, "scales by column": {"batched": True, "columns": True}}
ROWS = [(case, layout) for case in CASES for layout in LAYOUTS
        if layout != "scales by column" or case.scheme == "fp8_block"]  # fmt: skip


@pytest.mark.skipif(CAPABILITY != 90, reason="looks at Hopper's instructions")
@pytest.mark.parametrize(("case", "layout"), ROWS, ids=str)
def test_warpgroup_instructions_and_no_spills(case, layout):
    seen = set()
    for name, variants in kernels(case, **LAYOUTS[layout]).items():
        for compiled in variants:
            code = machine_code(compiled)
            assert compiled.metadata.shared <= SHARED_MEMORY, f"{name} does not fit"
            if name == "grouped":
                # Narrow products, which no shipped tile has, reload one pair a step in some batches. So do split sums of block
                # scales, which none has either, in many.
                narrow = case.tiles is not None and (case.tiles.gate_up.narrow or case.tiles.down.narrow)
                if case.scheme != "fp8_block" or case.tiles is None or case.tiles.down.split == 1 or narrow:
                    assert len(spills_in_products(code)) <= int(narrow), f"{name} spills registers at each step"
            else:
                assert "STL" not in code, f"{name} spills registers"
            if name in ("gate_up", "down", "grouped"):
                seen.add(name)
                assert MMA.get(case.scheme, "QGMMA") in code, f"{name} has no warpgroup products"
                assert "HMMA" not in code and "IMMA" not in code, f"{name} has products of single warps"
    assert seen


@pytest.mark.skipif(CAPABILITY != 90, reason="the specialised kernel is Hopper's")
@pytest.mark.parametrize(("bm", "lag"), [(128, 0), (128, 3), (192, 0)])
def test_every_barrier_is_used_so_that_its_memory_is_given_to_nothing_else(bm, lag):
    """Otherwise results pass through that memory, and the barrier comes back in it when the GPU is shared by time."""
    case = Case(why="thick", tokens=700, hidden=512, intermediate=384, tiles=special(bm=bm, lag=lag))
    variants = kernels(case)["grouped"]
    for compiled in variants:
        text = compiled.asm["ttgir"]
        barriers = set(re.findall(r"(%\w+) = ttg.local_alloc : \(\) -> !ttg.memdesc<\w+xi64,", text))
        used = re.findall(r"%\w+", re.search(r"ttg.warp_specialize\((.*?)\)", text)[1])
        assert {"%full", "%empty", "%posted", "%taken"} <= barriers <= set(used)
        assert ("%turn" in barriers) == (lag > 0)
    assert len(variants) == 2


@pytest.mark.skipif(CAPABILITY != 90, reason="looks at Hopper's instructions")
@pytest.mark.parametrize("scheme", ["int4", "mxfp4", "nvfp4"])
def test_thick_batches_widen_weights_once_and_multiply_them_as_bf16(scheme):
    found = kernels(Case(why="thick", tokens=2000, scheme=scheme, **SIZES))
    for compiled in found["widen"]:
        code = machine_code(compiled)
        assert "STL" not in code and "STG.E.128" in code and not re.search(r"I2F|STG\.E ", code)
    products = [compiled for name in ("gate_up", "down") for compiled in found[name]]
    assert len(products) == 2 and all("HGMMA" in machine_code(compiled) for compiled in products)
    assert "UBLK" in machine_code(found["gate_up"][0]) or "UTMALDG" in machine_code(found["gate_up"][0])


MOST = {"int4": 6.0, "mxfp4": 6.0, "nvfp4": 7.0}
"""Instructions of a step for each weight of a thread, products and addresses included; 6.4 to 18.5 by conversions."""


@pytest.mark.skipif(CAPABILITY != 90, reason="looks at Hopper's instructions")
@pytest.mark.parametrize("scheme", MOST)
def test_four_bits_are_widened_by_bits_and_stay_in_their_thread(scheme):
    for name, variants in kernels(Case(why="thin", tokens=8, scheme=scheme, **SIZES)).items():
        if name not in ("gate_up", "down"):
            continue
        for compiled in variants:
            code = machine_code(compiled)
            step = min(loops_with_products(code), key=len)
            weights = 64 * 128 // 128 * (2 if name == "gate_up" else 1)  # of a step, for one of 128 threads
            first = [word for text in step for word in text.split() if not word.startswith("@")]
            seen = [word for word in first if re.match(r"(I2F|STS|STL|LDL|LDS\.U8|LDG\b)", word)]
            assert not seen, f"{name}: slow conversions, or weights that pass through memory: {set(seen)}"
            fetched = sum("LDGSTS.E.BYPASS.128" in text for text in step)
            assert fetched >= weights // 32, f"{name}: weights are not fetched 16 bytes at a time"
            assert len(step) <= MOST[scheme] * weights, f"{name}: {len(step)} instructions for {weights} weights"
            assert sum("HGMMA" in text for text in step) == weights // 8


@pytest.mark.skipif(CAPABILITY == 90, reason="covered above")
@pytest.mark.parametrize("case", ELSEWHERE, ids=str)
def test_compiles_elsewhere(case):
    if CAPABILITY == 120 and case.tiles is not None:  # as chosen for 227 KiB of shared memory
        parts = {name: dataclasses.replace(getattr(case.tiles, name), stages=2) for name in ("gate_up", "down")}
        case = dataclasses.replace(case, tiles=dataclasses.replace(case.tiles, **parts))
    found = kernels(case)
    assert {"gate_up", "down", "weighted_sum"} <= set(found)
    for name, variants in found.items():
        for compiled in variants:
            assert compiled.metadata.shared <= SHARED_MEMORY, f"{name} does not fit"
