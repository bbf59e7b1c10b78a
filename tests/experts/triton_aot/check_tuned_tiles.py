"""However different the tuned tiles of a shape's buckets are, warm-up asks for few variants; through Triton's real key."""

import random

import pytest

from epserve.experts.tiles.candidates import candidates, joined, token_tiles
from epserve.experts.tiles.limits import Limits
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import Problem
from epserve.experts.triton import warmup as triton_warmup
from epserve.modular_kernel import Workspaces
from epserve.modular_kernel.measured.buckets import BUCKETS
from tests.experts.triton_aot import fake_driver
from tests.experts.triton_aot.check_late_compiles import SHAPES, Keys
from tests.experts.triton_aot.compiled import make, stub_weights
from tests.support.triton_cases import Case

fake_driver.install(90)
LARGE = [name for name in SHAPES if "small" not in name]


def every_bucket_its_own(problem: Problem, limits: Limits, seed: int) -> dict[int, Tiles]:
    """No candidate twice, as far as there are enough; those that quantise on the fly first, which need a second variant."""
    draw, used, cells = random.Random(seed), set(), {}
    for bucket in BUCKETS:
        bm = draw.choice(token_tiles(problem, bucket, limits))
        options = candidates(problem, bucket, bm, limits)
        firsts = [each for each in options.first if (bm, each) not in used] or options.first
        seconds = [each for each in options.second if (bm, each) not in used] or options.second
        first = draw.choice([each for each in firsts if each.tiles.fly] or firsts)
        second = draw.choice(seconds)
        used |= {(bm, first), (bm, second)}
        cells[bucket] = joined(bm, first, second)
    return cells


@pytest.mark.parametrize("scheme", ["none", "fp8_tensor", "fp8_block", "fp8_channel"])
@pytest.mark.parametrize("shape", LARGE)
def test_at_most_60_variants(shape, scheme):
    case = Case(why="any", tokens=0, scheme=scheme, **SHAPES[shape])
    experts, weights = make(case), stub_weights(case)
    experts.launcher().specialises = experts.launcher()._plain_enough()
    problem = Problem.of(case.spec, case.local)
    experts.table = {problem.key: every_bucket_its_own(problem, Limits.of(case.spec), 3)}
    with Keys() as warm:
        triton_warmup.warm_up(experts, weights, 16384, Workspaces("cpu"))
    assert 20 < len(warm.seen) <= 60
