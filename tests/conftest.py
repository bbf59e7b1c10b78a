"""Settings of all tests. `pytest --hypothesis-profile=long` tries 10,000 inputs for each property."""

import logging
import subprocess

import pytest
from hypothesis import settings

# The short profile tries the same inputs each time, however slowly, so that a run passes or fails for its code alone; the
# long one looks for new ones.
settings.register_profile("short", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=10_000, deadline=None)
settings.load_profile("short")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """ca, server (for localhost) and client: .pem and .key, good for a day."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "1")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign)
    return folder


@pytest.fixture(autouse=True)
def root_logger():
    """Handlers that a command added inside this process write to the stream of its test, which is closed afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)
