"""Tiles are searched with real launches: each GEMM alone, on real rows, and whole layers against each other. In Triton's
interpreter; run by test_tiles.py in its own process."""

import pytest
import torch

from tests.experts.triton_interpreter import exact_casts  # noqa: F401, first: it patches the interpreter

from tests.support.triton_cases import Case, make_weights, relative_error, run_standard, thick, thin, tolerance  # isort: skip
from epserve.modular_kernel import Tuning  # isort: skip
from epserve.modular_kernel import Workspaces  # isort: skip
from epserve.experts.triton import tile_trial, tile_tuning  # isort: skip
from epserve.experts.tiles.candidates import First, Options, joined  # isort: skip
from epserve.experts.triton.tile_trial import Trial, batches_of  # isort: skip
from epserve.experts.triton.experts import TritonExperts  # isort: skip
from epserve.experts.tiles.sizes import GemmTiles  # isort: skip
from epserve.experts.tiles.table import Problem  # isort: skip
from epserve.modular_kernel.measured.buckets import bucket_of  # isort: skip

torch.set_num_threads(1)
tile_trial.ROUNDS = 1
CASES = [
    Case(why="direct, split", tokens=4, local=2, total=2, hidden=256, intermediate=128, tiles=thin(split=2)),
    Case(why="fp8 channel, sorted", tokens=3, local=2, total=2, hidden=128, intermediate=128, scheme="fp8_channel",
         tiles=thick(64)),
    Case(why="fp8 blocks, on the fly", tokens=4, local=2, total=2, hidden=256, intermediate=128, scheme="fp8_block",
         tiles=thin(fly=True)),
]  # fmt: skip


def trial_of(case: Case) -> tuple[Trial, list[float]]:
    """With a timer that runs what it is given and calls every launch slower than the one before."""
    weights, _ = make_weights(case, "cpu")
    seen: list[float] = []

    def timer(launch) -> float:
        launch()
        seen.append(100.0 + len(seen))
        return seen[-1]

    batches = batches_of(case.spec, case.tokens, weights, every_row=True)[:2]
    return Trial(lambda: TritonExperts(case.spec), weights, batches, timer=timer), seen


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_gemm_alone_is_the_layer(case):
    trial, seen = trial_of(case)
    tiles = case.tiles
    assert tiles is not None
    first, bm = First(tiles.gate_up, tiles.expand), tiles.bm
    assert trial.time("gate_up", bm, first, tiles.down) == 50.0, "of one of two batches"
    launch = trial.launchable("down", bm, tiles.down, first)
    launch()
    by_halves = trial.out.clone()
    assert bool(torch.isfinite(by_halves).all()) and float(by_halves.abs().max()) > 0, "real rows, not stale bytes"
    options = Options(bm=bm, first=(first,), second=(tiles.down,))
    assert trial.compile(options, 0.0) == options
    experts = TritonExperts(case.spec)
    experts.table = {Problem.of(case.spec, case.local).key: {bucket_of(case.tokens): tiles}}
    batch, weights = trial.batches[-1], trial.weights
    workspace = Workspaces("cpu").carve(experts.workspace_shapes(case.tokens, case.top_k, case.local))
    whole = experts.apply(workspace.output, batch, weights=weights, workspace=workspace)
    assert torch.equal(by_halves, whole)
    before, us, wrong = trial.compare(tiles, tiles)
    assert wrong is None and before > 50.0 and us > 50.0 and len(seen) == 3


def test_what_computes_something_else_is_seen():
    case = CASES[0]
    assert case.tiles is not None
    trial, _ = trial_of(case)
    experts = [TritonExperts(case.spec), TritonExperts(case.spec)]
    half = experts[1].second_half

    def wrong(b, prepared, weights, tiles, direct, output):
        half(b, prepared, weights, tiles, direct, output)
        output *= 2

    experts[1].second_half = wrong
    made = iter(experts)
    trial.make = lambda: next(made)
    assert "results differ by 1" in (trial.compare(case.tiles, case.tiles)[2] or "")


def test_tiles_that_were_tuned_compute_the_same(tmp_path, monkeypatch):
    """From the search over the file to the result of another start's layer."""
    case = Case(why="tuned", tokens=4, local=2, total=2, hidden=256, intermediate=128)
    best = joined(
        16, First(GemmTiles(bn=64, bk=64, swap=True, split=2, stages=3)), GemmTiles(bn=128, bk=64, swap=True, stages=3)
    )
    few = Options(bm=16, first=(First(best.gate_up),), second=(best.down,))
    monkeypatch.setattr(tile_tuning, "options_for", lambda *_, **__: [few])
    weights, _ = make_weights(case, "cpu")
    experts = TritonExperts(case.spec)
    experts.use(Tuning(folder=tmp_path, budget_s=1e6, thorough=True))

    def timer(launch) -> float:
        launch()
        return 100.0

    def bench(bucket: int) -> Trial:
        batches = batches_of(case.spec, bucket, weights, every_row=True)[:1]
        trial = Trial(lambda: TritonExperts(case.spec), weights, batches, timer=timer)
        time, compare = trial.time, trial.compare

        def timed(which, bm, option, partner):  # the candidates win over the rule
            us = time(which, bm, option, partner)
            return us if us is None or option in (few.first[0], few.second[0]) else 2 * us

        def compared(old, new):
            before, us, wrong = compare(old, new)
            return before, us / 2, wrong

        trial.time, trial.compare = timed, compared
        return trial

    assert tile_tuning.tune(experts, weights, case.tokens, make_bench=bench)
    started = TritonExperts(case.spec)
    started.use(Tuning(folder=tmp_path))
    assert started.tiles(case.tokens, case.local, case.top_k)[0] == best
    out, want = run_standard(case, "cpu", experts=started)
    assert relative_error(out, want) < tolerance(case)
