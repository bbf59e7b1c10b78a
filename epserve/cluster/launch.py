"""Carries out `epserve cluster up | status | logs | down`.

`up` looks at every node, runs `ray up`, and waits until every node has joined, or names the missing nodes with the reasons.
Then it starts the service on the head, or refuses with the reason. `down` stops the service, then Ray on the workers, then
Ray on the head.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epserve.config import Config, load_config
from epserve.errors import ClusterError, ConfigError

from . import node
from .diagnosis import check_nodes, check_resources, probe, why_missing
from .direct import SLOW_START, Direct
from .file import ClusterFile
from .ssh import Ssh, check_ssh, each

HOME = Path("~/.epserve")  # on the operator's machine and on the head, with one folder a cluster
JOIN_SLICE_S = 15.0  # the length of one wait on the head. Between two waits the missing nodes are examined
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Holds the output of `epserve cluster status`. `nodes`: address -> Ray's record. `facts`: address -> probe or error."""

    up: bool
    nodes: dict[str, dict[str, Any]]
    facts: dict[str, Any]
    service: dict[str, Any] | None
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        ready = self.service is None or bool(self.service["ready"])
        return self.up and ready and not self.problems


class Cluster:
    """Runs the commands on the nodes of one cluster file."""

    def __init__(self, file: ClusterFile, *, say: Say = print):
        """Raises ConfigError when this machine lacks the ssh client, the key, or a folder for known hosts."""
        self.file, self.say = file, say
        check_ssh(file.ssh_key)
        self.home = HOME.expanduser() / file.name
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"{self.home}: {error.strerror}; set HOME to a folder that can be written") from None
        known = self.home / "known_hosts"
        self.ssh = Ssh(user=file.ssh_user, key=file.ssh_key, known_hosts=known, proxy=file.ssh_proxy)
        self.remote = str(HOME / file.name)

    def up(
        self, *, restart: bool = False, restart_service: bool = False, check: bool = True, direct: bool = False
    ) -> dict[str, Any]:
        """Starts the cluster and returns the service's ready record (host, port, pid). It is empty without a service.

        Args:
            restart: restarts Ray, and with it every actor, on nodes that already run it.
            restart_service: restarts only the service.
            check: refuses to start when a node has a problem.
            direct: runs the file's commands over plain ssh instead of `ray up`.

        Raises:
            ClusterError: the message has every node's reason.
        """
        if direct and not self.file.local:
            raise ConfigError(f"provider {self.file.provider}: only `ray up` can make its instances")
        service = self._service_config()  # a wrong configuration is an error before anything is started
        running = self._before(service, check=check)
        self._make_token()
        keep = bool(running) and not restart
        if keep:
            self.say("Ray is already up: it and its actors are left alone")
        if direct:
            start = time.monotonic()
            Direct.read(self.file, self.ssh).start(
                [host for host in self.file.nodes if not keep or host not in running]
            )
            self.say(f"the nodes were started in {time.monotonic() - start:.0f} s")
        else:
            self._ray_up(no_restart=keep)
        nodes = self._join()
        if service is None:
            return {}
        check_resources(service, nodes)
        return self._start(service, restart=restart_service or restart)

    def status(self) -> Status:
        gcs, nodes = self._gcs(), {}
        facts = each(self._addresses(), lambda host: probe(self.ssh, host, gcs))
        problems = [str(fact) for fact in facts.values() if isinstance(fact, ClusterError)]
        head = facts.get(self._head())
        up = isinstance(head, dict) and head["ray"]
        if up:
            nodes = self.ssh.call(self._head(), "nodes", gcs=gcs, count=0, timeout=0, wait=60)["nodes"]
            problems += check_nodes({host: fact for host, fact in facts.items() if isinstance(fact, dict)}, self.file)
            alive = sum(node["alive"] for node in nodes.values())
            if alive < self.file.num_nodes:
                problems.append(f"{alive} of {self.file.num_nodes} nodes are alive")
        service = None
        if self.file.service is not None and isinstance(head, dict):
            service = self.ssh.call(self._head(), "service", folder=self.remote)
        return Status(up=up, nodes=nodes, facts=facts, service=service, problems=problems)

    def logs(self, lines: int = 100) -> str:
        return self.ssh.call(self._head(), "log", folder=self.remote, lines=lines)["text"]

    def down(self, *, grace: float = 5.0) -> list[str]:
        """Stops everything that belongs to this cluster. Returns the processes that could not be stopped, one line each."""
        if not self.file.local:
            self._cloud_down()
            return []
        head, gcs, problems = self.file.head_ip, self._gcs(), []

        def stop(host: str) -> dict[str, Any]:
            return self.ssh.call(host, "stop-ray", gcs=gcs, name=self.file.name, wait=60)

        def stop_head(host: str) -> int:
            return self.ssh.call(host, "stop-service", folder=self.remote, grace=grace, wait=grace + 30)["stopped"]

        for host, stopped in each([head], stop_head).items():
            if isinstance(stopped, ClusterError):
                problems.append(str(stopped))
            else:
                self.say(f"{host}: the service is stopped" if stopped else f"{host}: no service was running")
        for group in (self.file.worker_ips, (head,)):  # a worker without its head would wait a minute for it
            for host, found in each(group, stop).items():
                if isinstance(found, ClusterError):
                    problems.append(str(found))
                elif found["left"]:
                    problems.append(f"{host}: processes {found['left']} did not end")
                else:
                    self.say(f"{host}: {found['stopped']} Ray processes are stopped")
        node.forget(self.file.name)
        return problems

    # Steps of `up`

    def _service_config(self) -> Config | None:
        return None if self.file.service is None else load_config(self.file.service)

    def _before(self, service: Config | None, *, check: bool) -> list[str]:
        """Looks at every node at once. Returns the nodes whose Ray runs already, or none if the head's does not.

        Raises ClusterError with every problem found.
        """
        if not self.file.local:
            return self._ray("get-head-ip", check=False)
        gcs = self._gcs()
        paths = [str(service.model.path)] if service is not None else []
        facts = each(self.file.nodes, lambda host: probe(self.ssh, host, gcs, paths))
        problems = [str(fact) for fact in facts.values() if isinstance(fact, ClusterError)]
        reached = {host: fact for host, fact in facts.items() if isinstance(fact, dict)}
        problems += check_nodes(reached, self.file)
        if problems and check:
            raise ClusterError("nothing was started:" + "".join(f"\n  - {problem}" for problem in problems))
        self.say(f"{len(reached)} nodes answer")
        running = [host for host, fact in reached.items() if fact["ray"]]
        return running if self.file.head_ip in running else []

    def _make_token(self) -> None:
        token = self.file.token_file
        if token is not None and not token.exists():
            token.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            self.say(f"a token was made: {token}")

    def _ray_up(self, *, no_restart: bool) -> None:
        words = ["up", "-y", "--no-config-cache", str(self.file.path)] + ["--no-restart"] * no_restart
        self.say("ray up ...")
        start = time.monotonic()
        log = self.home / "ray-up.log"
        code = self._logged(words, log)
        if code != 0 and SLOW_START in log.read_text(encoding="utf-8", errors="replace"):
            self.say("Ray took longer to start than it gives itself; ray up once more ...")
            code = self._logged(words, log)
        if code != 0:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
            raise ClusterError(f"`ray up` ended with {code}; the end of {log}:\n{tail}")
        self.say(f"ray up took {time.monotonic() - start:.0f} s")

    def _logged(self, words: list[str], log: Path) -> int | str:
        """Runs Ray's command line with its output in `log`. Returns the exit code, or the reason why there is none."""
        limit = self.file.settings.up_timeout_s
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self._ray_words(), *words], env=self._environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True)  # fmt: skip
            try:
                return process.wait(limit)
            except BaseException as error:  # a timeout or Ctrl-C must end `ray up`, which retries for ever
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return f"nothing after {limit:.0f} s (metadata.epserve.up_timeout_s)"

    def _join(self) -> dict[str, dict[str, Any]]:
        """Waits for all nodes and returns their resources. `why_missing` examines missing nodes during the wait."""
        head, gcs, wanted = self._head(), self._gcs(), self.file.num_nodes
        start = time.monotonic()
        deadline = start + self.file.settings.join_timeout_s
        while True:
            left = deadline - time.monotonic()
            wait = max(min(JOIN_SLICE_S, left), 0)
            found = self.ssh.call(head, "nodes", gcs=gcs, count=wanted, timeout=wait, wait=wait + 60)["nodes"]
            alive = {host: node for host, node in found.items() if node["alive"]}
            if len(alive) >= wanted:
                self.say(f"{len(alive)} nodes joined after {time.monotonic() - start:.0f} s")
                return alive
            missing = [host for host in self.file.nodes if host not in alive] if self.file.local else []
            reasons, hopeless = why_missing(self.ssh, self.file, missing)
            if hopeless or left <= 0:
                raise ClusterError(
                    f"{len(alive)} of {wanted} nodes joined within {time.monotonic() - start:.0f} s:"
                    + "".join(f"\n  - {reason}" for reason in reasons)
                    + "\nRay runs on the others; `epserve cluster up` again goes on from here, `down` stops it"
                )
            self.say(f"{len(alive)} of {wanted} nodes joined; waiting for {', '.join(missing) or 'the others'}")

    def _start(self, service: Config, *, restart: bool) -> dict[str, Any]:
        head = self._head()
        assert self.file.service is not None
        if restart:
            grace = service.scheduler.drain_timeout_s
            self.ssh.call(head, "stop-service", folder=self.remote, grace=grace, wait=grace + 30)
        text = self.file.service.read_text(encoding="utf-8")
        started = self.ssh.call(head, "start-service", folder=self.remote, config=text)
        if not started["started"]:
            same = "" if started["same"] else " with another configuration; --restart-service applies the new one"
            self.say(f"the service already runs{same}")
        else:
            self.say("the service is starting ...")
        limit = service.cluster.start_timeout_s + 30
        found = self.ssh.call(head, "wait-service", folder=self.remote, timeout=limit, wait=limit + 30)
        if not found["ready"]:
            self.ssh.call(head, "stop-service", folder=self.remote, grace=5.0, wait=40)
            raise ClusterError(f"the service did not become ready; the end of its log:\n{found['tail']}")
        ready = found["ready"]
        host = head if ready["host"] in ("0.0.0.0", "::") else ready["host"]
        self.say(f"ready: grpc on {host}:{ready['port']}")
        return {**ready, "host": host}

    # Ray's own command line

    def _ray_words(self) -> list[str]:
        ray = Path(sys.executable).with_name("ray")
        if not ray.exists():
            raise ConfigError(f"{ray} does not exist: install Ray beside epserve")
        return [str(ray)]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.file.local:  # with provider local the second autoscaler silently starts no workers
            environment["RAY_UP_enable_autoscaler_v2"] = "0"
        return environment

    def _ray(self, *words: str, check: bool = True) -> list[str]:
        command = [*self._ray_words(), *words, str(self.file.path)]
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode != 0 and check:
            raise ClusterError(f"`ray {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()[-800:]}")
        return done.stdout.split() if done.returncode == 0 else []

    def _cloud_down(self) -> None:
        self._ray("down", "-y")
        self.say("the instances are terminated")

    def _head(self) -> str:
        return self.file.head_ip or self._ray("get-head-ip")[-1]

    def _addresses(self) -> tuple[str, ...]:
        return self.file.nodes if self.file.local else (self._head(),)

    def _gcs(self) -> str:
        """Returns the head's address in the words of Ray's processes. In a cloud only the head knows that inner address."""
        return f"{self.file.head_ip}:{self.file.port}" if self.file.local else "auto"
