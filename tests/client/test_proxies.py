"""A proxy of the environment: asked for no target of this host, and named where a connection fails at it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest
import torch

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.errors import NotReady
from epserve.probe import serving
from epserve.process import proxies
from tests.support.observed import watched

ONCE = ClientOptions(retry=RetryPolicy(attempts=1))


@pytest.fixture
def refusing():
    """The port of a proxy that is down: bound, so that nobody else gets it."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        yield mute.getsockname()[1]


@pytest.fixture(params=proxies.VARIABLES)
def proxied(request, monkeypatch, refusing):
    for name in (*proxies.VARIABLES, "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, f"http://user:secret@127.0.0.1:{refusing}")
    return request.param


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("127.1.2.3:1", True),
        ("unix:/run/epserve.sock", True),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", True),
        ("ipv6:%5B::1%5D:1", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("10.0.0.1:50051", False),
        ("localhost.example.com:50051", False),
        ("[fe80::1]:50051", False),
    ],
)
def test_which_targets_are_this_host(target, local):
    assert proxies.is_local(target) == local
    assert bool(proxies.channel_options(target)) == local


async def test_a_service_on_this_host_is_reached_past_the_proxy(proxied):
    async with watched() as server:
        host, _, port = server.address.rpartition(":")
        assert host == "127.0.0.1"
        async with AsyncClient(server.address, ONCE) as client:
            assert (await client.status(timeout=20)).state == "serving"
            model = await client.model(timeout=20)
            x = torch.ones(2, model.hidden)
            assert (await client.forward(model.layers[0], x, timeout=20)).shape == x.shape
        command = [sys.executable, "-m", "epserve.probe", f"localhost:{port}", "--timeout", "20"]
        probed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert probed.stdout.strip() == "SERVING"


def test_a_connection_that_fails_at_the_proxy_names_its_variable_and_no_password(proxied, refusing):
    with Client("10.255.255.1:50051", ONCE) as client, pytest.raises(NotReady) as told:
        client.model(timeout=20)
    text = str(told.value)
    assert (
        f"went to the proxy 127.0.0.1:{refusing} of the environment's {proxied}; list the service's host in no_proxy"
        in text
    )
    assert "secret" not in text


def test_a_connection_that_fails_elsewhere_does_not_name_the_proxy(proxied, refusing):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{mute.getsockname()[1]}"
        with Client(target, ONCE) as client, pytest.raises(NotReady) as told:
            client.model(timeout=20)
        assert "proxy" not in str(told.value) and target in str(told.value)
        assert "proxy" not in serving(target, timeout_s=20)
