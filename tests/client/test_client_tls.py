"""Where TLS of client and server does not fit: what a client says, and that it tries again only where that may help."""

import asyncio
import subprocess
import time

import pytest
import torch

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy, Tls
from epserve.errors import ConfigError, NotReady
from tests.support.clients import serving_in_thread
from tests.support.fake_engine import FakeEngine, serving

NOBODY = "127.0.0.1:1"
X = torch.ones(2, 32)
ONCE = RetryPolicy(attempts=1)
PATIENT_S = 60.0
"""A client would try so long; what fails at once takes a small part of it."""


@pytest.fixture(scope="module")
def odd(certificates):
    """Beside the usual ones, of the same authority: `elsewhere`, for another host's name, and `expired`, in 2020."""

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=certificates, check=True, capture_output=True, timeout=60)

    (certificates / "other_names").write_text("subjectAltName=DNS:elsewhere.example\n")
    (certificates / "index").touch()
    (certificates / "config").write_text(
        "[ca]\ndefault_ca = here\n[here]\ndatabase = index\nnew_certs_dir = .\nrand_serial = yes\n"
        "default_md = sha256\npolicy = any\n[any]\ncommonName = supplied\n"
    )
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name, names, begin, end in (
        ("elsewhere", "other_names", "20200101000000Z", "20991231000000Z"),
        ("expired", "names", "20200101000000Z", "20200102000000Z"),
    ):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("-cert", "ca.pem", "-keyfile", "ca.key", "-extfile", names, "-startdate", begin, "-enddate", end)
        openssl("ca", "-batch", "-notext", "-config", "config", *sign, "-in", f"{name}.csr", "-out", f"{name}.pem")
    return certificates


def tls_server(folder, name: str = "server", **more):
    return serving_in_thread(FakeEngine(), tls_cert=folder / f"{name}.pem", tls_key=folder / f"{name}.key", **more)


MISFITS = {
    "an authority that did not sign": ("server", {"ca": "client.pem"}, r"no authority in tls\.ca .* has signed"),
    "the system's authorities": ("server", {}, r"no authority .*none: the system's.* has signed"),
    "another host's name": ("elsewhere", {"ca": "ca.pem"}, r"for other names than the target's host.*server_name="),
    "a name that is said and wrong": ("server", {"ca": "ca.pem", "server_name": "x.example"}, r"for other names"),
    "an old certificate": ("expired", {"ca": "ca.pem"}, r"has expired"),
}


class TestAtOnce:
    @pytest.mark.parametrize("what", MISFITS)
    def test_what_the_next_attempt_would_find_too(self, odd, what):
        name, given, message = MISFITS[what]
        tls = Tls(**{key: odd / value if key == "ca" else value for key, value in given.items()})
        with tls_server(odd, name) as server:
            options = ClientOptions(tls=tls, timeout_s=PATIENT_S)
            with Client(f"localhost:{server.port}", options) as client:
                before = time.monotonic()
                with pytest.raises(ConfigError, match=message) as raised:
                    client.forward(1, X)
                with pytest.raises(ConfigError, match=message):
                    client.wait_ready(PATIENT_S)
                with pytest.raises(ConfigError, match=message):
                    client.register_region(4096).__enter__()
                assert time.monotonic() - before < PATIENT_S / 3
        assert f":{server.port}" in str(raised.value), "gRPC's own words come along"

    async def test_a_port_that_has_none(self, certificates):
        options = ClientOptions(tls=Tls(ca=certificates / "ca.pem"), timeout_s=PATIENT_S)
        async with serving(FakeEngine()) as server, AsyncClient(f"localhost:{server.port}", options) as client:
            before = time.monotonic()
            with pytest.raises(ConfigError, match="the port speaks no TLS; leave tls and tls_ca out"):
                await client.forward(1, X)
            async with client.stream() as stream:
                with pytest.raises(ConfigError, match="the port speaks no TLS"):
                    await stream.forward(1, X)
            assert time.monotonic() - before < PATIENT_S / 3

    def test_the_name_that_is_said_counts(self, odd):
        tls = Tls(ca=odd / "ca.pem", server_name="elsewhere.example")
        with (
            tls_server(odd, "elsewhere") as server,
            Client(f"localhost:{server.port}", ClientOptions(tls=tls)) as client,
        ):
            assert torch.equal(client.forward(1, X), X)


class TestAgain:
    def test_a_port_that_wants_tls_looks_like_one_that_stops(self, certificates):
        tls = Tls(ca=certificates / "ca.pem")
        with tls_server(certificates, tls_client_ca=certificates / "ca.pem") as server:
            for given in (None, tls):  # without TLS, and with it but without the certificate that this port asks for
                retry = RetryPolicy(attempts=5, first_s=0.01)
                with Client(f"127.0.0.1:{server.port}", ClientOptions(retry=retry, tls=given)) as client:
                    with pytest.raises(NotReady, match=r"may want TLS.*tls_ca.*tls_client_ca.*cert=") as raised:
                        client.forward(1, X)
                    assert "127.0.0.1" in str(raised.value)
                    assert raised.value.__notes__ == ["after 5 attempts in 60 s at most"]

    def test_one_of_several_front_ends_does_not_stand_for_the_others(self, certificates):
        """A client that balances waits for those that are away."""
        tls = Tls(ca=certificates / "client.pem", server_name="localhost")
        options = ClientOptions(retry=RetryPolicy(attempts=3, first_s=0.01), tls=tls, balance="round_robin")
        refused = pytest.raises(NotReady, match="no authority in tls")
        with (
            tls_server(certificates) as server,
            Client(f"127.0.0.1:{server.port}", options) as client,
            refused as raised,
        ):
            client.forward(1, X)
        assert raised.value.__notes__ == ["after 3 attempts in 60 s at most"]

    async def test_a_port_that_speaks_something_else(self):
        async def speak(reader, writer):
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
            await writer.drain()
            writer.close()  # from Python 3.12 on the server waits for its connections when it ends

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, AsyncClient(f"127.0.0.1:{port}", ClientOptions(retry=ONCE)) as client:
            with pytest.raises(NotReady, match="speaks no gRPC"):
                await client.forward(1, X)

    async def test_a_service_that_goes_away_is_not_asked_about_tls(self):
        event = asyncio.Event()

        async def hang(batch):
            event.set()
            await asyncio.sleep(50)

        options = ClientOptions(retry=ONCE)
        async with serving(FakeEngine(hang)) as server, AsyncClient(server.address, options) as client:
            call = asyncio.ensure_future(client.forward(1, X))
            await event.wait()
            await server.stop(grace=0)
            with pytest.raises(NotReady) as raised:
                await call
        assert "TLS" not in str(raised.value)


def test_files_that_hold_no_certificate(certificates):
    for tls, message in (
        (Tls(ca=certificates / "names"), r"tls\.ca \(tls_ca\): .*names holds no certificate"),
        (
            Tls(cert=certificates / "client.pem", key=certificates / "server.key"),
            "are no PEM pair without a password",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Client(NOBODY, ClientOptions(tls=tls))
