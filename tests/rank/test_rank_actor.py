"""The Ray shell of a rank as a plain object, without Ray: what it answers, and what it must not answer with."""

import pytest
import torch

from epserve.config import parse_config
from epserve.link.door import LinkAddress
from epserve.models.demo import reference_block
from epserve.rank.actor import RankActor
from epserve.rank.groups import GroupAddress
from epserve.rank.setup import backends as backend_choice
from epserve.rank.step import Arrangement
from epserve.rank.worker import Worker
from tests.support.checkpoints import LAYER, write

GENERATION = 3
NOWHERE = LinkAddress(token="", protocol="store")


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """One rank that serves alone in generation 3, and the checkpoint."""
    path = write("deepseek_v3", tmp_path / "model", dtype=torch.float32)
    config = parse_config({"model": {"path": str(path)}, "engine": {"device": "cpu", "experts": "loop"}})
    monkeypatch.setattr(RankActor, "_facts", lambda self, uuid: None)  # asks Ray for the node
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
    return actor, path


def ask(actor, generation=GENERATION):
    x = torch.randn((9, 64), generator=torch.Generator().manual_seed(9))
    header = {
        "step": 7, "generation": generation, "layer": LAYER, "mode": "block", "tokens_per_rank": [9], "placement": 0,
    }  # fmt: skip
    told, tensors = actor._answer(header, [x], None)
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
