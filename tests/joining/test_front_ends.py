"""Several front ends: requests of all of them in one order of steps, and all that passes between them."""

import asyncio
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from epserve.client import ClientOptions
from epserve.config import load_front_end, parse_config
from epserve.engine.planning import Priority
from epserve.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    RankFailed,
    TooLarge,
    UnknownLayer,
)
from epserve.rank.step import joined_gradients
from tests.support.fake_engine import FakeEngine, LocalExperts, echo_after, hang
from tests.support.front_ends import ScheduledEngine, batch, joining, ordering
from tests.support.grpc_calls import until
from tests.support.observed import WatchedEngine


class TestJoined:
    async def test_answers_are_those_of_the_experts_over_both_kinds_of_address(self):
        experts = LocalExperts()
        x, ids, weights = torch.randn(9, 32), torch.randint(0, 8, (9, 3)).int(), torch.rand(9, 3)
        for address in ("127.0.0.1:0", f"unix:@epserve-test-{os.getpid()}"):
            async with ordering(FakeEngine(experts), address) as port, joining(port) as engine:
                assert engine.layers == (1, 2, 3, 7)
                assert (engine.state(), engine.info.hidden, engine.info.dtype) == ("serving", 32, torch.float32)
                assert torch.equal(await engine.forward(batch(x)), experts.forward(x))
                routed = await engine.forward(batch(x, ids=ids, weights=weights))
                assert torch.equal(routed, experts.forward(x, ids, weights))
                gradients = await engine.forward(batch(x, ids=ids, weights=weights, gradient=x.flip(0)))
                want = joined_gradients(*experts.backward(x, x.flip(0), ids, weights))
                assert torch.equal(gradients, want)

    async def test_a_batch_keeps_all_that_it_says(self):
        engine = FakeEngine()
        async with ordering(engine) as port, joining(port) as front_end:
            sent = batch(torch.ones(2, 32), 7, request_id="r-1", client="search", priority=Priority.HIGH)
            await front_end.forward(sent)
        (came,) = engine.seen
        kept = ("layer", "request_id", "client", "priority")
        assert [getattr(came, name) for name in kept] == [getattr(sent, name) for name in kept]
        assert came.deadline == pytest.approx(sent.deadline, abs=0.5)

    async def test_requests_of_all_front_ends_share_steps_in_one_order(self):
        engine = ScheduledEngine()
        engine.ranks.gate.clear()
        async with ordering(engine) as port, joining(port) as one, joining(port) as other:
            assert port.front_ends == 2
            calls = [
                asyncio.ensure_future(each.forward(batch(torch.full((2, 4), float(number)), layer)))
                for number in range(4)
                for layer in (1, 2)
                for each in (one, other)
            ]
            await until(lambda: len(engine.seen) == 16)
            engine.ranks.gate.set()
            for number, answer in enumerate(await asyncio.gather(*calls)):
                assert torch.equal(answer, torch.full((2, 4), float(number // 4)) + 1 + number // 2 % 2)
        assert [plan.step for plan in engine.ranks.steps] == list(range(len(engine.ranks.steps)))
        assert len(engine.ranks.steps) < 16
        await engine.scheduler.close()

    @pytest.mark.parametrize(
        "error",
        [
            Overloaded("full", retry_after_s=0.25),
            InvalidRequest("bad ids", field="topk_ids"),
            RankFailed("rank 1 died"),
            NotReady("recovering"),
            TooLarge("41 tokens"),
            UnknownLayer("layer 9"),
            DeadlineExceeded("in the queue"),
        ],
        ids=lambda error: type(error).__name__,
    )
    async def test_errors_arrive_as_they_were_raised(self, error):
        async def refuse(batch):
            raise error

        async with ordering(FakeEngine(refuse)) as port, joining(port) as engine:
            with pytest.raises(type(error), match=str(error)) as raised:
                await engine.forward(batch(torch.ones(1, 32)))
        for name in ("field", "retry_after_s"):
            assert getattr(raised.value, name, None) == getattr(error, name, None)

    async def test_a_defect_is_logged_where_it_was_and_not_shown(self, caplog):
        async def break_down(batch):
            raise ZeroDivisionError("of ours")

        async with ordering(FakeEngine(break_down)) as port, joining(port) as engine:
            with pytest.raises(InternalError) as raised:
                await engine.forward(batch(torch.ones(1, 32)))
        assert "of ours" not in str(raised.value)
        assert "of ours" in caplog.text

    async def test_cancelled_calls_and_late_ones_are_cancelled_there(self):
        engine = FakeEngine(hang)
        async with ordering(engine) as port, joining(port) as front_end:
            call = asyncio.ensure_future(front_end.forward(batch(torch.ones(1, 32))))
            await until(lambda: engine.running == 1)
            call.cancel()
            await until(lambda: engine.cancelled == 1)
            late = batch(torch.ones(1, 32), deadline=time.monotonic() - 0.9)
            with pytest.raises(DeadlineExceeded, match="no answer from"):
                await front_end.forward(late)
            await until(lambda: engine.cancelled == 2 and engine.running == 0)
            assert port._held == 0
            assert not front_end._calls

    async def test_bytes_of_all_front_ends_are_bounded(self):
        gate = asyncio.Event()
        engine, x = FakeEngine(echo_after(gate)), torch.randn(100, 32)
        async with ordering(engine, max_bytes=20_000) as port, joining(port) as one, joining(port) as other:
            first = asyncio.ensure_future(one.forward(batch(x)))
            await until(lambda: engine.running == 1)
            with pytest.raises(Overloaded, match=r"12800 bytes of other front ends'.*at most 20000"):
                await other.forward(batch(x))
            small = asyncio.ensure_future(other.forward(batch(x[:10])))  # what follows a refused payload is whole
            await until(lambda: engine.running == 2)
            gate.set()
            assert torch.equal(await first, x)
            assert torch.equal(await small, x[:10])
            assert torch.equal(await other.forward(batch(x)), x)

    async def test_states_status_and_changes_pass(self):
        engine = WatchedEngine(layers=(1, 2))

        async def rebalance(explain):
            assert explain
            return SimpleNamespace(layers=(1,), skipped=(), moved=3, before=2.0, after=1.1, seconds=0.5)

        async def scale(ranks):
            raise ConfigError(f"{ranks} ranks cannot be")

        engine.rebalance, engine.scale = rebalance, scale
        async with ordering(engine) as port, joining(port) as front_end:
            states = []
            front_end.on_state_change(states.append)
            status = front_end.status()
            assert status.ranks[0].layer_experts == {2: [7, 1, 2, 3]}
            assert list(status.expert_tokens) == [1, 2]
            for state in ("recovering", "serving"):
                engine.set_state(state)
            await until(lambda: states == ["recovering", "serving"])
            assert (await front_end.rebalance(explain=True)).moved == 3
            with pytest.raises(ConfigError, match="5 ranks cannot be"):
                await front_end.scale(5)
            await front_end.forward(batch(torch.ones(4, 32)))
            await until(lambda: front_end.status().expert_tokens[1][7] == 28)

    async def test_steps_are_told_to_whose_requests_they_had(self):
        engine = ScheduledEngine()
        async with ordering(engine) as port, joining(port) as one, joining(port) as other:
            seen = {1: [], 2: []}
            one.on_step(seen[1].append)
            other.on_step(seen[2].append)
            engine.ranks.gate.clear()
            calls = [
                asyncio.ensure_future(one.forward(batch(torch.ones(3, 4), request_id="a", trace="span a"))),
                asyncio.ensure_future(one.forward(batch(torch.ones(4, 4), 2, request_id="b"))),
                asyncio.ensure_future(other.forward(batch(torch.ones(5, 4), 3, request_id="c"))),
            ]
            await until(lambda: 1 in [plan.layer for plan in engine.ranks.steps])
            await asyncio.sleep(0.1)
            engine.ranks.gate.set()
            await asyncio.gather(*calls)
            (mine,) = [record for record in seen[1] if record.layer == 1]
            (part,) = mine.parts
            assert (part.request_id, part.tokens, part.trace) == ("a", 3, "span a")
            assert 0.09 < mine.seconds < 60
            assert abs(time.monotonic() - mine.ended) < 60
            assert [record.layer for record in seen[2]] == [3]
        await engine.scheduler.close()


class TestConfiguration:
    def test_ports_that_clash_are_refused(self):
        server = {"front_ends": 4, "port": 50051, "metrics_port": 50053}
        with pytest.raises(ConfigError, match=r"4 front ends would use .*50054.*\[50053, 50054\] clash"):
            parse_config({"model": {"path": "."}, "server": server})
        good = parse_config({"model": {"path": "."}, "server": {**server, "metrics_port": 9464}}).server
        assert good.ports == (50051, 50052, 50053, 50054)
        assert good.all_metrics_ports == (9464, 9465, 9466, 9467)
        assert parse_config({"model": {"path": "."}, "server": {"front_ends": 2, "port": 0}}).server.ports == (0, 0)

    def test_a_secret_and_a_port_come_together(self, tmp_path):
        with pytest.raises(ConfigError, match="join_port and join_secret_file come together"):
            parse_config({"model": {"path": "."}, "server": {"join_port": 0}})

    def test_a_front_end_reads_the_services_own_file(self, tmp_path):
        path = tmp_path / "service.yaml"
        path.write_text(
            "model: {path: /nowhere}\nengine: {ranks: 8}\nscheduler: {default_deadline_s: 3}\n"
            "server: {port: 7000, front_ends: 3, join_port: 7100, join_secret_file: /etc/secret}\n"
        )
        server, scheduler = load_front_end(path, {"server.port": 0})
        assert (server.port, server.front_ends, server.join_port, scheduler.default_deadline_s) == (0, 1, None, 3)
        with pytest.raises(ConfigError, match="unknown key"):
            load_front_end(None, {"server.prt": 0})


def test_round_robin_asks_for_health():
    options = dict(ClientOptions(balance="round_robin").channel_options())
    assert json.loads(options["grpc.service_config"])["healthCheckConfig"] == {"serviceName": "epserve.v1.Experts"}
    assert "grpc.service_config" not in dict(ClientOptions().channel_options())
