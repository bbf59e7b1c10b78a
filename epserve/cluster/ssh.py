"""Runs commands on a cluster's nodes over ssh, and gives the reason when a node cannot be reached.

It runs OpenSSH's client: jump hosts, agents and `~/.ssh/config` work as they do by hand.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from epserve.errors import ClusterError, ConfigError

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5  # a host in the same room answers in milliseconds
NODE_PROGRAM = Path(__file__).with_name("node.py")
REASONS = (  # OpenSSH's words, their meaning, the remedy
    ("Permission denied", "it refuses the key", "check auth.ssh_user and auth.ssh_private_key"),
    ("Connection refused", "nothing listens on its ssh port", "start sshd there"),
    ("timed out", "no answer", "check the address, the power and the firewall"),
    ("No route to host", "no route", "check the address, the power and the firewall"),
    ("Network is unreachable", "no route", "check this machine's network"),
    ("Could not resolve hostname", "its name does not resolve", "use an address"),
    ("HOST IDENTIFICATION HAS CHANGED", "its host key changed", "if it was reinstalled, remove its line from {known}"),
    ("UNPROTECTED PRIVATE KEY", "the key file is readable by others", "chmod 600 {key}"),
    ("No such identity", "the key file {key} does not exist", "check auth.ssh_private_key"),
)
NOISE = ("cannot set terminal process group", "no job control in this shell", "Permanently added")


class Unreachable(ClusterError):
    """ssh could not run anything on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    user: str
    key: Path
    known_hosts: Path
    proxy: str = ""

    def call(self, host: str, action: str, *, wait: float = 30.0, **arguments: Any) -> Any:
        """Runs one action of `epserve.cluster.node` on a node. The program's source travels with the call, so the node only
        needs Python. Raises Unreachable, or ClusterError when the action fails."""
        words = ["python3", "-", action, json.dumps(arguments)]
        done = self.run(host, shlex.join(words), timeout=wait, stdin=NODE_PROGRAM.read_text(encoding="utf-8"))
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise ClusterError(f"{host}: {action} failed: {_clean(done.stderr) or f'exit code {done.returncode}'}")
        return json.loads(lines[-1])

    def run(self, host: str, command: str, *, timeout: float, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs `command` in the environment of Ray's own commands: an interactive login shell that reads ~/.bashrc."""
        words = [*self.words(host), "bash", "--login", "-i", "-c", shlex.quote(f"source ~/.bashrc; {command}")]
        try:
            done = subprocess.run(
                words, input=stdin, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{host}: no answer within {timeout:.0f} s to: {command.splitlines()[0][:80]}") from None
        if done.returncode == 255:  # OpenSSH's own failures
            raise Unreachable(f"{host}: {self._explain(done.stderr)}")
        return done

    def words(self, host: str) -> list[str]:
        """Returns the ssh command line up to the remote command."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "accept-new",  # a changed key is an error, a new host is accepted
            "UserKnownHostsFile": self.known_hosts,
            "LogLevel": "ERROR",
            "ServerAliveInterval": 5,
        }
        if self.proxy:
            options["ProxyCommand"] = self.proxy
        words = ["ssh", "-i", str(self.key)]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        return [*words, f"{self.user}@{host}"]

    def _explain(self, stderr: str) -> str:
        if not self.key.is_file():
            return f"the key file {self.key} does not exist; check auth.ssh_private_key"
        for text, meaning, remedy in REASONS:
            if text.lower() in stderr.lower():
                return f"{meaning}; {remedy}".format(key=self.key, known=self.known_hosts)
        return _clean(stderr) or "ssh failed without a word"


def check_ssh(key: Path) -> None:
    """Raises ConfigError for a missing client or key, once instead of for each node."""
    if shutil.which("ssh") is None:
        raise ConfigError("ssh is not installed here: install OpenSSH's client (openssh-client)")
    try:
        key.open("rb").close()
    except OSError as error:
        raise ConfigError(f"auth.ssh_private_key {key} cannot be read: {error.strerror}") from None


def each(hosts: Iterable[str], work: Callable[[str], T]) -> dict[str, T | ClusterError]:
    """Runs `work` on all hosts at once. A node's ClusterError is its result."""

    def one(host: str) -> T | ClusterError:
        try:
            return work(host)
        except ClusterError as error:
            return error

    hosts = tuple(hosts)
    with ThreadPoolExecutor(max_workers=max(len(hosts), 1)) as pool:
        return dict(zip(hosts, pool.map(one, hosts), strict=True))


def _clean(stderr: str) -> str:
    lines = [line for line in stderr.strip().splitlines() if line and not any(noise in line for noise in NOISE)]
    return "\n".join(lines[-8:])
