"""What the rule's tiles take of a GPU's shared memory, compiled for it: it fits, and no more than the tiles were chosen by.

EPSERVE_TEST_CASES=few: bf16 and fp8 in blocks, thick, Standard; without it every quantisation, thin to thick, in both formats.
"""

import os

import pytest

from epserve.experts.tiles.memory import SPARE, Gpu, bytes_of
from epserve.modular_kernel import Workspaces
from tests.experts.triton_aot import fake_driver
from tests.experts.triton_aot.compiled import apply, make, prepare, prepare_batched, stub_weights
from tests.support.triton_cases import Case

CAPABILITY = int(os.environ.get("EPSERVE_TEST_CAPABILITY", "90"))
fake_driver.install(CAPABILITY)
GPU = Gpu.like((CAPABILITY // 10, CAPABILITY % 10))
FEW = os.environ.get("EPSERVE_TEST_CASES") == "few"
SIZES = {"hidden": 1024, "intermediate": 512, "local": 8, "total": 8}
TENSOR_COLUMNS = 512
"""Of a multiprocessor's tensor memory, on compute capability 10.0."""
SCHEMES = [("none", False), ("fp8_tensor", False), ("fp8_tensor", True), ("fp8_channel", False), ("fp8_block", False),
           ("int8_channel", False), ("int4", False), ("mxfp4", False), ("nvfp4", False)]  # fmt: skip
BATCHES = {16: (4, 2), 32: (40, 2), 64: (256, 1), 128: (1200, 2)}
"""Rows of a tile -> tokens and top-k for which the rule takes them. 4-bit weights: 64 at most."""
CAPACITIES = (64, 600)
ROWS = [
    (scheme, dynamic, rows, batched)
    for scheme, dynamic in SCHEMES
    if CAPABILITY >= 89 or not scheme.startswith("fp8")
    for batched, sizes in ((False, BATCHES), (True, CAPACITIES))
    for rows in sizes
    if not FEW or (scheme in ("none", "fp8_block") and rows == 128 and not batched)
]


@pytest.mark.parametrize(("scheme", "dynamic", "rows", "batched"), ROWS)
def test_default_tiles_fit(scheme, dynamic, rows, batched):
    """rows: of a tile; batched: the capacity."""
    tokens, top_k = (rows, 2) if batched else BATCHES[rows]
    case = Case(why="any", tokens=tokens, top_k=top_k, scheme=scheme, dynamic=dynamic, **SIZES)
    experts, spaces, found = make(case, batched=batched), Workspaces("cpu"), []
    if batched:
        sets = experts.tiles(case.local, tokens)
        prepared = prepare_batched(case, tokens, quantised=scheme == "fp8_block")
    else:
        sets = (experts.tiles(tokens, case.local, case.top_k)[0],)
        prepared = prepare(case, tokens)
        packed = scheme in ("int4", "mxfp4", "nvfp4")
        assert sets[0].bm == (min(rows, 64) if packed else rows), "another kind of tiles than this case is for"

    def record(kernel, programs, *args, **constants):
        if kernel.__name__ in ("gate_up", "down"):
            found.append((kernel.__name__, constants["BM"], kernel.warmup(*args, grid=(1,), **constants)))

    experts.launcher().launch = record
    experts.widened = lambda: (
        None
    )  # thick batches of 4-bit weights take the tiles of bf16, which are cases of their own
    apply(experts, case, prepared, stub_weights(case), spaces)
    assert [name for name, *_ in found] == ["gate_up"] * len(sets) + ["down"] * len(sets)
    for (name, bm, compiled), tiles in zip(found, sets * 2, strict=True):
        taken = compiled.metadata.shared
        assert bm == tiles.bm and taken > 0
        assert taken <= GPU.shared_memory, f"{name} of {tiles} takes {taken} bytes, {GPU.shared_memory} are there"
        said = bytes_of(getattr(tiles, name), bm, scheme=scheme, gated=name == "gate_up", gpu=GPU, group=_group(case))
        assert taken <= said + SPARE, f"{name} of {tiles} takes {taken} bytes, chosen by {said}"
        assert (getattr(compiled.metadata, "tmem_size", 0) or 0) <= TENSOR_COLUMNS


def _group(case: Case) -> int:
    return case.spec.quant.group if case.scheme == "int4" else 0
