"""The Python clients against a real server: both kinds of tensor, errors, security, Ray beside gRPC."""

import asyncio
import concurrent.futures
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch

from epserve import errors
from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy, Tls
from epserve.client.exchange import OutgoingRequest
from epserve.errors import InvalidRequest
from epserve.protocol import wire
from epserve.protocol.status import error_of, failure_of
from tests.support.clients import LARGE, QUICK, SMALL, client_of, serving_in_thread
from tests.support.fake_engine import FakeEngine, LocalExperts, serving


class TestForward:
    @pytest.mark.parametrize("tokens", [0, 1, SMALL, LARGE])
    @pytest.mark.parametrize("kind", ["torch", "numpy"])
    def test_the_same_kind_comes_back(self, kind, tokens):
        x = torch.randn(tokens, 32)
        with client_of(FakeEngine(), max_tokens_per_request=50000) as client:
            y = client.forward(1, x if kind == "torch" else x.numpy())
        assert isinstance(y, torch.Tensor if kind == "torch" else np.ndarray)
        assert y.dtype == (torch.float32 if kind == "torch" else np.float32)
        assert np.array_equal(np.asarray(y), x.numpy())
        y += 1  # it is the caller's own, writable memory

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_the_callers_dtype_comes_back(self, dtype):
        x = torch.randn(SMALL, 32).to(dtype)
        with client_of(FakeEngine(dtype=torch.bfloat16)) as client:
            y = client.forward(1, x)
            assert torch.equal(y, x.bfloat16().to(dtype))
            if dtype is not torch.bfloat16:
                assert np.array_equal(client.forward(1, x.numpy()), y.numpy())

    @pytest.mark.parametrize("tokens", [SMALL, 16000])
    async def test_answers_are_those_of_the_experts(self, tokens):
        experts = LocalExperts()
        x, ids, weights = torch.randn(tokens, 32), torch.randint(0, 8, (tokens, 3)), torch.rand(tokens, 3)
        async with serving(FakeEngine(experts)) as server, AsyncClient(server.address, QUICK) as client:
            assert torch.equal(await client.forward(2, x), experts.forward(x))
            assert torch.equal(await client.forward(2, x, ids, weights), experts.forward(x, ids, weights))
            mixed = await client.forward(2, x.numpy(), ids.numpy().astype(np.uint32), weights)
            assert np.array_equal(mixed, experts.forward(x, ids, weights).numpy())

    async def test_many_large_and_small_calls_at_once(self):
        async with serving(FakeEngine()) as server, AsyncClient(server.address, QUICK) as client:
            batches = [torch.randn(16000 if number % 4 == 0 else 3, 32) for number in range(32)]
            for x, y in zip(batches, await asyncio.gather(*(client.forward(1, x) for x in batches)), strict=True):
                assert torch.equal(x, y)

    def test_futures(self):
        release = threading.Event()

        async def held_if_one(batch):
            while float(batch.hidden[0, 0]) == 1 and not release.is_set():
                await asyncio.sleep(0.005)
            return batch.hidden

        with client_of(FakeEngine(held_if_one)) as client:
            slow, fast = (client.forward_async(1, torch.full((1, 32), value)) for value in (1.0, 0.0))
            done, _ = concurrent.futures.wait([slow, fast], return_when=concurrent.futures.FIRST_COMPLETED, timeout=20)
            assert done == {fast}
            release.set()
            assert float(slow.result(20)[0, 0]) == 1

    def test_model_status_and_readiness(self):
        engine = FakeEngine()
        engine.set_state("starting")
        with client_of(engine) as client:
            assert client.model().hidden == 32
            with pytest.raises(errors.DeadlineExceeded, match="state starting"):
                client.wait_ready(timeout=1)
            threading.Timer(0.3, engine.set_state, ["serving"]).start()
            assert client.wait_ready(timeout=20).state == "serving"

    async def test_model_status_and_readiness_async(self):
        engine = FakeEngine()
        async with serving(engine) as server, AsyncClient(server.address, QUICK) as client:
            assert (await client.model()).name == "tiny-moe"
            assert (await client.wait_ready()).state == "serving"
            engine.set_state("recovering")
            with pytest.raises(errors.DeadlineExceeded, match="state recovering"):
                await client.wait_ready(timeout=1)


class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            errors.InvalidRequest("ids: wrong", field="topk_ids"),
            errors.UnknownLayer("layer 9", field="layer"),
            errors.TooLarge("much", field="hidden_states"),
            errors.Unauthenticated("who"),
            errors.ConfigError("set-up"),
            errors.Incompatible("parts", ("one", "two")),
            errors.Overloaded("full", retry_after_s=0.25),
            errors.RankFailed("rank 2"),
            errors.NotReady("soon"),
            errors.DeadlineExceeded("late"),
            errors.InternalError("defect"),
            errors.HandleError("twice"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_every_error_arrives_as_its_own_class(self, error):
        got = error_of(failure_of(error))
        assert type(got) is type(error)
        assert str(got) == str(error)
        assert got.retryable == error.retryable
        assert vars(got).get("field") == vars(error).get("field")
        assert vars(got).get("retry_after_s") == vars(error).get("retry_after_s")

    @pytest.mark.parametrize("tokens", [SMALL, LARGE])
    async def test_they_cross_the_wire(self, tokens):
        options = {"max_tokens_per_request": 50000}
        x = torch.ones(tokens, 32)
        async with serving(FakeEngine(), **options) as server, AsyncClient(server.address, QUICK) as client:
            with pytest.raises(errors.UnknownLayer, match="layer: 4"):
                await client.forward(4, x)
            with pytest.raises(errors.InvalidRequest, match="hidden size 31") as raised:
                await client.forward(1, x[:, 1:])
            assert raised.value.field == "hidden_states"
            assert torch.equal(await client.forward(1, x), x)

    def test_too_large_names_the_limit_and_the_setting_without_sending_it_all(self, monkeypatch):
        x, frames, sent = torch.zeros(40000, 7168, dtype=torch.bfloat16), wire.request_frames, []  # 573 MB

        def counted(*arguments):
            for frame in frames(*arguments):
                sent.append(wire.FRAME_BYTES)
                yield frame

        monkeypatch.setattr(wire, "request_frames", counted)
        refused = pytest.raises(errors.TooLarge, match=r"40000 tokens, at most 16384.*server\.max_tokens_per_request")
        with client_of(FakeEngine(hidden=7168, dtype=torch.bfloat16)) as client, refused:
            client.forward(1, x)
        assert 0 < sum(sent) < x.nbytes / 4

    def test_half_a_routing_is_refused_before_sending(self):
        with Client("127.0.0.1:1") as client, pytest.raises(errors.InvalidRequest, match="topk_weights: missing"):
            client.forward(1, torch.ones(1, 32), topk_ids=torch.ones(1, 1).int())

    def test_no_server_is_not_ready_after_some_attempts(self):
        options = ClientOptions(retry=RetryPolicy(attempts=3, first_s=0.01))
        with Client("127.0.0.1:1", options) as client, pytest.raises(errors.NotReady) as raised:
            client.forward(1, torch.ones(1, 32))
        assert "after 3 attempts" in raised.value.__notes__[0]

    async def test_a_closed_asyncio_client_says_so(self):
        client = AsyncClient("127.0.0.1:1")
        await client.close()
        with pytest.raises(errors.CallerError, match="closed"):
            await client.status()

    def test_a_closed_client_says_so(self):
        client = Client("127.0.0.1:1")
        client.close()
        with pytest.raises(errors.CallerError, match="closed"):
            client.forward(1, torch.ones(1, 32))


class TestSecurity:
    def test_tokens(self, tmp_path):
        (tmp_path / "tokens").write_text("secret\n")
        with serving_in_thread(FakeEngine(), tokens_file=tmp_path / "tokens") as server:
            with Client(server.address, token="secret") as client:
                assert client.forward(1, torch.ones(16000, 32)).shape == (16000, 32)
            with Client(server.address, token="wrong") as client:
                for tokens in (1, 16000):
                    with pytest.raises(errors.Unauthenticated, match="tokens_file"):
                        client.forward(1, torch.ones(tokens, 32))
        assert "secret" not in repr(ClientOptions(token="secret"))

    def test_mutual_tls(self, certificates):
        names = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
        own = {"cert": certificates / "client.pem", "key": certificates / "client.key"}
        with serving_in_thread(FakeEngine(), **{key: certificates / name for key, name in names.items()}) as server:
            with Client(
                f"localhost:{server.port}", ClientOptions(tls=Tls(**own)), tls_ca=certificates / "ca.pem"
            ) as client:
                assert client.model().hidden == 32
            options = ClientOptions(retry=RetryPolicy(attempts=2))
            anonymous = Client(f"localhost:{server.port}", options, tls_ca=certificates / "ca.pem")
            with anonymous, pytest.raises(errors.NotReady):
                anonymous.model()

    def test_files_of_tls_that_do_not_fit(self, certificates):
        with pytest.raises(errors.ConfigError, match="cert and key come together"):
            Client("localhost:1", ClientOptions(tls=Tls(cert=certificates / "client.pem")))
        with pytest.raises(errors.ConfigError, match="a file's path is wanted, not bytes"):
            Client("localhost:1", tls_ca=b"-----BEGIN CERTIFICATE-----")
        with pytest.raises(errors.ConfigError, match=r"cannot read .*missing"):
            Client("localhost:1", tls_ca=certificates / "missing")


def run_python(code: str, timeout_s: float = 250) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_client_needs_no_torch():
    out = run_python("""
        import sys
        import numpy as np
        import epserve.client
        from epserve.errors import NotReady
        from epserve.client import Client, ClientOptions, RetryPolicy
        with Client("127.0.0.1:1", ClientOptions(retry=RetryPolicy(attempts=1))) as client:
            try:
                client.forward(1, np.ones((1, 4), dtype=np.float32))
            except NotReady:
                print("not ready")
        print("torch" in sys.modules, "ray" in sys.modules)
    """)
    assert out == "not ready\nFalse False\n"


SERVICE = """
import asyncio, os, threading
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray, torch
from epserve.client import Client
from epserve.pool.own_ray import OwnRay
from tests.support.fake_engine import FakeEngine, serving

def start_ray():
    # On a cluster of its own: without an address Ray joins whatever runs on this machine.
    OwnRay().start(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)

def ask_ray():
    @ray.remote(num_cpus=0.1)
    def double(x):
        return 2 * x
    assert ray.get(double.remote(21), timeout=150) == 42

async def main():
    {before}
    async with serving(FakeEngine()) as server:
        with Client(server.address) as client:
            ask = lambda: client.forward(1, torch.ones(2, 32))
            assert (await asyncio.to_thread(ask)).shape == (2, 32)
            {after}
            await asyncio.to_thread(ask_ray)
            assert (await asyncio.to_thread(ask)).shape == (2, 32)
            await asyncio.to_thread(ray.shutdown)
            assert (await asyncio.to_thread(ask)).shape == (2, 32)
    print("both work")

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("start_ray()", ""), ("", "start_ray()")], ids=["Ray, then gRPC", "gRPC, then Ray"]
)
def test_ray_and_grpc_in_one_process(before, after):
    """A gRPC server and a channel in a process that starts Ray, in both orders."""
    assert "both work" in run_python(SERVICE.format(before=before or "pass", after=after or "pass"))


@pytest.mark.parametrize("layer", [None, "0", 1.5, True, -1, 2**40])
def test_what_is_no_layer_number_is_refused_before_it_is_sent(layer):
    with pytest.raises(InvalidRequest, match="layer: "):
        OutgoingRequest(layer, torch.ones(1, 32), None, None, request_id="")
