"""What a client refuses before it sends anything, and how long it tries again."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.client.attempts import Attempts
from epserve.client.region import ClientRegion
from epserve.errors import ConfigError, DeadlineExceeded, EpserveError, InvalidRequest, NotReady, Overloaded
from tests.support.clients import serving_in_thread
from tests.support.fake_engine import FakeEngine, serving

NOBODY = "127.0.0.1:1"
X = torch.ones(2, 32)

OPTIONS = {
    "a balance that gRPC has, we have not": (
        lambda: ClientOptions(balance="x"),
        "balance: 'x' is none of '', 'round_robin'",
    ),
    "a priority of another system": (
        lambda: ClientOptions(priority="urgent"),
        "priority: 'urgent' is none of '', 'low', 'normal', 'high'",
    ),
    "a priority that is no string": (lambda: ClientOptions(priority=["high"]), "priority: "),
    "a token with a letter beyond ASCII": (lambda: ClientOptions(token="abü"), r"token: character 3 of 3 is U\+00FC"),
    "a token with the end of its line": (
        lambda: Client(NOBODY, token="secret\n"),
        r"token: character 7 of 7 is U\+000A.*strip",
    ),
    "bytes for a token": (lambda: Client(NOBODY, token=b"secret"), "token: must be a string, got bytes"),
    "a path for TLS": (lambda: ClientOptions(tls="ca.pem"), r"tls: must be Tls\(...\), got str"),
    "a number for retries": (lambda: ClientOptions(retry=3), r"retry: must be RetryPolicy\(...\), got int"),
    "no attempt": (lambda: RetryPolicy(attempts=0), r"retry\.attempts: 0 .*from 1 up"),
    "half an attempt": (lambda: RetryPolicy(attempts=1.5), r"retry\.attempts: 1\.5"),
    "no first wait": (lambda: RetryPolicy(first_s=0), r"retry\.first_s: 0"),
    "waits that shrink": (lambda: RetryPolicy(first_s=5), r"retry\.longest_s: 2\.0 is below retry\.first_s, 5"),
    "options that are a token": (lambda: Client(NOBODY, "secret"), r"options: must be ClientOptions\(...\)"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options_are_checked_where_they_are_made(what):
    make, message = OPTIONS[what]
    with pytest.raises(ConfigError, match=message) as raised:
        make()
    assert "token" not in what or "secret" not in str(raised.value)


@pytest.mark.parametrize("timeout_s", ["2", True, None, float("nan"), 0, -1.0])
def test_a_timeout_of_all_calls_is_one(timeout_s):
    with pytest.raises(InvalidRequest, match="timeout_s: "):
        ClientOptions(timeout_s=timeout_s)


TARGETS = {
    "": "is empty",
    " ": "has spaces",
    "ü:1": "ASCII",
    "a b:1": "has spaces",
    "host:1\n": "control characters",
    "host": "has no port",
    "::1:50051": "without brackets",
    ":50051": "has no host",
    "host:x": "has the port 'x', must be 1 to 65535",
    "host:99999": "has the port '99999'",
    "http://host:50051": "is a web address",
    "unix:": "names nothing",
    "ipv4:host:1": "holds 'host:1', which is no ipv4 address",
    "ipv4:10.0.0.1:1,10.0.0.2": "holds '10.0.0.2', which is no ipv4 address and port",
    b"host:1": "is not a string",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_is_no_target_is_refused_with_those_that_are(kind, target):
    with pytest.raises(ConfigError, match=rf"^target: .*{TARGETS[target]}.*; give \"host:port\""):
        kind(target)


@pytest.mark.parametrize(
    "target", ["unix:/run/x.sock", "dns:///host:1", "[::1]:1", "ipv6:[::1]:1", "ipv4:127.0.0.1:1,127.0.0.2:1"]
)
def test_every_kind_of_target_passes(target):
    Client(target).close()


CALLS = {
    "a sparse tensor": ({"hidden": X.to_sparse()}, "hidden_states", "sparse_coo tensor.*to_dense"),
    "a nested tensor": (
        {"hidden": torch.nested.nested_tensor([X, X], layout=torch.jagged)},
        "hidden_states",
        "nested tensor.*to_padded",
    ),
    "a tensor without values": ({"hidden": X.to("meta")}, "hidden_states", "device meta"),
    "sparse weights": (
        {"hidden": X, "topk_ids": torch.zeros(2, 1).int(), "topk_weights": torch.ones(2, 1).to_sparse()},
        "topk_weights",
        "sparse_coo",
    ),
    "a list": ({"hidden": [[1.0]]}, "hidden_states", "must be a torch tensor or a numpy array"),
    "a timeout as text": ({"hidden": X, "timeout": "2"}, "timeout", "'2' is not a number; give seconds"),
    "a region's name": ({"hidden": X, "region": "mine"}, "region", r"what register_region.* gives, got str"),
    "an id that is a number": ({"hidden": X, "request_id": 7}, "request_id", "7 is not a string"),
    "an id beyond ASCII": ({"hidden": X, "request_id": "ü"}, "request_id", "ASCII"),
}


@pytest.mark.parametrize("what", CALLS)
async def test_what_cannot_be_sent_is_refused_before_it_is(what):
    arguments, field, message = CALLS[what]
    with Client(NOBODY) as client:
        for call in (client.forward, client.forward_async):
            with pytest.raises(InvalidRequest, match=rf"^{field}: .*{message}") as raised:
                call(1, **arguments)
            assert raised.value.field == field
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match=rf"^{field}: .*{message}"):
            await client.forward(1, **arguments)


GRADIENTS = {
    "hidden states": ({"hidden": X.clone().requires_grad_()}, "hidden_states"),
    "weights of a router that learns": (
        {"hidden": X, "topk_ids": torch.zeros(2, 1).int(), "topk_weights": torch.ones(2, 1).requires_grad_()},
        "topk_weights",
    ),
}


@pytest.mark.parametrize("what", GRADIENTS)
async def test_only_the_blocking_forward_records_gradients(what):
    arguments, field = GRADIENTS[what]
    refused = partial(pytest.raises, InvalidRequest, match=f"^{field}: requires a gradient.*under torch.no_grad")
    with serving_in_thread(FakeEngine()) as server, Client(server.address) as client:
        with refused():
            client.forward_async(1, **arguments)
        assert client.forward(1, **arguments).requires_grad
        with torch.no_grad():
            assert torch.equal(client.forward_async(1, **arguments).result(60), X)
    async with serving(FakeEngine()) as server, AsyncClient(server.address) as client, client.stream() as stream:
        for call in (client.forward, stream.forward):
            with refused():
                await call(1, **arguments)
            with torch.no_grad():
                assert torch.equal(await call(1, **arguments), X)


def test_a_negated_view_is_sent_as_its_values():
    view = torch.conj(torch.complex(X, X)).imag
    assert view.is_neg()
    with serving_in_thread(FakeEngine()) as server, Client(server.address) as client:
        assert torch.equal(client.forward(1, view), -X)


async def test_a_streams_timeout_is_checked_as_a_calls_is():
    async with serving(FakeEngine()) as server, AsyncClient(server.address) as client, client.stream() as stream:
        with pytest.raises(InvalidRequest, match="timeout: '2'"):
            await stream.forward(1, X, timeout="2")
        assert torch.equal(await stream.forward(1, X), X)


@pytest.mark.parametrize("size", ["x", "4096", 4096.0, True, None, 63, -1, 2**70])
async def test_what_is_no_size_of_a_region_is_refused(size):
    with Client(NOBODY) as client, pytest.raises(InvalidRequest, match="size: ") as raised:
        client.register_region(size).__enter__()
    assert raised.value.field == "size"
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match="size: "):
            async with client.register_region(size):
                pass


async def test_a_regions_timeout_is_checked_too():
    with Client(NOBODY) as client, pytest.raises(InvalidRequest, match="timeout: "):
        client.register_region(4096, timeout="2").__enter__()
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match="timeout: "):
            async with client.register_region(4096, timeout="2"):
                pass


def test_shapes_and_dtypes_in_a_region():
    region = ClientRegion(4096)
    try:
        for shape in ((-1, 3), (2.5, 3), ("2", 3), (True, 3), 5, "23", None, (2**63, 1), torch.ones(2)):
            with pytest.raises(InvalidRequest, match=r"shape: .*whole numbers") as raised:
                region.empty(shape, torch.float32)
            assert raised.value.field == "shape"
        for dtype in ("no such", 3.5, torch.complex64, np.dtype("O")):
            with pytest.raises(InvalidRequest, match="dtype: ") as raised:
                region.empty((2, 3), dtype)
            assert raised.value.field == "dtype"
        assert region.empty(X.shape, X.dtype).shape == X.shape
        assert region.empty([np.int64(2), 3], np.float32).shape == (2, 3)
    finally:
        region.close()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("epserve.client.attempts.time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def attempt_until_raised(policy: RetryPolicy, timeout_s: float, clock, error: EpserveError) -> list[float]:
    attempts, waits = Attempts(policy, timeout_s), []
    while len(waits) < 1000:
        try:
            waits.append(attempts.wait_after(error))
        except type(error):
            return waits
        clock.seconds += waits[-1]
    raise AssertionError("it never ends")


class TestAttempts:
    @pytest.mark.parametrize("timeout_s", [0.2, 2.0, 60.0, 600.0])
    def test_they_go_on_until_just_before_the_deadline(self, clock, timeout_s):
        error = NotReady("nobody is there")
        waits = attempt_until_raised(RetryPolicy(), timeout_s, clock, error)
        assert timeout_s - 0.05 <= sum(waits) < timeout_s
        assert max(waits) <= 2.0
        assert len(set(waits)) == len(waits), "no jitter"
        assert timeout_s / 2.0 < len(waits) < timeout_s + 20
        assert error.__notes__ == [f"after {len(waits) + 1} attempts in {timeout_s:g} s at most"]

    def test_a_bound_is_one_only_where_it_is_set(self, clock):
        assert len(attempt_until_raised(RetryPolicy(attempts=4), 60.0, clock, NotReady("nobody"))) == 3

    def test_the_service_says_how_long_to_wait(self, clock):
        waits = attempt_until_raised(RetryPolicy(), 10.0, clock, Overloaded("full", retry_after_s=3.0))
        assert waits == [3.0, 3.0, 3.0]

    @pytest.mark.parametrize(("took_s", "raised"), [(0.5, NotReady), (20.0, DeadlineExceeded)])
    def test_a_last_attempt_with_little_time_says_less_than_the_one_before(self, clock, took_s, raised):
        attempts = Attempts(RetryPolicy(), 0.6 if took_s < 1 else 20.1)
        clock.seconds += attempts.wait_after(NotReady("Connection refused")) + took_s
        with pytest.raises(raised) as error:
            attempts.wait_after(DeadlineExceeded("no reply came"))
        assert error.value.__notes__[0].startswith("after 2 attempts")
        assert raised is NotReady or error.value.__notes__[1] == "the attempt before: NotReady: Connection refused"


async def test_a_service_that_comes_after_more_than_ten_attempts_is_found():
    engine = FakeEngine()
    engine.set_state("recovering")
    refused, answer = [], engine.answer

    async def counted(batch):
        refused.append(engine.state())
        if len(refused) > 15:
            engine.set_state("serving")
        return await answer(batch)

    engine.answer = counted
    options = ClientOptions(retry=RetryPolicy(first_s=0.001, longest_s=0.002))
    async with serving(engine) as server, AsyncClient(server.address, options) as client:
        assert torch.equal(await client.forward(1, X), X)
    assert len(refused) == 16
