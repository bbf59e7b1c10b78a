"""Two batches in flight: the same bits as one after the other, in an order of calls that hides one behind the other."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epserve import all2all
from epserve.errors import Incompatible
from epserve.models.demo import reference_block
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.steps.in_flight import TwoInFlight, cut, pieces_of
from epserve.rank.step import StepPlan
from tests.all2all.test_all2all import _backends, _loop_for
from tests.all2all.test_deepep import manager_on_cpu
from tests.rank.test_worker import make_worker, tokens
from tests.support.cases import CASES, TOLERANCE, reference
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import run_ranks

from .test_modular_kernel_combinations import make_kernel, poison_new_memory

CASE_NAMES = ("plain", "bf16", "cap_on_one", "cap_times_10", "holes", "all_empty", "silent_owner", "lopsided")


@pytest.mark.parametrize(
    ("longest", "cap", "size", "num_pieces"),
    [
        (0, 8, 1, 1),
        (1, 8, 1, 1),
        (2, 8, 1, 2),
        (7, 8, 4, 2),
        (8, 8, 4, 2),
        (9, 8, 3, 3),
        (80, 8, 4, 20),
        (9, None, 5, 2),
    ],
)
def test_pieces_are_within_the_cap_and_as_many_on_every_rank(longest, cap, size, num_pieces):
    assert cut(longest, cap) == size
    counts = (longest, longest // 3, 0)
    of_ranks = [pieces_of(count, longest, size, counts) for count in counts]
    assert {len(pieces) for pieces in of_ranks} == {num_pieces}
    for rank, (pieces, count) in enumerate(zip(of_ranks, counts, strict=True)):
        assert [piece.counts for piece in pieces] == [piece.counts for piece in of_ranks[0]]
        assert [piece.stop - piece.start for piece in pieces] == [piece.counts[rank] for piece in pieces]
        assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(count))


class Calls:
    """Wraps a prepare/finalize: what is called in which order, and the most handles that were ever out."""

    def __init__(self, pf):
        self.log, self.out, self.most = [], 0, 0
        dispatch, combine = pf.prepare_no_receive, pf.finalize_no_wait
        pf.prepare_no_receive = lambda *a, **k: self._later("dispatch", dispatch(*a, **k), +1)
        pf.finalize_no_wait = lambda *a, **k: self._later("combine", combine(*a, **k), -1)

    def _later(self, what, receive, change):
        self.log.append(f"{what} begins")
        self.out += max(change, 0)
        self.most = max(self.most, self.out)

        def wait():
            self.log.append(f"{what} ends")
            self.out += min(change, 0)
            return receive()

        return wait


ORDER = [
    "dispatch begins", "shared", "dispatch ends", "dispatch begins", "experts", "combine begins",
    "shared", "dispatch ends", "experts", "combine ends", "combine begins", "combine ends",
]  # fmt: skip


def both_orders(ranks: RankContext, pf_name: str, case_name: str, known: bool, stand_in: bool):
    """On one rank: overlapped, then piece by piece; (squared error, squared norm) against the reference."""
    poison_new_memory(ranks)
    case = dataclasses.replace(CASES[case_name], dtype=torch.bfloat16) if stand_in else CASES[case_name]
    manager = manager_on_cpu(pf_name, ranks) if stand_in else all2all.REGISTRY.get(pf_name)(ranks)
    kernel, inputs = make_kernel(manager, _loop_for(pf_name), case, ranks, batches_in_flight=2)
    two = TwoInFlight(kernel)
    kernel.warm_up(inputs.weights)
    two.warm_up()
    calls = Calls(kernel.prepare_finalize)
    apply = kernel.fused_experts.apply

    def experts(*arguments, **named):
        calls.log.append("experts")
        return apply(*arguments, **named)

    kernel.fused_experts.apply = experts

    def shared(x_MK):
        calls.log.append("shared")
        return torch.tanh(x_MK)

    counts = inputs.tokens_per_rank if known else None
    outs = []
    for overlap in (True, False):
        kernel.workspaces.poison()
        two.second.poison()
        calls.log.clear()
        outs.append(
            two.forward(
                inputs.x_MK, inputs.routing, weights=inputs.weights, tokens_per_rank=counts, shared_experts=shared,
                overlap=overlap,
            )
        )  # fmt: skip
        if overlap and 2 <= max(inputs.tokens_per_rank) <= case.cap:
            assert calls.log == ORDER
    assert calls.most <= 2 and calls.out == 0, "a third handle was out"
    assert torch.equal(*outs), "overlapped and sequential differ"
    manager.destroy()
    truth = reference(inputs.x_MK, inputs.routing, inputs.every)
    got = outs[0].double() - torch.tanh(inputs.x_MK).double()
    return float((got - truth).square().sum()), float(truth.square().sum())


def check(results, dtype):
    error, norm = (sum(part) for part in zip(*results, strict=True))
    assert error <= (2 * TOLERANCE[dtype]) ** 2 * max(norm, 1e-6), (error, norm)


@pytest.mark.parametrize("case_name", CASE_NAMES)
@pytest.mark.parametrize("pf_name", _backends(async_receive=True))
def test_overlapped_halves_are_bit_equal_to_sequential_ones(pf_name, case_name):
    results = run_ranks(both_orders, 2, pf_name, case_name, case_name != "plain", False)
    check(results, CASES[case_name].dtype)


@pytest.mark.parametrize("case_name", ["plain", "cap_times_10", "holes"])
@pytest.mark.parametrize("pf_name", ["deepep_ht", "deepep_ll"])
def test_a_library_that_holds_two_results_is_never_asked_for_a_third(pf_name, case_name):
    """Over the strict stand-in, which overwrites the oldest result with NaN when there is a third."""
    check(run_ranks(both_orders, 2, pf_name, case_name, True, True), torch.bfloat16)


def test_a_backend_that_cannot_receive_later_is_refused():
    kernel, _ = make_kernel(all2all.REGISTRY.get("local")(RankContext()), "loop", CASES["plain"], RankContext())
    with pytest.raises(Incompatible, match="LocalPrepareAndFinalize has no asynchronous dispatch"):
        TwoInFlight(kernel)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("in_flight") / "deepseek", dtype=torch.float32)


def steps(ranks: RankContext, path, counts):
    """A step that overlaps and one that is too small for it; the clock still has all phases."""
    worker = make_worker(path, ranks, batches_in_flight=2, overlap_min_tokens=4, max_tokens_per_rank=8)
    first = sum(counts[: ranks.rank])
    x = tokens(sum(counts))[first : first + counts[ranks.rank]]
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=tuple(counts))
    y = worker.step(plan, x, None, None)
    assert {"prepare", "experts", "finalize"} <= set(worker.clock.seconds())
    notes = worker.explain()
    worker.close()
    return y, notes


@pytest.mark.parametrize("counts", [(9, 2), (3, 1), (40, 0), (6,)])
def test_a_rank_runs_its_steps_as_halves(checkpoint, counts):
    results = run_ranks(steps, len(counts), checkpoint, counts)
    got = torch.cat([y for y, _ in results])
    want = reference_block(checkpoint, LAYER)(tokens(sum(counts)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    note = results[0][1][0]
    if len(counts) == 1:
        assert note.startswith("local: one batch in flight: LocalPrepareAndFinalize has no asynchronous dispatch")
    else:
        assert note == "all_to_all: two batches in flight from 4 tokens a rank"
