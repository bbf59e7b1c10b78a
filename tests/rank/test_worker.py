"""One rank as a plain class, alone and on gloo ranks, against transformers' own block."""

import gc
import pickle
import weakref

import pytest
import torch

from epserve import all2all
from epserve.config import parse_config
from epserve.errors import ConfigError, Incompatible, InternalError
from epserve.link.failure import StepError, from_exception
from epserve.models.demo import reference_block
from epserve.modular_kernel import RankContext
from epserve.rank.gate import route
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import RanksFailed, run_ranks

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    return {
        name: write(family, folder / name, dtype=torch.float32, **sizes)
        for name, family, sizes in (
            ("deepseek", "deepseek_v3", {}),
            ("mixtral", "mixtral", {}),
            ("five", "mixtral", {"num_experts": 5}),
            ("three", "mixtral", {"num_experts": 3}),
        )
    }


def make_config(path, **engine):
    return parse_config({"model": {"path": str(path)}, "engine": {"device": "cpu", **engine}})


def tokens(count: int, hidden: int = 64) -> torch.Tensor:
    return torch.randn((count, hidden), generator=torch.Generator().manual_seed(count))


def make_worker(path, ranks: RankContext, **engine) -> Worker:
    worker = Worker(make_config(path, ranks=ranks.world_size, **engine), ranks)
    worker.load()
    worker.warm_up()
    return worker


def block_on_ranks(ranks: RankContext, path, counts, engine) -> torch.Tensor:
    """On every rank: its share of sum(counts) tokens through LAYER, twice; the two results must have the same bits."""
    worker = make_worker(path, ranks, **engine)
    first = sum(counts[: ranks.rank])
    x = tokens(sum(counts))[first : first + counts[ranks.rank]]
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=tuple(counts))
    y = worker.step(plan, x, None, None)
    assert torch.equal(y, worker.step(plan, x, None, None))
    worker.close()
    return y


def routed_on_ranks(ranks: RankContext, path, counts, ids, weights) -> torch.Tensor:
    worker = make_worker(path, ranks)
    rows = slice(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
    plan = StepPlan(step=0, layer=LAYER, mode="routed", tokens_per_rank=tuple(counts))
    y = worker.step(plan, tokens(sum(counts))[rows], ids[rows], weights[rows])
    worker.close()
    return y


class Group:
    """Stands for a process group, of which one rank alone makes no use."""


@pytest.mark.parametrize("fails", [False, True], ids=["after steps", "after a step that failed"])
def test_a_rank_that_leaves_keeps_no_reference_to_its_group(checkpoints, fails):
    """A group closes its connections with its last reference. Until then peers would wait for this rank."""
    group = Group()
    left = weakref.ref(group)
    worker = make_worker(checkpoints["deepseek"], RankContext(group=group), experts="grouped_mm")
    del group
    plan = StepPlan(step=3, layer=LAYER, mode="block", tokens_per_rank=(9,))
    gc.collect()
    gc.disable()
    try:
        failure = None
        try:
            worker.step(plan, tokens(8 if fails else 9), None, None)
        except StepError as error:
            failure = from_exception(error, rank=0, phase="step")
        assert (failure is not None) == fails and left() is not None
        worker.leave()
        assert left() is None
    finally:
        gc.enable()


# Each row: checkpoint, tokens of each rank, engine settings, and why the row exists.
CASES = {
    "one rank": ("deepseek", (7,), {}),
    "two ranks, shared experts": ("deepseek", (5, 6), {}),
    "four ranks": ("mixtral", (9, 8, 8, 8), {}),
    "a silent rank holds experts that others need": ("mixtral", (4, 0, 4, 4), {}),
    "no token anywhere": ("deepseek", (0, 0), {}),
    "one token for four ranks": ("mixtral", (1, 0, 0, 0), {}),
    "five experts on two ranks": ("five", (6, 6), {}),
    "three experts on four ranks: one holds none": ("three", (3, 3, 3, 3), {}),
    "experts placed by hand": ("mixtral", (4, 4), {"experts_per_rank": [1, 7]}),
    "above the cap on one rank only": ("mixtral", (13, 2), {"max_tokens_per_rank": 4}),
    "exactly at the cap": ("mixtral", (4, 4), {"max_tokens_per_rank": 4}),
    "ten times the cap": ("deepseek", (40, 40), {"max_tokens_per_rank": 4}),
    "sums in slot order": ("mixtral", (5, 5), {"combine_order": "slot"}),
}


@pytest.mark.parametrize("case", CASES)
def test_block_equals_transformers(checkpoints, case):
    name, counts, engine = CASES[case]
    got = torch.cat(run_ranks(block_on_ranks, len(counts), checkpoints[name], counts, engine))
    assert got.shape == (sum(counts), 64)
    torch.testing.assert_close(got, reference_block(checkpoints[name], LAYER)(tokens(sum(counts))), **TOLERANCE)


@pytest.mark.parametrize("backend", [name for name in all2all.REGISTRY.names() if name != "local"])
def test_each_all_to_all_backend(checkpoints, backend):
    missing = all2all.REGISTRY.get(backend).unavailable()
    counts = (3, 4)
    if missing:
        with pytest.raises(Incompatible, match=backend):
            Worker(make_config(checkpoints["mixtral"], ranks=2, all2all=backend), RankContext(world_size=2))
        return
    got = torch.cat(run_ranks(block_on_ranks, 2, checkpoints["mixtral"], counts, {"all2all": backend}))
    torch.testing.assert_close(got, reference_block(checkpoints["mixtral"], LAYER)(tokens(7)), **TOLERANCE)


@pytest.mark.parametrize("counts", [(11,), (6, 5), (11, 0, 0, 0)])
def test_routed_equals_block_when_the_ids_are_the_gates(checkpoints, counts):
    """Mixtral has no shared experts, so the two modes must agree."""
    worker = make_worker(checkpoints["mixtral"], RankContext())
    x = tokens(sum(counts))
    layer = worker.checkpoint.load_layer(LAYER, worker.experts)
    routing = route(x, layer.gate, worker.info.gate)
    args = checkpoints["mixtral"], counts, routing.ids_Mt, routing.weights_Mt
    got = torch.cat(run_ranks(routed_on_ranks, len(counts), *args))
    torch.testing.assert_close(got, reference_block(checkpoints["mixtral"], LAYER)(x), **TOLERANCE)


def test_routed_leaves_the_shared_experts_out(checkpoints):
    worker = make_worker(checkpoints["deepseek"], RankContext())
    nowhere = torch.full((3, 2), -1, dtype=torch.int32)
    plan = StepPlan(step=0, layer=LAYER, mode="routed", tokens_per_rank=(3,))
    assert torch.equal(worker.step(plan, tokens(3), nowhere, torch.ones(3, 2)), torch.zeros(3, 64))


def load_report(ranks: RankContext, path):
    worker = Worker(make_config(path, ranks=ranks.world_size), ranks)
    return worker.load()


def test_every_expert_is_loaded_on_exactly_one_rank(checkpoints):
    (alone,) = run_ranks(load_report, 1, checkpoints["five"])
    reports = run_ranks(load_report, 4, checkpoints["five"])
    assert [report.rank for report in reports] == [0, 1, 2, 3]
    assert sorted(expert for report in reports for expert in report.experts) == [0, 1, 2, 3, 4]
    assert sum(report.weights_bytes for report in reports) == alone.weights_bytes
    assert alone.weights_bytes == 2 * 5 * 3 * 64 * 32 * 4  # layers, experts, matrices, K, N, bytes
    assert all(report.peak_bytes > report.weights_bytes for report in reports)


def regroup_on_ranks(ranks: RankContext, path, counts):
    worker = make_worker(path, ranks)
    first = sum(counts[: ranks.rank])
    x = tokens(sum(counts))[first : first + counts[ranks.rank]]
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=tuple(counts))
    before, weights = worker.step(plan, x, None, None), worker.weights.layers[LAYER].experts.w13_eNK.data_ptr()
    worker.regroup(ranks)
    with pytest.raises(StepError, match="warm_up"):
        worker.step(plan, x, None, None)
    worker.warm_up()
    assert worker.weights.layers[LAYER].experts.w13_eNK.data_ptr() == weights, "weights were loaded again"
    assert torch.equal(worker.step(plan, x, None, None), before)
    done = worker.counters
    worker.close()
    return done


def test_regroup_keeps_weights_and_bits(checkpoints):
    counters = run_ranks(regroup_on_ranks, 2, checkpoints["deepseek"], (3, 2))
    assert [(each.steps, each.tokens, each.slots) for each in counters] == [(2, 6, 12), (2, 4, 8)]


BAD_STEPS = {
    "another layer": ({"layer": 0}, tokens(2), "layer 0 is not loaded"),
    "another number of ranks": ({"tokens_per_rank": (1, 1)}, tokens(2), "plan for 2 ranks, there are 1"),
    "fewer rows than planned": ({}, tokens(1), r"\(1, 64\).*planned \(2, 64\)"),
    "another dtype": ({}, tokens(2).double(), "float64"),
    "another mode": ({"mode": "shared"}, tokens(2), "'shared'"),
    "routed without ids": ({"mode": "routed"}, tokens(2), "mode 'routed' with ids False"),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_step_that_does_not_fit_its_plan_names_rank_step_and_phase(checkpoints, case):
    changes, x, message = BAD_STEPS[case]
    worker = make_worker(checkpoints["deepseek"], RankContext())
    plan = StepPlan(**{"step": 17, "layer": LAYER, "mode": "block", "tokens_per_rank": (2,), **changes})
    with pytest.raises(StepError, match=message) as info:
        worker.step(plan, x, None, None)
    assert isinstance(info.value.__cause__, InternalError)
    copy = pickle.loads(pickle.dumps(info.value))
    assert (copy.rank, copy.step, copy.phase, str(copy)) == (0, 17, "check", str(info.value))
    good = StepPlan(step=18, layer=LAYER, mode="block", tokens_per_rank=(2,))
    assert worker.step(good, tokens(2), None, None).shape == (2, 64)  # the worker itself goes on


def fail_on_rank_one(ranks: RankContext, path):
    worker = make_worker(path, ranks)
    counts = (2, 2) if ranks.rank == 0 else (2, 3)
    plan = StepPlan(step=3, layer=LAYER, mode="block", tokens_per_rank=counts)
    worker.step(plan, tokens(2), None, None)


def test_a_rank_that_fails_is_named(checkpoints):
    with pytest.raises(RanksFailed, match="rank 1, step 3, check: InternalError: hidden states"):
        run_ranks(fail_on_rank_one, 2, checkpoints["mixtral"])


BAD_CONFIGS = {
    "misspelt all-to-all": ({"all2all": "all_to_al"}, ConfigError, "did you mean 'all_to_all'"),
    "misspelt experts": ({"experts": "lop"}, ConfigError, "did you mean 'loop'"),
    "local on two ranks": ({"all2all": "local"}, Incompatible, "2 ranks, at most 1"),
    "experts for another number of ranks": (
        {"experts_per_rank": [8]},
        ConfigError,
        "lists 1 ranks, engine.ranks is 2",
    ),
    "experts that do not add up": ({"experts_per_rank": [4, 5]}, ConfigError, "holds 9 experts, the model has 8"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_wrong_configuration_is_refused_before_weights_are_read(checkpoints, case, monkeypatch):
    engine, error, message = BAD_CONFIGS[case]
    monkeypatch.setattr("epserve.models.Checkpoint.load_layer", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        Worker(make_config(checkpoints["mixtral"], **{"ranks": 2, **engine}), RankContext(world_size=2))


def test_layers_outside_the_model_are_refused(checkpoints):
    config = parse_config({"model": {"path": str(checkpoints["mixtral"]), "layers": [1, 9]}})
    with pytest.raises(ConfigError, match=r"model.layers: \[9\]"):
        Worker(config, RankContext())


def test_only_the_asked_layers_are_loaded(checkpoints):
    config = parse_config({"model": {"path": str(checkpoints["mixtral"]), "layers": [1]}})
    assert Worker(config, RankContext()).load().num_layers == 1
