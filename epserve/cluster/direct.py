"""Runs the commands of a cluster file over plain ssh, without `ray up`: no autoscaler runs, and no node heals by itself.

It is for provider local. The steps are those of `ray up`: file mounts, setup commands, start commands, in this order, head first.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from epserve.errors import ClusterError

from .file import ClusterFile
from .ssh import Ssh, each

SLOW_START = "timed out during startup"  # Ray's own start has a fixed limit of 30 s, and a busy machine takes longer
AUTOSCALER = re.compile(r"\s--autoscaling-config=\S+")  # the option names a file that only `ray up` makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """Starts Ray on nodes by the cluster file's commands. Raises ClusterError with every node's reason."""

    file: ClusterFile
    ssh: Ssh
    data: dict[str, Any]
    """The cluster file as it was written."""

    @classmethod
    def read(cls, file: ClusterFile, ssh: Ssh) -> Direct:
        return cls(file=file, ssh=ssh, data=yaml.safe_load(file.path.read_text(encoding="utf-8")))

    def start(self, hosts: Sequence[str]) -> None:
        """Sets up and starts Ray on these nodes. The others are left alone."""
        head, limit = self.file.head_ip, self.file.settings.up_timeout_s
        for kind, group in (("head", [head]), ("worker", self.file.worker_ips)):
            chosen = [host for host in group if host in hosts]
            set_up = self._commands("initialization", "setup", f"{kind}_setup")
            start = self._commands(f"{kind}_start_ray")
            done = each(chosen, partial(self._node, set_up=set_up, start=start, limit=limit))
            problems = [str(error) for error in done.values() if isinstance(error, ClusterError)]
            if problems:
                raise ClusterError("the nodes could not be set up:" + "".join(f"\n  - {each}" for each in problems))

    def _commands(self, *kinds: str) -> list[str]:
        commands = [command for kind in kinds for command in self.data.get(f"{kind}_commands", [])]
        return [AUTOSCALER.sub("", command) for command in commands]

    def _node(self, host: str, *, set_up: list[str], start: list[str], limit: float) -> None:
        for remote, local in self.data.get("file_mounts", {}).items():
            self._copy(host, local, remote, limit)
        self._run(host, set_up, limit)
        try:
            self._run(host, start, limit)
        except ClusterError as error:
            if SLOW_START not in str(error):
                raise
            self._run(host, start, limit)

    def _run(self, host: str, commands: list[str], limit: float) -> None:
        for command in commands:
            done = self.ssh.run(host, f"export RAY_HEAD_IP={self.file.head_ip}; {command}", timeout=limit)
            if done.returncode != 0:
                said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
                raise ClusterError(f"{host}: {command.splitlines()[0][:100]!r} ended with {done.returncode}: {said}")

    def _copy(self, host: str, local: str, remote: str, limit: float) -> None:
        """Copies as `ray up` does: a folder's contents, or a file with the folders above it."""
        source = Path(local).expanduser()
        slash = "/" if source.is_dir() else ""
        excludes = [f"--exclude={pattern}" for pattern in self.data.get("rsync_exclude", [])]
        *ssh, target = self.ssh.words(host)
        where = remote if slash else str(Path(remote).parent)
        made = self.ssh.run(host, f"mkdir -p {where}", timeout=60)  # without quotes, ~ is the node's home directory
        words = ["rsync", "-az", *excludes, "-e", shlex.join(ssh), f"{source}{slash}", f"{target}:{remote}{slash}"]
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=limit, check=False
        )
        if made.returncode or done.returncode:
            raise ClusterError(
                f"{host}: {local} could not be copied to {remote}: {(made.stderr + done.stderr).strip()[-400:]}"
            )
