"""The Ray shell of a rank as a plain object, without Ray: what it answers, and what it must not answer with."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from epserve.config import parse_config
from epserve.link.door import LinkAddress
from epserve.models.demo import reference_block
from epserve.rank.actor import RankActor
from epserve.rank.groups import GroupAddress
from epserve.rank.setup import backends as backend_choice
from epserve.rank.setup import cores
from epserve.rank.setup.cores import Host
from epserve.rank.step import Arrangement, StepPlan
from epserve.rank.worker import Worker
from tests.support.checkpoints import LAYER, write

GENERATION = 3
HOST = Host(nodes=((0, 1, 2),))  # made up: nothing is bound where there is one node
NOWHERE = LinkAddress(token="", protocol="store")


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """One rank that serves alone in generation 3, and the checkpoint."""
    path = write("deepseek_v3", tmp_path / "model", dtype=torch.float32)
    config = parse_config({"model": {"path": str(path)}, "engine": {"device": "cpu", "experts": "loop"}})
    monkeypatch.setattr(RankActor, "_facts", lambda self, uuid, **_: None)  # asks Ray for the node
    monkeypatch.setattr(cores, "this_host", lambda: HOST)
    before = torch.get_num_threads()
    actor = RankActor(config, "cpu")
    chosen = backend_choice.Chosen(all2all="local", experts="loop")
    assert actor.call("stand_by", (chosen,)).failure is None
    plan = Worker(config, actor._context(None)).plan
    arrangement = Arrangement(config=config, placements=dict.fromkeys(plan.layers, plan.placement))
    for method, *args in (
        ("set_up", 0, arrangement),
        ("load",),
        ("join", GroupAddress(store=NOWHERE, generation=GENERATION)),
    ):
        assert actor.call(method, *args).failure is None, method
    yield actor, path
    torch.set_num_threads(before)


def ask(actor, generation=GENERATION):
    x = torch.randn((9, 64), generator=torch.Generator().manual_seed(9))
    plan = StepPlan(step=7, layer=LAYER, mode="block", tokens_per_rank=(9,), generation=generation)
    told, tensors = actor._answer(plan.as_json(), [x], None)
    return told, tensors, x


def test_what_ended_operations_leave_behind_is_no_result(rank):
    """NCCL's abort lets a kernel end as if all were well, with whatever is in its buffers."""
    actor, path = rank
    told, (y,), x = ask(actor)
    torch.testing.assert_close(y, reference_block(path, LAYER)(x), rtol=1e-4, atol=1e-5)
    actor.abort(GENERATION - 1, [])  # late: of a group that is no more
    assert "failure" not in ask(actor)[0]
    actor.abort(GENERATION, [])
    told, tensors, _ = ask(actor)
    assert not tensors and told["failure"]["consequence"]
    assert "another rank is gone, the operations of this step were ended" in told["failure"]["message"]
    assert actor.call("join", GroupAddress(store=NOWHERE, generation=GENERATION + 1)).failure is None
    told, (again,), _ = ask(actor, GENERATION + 1)
    assert "failure" not in told and torch.equal(again, y)


def test_steps_of_another_generation_are_refused(rank):
    actor, _ = rank
    told, tensors, _ = ask(actor, GENERATION - 1)
    assert not tensors and told["failure"]["consequence"] and "generation 2 has ended" in told["failure"]["message"]


def in_a_thread(run):
    """The result of `run` in a thread that has computed with one thread before, as torch remembers for each."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_num_threads, 1).result()
        return pool.submit(run).result(timeout=60)


def test_a_step_computes_with_the_ranks_share_of_the_cores(rank, monkeypatch):
    """In whichever thread it runs; the rank says how many, and a limit of the user's counts from the next group on."""
    actor, _ = rank
    seen, step = [], Worker.step

    def watched(*args):
        seen.append(torch.get_num_threads())
        return step(*args)

    monkeypatch.setattr(Worker, "step", watched)
    in_a_thread(lambda: ask(actor))
    assert seen == [3]
    assert actor.call("explain").value.notes[-1] == "threads: 3, 3 cores among 1 ranks"
    engine = actor._config.engine.model_copy(update={"cpu_threads": 2})
    actor._config = actor._config.model_copy(update={"engine": engine})
    assert actor.call("join", GroupAddress(store=NOWHERE, generation=GENERATION)).failure is None
    seen.clear()  # join's own warm-up steps
    in_a_thread(lambda: ask(actor))
    assert seen == [2]


def test_more_threads_than_the_share_are_not_taken_and_the_log_says_so(rank, caplog):
    actor, _ = rank
    engine = actor._config.engine.model_copy(update={"cpu_threads": 8})
    actor._config = actor._config.model_copy(update={"engine": engine})
    assert actor.call("join", GroupAddress(store=NOWHERE, generation=GENERATION)).failure is None
    assert torch.get_num_threads() == 3
    (line,) = [each.getMessage() for each in caplog.records if "cpu_threads" in each.getMessage()]
    assert "8 is above its share, 3 cores among 1 ranks; it takes 3" in line
