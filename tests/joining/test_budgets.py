"""Clients' limits over several front ends: the counting, what processes tell each other, and a whole service of them."""

import asyncio
import contextlib
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epserve.client import AsyncClient
from epserve.engine.budgets import HERE, MOST_IDLE, Budget, Budgets, Claim
from epserve.errors import NotReady, Overloaded
from epserve.joining.peers import Peers
from epserve.joining.remote import RemoteEngine
from tests.support.fake_engine import FakeEngine, echo_after, serving
from tests.support.front_ends import SECRET, service
from tests.support.grpc_calls import until
from tests.support.limited import impatient

KIB = torch.ones(8, 32)  # float32: 1 KiB


@pytest.fixture
def now(monkeypatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


class TestBudget:
    def test_what_is_served_for_several_front_ends_never_passes_the_limit(self):
        budget = Budget("a")
        budget.hold(40, 100)
        budget.hold_for("one", 40, 100)
        with pytest.raises(Overloaded, match=r"'a': 80 bytes of its requests are here, 40 more .* limit of 100"):
            budget.hold_for("other", 40, 100)
        budget.release(40, "one")
        budget.hold_for("other", 40, 100)
        assert (budget.held(), budget.held("one"), budget.elsewhere(), budget.elsewhere("other")) == (40, 0, 40, 40)

    def test_what_lies_at_other_doors_counts_at_this_one_and_once(self):
        budget = Budget("a")
        budget.report("one", 90)  # of which it has sent on 50
        budget.hold_for("one", 50, 100)
        assert budget.elsewhere() == 90
        with pytest.raises(Overloaded, match="90 bytes"):
            budget.hold(20, 100)
        budget.hold_for("one", 40, 100)  # the rest of it, which nobody refuses for its own report
        budget.release(90, "one")
        budget.report("one", 0)
        assert budget.elsewhere() == 0
        budget.hold(1000, 100)  # a single one of any size

    def test_two_that_arrive_at_two_doors_at_one_time_do_not_refuse_each_other(self):
        budget = Budget("a")
        for each in ("one", "other"):
            budget.report(each, 100)
        budget.hold_for("one", 100, 100)
        with pytest.raises(Overloaded):
            budget.hold_for("other", 100, 100)

    def test_a_front_end_that_is_gone_holds_nothing(self):
        budget = Budget("a")
        budget.report("one", 100)
        with pytest.raises(Overloaded):
            budget.hold(1, 100)
        budget.forget("one")
        budget.hold(100, 100)

    def test_a_bucket_that_others_have_emptied_is_empty_here_too(self, now):
        budget = Budget("a")
        budget.told("orderer", 0, 0.25)
        with pytest.raises(Overloaded) as raised:
            budget.spend(50, 100)
        assert raised.value.retry_after_s == pytest.approx(0.25)
        now[0] += 0.25
        budget.spend(50, 100)
        with pytest.raises(Overloaded):
            budget.spend(1, 100)
        budget.give_back(50, 100)
        budget.spend(50, 100)
        budget.told("orderer", 0, -3.0)  # a debt
        now[0] += 3
        with pytest.raises(Overloaded):
            budget.spend(1, 100)
        budget.forget("orderer")  # it cannot be reached: this process counts for itself
        budget.spend(100, 100)

    @given(work=st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, 3), st.integers(1, 150)), min_size=1, max_size=80))
    @settings(max_examples=100, deadline=None)
    def test_the_rate_holds_over_all_front_ends_whatever_they_know_of_each_other(self, work):
        """`orderer` is asked for each request, as on a connection; doors hear of it sometimes."""
        with pytest.MonkeyPatch.context() as patch:
            clock = [1000.0]
            patch.setattr(time, "monotonic", lambda: clock[0])
            orderer, doors = Budget("a"), [Budget("a") for _ in range(4)]
            passed, largest = 0, 0
            for wait, number, tokens in work:
                clock[0] += wait
                try:
                    doors[number].spend(tokens, 100)
                except Overloaded:
                    continue
                try:
                    orderer.spend(tokens, 100)
                except Overloaded:
                    doors[number].give_back(tokens, 100)
                    continue
                passed, largest = passed + tokens, max(largest, tokens)
                if tokens % 3 == 0:
                    for door in doors:
                        door.told("orderer", 0, orderer.level)
                assert passed <= 100 * (clock[0] - 1000.0) + 100 + largest + 1

    def test_idle_clients_are_forgotten_and_busy_ones_are_not(self, now):
        budgets = Budgets()
        busy = budgets.of("busy")
        busy.hold(1, 100)
        for number in range(3 * MOST_IDLE):
            budgets.of(str(number)).spend(1, 1e9)
            now[0] += 1
        assert len(list(budgets)) <= MOST_IDLE + 1
        assert budgets.of("busy") is busy

    @pytest.mark.parametrize("claim", [(100.0, math.inf, 5), (math.inf, 1024.0, 0), (0.5, 1.0, 1 << 40)])
    def test_claims_pass_through_json(self, claim):
        sent = Claim(tokens_per_s=claim[0], bytes_in_flight=claim[1], nbytes=claim[2])
        assert Claim.from_json(sent.as_json()) == sent

    @pytest.mark.parametrize(
        "value", [[0, None, 1], [None, -1, 1], [None, None, -1], [1, 1], "abc", [None, None, None]]
    )
    def test_what_is_no_claim_is_refused(self, value):
        with pytest.raises((ValueError, TypeError)):
            Claim.from_json(value)


class TestService:
    @pytest.fixture
    def tokens(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("slow name=slow tokens_per_s=0.001\nsmall name=small bytes_in_flight=2KiB\nfree name=free\n")
        return path

    async def test_the_rate_of_a_client_is_one_for_all_front_ends(self, tokens):
        """A bucket holds one second: at a thousandth of a token a second, one request, and then a debt for very long."""
        engine = FakeEngine()
        async with service(engine, tokens_file=tokens) as (servers, _, _), contextlib.AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(impatient(each.address, "slow")) for each in servers]
            results = await asyncio.gather(*(each.forward(1, KIB) for each in callers), return_exceptions=True)
            passed = [each for each in results if isinstance(each, torch.Tensor)]
            refused = [each for each in results if isinstance(each, Overloaded)]
            assert (len(passed), len(refused)) == (1, 2), results
            assert all("limit of 0.001 a second" in str(each) and each.retry_after_s > 100 for each in refused)
            assert len(engine.seen) == 1
            async with impatient(servers[1].address, "free") as other:
                for _ in range(5):
                    await other.forward(1, KIB)

    async def test_bytes_in_flight_are_counted_over_all_front_ends_and_doors_hear_of_them(self, tokens):
        gate = asyncio.Event()
        engine = FakeEngine(echo_after(gate))
        async with service(engine, tokens_file=tokens) as (servers, port, peers), contextlib.AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(impatient(each.address, "small")) for each in servers]
            running = [asyncio.ensure_future(each.forward(1, KIB)) for each in callers[1:]]
            await until(lambda: engine.running == 2)
            with pytest.raises(Overloaded, match=r"'small': 2048 bytes .* limit of 2048 \(bytes_in_flight\)"):
                await callers[0].forward(1, KIB)
            await until(lambda: peers[1].budgets.of("small").elsewhere() == 1024)
            assert [each.budgets.of("small").held() for each in peers] == [0, 1024, 1024]
            with pytest.raises(Overloaded, match="bytes_in_flight"):
                await callers[1].forward(1, KIB)
            gate.set()
            await asyncio.gather(*running)
            await until(lambda: not any(each.budgets.of("small").elsewhere() for each in peers))
            for each in callers:
                await each.forward(1, KIB)
            assert port._held == 0

    async def test_a_front_end_that_vanishes_holds_nothing_of_its_clients_limits(self, tokens):
        engine = FakeEngine(lambda batch: asyncio.sleep(600))
        async with service(engine, tokens_file=tokens, further=1) as (servers, port, peers):
            lost = Peers()
            remote = await RemoteEngine.join(port.address, SECRET, timeout_s=30, peers=lost)
            async with (
                serving(remote, peers=lost, tokens_file=tokens) as server,
                impatient(server.address, "small") as own,
            ):
                call = asyncio.ensure_future(own.forward(1, torch.ones(16, 32)))
                await until(lambda: peers[1].budgets.of("small").elsewhere() == 2048)
                await remote.close()
                with pytest.raises(NotReady):
                    await call
            await until(lambda: not any(each.budgets.of("small").elsewhere() for each in peers))
            async with AsyncClient(servers[1].address, token="small") as caller:
                again = asyncio.ensure_future(caller.forward(1, KIB))
                await until(lambda: engine.running == 1)
                again.cancel()

    async def test_work_that_the_service_refused_costs_nothing_there_either(self, tokens):
        async def refuse(batch):
            raise NotReady("recovering")

        async with service(FakeEngine(refuse), tokens_file=tokens, further=1) as (servers, _, peers):
            async with impatient(servers[1].address, "slow") as caller:
                for _ in range(3):
                    with pytest.raises(NotReady):
                        await caller.forward(1, KIB)
            assert peers[0].budgets.of("slow").level == pytest.approx(1.0)
            assert peers[0].budgets.of("slow").held(HERE) == 0

    async def test_a_request_over_its_limit_is_refused_before_its_bytes_are_taken(self, tokens):
        """The orderer knows from the header; the front end then sends no more of it."""
        engine = FakeEngine()
        async with service(engine, tokens_file=tokens, further=1) as (servers, port, peers):
            peers[0].budgets.of("slow").spend(1, 0.001)  # as if through another front end, and not told yet
            peers[1].budgets.of("slow").told(None, 0, 1.0)
            async with impatient(servers[1].address, "slow") as caller:
                with pytest.raises(Overloaded, match="tokens_per_s"):
                    await caller.forward(1, torch.ones(16_000, 32))
            (guest,) = port._guests
            assert not engine.seen
            await until(lambda: not guest.link._arriving)
            assert port._held == 0
