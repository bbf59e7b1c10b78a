"""Hosts of our own on one machine: see fake_hosts.sh. Needs root, iproute2, openssh-server, openssh-client, rsync."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).with_name("fake_hosts.sh")
NEEDS = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync", "unshare": "util-linux"}
OPERATOR = "10.88.0.1"


def why_not() -> str:
    """Why this machine cannot have hosts of its own, or nothing."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [package for tool, package in NEEDS.items() if shutil.which(tool, path=path) is None]
    if missing:
        return f"apt-get install {' '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True, text=True)
    return f"this kernel or container forbids namespaces: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """`addresses`: of the hosts; the operator is at 10.88.0.1."""

    tag: str
    folder: Path
    addresses: tuple[str, ...] = field(default_factory=tuple)

    @property
    def key(self) -> Path:
        return self.folder / "key"

    def operator(self, *words: str, timeout: float, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the operator's namespace, with a home directory of its own."""
        home = self.folder / "operator"
        home.mkdir(exist_ok=True)
        environment = {**os.environ, "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["ip", "netns", "exec", f"{self.tag}-op", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def epserve(self, *words: str, timeout: float, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.operator(sys.executable, "-m", "epserve", *words, timeout=timeout, check=check)

    def inside(self, number: int, *words: str) -> str:
        """Run a command on a host, without ssh."""
        sshd = subprocess.run(
            ["pgrep", "-f", f"sshd -D -e -f {self.folder}/host{number}/"], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        return subprocess.run(
            ["nsenter", "--target", sshd, "--net", "--pid", "--mount", "--uts", *words],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def processes(self, number: int) -> list[str]:
        """Command lines of what runs on a host besides its sshd."""
        lines = self.inside(number, "ps", "-eo", "args", "--no-headers").splitlines()
        return [line for line in lines if "sshd" not in line and not line.startswith("ps ")]

    def left(self, seconds: float = 10.0) -> dict[int, list[str]]:
        """What still runs besides the sshd of each host; a session that is over may take a moment to go."""
        end = time.monotonic() + seconds
        while True:
            found = {number: self.processes(number) for number in range(len(self.addresses))}
            if not any(found.values()) or time.monotonic() > end:
                return found
            time.sleep(0.2)

    def cable(self, number: int, *, plugged: bool) -> None:
        state = "up" if plugged else "down"
        subprocess.run(["ip", "-n", f"{self.tag}-op", "link", "set", f"host{number}", state], check=True)


@contextlib.contextmanager
def fake_hosts(count: int, folder: Path):
    """Hosts that see this interpreter and this checkout; gone afterwards, with everything that ran on them."""
    tag = f"eps{os.getpid()}"
    shared = {sys.base_prefix, sys.prefix, str(Path(__file__).parent.parent.parent)}
    addresses = tuple(f"10.88.0.{10 + number}" for number in range(count))
    try:
        subprocess.run([SCRIPT, "up", tag, str(count), folder, *sorted(shared)], check=True, timeout=200)
        yield Hosts(tag=tag, folder=folder, addresses=addresses)
    finally:
        subprocess.run([SCRIPT, "down", tag, folder], check=True, timeout=200)
