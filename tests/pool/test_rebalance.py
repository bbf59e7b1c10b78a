"""Where experts are: placements that change while steps run, by hand on workers and through the engine."""

import asyncio
import os
import random
import time

import pytest
import pytest_asyncio
import torch

from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import CheckpointError, ConfigError, InternalError, NotReady
from epserve.link.failure import StepError
from epserve.models import open_checkpoint
from epserve.models.demo import reference_block
from epserve.modular_kernel import ExpertLayout, RankContext
from epserve.pool import changes
from epserve.rank.actor import RankActor
from epserve.rank.placement import Placement, pack_slots
from epserve.rank.step import Arrangement, StepPlan
from epserve.rank.weights.copies import HostCopies
from epserve.rank.worker import Worker
from tests.models.test_models import quantise_blocks
from tests.support.checkpoints import LAYER, edit, edit_config, write
from tests.support.ranks import run_ranks

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
SWITCHES = 20


# The policy.


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(8, 10, 2), (64, 80, 8), (256, 320, 32), (60, 75, 7)], ids=str)
def test_zipf_load_with_a_quarter_of_redundancy_is_balanced(experts, slots, ranks):
    loads = [1e6 / (1 + expert) for expert in random.Random(experts).sample(range(experts), experts)]
    layout = ExpertLayout.even(slots, ranks)
    placement = Placement.spread(experts, layout, loads=loads)
    assert placement.imbalance(loads) < 1.1
    assert placement.imbalance(loads) < Placement.identity(experts, ranks).imbalance(loads)


def test_uneven_ranks_get_what_they_have_room_for():
    layout = ExpertLayout(counts=(1, 5, 0, 4))
    placement = Placement.spread(8, layout, loads=[8.0, 1, 1, 1, 1, 1, 1, 1])
    assert [len(placement.experts_of(rank)) for rank in range(4)] == [1, 5, 0, 4]
    assert set(placement.physical_to_logical) == set(range(8))


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (8, 4), (8, 3), (7, 4), (256, 8)], ids=str)
def test_two_copies_of_each_expert_survive_the_loss_of_any_rank(experts, ranks):
    placement = Placement.spread(experts, ExpertLayout.even(2 * experts, ranks))
    for lost in range(ranks):
        less = placement.without({lost}, version=3)
        assert less is not None
        kept = [rank for rank in range(ranks) if rank != lost]
        assert [less.experts_of(new) for new in range(ranks - 1)] == [placement.experts_of(old) for old in kept]


@pytest.mark.parametrize(
    ("experts", "slots", "ranks"), [(16, 32, 2), (8, 16, 3), (8, 19, 4), (60, 123, 7), (4, 11, 2)], ids=str
)
def test_hot_experts_never_take_the_second_copy_of_others(experts, slots, ranks):
    """Nor a second copy on one rank, which would help nobody, while that rank lacks an expert that another one has twice."""
    layout = ExpertLayout.even(slots, ranks)
    for loads in (
        [1e6 / (1 + expert) for expert in random.Random(experts).sample(range(experts), experts)],
        [1e6, *[1.0] * (experts - 1)],
        [1e6, *[0.0] * (experts - 1)],
        [0.0] * experts,
    ):
        placement = Placement.spread(experts, layout, loads=loads)
        held = [placement.experts_of(rank) for rank in range(ranks)]
        assert all(sum(expert in each for each in held) >= 2 for expert in range(experts)), (loads[:4], held)
        assert all(len(set(each)) == min(len(each), experts) for each in held), (loads[:4], held)
        assert all(placement.without({lost}, version=1) is not None for lost in range(ranks))


def test_the_loss_of_a_last_copy_is_told():
    placement = Placement.identity(8, 4)
    assert placement.without({1}, version=1) is None
    assert Placement.spread(8, ExpertLayout.even(16, 4)).without({0, 1, 2}, version=1) is None


def test_packing_is_deterministic():
    loads = [random.Random(1).random() for _ in range(64)]
    assert pack_slots(loads, ExpertLayout.even(80, 8)) == pack_slots(list(loads), ExpertLayout.even(80, 8))


# On workers.


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rebalance")
    return {
        "float32": write("deepseek_v3", folder / "float32", dtype=torch.float32),
        "bfloat16": write("deepseek_v3", folder / "bfloat16", dtype=torch.bfloat16),
    }


def make_config(path, **engine):
    values = {"device": "cpu", "experts": "loop", "combine_order": "slot", "dispatch_quantised": False}
    return parse_config({"model": {"path": str(path), "layers": [LAYER]}, "engine": {**values, **engine}})


def switch_on_ranks(ranks: RankContext, path, redundant):
    """Steps through SWITCHES placements: before, between staging and adopting, after. All outputs of this rank."""
    worker = Worker(make_config(path, ranks=ranks.world_size, redundant_experts=redundant), ranks)
    worker.load()
    worker.warm_up()
    x = torch.randn((10, 64), generator=torch.Generator().manual_seed(1)).to(worker.info.dtype)
    rows, mine = (5,) * ranks.world_size, slice(5 * ranks.rank, 5 * ranks.rank + 5)

    def step(version):
        plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=rows, placement=version)
        return worker.step(plan, x[mine], None, None)

    outputs, chance = [step(0)], random.Random(7)
    for version in range(1, SWITCHES + 1):
        loads = [chance.random() ** 3 for _ in range(8)]
        placement = Placement.spread(8, worker.plan.spec.layout, loads=loads, version=version)
        assert worker.stage(LAYER, placement)
        outputs += [step(version - 1), step(version)]
        worker.adopt(LAYER, version)
        assert worker.experts == placement.experts_of(ranks.rank)
        outputs.append(step(version))
    with pytest.raises(StepError, match=r"placement 3 of layer 1 is not here \(here: \[20\]\)"):
        step(3)
    worker.close()
    return outputs


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_outputs_are_bit_equal_before_during_and_after_moves(paths, kind):
    for outputs in run_ranks(switch_on_ranks, 2, paths[kind], 0):
        assert len(outputs) == 1 + 3 * SWITCHES
        assert all(torch.equal(each, outputs[0]) for each in outputs)


def test_outputs_agree_where_copies_move(paths):
    """Copies share an expert's rows, and a GEMM of fewer rows may round its last bit otherwise."""
    outputs = [torch.cat(parts) for parts in zip(*run_ranks(switch_on_ranks, 2, paths["float32"], 4), strict=True)]
    x = torch.randn((10, 64), generator=torch.Generator().manual_seed(1))
    expected = reference_block(paths["float32"], LAYER)(x)
    for each in outputs:
        torch.testing.assert_close(each, expected, **TOLERANCE)


def test_copies_in_host_memory_are_what_the_checkpoint_holds(paths, tmp_path):
    """In float8 too, whose scales must come with their experts."""
    fp8 = write("deepseek_v3", tmp_path / "fp8", dtype=torch.bfloat16, hidden=128, intermediate=128)

    def quantise(tensors):
        for name in [name for name in tensors if ".mlp.experts." in name or ".mlp.shared_experts." in name]:
            tensors[name], tensors[name + "_scale_inv"] = quantise_blocks(tensors[name].float())

    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    edit_config(edit(fp8, quantise), quantization_config=method)
    for path, names in ((paths["float32"], 2), (fp8, 4)):
        checkpoint = open_checkpoint(path)
        copies = HostCopies(checkpoint, 8, [LAYER])
        for experts in ([5, 0, 5], []):
            got = copies.load_layer(LAYER, experts, torch.device("cpu"))
            expected = checkpoint.load_layer(LAYER, experts)
            tensors, wanted = got.experts.tensors(), expected.experts.tensors()
            assert len(tensors) == names and tensors.keys() == wanted.keys()
            for name, tensor in tensors.items():
                assert tensor.dtype == wanted[name].dtype and torch.equal(tensor.float(), wanted[name].float())
            assert torch.equal(got.gate.weight_EK, expected.gate.weight_EK)
            assert torch.equal(got.shared.w13_SK, expected.shared.w13_SK)


def ready_worker(path, **engine):
    worker = Worker(make_config(path, **engine), RankContext())
    worker.load()
    worker.warm_up()
    return worker


def test_no_memory_for_a_move_changes_nothing(paths, monkeypatch):
    worker = ready_worker(paths["float32"])
    monkeypatch.setattr("epserve.rank.worker.free_bytes", lambda device: worker.weights.nbytes)
    assert not worker.stage(LAYER, worker.plan.placement.with_version(1))
    worker.adopt(LAYER, 1)
    assert worker.placements[LAYER].version == 0


def test_a_checkpoint_that_changed_is_not_mixed_in(paths, tmp_path):
    path = write("deepseek_v3", tmp_path / "model", dtype=torch.float32)
    worker = ready_worker(path)
    os.utime(path / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="has changed since the start"):
        worker.stage(LAYER, worker.plan.placement.with_version(1))


def test_arranging_keeps_what_fits_and_reads_what_is_missing(paths):
    """One rank of two becomes the only one, and back."""
    worker = Worker(make_config(paths["float32"], ranks=2), RankContext(rank=1, world_size=2))
    worker.load()
    half = worker.weights.layers[LAYER].experts.w13_eNK
    worker.arrange(1, Arrangement(config=worker.config, placements=dict(worker.placements)))
    assert worker.weights.layers[LAYER].experts.w13_eNK is half
    alone = Arrangement(config=make_config(paths["float32"]), placements={LAYER: Placement.identity(8, 1)})
    worker.arrange(0, alone)
    worker.regroup(RankContext())
    worker.warm_up()
    assert worker.experts == tuple(range(8))
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    y = worker.step(StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=(6,)), x, None, None)
    torch.testing.assert_close(y, reference_block(paths["float32"], LAYER)(x), **TOLERANCE)


# Through the engine.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(paths):
    config = {
        "model": {"path": str(paths["float32"])},
        "engine": {"ranks": 3, "device": "cpu", "experts": "loop", "redundant_experts": 8},
        "cluster": {"start_timeout_s": 280},
    }
    engine = Engine(parse_config(config))
    await engine.start()
    yield engine
    await engine.close()


class Load:
    """Clients that ask without pause and compare every answer."""

    def __init__(self, engine, path):
        self.engine, self.reference = engine, reference_block(path, LAYER)
        self.answers = 0
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(3)]

    async def _ask(self, number):
        x = torch.randn((3 + 8 * number, 64), generator=torch.Generator().manual_seed(number))
        expected = self.reference(x)
        while not self._stop:
            y = await self.engine.forward(Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + 240))
            torch.testing.assert_close(y, expected, **TOLERANCE)
            self.answers += 1

    async def stop(self):
        self._stop = True
        await asyncio.gather(*self._tasks)
        return self.answers


def holdings(engine):
    return [rank.experts for rank in engine.status().ranks]


@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
async def test_moves_while_serving(engine, paths):
    load, chance, seen = Load(engine, paths["float32"]), random.Random(3), set()
    for _ in range(5):
        loads = {layer: [chance.random() ** 3 for _ in range(8)] for layer in engine.layers}
        done = await engine._pool.changes.rebalance(loads=loads)
        assert done.layers == engine.layers and done.moved and not done.skipped
        assert done.after < done.before
        assert done.came_from["peer"] and "checkpoint" not in done.came_from
        seen.add(tuple(holdings(engine)))
        for rank in engine.status().ranks:  # of every layer, not of the first alone
            for layer, placement in engine._pool.arrangement.placements.items():
                assert rank.layer_experts.get(layer, rank.experts) == placement.experts_of(rank.rank)
        await asyncio.sleep(0.1)
    assert await load.stop() > 20
    assert len(seen) == 5
    assert engine.status().rebalances == 5
    assert engine.status().recoveries == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_no_memory_on_one_rank_skips_the_layer_and_counts_it(engine, paths, monkeypatch):
    """T18: all or none, the service goes on."""
    real, calls = changes.call_all, []

    async def call_all(members, method, *args, **options):
        done = await real(members, method, *args, **options)
        calls.append(method.__name__)
        return [None, *done[1:]] if method is RankActor.stage else done

    monkeypatch.setattr(changes, "call_all", call_all)
    before, held = engine.status().rebalances_skipped, holdings(engine)
    uneven = {}
    for layer, placement in engine._pool.arrangement.placements.items():  # the load lies on one rank alone
        uneven[layer] = [9.0 if expert in placement.experts_of(0) else 1.0 for expert in range(8)]
    done = await engine._pool.changes.rebalance(loads=uneven)
    assert done.skipped == engine.layers and not done.layers
    assert engine.status().rebalances_skipped == before + len(engine.layers)
    assert holdings(engine) == held and "adopt" not in calls
    x = torch.randn(5, 64)
    y = await engine.forward(Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + 60))
    torch.testing.assert_close(y, reference_block(paths["float32"], LAYER)(x), **TOLERANCE)


@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
async def test_counted_load_moves_experts(engine, paths):
    """All tokens to two experts: their copies must end up on all ranks."""
    ids, weights = torch.tensor([[0, 1]] * 30, dtype=torch.int32), torch.full((30, 2), 0.5)
    hidden = torch.randn(30, 64)
    for _ in range(5):
        deadline = time.monotonic() + 120
        await engine.forward(Batch(layer=LAYER, hidden=hidden, ids=ids, weights=weights, deadline=deadline))
    held, counted = holdings(engine), engine.status().rebalances
    told = await engine.rebalance(explain=True)
    assert told.moved and told.after < told.before and holdings(engine) == held, "it tells and moves nothing"
    assert engine.status().rebalances == counted
    assert [each.layer for each in told.moves] == list(engine.layers)
    assert all(each.reason for each in told.moves if not each.moved) and all(
        each.nbytes for each in told.moves if each.moved
    )
    loads = (await engine.rebalance(), engine._pool.arrangement.placements[LAYER])
    assert (loads[0].moved, loads[0].layers) == (told.moved, told.layers), "as it was told"
    ranks = range(loads[1].layout.num_ranks)
    assert all({0, 1} & set(loads[1].experts_of(rank)) for rank in ranks)
    assert loads[0].after < 1.3


@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_timer_moves_what_is_out_of_balance(engine, paths):
    """Three experts of two copies each lie on one rank. Two copies on each of the three ranks are even."""
    hot = sorted(set(engine._pool.arrangement.placements[LAYER].experts_of(0)))[:3]
    pairs = [[hot[0], hot[1]], [hot[1], hot[2]], [hot[2], hot[0]]]
    ids, weights = torch.tensor(pairs * 10, dtype=torch.int32), torch.full((30, 2), 0.5)
    before, hidden = engine.status().rebalances, torch.randn(30, 64)
    timer = asyncio.ensure_future(engine._pool.changes._timer(0.2))
    end = time.monotonic() + 120
    while engine.status().rebalances == before:
        assert time.monotonic() < end
        await engine.forward(Batch(layer=LAYER, hidden=hidden, ids=ids, weights=weights, deadline=end))
        await asyncio.sleep(0.05)
    timer.cancel()
    await asyncio.gather(timer, return_exceptions=True)
    placement = engine._pool.arrangement.placements[LAYER]
    assert placement.imbalance([float(expert in hot) for expert in range(8)]) == pytest.approx(1.0)


@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
async def test_another_number_of_ranks_without_losing_a_request(engine, paths):
    load = Load(engine, paths["float32"])
    states = []
    engine.on_state_change(states.append)
    for ranks in (2, 3):
        changing = asyncio.ensure_future(engine.scale(ranks))
        await asyncio.sleep(0)
        with pytest.raises(NotReady, match="another change"):  # two operators at once
            await engine.scale(4)
        done = await changing
        assert done.after == ranks == len(engine.status().ranks) and done.paused_s <= done.seconds
        assert {expert for experts in holdings(engine) for expert in experts} == set(range(8))
        answers = load.answers
        while load.answers < answers + 5:
            await asyncio.sleep(0.01)
    await load.stop()
    assert states == ["resizing", "serving"] * 2  # health says so too
    assert engine.status().recoveries == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_as_many_ranks_as_there_are_is_nothing_to_do(engine):
    before = engine.status()
    done = await engine.scale(3)
    assert (done.before, done.after, done.paused_s) == (3, 3, 0)
    after = engine.status()
    assert after.generation == before.generation and [r.pid for r in after.ranks] == [r.pid for r in before.ranks]


@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_change_goes_on_when_its_caller_gives_up(engine, paths, caplog):
    caplog.set_level("INFO", "epserve.pool.changes")
    for ranks in (2, 3):
        asking = asyncio.ensure_future(engine.scale(ranks))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        end = time.monotonic() + 240
        while len(engine.status().ranks) != ranks or engine.state() != "serving" or engine._pool.changes._one.busy:
            assert time.monotonic() < end  # it serves again a moment before the change has ended
            await asyncio.sleep(0.02)
        assert f"scale to {ranks} ranks: whoever asked for it has gone; it goes on" in caplog.text
    x = torch.randn(5, 64)
    y = await engine.forward(Batch(layer=LAYER, hidden=x, deadline=time.monotonic() + 60))
    torch.testing.assert_close(y, reference_block(paths["float32"], LAYER)(x), **TOLERANCE)


@pytest.mark.asyncio(loop_scope="module")
async def test_sizes_that_cannot_be(engine):
    with pytest.raises(ConfigError, match="0 ranks; at least 1"):
        await engine.scale(0)
    with pytest.raises(ConfigError, match=r"600 ranks need|engine\.ranks 600: rank 0 needs"):
        await engine.scale(600)
    assert engine.state() == "serving"


@pytest.mark.asyncio(loop_scope="module")
async def test_more_ranks_than_the_machine_has_room_for_are_refused_and_nothing_starts(engine, monkeypatch):
    monkeypatch.setattr("epserve.rank.setup.machine.memory_bytes", lambda: 2 << 30)
    before = engine.status()
    with pytest.raises(ConfigError, match=r"engine\.ranks 16: rank 0 needs .* memory is 128 MiB"):
        await engine.scale(16)
    after = engine.status()
    assert after.state == "serving" and [r.pid for r in after.ranks] == [r.pid for r in before.ranks]


@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
async def test_copies_bridge_the_loss_of_a_rank(engine, paths, record_property):
    done = await engine._pool.changes.rebalance(loads={layer: [9.0, *[1.0] * 7] for layer in engine.layers})
    assert done.skipped == ()  # and each expert has two copies on two ranks, the busy one and all others
    load = Load(engine, paths["float32"])
    while load.answers < 10:
        await asyncio.sleep(0.01)
    pid, start = engine.status().ranks[1].pid, time.monotonic()
    os.kill(pid, 9)
    while engine.state() == "serving":
        await asyncio.sleep(0.001)
    while engine.state() != "serving":
        await asyncio.sleep(0.001)
    record_property("bridged_s", round(time.monotonic() - start, 3))
    assert engine._pool.recoveries[-1].by == "copies"
    assert len(engine.status().ranks) == 2
    while len(engine.status().ranks) < 3 or engine.state() != "serving":
        await asyncio.sleep(0.05)
    answers = load.answers
    while load.answers < answers + 5:
        await asyncio.sleep(0.01)
    await load.stop()
    assert pid not in [rank.pid for rank in engine.status().ranks]


def test_a_version_is_checked_before_anything_runs(paths):
    worker = ready_worker(paths["float32"])
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=(2,), placement=9)
    with pytest.raises(StepError, match="placement 9") as info:
        worker.step(plan, torch.ones(2, 64), None, None)
    assert isinstance(info.value.__cause__, InternalError)
