"""Clients with names and limits: the tokens file, its reload, rates and bytes."""

import logging
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epserve.errors import ConfigError, Overloaded, Unauthenticated
from epserve.server import accounts as clients
from epserve.server.accounts import Account, Accounts, ClientPolicy
from tests.support.limited import bearer


class TestTokensFile:
    def read(self, tmp_path, text: str) -> list[ClientPolicy]:
        path = tmp_path / "tokens"
        path.write_text(text)
        return list(clients.read_policies(path).values())

    def test_lines_carry_names_and_limits(self, tmp_path):
        first, second, third = self.read(
            tmp_path,
            "# who may\n\nt1 name=search tokens_per_s=5e3 bytes_in_flight=1.5MiB\n t2   name=ops admin \nt3\n",
        )
        assert first == ClientPolicy(name="search", tokens_per_s=5000, bytes_in_flight=1.5 * 2**20)
        assert second == ClientPolicy(name="ops", admin=True)
        assert (third.tokens_per_s, third.bytes_in_flight, third.admin) == (math.inf, math.inf, False)
        assert third.name.startswith("client-")
        assert "t3" not in third.name

    def test_a_plain_list_of_tokens_lets_all_do_everything(self, tmp_path):
        assert all(policy.admin for policy in self.read(tmp_path, "t1\nt2 tokens_per_s=5\n"))

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("t1 admn\n", "line 1: .*not KEY=VALUE"),
            ("t1 rate=5\n", "unknown or repeated key 'rate'"),
            ("ok\nt1 name=a name=b\n", "line 2: unknown or repeated key 'name'"),
            ("t1 tokens_per_s=0\n", "tokens_per_s: must be a number above 0"),
            ("t1 tokens_per_s=fast\n", "got 'fast'"),
            ("t1 tokens_per_s=nan\n", "got 'nan'"),
            ("t1 bytes_in_flight=5parsecs\n", "KiB, MiB or GiB"),
            ("t1 bytes_in_flight=-1\n", "got '-1'"),
            ("t1 priority=urgent\n", "priority: must be one of low, normal, high, got 'urgent'"),
            ("t1\nt1 name=b\n", "line 2: this token is listed already"),
            ("t1 name=a\nt2 name=a tokens_per_s=5\n", "'a' has lines with different limits"),
            ("tök\n", "non-ASCII"),
        ],
    )
    def test_mistakes_are_named_without_the_token(self, tmp_path, text, why):
        with pytest.raises(ConfigError, match=why) as raised:
            self.read(tmp_path, text)
        assert "t1" not in str(raised.value).replace(str(tmp_path), "")

    @given(text=st.text(alphabet=st.sampled_from("ab #=\n\t0.5Miadnme_"), max_size=80))
    @settings(max_examples=300, deadline=None)
    def test_any_text_is_read_or_refused(self, tmp_path_factory, text):
        path = tmp_path_factory.getbasetemp() / "fuzzed-tokens"
        path.write_text(text)
        try:
            policies = clients.read_policies(path)
        except ConfigError:
            return
        assert all(
            policy.name and policy.tokens_per_s > 0 and policy.bytes_in_flight > 0 for policy in policies.values()
        )


class TestAccount:
    def clock(self, monkeypatch) -> list[float]:
        now = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        return now

    def test_a_bucket_holds_one_second_and_says_when_to_come_again(self, monkeypatch):
        now = self.clock(monkeypatch)
        account = Account(ClientPolicy(name="a", tokens_per_s=100))
        account.spend(80)
        with pytest.raises(Overloaded, match="limit of 100 a second") as raised:
            account.spend(50)
        assert raised.value.retry_after_s == pytest.approx(0.3)
        now[0] += 0.3
        account.spend(50)
        now[0] += 3600
        account.spend(100)
        with pytest.raises(Overloaded):
            account.spend(1)

    def test_a_request_above_one_second_passes_and_leaves_a_debt(self, monkeypatch):
        now = self.clock(monkeypatch)
        account = Account(ClientPolicy(name="a", tokens_per_s=100))
        account.spend(500)
        with pytest.raises(Overloaded) as raised:
            account.spend(100)
        assert raised.value.retry_after_s == pytest.approx(5)
        now[0] += 5
        account.spend(100)

    def test_what_is_given_back_makes_no_more_than_a_full_bucket(self, monkeypatch):
        now = self.clock(monkeypatch)
        account = Account(ClientPolicy(name="a", tokens_per_s=100))
        account.spend(100)
        account.give_back(1000)
        now[0] += 0.5
        account.spend(100)
        with pytest.raises(Overloaded):
            account.spend(1)

    @given(
        steps=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 300)), min_size=1, max_size=60),
        rate=st.sampled_from([1.0, 50.0, 1e4]),
    )
    @settings(max_examples=200, deadline=None)
    def test_the_rate_is_never_passed_by_more_than_the_burst(self, steps, rate):
        with pytest.MonkeyPatch.context() as patch:
            now = self.clock(patch)
            account, passed, largest = Account(ClientPolicy(name="a", tokens_per_s=rate)), 0, 0
            for wait, tokens in steps:
                now[0] += wait
                try:
                    account.spend(tokens)
                except Overloaded as error:
                    now[0] += error.retry_after_s + 1e-6
                    account.spend(tokens)  # the promise holds
                passed, largest = passed + tokens, max(largest, tokens)
                assert passed <= rate * (now[0] - 1000.0) + rate + largest + 1

    def test_bytes_in_flight_are_bounded_but_one_request_always_passes(self):
        account = Account(ClientPolicy(name="a", bytes_in_flight=100))
        with account.holding(1000), pytest.raises(Overloaded, match="bytes_in_flight"), account.holding(1):
            pass
        with account.holding(60), account.holding(40):
            pass
        assert account.bytes_in_flight == 0


class TestReload:
    def test_accounts_keep_their_use_and_lost_tokens_lose_access_at_once(self, tmp_path):
        path = tmp_path / "tokens"
        path.write_text("t1 name=a tokens_per_s=10\nt2 name=b\n")
        accounts = Accounts(path)
        a, b = accounts.identify(bearer("t1")), accounts.identify(bearer("t2"))
        a.spend(10)
        path.write_text("t1 name=a tokens_per_s=20\nt9 name=a tokens_per_s=20\n")
        assert accounts.changed()
        accounts.reload()
        assert not accounts.changed()
        assert accounts.identify(bearer("t9")) is a, "a second token of the same client, to replace the first"
        assert a.current().tokens_per_s == 20
        with pytest.raises(Overloaded):
            a.spend(10)
        with pytest.raises(Unauthenticated):
            accounts.identify(bearer("t2"))
        with pytest.raises(Unauthenticated, match="withdrawn"):
            b.current()

    def test_an_unusable_file_changes_nothing_and_is_logged_once(self, tmp_path, caplog):
        path = tmp_path / "tokens"
        path.write_text("t1 name=a\n")
        accounts = Accounts(path)
        for broken in (lambda: path.write_text("t1 what\n"), path.unlink):
            broken()
            assert accounts.changed()
            with caplog.at_level(logging.ERROR):
                accounts.reload()
            assert not accounts.changed()
            assert accounts.identify(bearer("t1")).name == "a"
        assert len(caplog.records) == 2
        assert "t1" not in caplog.text.replace(str(tmp_path), "")
        path.write_text("t2 name=b\n")
        accounts.reload()
        assert accounts.identify(bearer("t2")).name == "b"
