"""A program: compiles the NVLink kernels for sm_90, with no GPU, and prints what they became as JSON.

A process of its own: it must not run with TRITON_INTERPRET set.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from epserve.all2all.kernels import nvlink, rows
from epserve.all2all.nvlink import Tiling, Tilings

TYPES = {
    "x": "*bf16", "out": "*bf16", "ids": "*i32", "weights": "*fp32", "table": "*i64", "flags": "*i32", "ctl": "*i32",
    "failed": "*i64", "offsets": "*i32", "tokens": "i32", "first_row": "i64", "limit_ns": "i64", "dense": "i32",
    "shifts": "*i64", "named": "*i64", "shares": "*fp32", "scales": "*fp32", "rows": "i32",
}  # fmt: skip


def build(name: str, function, warps: int, types: dict[str, str] | None = None, **constants) -> dict:
    names = function.arg_names
    types = TYPES | (types or {})
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(function, signature, {(names.index(n),): value for n, value in constants.items()}, attrs)
    options = {"num_warps": warps} | ({"launch_pdl": True} if constants.get("PDL") else {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    loop = re.search(r"ld\.acquire\.sys(?:(?!ld\.acquire).)*?ld\.acquire\.sys(.*?)bra", ptx, re.S)
    return {
        "name": name,
        "warps": warps,
        **usage(ptx),
        "shared": made.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
        "half_stores": len(re.findall(r"st\.global\S*\.v2\.b32", ptx)),
        "acquires": ptx.count("ld.acquire.sys"),
        "releases": len(re.findall(r"\.release\.sys|\.sys\.release|\.sys\.global\S*release|atom\S*sys\S*", ptx)),
        "traps": ptx.count("trap"),
        "barriers_in_wait_loop": loop.group(1).count("bar.sync") if loop else None,
        "multimem": ptx.count("multimem"),
    }


def usage(ptx: str) -> dict[str, int]:
    """Registers, and bytes spilled to memory, by the assembler that Triton's wheel carries."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled, registers = re.search(r"(\d+) bytes spill stores", text), re.search(r"Used (\d+) registers", text)
    assert spilled and registers, text
    return {"registers": int(registers.group(1)), "spilled": int(spilled.group(1))}


def main() -> None:
    tilings, made = Tilings(), []
    used: dict[str, list[Tiling]] = {
        "dispatch": [tilings.dispatch_few, tilings.dispatch_many, tilings.dispatch_narrow],
        "dispatch_fp8": [tilings.dispatch_few, tilings.dispatch_many_fp8, tilings.dispatch_narrow],
        "combine": [tilings.combine_few, tilings.combine_many, tilings.combine_narrow],
    }
    for ranks in (2, 8, 64):
        for phase, several in used.items():
            for t in dict.fromkeys(several):
                sizes = {"H": 7168, "K": 8, "W": ranks, "TILE": t.tile, "BLOCK": t.block}
                sizes["PDL"] = t not in (tilings.dispatch_narrow, tilings.combine_narrow)
                if phase != "combine":
                    sizes |= {"FP8": phase == "dispatch_fp8", "WAIT": True}
                name = f"{phase} R{ranks} {t.programs}x{t.warps} {t.tile}x{t.block}"
                made.append(build(name, getattr(nvlink, phase.removesuffix("_fp8")), t.warps, **sizes))
        made.append(build(f"dispatch_wait R{ranks}", nvlink.dispatch_wait, 1, W=ranks))
    more = {"ids": "*i64", "out": "*fp8e4nv", "in_rank": "*i1", "counts": "*i32", "partial": "*i32", "arrived": "*i32"}
    for ranks in (2, 8):
        sizes = {
            "H": 7168,
            "K": 8,
            "RANKS": ranks,
            "EACH": 32,
            "SHIFT": True,
            "LAYOUT": True,
            "TILE": 32,
            "BLOCK": 1024,
        }
        made.append(build(f"ready R{ranks}", rows.ready, 4, more, FP8=True, **sizes))
    print(json.dumps(made))


if __name__ == "__main__":
    main()
