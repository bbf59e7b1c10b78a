"""docker/build.sh in a plain Debian root file system: what the CPU image's Dockerfile runs, without an engine.

Ends with the demo as the image's user: real ranks, compared with transformers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.hosts import why_not as no_namespaces

ROOT = Path(__file__).parent.parent.parent
MIRROR = "http://deb.debian.org/debian"
CHROOT = Path(__file__).parent / "chroot.sh"
COPIED = (
    "docker",
    "requirements",
    "epserve",
    "all2all",
    "experts",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
NEEDED_BYTES = 6 << 30


def why_not() -> str:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        return "the locked torch is the one for x86-64 Linux"
    if os.geteuid() != 0:
        return "needs root, to change the root file system"
    if shutil.which("debootstrap", path=path) is None:
        return "apt-get install debootstrap"
    try:
        urllib.request.urlopen(f"{MIRROR}/dists/bookworm/Release", timeout=10).close()
    except (urllib.error.URLError, OSError) as error:
        return f"Debian's mirror cannot be reached: {error}"
    return no_namespaces()


pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_the_cpu_images_steps_build_and_its_user_runs_the_demo(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("image")
    if shutil.disk_usage(folder).free < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of disk below {folder}")
    root = folder / "root"
    try:
        bootstrap(root)
        source = root / "src"
        source.mkdir()
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
        for step in (("system", "cpu"), ("python", "cpu"), ("user",), ("check",)):
            done = inside(root, 0, f"cd /src && docker/build.sh {' '.join(step)}", timeout=900)
            assert done.returncode == 0, f"{step}: {(done.stdout + done.stderr)[-3000:]}"
        shutil.rmtree(source)  # the image's second stage has no sources either
        demo = inside(root, 10001, "cd /tmp && HOME=/home/epserve /opt/epserve/bin/epserve demo --ranks 2 --clients 1",
                      timeout=400)  # fmt: skip
        assert demo.returncode == 0 and "every answer agrees with transformers" in demo.stdout, (
            demo.stdout + demo.stderr
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


def bootstrap(root: Path) -> None:
    """Once more where the mirror did not answer for a moment."""
    words = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", root, MIRROR]
    for _ in range(2):
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        if done.returncode == 0:
            return
        shutil.rmtree(root, ignore_errors=True)
    raise AssertionError(done.stdout[-3000:] + done.stderr[-1000:])


def inside(root: Path, user: int, script: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Where pip is told of local wheels and certificates, so is the one inside."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    binds = [wheels] if os.path.isdir(wheels) else []
    if binds:
        environment["TORCH_LINKS"] = wheels
    certificates = os.environ.get("PIP_CERT", "")
    if os.path.isfile(certificates):
        shutil.copy(certificates, root / "etc" / "ssl" / "certs" / "ca-certificates.crt")
        environment["PIP_CERT"] = "/etc/ssl/certs/ca-certificates.crt"
    environment["BIND"] = " ".join(binds)
    words = [str(CHROOT), str(root), str(user), "/bin/sh", "-euc", script]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout)
