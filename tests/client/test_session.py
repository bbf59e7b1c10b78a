"""The connection that engines share: calls begun now and waited for later, batches of any length, and the ways they go."""

import asyncio
import gc
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from epserve import errors
from epserve.client import Client
from epserve.client.session import RETRY_FOR_S, Session, connect
from epserve.protocol.served_model import model_reply
from tests.support.clients import QUICK, client_of, serving_in_thread, wait_until
from tests.support.fake_engine import FakeEngine, LocalExperts, hang, tiny_info

LARGE = 16_000
"""Tokens of 32 float32 values: too many for one message."""


async def doubled(batch):
    return batch.hidden * 2


@contextmanager
def session_of(engine, *, shared_memory_bytes=0, **config):
    with (
        serving_in_thread(engine, **config) as server,
        connect(server.address, retry_for_s=50, shared_memory_bytes=shared_memory_bytes) as session,
    ):
        yield session


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("epserve-client")}


class TestBegin:
    @pytest.mark.parametrize("tokens", [3, LARGE])
    @pytest.mark.parametrize("region_bytes", [0, 1 << 24])
    def test_the_request_is_on_its_way_before_the_wait_and_no_thread_works_on_it(self, tokens, region_bytes):
        engine, x = FakeEngine(doubled), torch.randn(tokens, 32)
        with client_of(engine) as client:
            before = threads()
            with client.register_region(region_bytes or 64) as region:
                chosen = region if region_bytes else None
                pending = client.begin(1, x, region=chosen)
                wait_until(lambda: engine.seen)
                assert torch.equal(pending.wait(), 2 * x)
            assert threads() == before

    def test_several_at_once_in_any_order(self):
        experts = LocalExperts()
        x, ids, weights = torch.randn(9, 32), torch.randint(0, 8, (9, 3)), torch.rand(9, 3)
        with client_of(FakeEngine(experts)) as client, client.register_region(1 << 20) as region:
            begun = [client.begin(1, x + number, ids, weights, region=region) for number in range(5)]
            for number in reversed(range(5)):
                assert torch.equal(begun[number].wait(), experts.forward(x + number, ids, weights))

    def test_an_attempt_that_fails_is_made_again_by_the_wait(self):
        engine, failures = FakeEngine(doubled), [errors.RankFailed("died"), errors.NotReady("soon")]

        async def fails_twice(batch):
            if failures:
                raise failures.pop()
            return batch.hidden * 2

        engine.compute = fails_twice
        with client_of(engine) as client:
            assert torch.equal(client.begin(1, torch.ones(2, 32)).wait(), torch.full((2, 32), 2.0))
        assert len(engine.seen) == 3

    def test_a_service_that_nobody_listens_for_is_an_error_of_the_wait(self):
        with Client("127.0.0.1:1", QUICK) as client:
            pending = client.begin(1, torch.ones(1, 32), timeout=0.3)
            with pytest.raises((errors.NotReady, errors.DeadlineExceeded)):
                pending.wait()

    @pytest.mark.parametrize("tokens", [3, LARGE])
    @pytest.mark.parametrize("region_bytes", [0, 1 << 24])
    def test_a_call_that_is_dropped_ends_on_the_server_and_its_memory_stays_out_of_use(self, tokens, region_bytes):
        engine = FakeEngine(hang)
        with client_of(engine) as client, client.register_region(region_bytes or 64) as region:
            with client.begin(1, torch.ones(tokens, 32), region=region if region_bytes else None):
                wait_until(lambda: engine.running)
            wait_until(lambda: engine.cancelled)
            gc.collect()
            assert len(region._quarantined) == bool(region_bytes), "the server may write there still"
            engine.compute = doubled
            assert torch.equal(client.forward(1, torch.ones(1, 32)), torch.full((1, 32), 2.0))

    def test_a_call_is_waited_for_once(self):
        with client_of(FakeEngine()) as client:
            pending = client.begin(1, torch.ones(1, 32))
            pending.wait()
            with pytest.raises(errors.CallerError, match="begin another"):
                pending.wait()


class TestBatches:
    @pytest.mark.parametrize("region_bytes", [0, 1 << 20])
    @pytest.mark.parametrize("tokens", [0, 1, 8, 9, 27])
    def test_a_batch_of_any_length_is_cut_into_requests(self, tokens, region_bytes):
        engine, experts = FakeEngine(), LocalExperts()
        engine.compute = experts
        x, ids, weights = torch.randn(tokens, 32), torch.randint(0, 8, (tokens, 3)), torch.rand(tokens, 3)
        with session_of(engine, shared_memory_bytes=region_bytes, max_tokens_per_request=8) as session:
            calls = session.layer(1)
            parts = zip(x.split(8), ids.split(8), weights.split(8), strict=True)
            wanted = torch.cat([experts.forward(*part) for part in parts])
            assert torch.equal(calls.forward(x, ids, weights), wanted)
            out = torch.empty_like(x)
            assert calls.forward(x, ids, weights, out=out) is out
            assert torch.equal(out, wanted)
        assert max((len(batch.hidden) for batch in engine.seen), default=0) <= 8
        assert len(engine.seen) == 2 * -(-tokens // 8)

    def test_all_requests_of_a_batch_are_under_way_at_once(self):
        release = threading.Event()
        engine = FakeEngine()

        async def held(batch):
            await hang_until(release)
            return batch.hidden

        engine.compute = held
        with session_of(engine, max_tokens_per_request=8) as session:
            begun = session.layer(1).begin(torch.ones(20, 32))
            wait_until(lambda: engine.running == 3)
            release.set()
            assert torch.equal(begun.wait(), torch.ones(20, 32))

    @pytest.mark.parametrize("given_out", [True, False])
    def test_rows_of_padding_are_not_sent_and_become_zeros(self, given_out):
        engine, x = FakeEngine(doubled), torch.randn(20, 32)
        with session_of(engine, max_tokens_per_request=8) as session:
            out = torch.full_like(x, float("nan")) if given_out else None
            got = session.layer(1).forward(x, num_valid=11, out=out)
        assert torch.equal(got, torch.cat((2 * x[:11], torch.zeros(9, 32))))
        assert sum(len(batch.hidden) for batch in engine.seen) == 11

    def test_a_batch_without_a_valid_row_makes_no_request(self):
        engine = FakeEngine()
        with session_of(engine) as session:
            assert torch.equal(session.layer(1).forward(torch.ones(4096, 32), num_valid=0), torch.zeros(4096, 32))
        assert not engine.seen

    def test_one_request_that_fails_ends_the_others(self):
        engine = FakeEngine()

        async def second_fails(batch):
            if float(batch.hidden[0, 0]) == 1:
                while engine.running < 2:
                    await asyncio.sleep(0.005)
                raise errors.InternalError("defect")
            await hang(batch)

        engine.compute = second_fails
        x = torch.zeros(16, 32)
        x[:8] = 1
        with session_of(engine, max_tokens_per_request=8) as session:
            with pytest.raises(errors.InternalError):
                session.layer(1).forward(x)
            wait_until(lambda: engine.cancelled == 1)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param({"num_valid": 5}, "num_valid: 5, must be 0 to 4", id="more rows than there are"),
            pytest.param({"out": torch.empty(3, 32)}, "out: .3, 32. .* must be like hidden, .4, 32", id="another shape"),
            pytest.param({"out": torch.empty(4, 32).half()}, "out: .* torch.float16", id="another dtype"),
            pytest.param({"ids": torch.zeros(5, 1).int(), "weights": torch.ones(5, 1), "num_valid": 2},
                         "topk_ids: 5 rows, hidden_states has 4", id="ids of another batch"),
            pytest.param({"ids": torch.zeros(4, 1).int()}, "topk_weights: missing", id="half a routing"),
        ],
    )  # fmt: skip
    def test_bad_arguments_name_the_field(self, arguments, message):
        engine = FakeEngine()
        with session_of(engine) as session, pytest.raises(errors.InvalidRequest, match=message):
            session.layer(1).forward(torch.ones(4, 32), **arguments)
        assert not engine.seen

    def test_a_layer_that_is_not_served(self):
        with (
            session_of(FakeEngine()) as session,
            pytest.raises(errors.UnknownLayer, match=r"4 is not served.*1, 2, 3, 7"),
        ):
            session.layer(4)

    def test_a_batch_is_waited_for_once(self):
        with session_of(FakeEngine()) as session:
            begun = session.layer(1).begin(torch.ones(2, 32))
            begun.wait()
            with pytest.raises(errors.CallerError, match="begin another"):
                begun.wait()


async def hang_until(event):
    while not event.is_set():
        await asyncio.sleep(0.005)


class Double:
    """A client whose region fails with `error`; it notes the time that each request over the wire was given."""

    def __init__(self, error, clock):
        self.error, self.clock, self.timeouts, self.registered = error, clock, [], 0

    def model(self):
        info = tiny_info()
        return model_reply(info, info.layers, SimpleNamespace(max_tokens_per_request=8, max_message_bytes=1 << 20))

    @contextmanager
    def register_region(self, size, *, timeout):
        self.registered += 1
        yield f"region {self.registered}"

    def forward(self, layer, hidden, ids, weights, *, region=None, timeout=None):
        if region is not None:
            self.clock.now += 90  # its retries
            raise self.error
        self.timeouts.append(timeout)
        return hidden

    def close(self):
        pass


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.mark.parametrize(
    ("error", "registered"),
    [(errors.NotReady("restarted"), 2), (errors.InvalidRequest("region: full", field="region"), 1)],
    ids=["forgotten", "full"],
)
def test_a_request_goes_over_the_wire_in_the_time_that_is_left(monkeypatch, error, registered):
    clock = Clock()
    monkeypatch.setattr("epserve.client.session.time", clock)
    double = Double(error, clock)
    session = Session(double, shared_memory_bytes=1 << 20)
    x = torch.ones(2, 32)
    for _ in range(2):
        assert session.layer(1).forward(x) is x
    assert double.timeouts == [RETRY_FOR_S - 90] * 2
    assert double.registered == registered


def test_no_request_outlives_its_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("epserve.client.session.time", clock)
    double = Double(errors.NotReady("restarting"), clock)
    session = Session(double, retry_for_s=60, shared_memory_bytes=1 << 20)
    with pytest.raises(errors.NotReady, match="restarting"):
        session.layer(1).forward(torch.ones(2, 32))
    assert double.timeouts == []
