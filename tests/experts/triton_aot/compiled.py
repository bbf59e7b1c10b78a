"""What the Triton experts compile for a GPU that is not there: every kernel of one `apply`, with its machine code."""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton

from epserve.experts.tiles.memory import Gpu
from epserve.experts.tiles.table import Problem
from epserve.experts.triton.batched import BatchedTritonExperts
from epserve.experts.triton.experts import TritonExperts
from epserve.modular_kernel import DispatchHandle, ExpertWeights, HandleBook, Prepared, Routing, Workspaces
from epserve.modular_kernel.measured.buckets import BUCKETS
from tests.support.triton_cases import Case

BOOK = HandleBook("test")
STORED = {
    "none": None,
    "int8_channel": torch.int8,
    "int4": torch.uint8,
    "mxfp4": torch.uint8,
    "nvfp4": torch.uint8,
}  # others: e4m3


def stub_weights(case: Case) -> ExpertWeights:
    """Weights of a few elements: enough where nothing runs."""
    stored = STORED.get(case.scheme, torch.float8_e4m3fn) or case.dtype
    scale = (
        None
        if case.scheme == "none"
        else torch.empty(64, dtype=torch.uint8 if case.scheme == "mxfp4" else torch.float32)
    )
    static = torch.empty(1) if case.scheme == "fp8_tensor" and not case.dynamic else None
    bias = torch.empty(64, dtype=case.dtype) if case.bias else None
    w = torch.empty((case.local, 1, 64), dtype=stored)
    return ExpertWeights(w13_eNK=w, w2_eKN=w, s13=scale, s2=scale, a1=static, a2=static, b13=bias, b2=bias,
                         activation=case.activation)  # fmt: skip


def make(case: Case, *, batched: bool = False):
    experts = (BatchedTritonExperts if batched else TritonExperts)(case.spec)
    if case.tiles is not None:
        experts.table = {Problem.of(case.spec, case.local).key: dict.fromkeys(BUCKETS, case.tiles)}
    launcher = experts.launcher()
    launcher.specialises = case.tiles is not None and case.tiles.specialised
    launcher.gpu = Gpu.like(triton.runtime.driver.active.get_device_capability())
    return experts


def prepare(case: Case, tokens: int, *, quantised: bool = False, shift: int = 0) -> Prepared:
    """shift: ids start so many bytes / 4 after an aligned address, as rows of a round do."""
    ids = torch.zeros(tokens * case.top_k + shift, dtype=torch.int32)[shift:].view(tokens, case.top_k)
    routing = Routing(ids_Mt=ids, weights_Mt=torch.zeros((tokens, case.top_k)))
    x = torch.empty((tokens, case.hidden), dtype=torch.float8_e4m3fn if quantised else case.dtype)
    scales = torch.empty((tokens, -(-case.hidden // 128))) if quantised else None
    return Prepared(x=x, scales=scales, routing=routing, handle=DispatchHandle(BOOK, None))


def prepare_batched(case: Case, capacity: int, *, quantised: bool = False, columns: bool = False) -> Prepared:
    """columns: with scales that lie column by column, as DeepEP leaves them."""
    x = torch.empty((case.local, capacity, case.hidden), dtype=torch.float8_e4m3fn if quantised else case.dtype)
    scales = torch.empty((case.local, capacity, -(-case.hidden // 128))) if quantised else None
    if scales is not None and columns:
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
    counts = torch.zeros(case.local, dtype=torch.int32)
    return Prepared(x=x, scales=scales, expert_num_tokens=counts, handle=DispatchHandle(BOOK, None))


def apply(experts, case: Case, prepared: Prepared, weights: ExpertWeights, spaces: Workspaces) -> None:
    if prepared.routing is None:
        shapes = experts.workspace_shapes(0, case.top_k, *prepared.x.shape[:2])
    else:
        shapes = experts.workspace_shapes(prepared.x.shape[0], case.top_k, case.local)
    workspace = spaces.carve(shapes)
    experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)


def kernels(case: Case, *, batched: bool = False, columns: bool = False) -> dict[str, list]:
    """Name -> compiled variants of one `apply`. columns: rows come quantised, their scales column by column."""
    experts, found = make(case, batched=batched), {}

    def record(kernel, programs, *args, **constants):
        compiled = kernel.warmup(*args, grid=(1,), **constants)
        found.setdefault(compiled.metadata.name, []).append(compiled)

    experts.launcher().launch = record
    if batched:
        prepared = prepare_batched(case, case.tokens, quantised=columns, columns=columns)
    else:
        prepared = prepare(case, case.tokens)
    apply(experts, case, prepared, stub_weights(case), Workspaces("cpu"))
    return found


def machine_code(compiled) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def loops_with_products(code: str) -> list[list[str]]:
    """Instructions of each loop that has matrix products."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", code)]
    loops = [(int(target, 16), at) for at, text in lines for target in re.findall(r"BRA\S* 0x([0-9a-f]+)", text)
             if int(target, 16) < at]  # fmt: skip
    bodies = [[text for at, text in lines if first <= at <= last] for first, last in loops]
    return [body for body in bodies if any("MMA" in text for text in body)]


def spills_in_products(code: str) -> list[str]:
    """Instructions that spill inside the innermost loops with products; elsewhere they are once a work item."""
    with_products = loops_with_products(code)
    smallest = min(map(len, with_products))
    assert smallest < 1000, "the loop over steps was not found"
    inner = [body for body in with_products if len(body) < 3 * smallest]
    return [text for body in inner for text in body if "STL" in text or "LDL" in text]


def resized(case: Case, **options) -> Case:
    return dataclasses.replace(case, **options)
