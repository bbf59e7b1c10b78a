"""Ids and weights are looked at once: at the door, or by the engine where no door has seen them. No ranks here."""

from types import SimpleNamespace

import pytest
import torch

from epserve.engine import engine as engine_module
from epserve.engine.engine import Engine
from epserve.engine.planning import Batch
from epserve.errors import EpserveError, InvalidRequest, TooLarge
from epserve.modular_kernel import GateSpec, check_routing
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.server import codec
from tests.support.fake_engine import FakeEngine, serving, tiny_info
from tests.support.front_ends import batch as in_time
from tests.support.front_ends import joining, ordering
from tests.support.grpc_calls import connect, message

ENGINE = SimpleNamespace(
    plan=SimpleNamespace(
        spec=SimpleNamespace(shape=SimpleNamespace(hidden=32, dtype=torch.float32, top_k=3)), layers=(1,)
    ),
    info=tiny_info(),
)
"""What the check needs of one."""


def batch(ids, weights=None, **more) -> Batch:
    ids = torch.tensor(ids)
    weights = torch.ones(ids.shape) if weights is None else torch.tensor(weights)
    return Batch(layer=1, hidden=torch.ones(len(ids), 32), ids=ids, weights=weights, deadline=0.0, **more)


def test_who_asks_for_a_gate_that_is_not_computed_learns_why():
    gate = GateSpec(top_k=3, scoring="client", refusal="scoring_func is 'softmax'")
    engine = SimpleNamespace(plan=ENGINE.plan, info=tiny_info(gate=gate))
    request = Batch(layer=1, hidden=torch.ones(1, 32), ids=None, weights=None, deadline=0.0)
    with pytest.raises(InvalidRequest, match=r"no gate for tiny \(scoring_func is 'softmax'\), the client chooses"):
        Engine._check(engine, request)


@pytest.fixture
def looks(monkeypatch) -> list[str]:
    """Who looked at ids and weights."""
    seen: list[str] = []
    for name, module in (("engine", engine_module), ("door", codec)):

        def look(*args, name=name, **more):
            seen.append(name)
            return check_routing(*args, **more)

        monkeypatch.setattr(module, "check_routing", look)
    return seen


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (batch([[0, 8]]), InvalidRequest),
        (batch([[0, -2]]), InvalidRequest),
        (batch([[0, 1]], [[1.0, float("nan")]]), InvalidRequest),
        (batch([[0.0, 1.0]]), InvalidRequest),
        (batch([[0, 1, 2, 3]]), TooLarge),
        (batch([[0, 1, 2, 3]], routing_checked=True), TooLarge),
    ],
)
def test_who_calls_the_engine_himself_is_checked_by_it(bad, error):
    with pytest.raises(error) as raised:
        Engine._check(ENGINE, bad)
    assert isinstance(raised.value, EpserveError)


def test_it_makes_of_them_what_the_ranks_take_and_looks_once(looks):
    checked = Engine._check(ENGINE, batch([[0, 1], [7, -1]]))
    assert (checked.ids.dtype, checked.weights.dtype, checked.routing_checked) == (torch.int32, torch.float32, True)
    assert Engine._check(ENGINE, checked) is checked
    assert looks == ["engine"]


async def test_what_a_door_has_seen_is_not_looked_at_again(looks):
    engine, x = FakeEngine(), torch.ones(2, 32)
    async with serving(engine) as server, connect(server) as channel:
        await pb_grpc.ExpertsStub(channel).Forward(message(x, torch.zeros(2, 2).long(), torch.ones(2, 2)))
    (came,) = engine.seen
    Engine._check(ENGINE, came)
    assert looks == ["door"]


async def test_what_came_over_a_socket_is(looks):
    engine = FakeEngine()
    ids, weights = torch.zeros(2, 2).int(), torch.ones(2, 2)
    async with ordering(engine) as port, joining(port) as front_end:
        await front_end.forward(in_time(torch.ones(2, 32), ids=ids, weights=weights, routing_checked=True))
    (came,) = engine.seen
    Engine._check(ENGINE, came)
    assert looks == ["engine"]
