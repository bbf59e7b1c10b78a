"""`python -m epserve.probe`: what containers and kubelets ask, with TLS and without."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from epserve.probe import SERVICE
from epserve.protocol import epserve_pb2

KINDS = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "tls.key", folder / "tls.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=epserve", "-addext", "subjectAltName=DNS:epserve.epserve.svc", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


@pytest.fixture(params=["plain", "tls"])
def server(request, certificate):
    """(port, set_state, options of the probe)."""
    servicer = health.HealthServicer()
    made = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
    if request.param == "plain":
        port, options = made.add_insecure_port("127.0.0.1:0"), []
    else:
        key, cert = (path.read_bytes() for path in certificate)
        port = made.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
        options = ["--tls-ca", str(certificate[1]), "--server-name", "epserve.epserve.svc"]
    made.start()
    yield port, lambda state: servicer.set(SERVICE, state), options
    made.stop(0)


def probe(port: int, *options: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "epserve.probe", f"127.0.0.1:{port}", "--timeout", "60", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.strip()


def test_only_serving_is_good(server):
    port, set_state, options = server
    assert probe(port, *options)[0] == 1, "a service that nobody knows is not serving"
    set_state(KINDS.NOT_SERVING)
    assert probe(port, *options) == (1, "NOT_SERVING")
    set_state(KINDS.SERVING)
    assert probe(port, *options) == (0, "SERVING")


def test_a_closed_port_is_not_serving():
    with socket.socket() as mute:  # bound, so that nobody else gets the port, but it does not listen
        mute.bind(("127.0.0.1", 0))
        code, said = probe(mute.getsockname()[1])
    assert code == 1 and said.startswith("UNAVAILABLE")


def test_the_probe_asks_for_the_service_that_we_publish():
    assert epserve_pb2.DESCRIPTOR.services_by_name["Experts"].full_name == SERVICE
