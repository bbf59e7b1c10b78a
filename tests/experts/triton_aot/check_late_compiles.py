"""After warm-up, batches of any size ask for no kernel variant that warm-up did not: through Triton's real specialisation key.

The hook that sees a missing variant vetoes its compilation, so that only keys are made: a variant asked for twice is the same
key twice.
"""

import random

import pytest
import torch
import triton

from epserve.experts.tiles.table import shipped
from epserve.experts.triton import warmup as triton_warmup
from epserve.experts.triton.compiles import CompileCounter
from epserve.modular_kernel import Workspaces
from tests.experts.triton_aot import fake_driver
from tests.experts.triton_aot.compiled import apply, make, prepare, prepare_batched, stub_weights
from tests.support.triton_cases import Case

fake_driver.install(90)
MAX_ROWS = 4096
SHAPES = {
    "small, not measured": {"local": 8, "total": 8, "hidden": 512, "intermediate": 384, "top_k": 2},
    "one rank of eight": {"local": 32, "total": 256, "hidden": 7168, "intermediate": 2048, "top_k": 8},
    "top-8 of 128": {"local": 128, "total": 128, "hidden": 4096, "intermediate": 1536, "top_k": 8},
    "top-2 of 8": {"local": 8, "total": 8, "hidden": 4096, "intermediate": 14336, "top_k": 2},
}
SCHEMES = [("none", False), ("fp8_tensor", False), ("fp8_tensor", True), ("fp8_channel", False), ("fp8_block", False),
           ("int8_channel", False), ("mxfp4", False)]  # fmt: skip


class Keys:
    """Collects the keys of variants that are asked for, and keeps them from being compiled."""

    def __enter__(self):
        self.seen: set = set()
        self.before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, self._hook
        return self

    def __exit__(self, *error):
        triton.knobs.runtime.jit_cache_hook = self.before

    def _hook(self, *, key, fn, **other):
        self.seen.add((fn.name, key))
        return True


MEASURED = [("none", False), ("fp8_tensor", False), ("fp8_block", False)]
SMALL, *LARGE = SHAPES


@pytest.mark.parametrize(
    ("shape", "scheme"), [(SMALL, scheme) for scheme in SCHEMES] + [(s, scheme) for s in LARGE for scheme in MEASURED]
)
def test_500_batch_sizes(shape, scheme):
    case = Case(why="any", tokens=0, scheme=scheme[0], dynamic=scheme[1], **SHAPES[shape])
    experts, weights, spaces = make(case), stub_weights(case), Workspaces("cpu")
    experts.table = shipped("NVIDIA H200")
    experts.launcher().specialises = experts.launcher()._plain_enough()
    spaces.reserve(experts.workspace_shapes(MAX_ROWS, case.top_k, case.local))
    spaces.lock()
    sizes = [1, 2, 15, 16, 17, 31, 4096] + [random.Random(1).randint(1, MAX_ROWS) for _ in range(493)]
    with Keys() as warm:
        triton_warmup.warm_up(experts, weights, MAX_ROWS, spaces)
    assert 4 <= len(warm.seen) <= 60
    with Keys() as later:
        for tokens in sizes:
            quantised = case.scheme == "fp8_block" and tokens % 2 == 0
            apply(experts, case, prepare(case, tokens, quantised=quantised, shift=tokens % 3), weights, spaces)
    assert later.seen <= warm.seen, {name for name, _ in later.seen - warm.seen}
    assert len(later.seen) > 3


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_batched_warm_up_covers_what_comes(scheme):
    case = Case(why="any", tokens=0, scheme=scheme[0], dynamic=scheme[1], **SHAPES["small, not measured"])
    experts, weights, spaces = make(case, batched=True), stub_weights(case), Workspaces("cpu")
    with Keys() as warm:
        triton_warmup.warm_up_batched(experts, weights, 64, spaces)
    with Keys() as later:
        for quantised in {False, case.scheme == "fp8_block"}:
            for columns in {False, quantised}:
                batch = prepare_batched(case, 64, quantised=quantised, columns=columns)
                apply(experts, case, batch, weights, spaces)
    assert later.seen == warm.seen and len(warm.seen) > 3


def test_the_counter_tells_warm_from_late():
    @triton.jit
    def doubled(x, n):
        triton.language.store(x, n * 2)

    counter = CompileCounter()
    counter.install()
    try:
        doubled.warmup(torch.empty(1), 5, grid=(1,))
        counter.ready()
        doubled.warmup(torch.empty(1), 7, grid=(1,))  # the same variant: neither 1 nor a multiple of 16
        assert (counter.num_warm, counter.num_late) == (1, 0)
        doubled.warmup(torch.empty(1), 16, grid=(1,))
        with counter.warming():
            doubled.warmup(torch.empty(1), 1, grid=(1,))
        assert (counter.num_warm, counter.num_late) == (2, 1)
        assert counter.late == {"doubled": 1} or list(counter.late.values()) == [1]
    finally:
        counter.remove()


def test_a_kernel_that_does_not_compile_ends_only_its_own_warm_up():
    @triton.jit
    def impossible(x):
        triton.language.store(x, x + x)  # a pointer is no number

    @triton.jit
    def fine(x):
        triton.language.store(x, 1.0)

    def warm(kernel):
        triton_warmup._compile_side_by_side(1, lambda: kernel.warmup(torch.empty(1), grid=(1,)))

    with pytest.raises(triton.CompilationError):
        warm(impossible)
    warm(fine)
    assert len(fine.device_caches[0][0]) == 1
