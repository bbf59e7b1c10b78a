"""The program of a node: probes it, ends one cluster's Ray processes, and starts and stops the service.

It uses the standard library only and imports nothing of this package. `ssh.py` sends this file to the node's `python3 -`, so
it works before anything is installed there. Cluster files call it as `python3 -m epserve.cluster.node ACTION ...`.
Every action prints one line of JSON last, except those for shells: `network`, whose output is evaluated, and `wait-nodes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("ray", "torch", "epserve")
STATE, CONFIG, READY, LOG = "state.json", "service.yaml", "ready.json", "service.log"
SUPERVISOR = "epserve.cluster.supervise"
MAX_LOG_BYTES = 64 << 20
SUPERVISOR_START_S = 20.0  # an interpreter's start, on a busy machine


# Looking around


def probe(gcs: str, paths: list[str] | None = None) -> dict:
    """Returns facts that decide whether this node can join and serve. Changes nothing. `gcs` "auto": the node's own cluster."""
    address, port = _split(gcs)
    facts: dict = {"host": socket.gethostname(), "python": sys.version.split()[0], "time": time.time()}
    facts["packages"] = {name: _version(name) for name in PACKAGES}
    facts["rsync"] = shutil.which("rsync") is not None
    facts["disk_free"] = shutil.disk_usage("/tmp").free
    facts["gpus"] = _gpus()
    facts["resolves_to"] = _resolve(facts["host"])
    own, table = own_ray(gcs), processes()
    facts["ray"] = any(Path(table.get(pid, [""])[0]).name == "raylet" for pid in own)  # other processes may outlive it
    facts["missing"] = [path for path in paths or () if not os.path.exists(os.path.expanduser(path))]
    facts["port_taken_by"] = "" if own else _port_user(address, port)
    return facts


def _version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _port_user(address: str, port: int) -> str:
    """Returns the listener on a port of this node. Empty when the port is free or the address is another node's."""
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((address, port))
            return ""
        except OSError as error:
            if "assign" in str(error):  # EADDRNOTAVAIL: the address is another node's
                return ""
    wanted, listening = f":{port:04X}", "0A"
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for fields in (line.split() for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]):
                if fields[1].endswith(wanted) and fields[3] == listening:
                    inodes.add(f"socket:[{fields[9]}]")
    for pid, words in processes().items():
        with contextlib.suppress(OSError):
            if any(os.readlink(entry.path) in inodes for entry in os.scandir(f"/proc/{pid}/fd")):
                return f"process {pid} ({' '.join(words)[:80]})"
    return "another user's process"


def network(peer: str) -> None:
    """Prints the environment that binds gloo and NCCL to the interface that leads to `peer` (or owns that address).

    Without it gloo binds to the address that this host's name resolves to: on Debian-like systems 127.0.1.1, without peers.
    """
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        probe_socket.connect((peer, 9))  # with UDP this sends nothing and chooses the route
        own = probe_socket.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # SIOCGIFADDR fails for interfaces without an IPv4 address
                found = fcntl.ioctl(probe_socket.fileno(), 0x8915, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == own:
                    print(f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}")
                    return
    sys.exit(f"no interface has the address {own} that leads to {peer}")


# Processes


def processes() -> dict[int, list[str]]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
                found[int(name)] = [word for word in words if word]
    return found


def own_ray(gcs: str) -> set[int]:
    """Returns the Ray processes of the cluster whose head is `gcs` (address:port), and everything that they started.

    `ray stop` would end the Ray processes of every cluster and user on this machine.
    """
    address, port = _split(gcs)
    gcs = f"{address}:{port}"
    table = processes()
    marks = (f"--gcs-address={gcs}", f"--gcs_address={gcs}", f"--address={gcs}")
    found = set()
    for pid, words in table.items():
        line = " ".join(words)
        server = (
            "gcs_server" in line and f"--gcs_server_port={port}" in words and f"--node-ip-address={address}" in words
        )
        client = "ray" in line and any(f"{mark} " in f"{line} " for mark in marks)
        if (server or client) and SUPERVISOR not in line:
            found.add(pid)
    return (found | descendants(found)) - _ancestors(os.getpid())


def _parents() -> dict[int, int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = Path("/proc", name, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(name)] = int(fields[1])
    return parents


def descendants(roots: set[int]) -> set[int]:
    parents, found = _parents(), set(roots)
    grown = True
    while grown:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
        grown = bool(new)
    return found - roots


def _ancestors(pid: int) -> set[int]:
    parents, found = _parents(), {pid}
    while (pid := parents.get(pid, 0)) > 0:
        found.add(pid)
    return found


def _alive(pids: set[int]) -> set[int]:
    return pids & _parents().keys()


def end(pids: set[int], grace: float) -> int:
    """Sends SIGTERM, then SIGKILL after `grace` seconds. Returns the number of processes."""
    for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 3.0)):
        for pid in _alive(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait
        while _alive(pids) and time.monotonic() < deadline:
            time.sleep(0.05)
    return len(pids)


def stop_ray(gcs: str, name: str = "", grace: float = 3.0) -> dict:
    """Ends this cluster's Ray here and waits for it. `left` lists processes that would not die."""
    pids: set[int] = set()
    stopped = 0
    for _ in range(2):  # the second pass finds processes that were just being started
        found = own_ray(gcs) - pids
        stopped += end(found, grace)
        pids |= found
    if name:
        masters = ssh_masters(name)
        end(masters, 1.0)
        pids |= masters
        forget(name)
    return {"stopped": stopped, "left": sorted(_alive(pids | own_ray(gcs)))}


def ssh_masters(name: str) -> set[int]:
    """Returns the shared ssh connections that this cluster's autoscaler keeps to its workers.

    OpenSSH detaches them from Ray's processes, so that they outlive those: by 10 s when idle, and until a network timeout
    when their worker has gone. Ray's `command_runner.py` names their sockets.
    """
    mark = f"/{hashlib.sha256(name.encode()).hexdigest()[:10]}/"
    return {
        pid
        for pid, words in processes().items()
        if words[:1] and words[0].startswith("ssh: /tmp/ray_ssh_") and mark in words[0]
    }


def forget(name: str) -> None:
    """Removes provider local's state of a cluster. Stale state makes the next `ray up` wait for dead workers."""
    for suffix in ("state", "lock"):
        Path("/tmp/ray", f"cluster-{name}.{suffix}").unlink(missing_ok=True)


# Nodes of the cluster, as Ray sees them


def nodes(gcs: str, count: int, timeout: float) -> dict:
    """Waits until `count` nodes are alive, at most `timeout` seconds. Returns the nodes."""
    import ray

    ray.init(address=gcs, log_to_driver=False, logging_level=logging.ERROR, namespace="epserve-cluster")
    deadline = time.monotonic() + timeout
    while True:
        known = ray.nodes()
        alive = [node for node in known if node["Alive"]]
        if len(alive) >= count or time.monotonic() > deadline:
            break
        time.sleep(0.25)
    seen = {}
    for node in sorted(known, key=lambda node: node["Alive"]):  # a node that came back is listed twice: alive wins
        resources = node["Resources"]
        entry = {"alive": node["Alive"], "cpus": resources.get("CPU", 0), "gpus": resources.get("GPU", 0)}
        seen[node["NodeManagerAddress"]] = entry
    ray.shutdown()
    return {"nodes": seen}


def wait_nodes(count: str, timeout: str) -> None:
    """Exits with 0 once `count` nodes are alive, else with an error after `timeout` seconds. For shell scripts on a node."""
    alive = sum(node["alive"] for node in nodes(_this_cluster(), int(count), float(timeout))["nodes"].values())
    if alive < int(count):
        sys.exit(f"{alive} of {count} nodes joined within {timeout} s")


# The service


def start_service(folder: str, config: str) -> dict:
    """Writes the configuration and starts the supervisor, detached. It starts the service and restarts it when it dies."""
    base = _folder(folder)
    if _supervisor(base):
        return {"started": False, "same": (base / CONFIG).read_text(encoding="utf-8") == config}
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    (base / CONFIG).write_text(config, encoding="utf-8")
    for name in (READY, STATE):
        (base / name).unlink(missing_ok=True)
    path = base / LOG
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))
    command = [sys.executable, "-m", SUPERVISOR, str(base)]
    with path.open("ab") as out:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + SUPERVISOR_START_S  # until it has written its first state it may not be found
    while started.poll() is None and not (base / STATE).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"started": True, "pid": started.pid}


def wait_service(folder: str, timeout: float) -> dict:
    """Waits until the service is ready or has given up."""
    deadline = time.monotonic() + timeout
    while True:
        found = service(folder)
        if found["ready"] or not found["running"] or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def service(folder: str) -> dict:
    """Returns whether the service runs and is ready, its number of restarts, and the end of its log when it is not well."""
    base = _folder(folder)
    pid = _supervisor(base)
    ready, state = _read(base / READY), _read(base / STATE)
    found: dict = {"running": pid is not None, "pid": pid, "ready": ready if pid else None, "state": state}
    found["tail"] = "" if found["ready"] else show_log(folder, 30)["text"]
    return found


def stop_service(folder: str, grace: float) -> dict:
    """Stops the service. SIGTERM lets it finish accepted requests for at most `grace` seconds, then its process tree ends."""
    base = _folder(folder)
    pid = _supervisor(base)
    if pid is None:
        return {"stopped": 0}
    tree = {pid} | descendants({pid})
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while _alive({pid}) and time.monotonic() < deadline:
        time.sleep(0.05)
    end(tree, 0.0)
    return {"stopped": len(tree)}


def show_log(folder: str, lines: int) -> dict:
    path = _folder(folder) / LOG
    if not path.exists():
        return {"text": ""}
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 400 * lines, 0))
        return {"text": "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])}


def _supervisor(base: Path) -> int | None:
    for pid, words in processes().items():
        if words[1:4] == ["-m", SUPERVISOR, str(base)] and pid in _parents():
            return pid
    return None


def _folder(folder: str) -> Path:
    return Path(folder).expanduser()


def _this_cluster() -> str:
    """Returns the head's address that Ray stored on this node. Port 0, which nothing uses: Ray never ran here."""
    with contextlib.suppress(OSError):
        return Path("/tmp/ray/ray_current_cluster").read_text(encoding="utf-8").strip() or "127.0.0.1:0"
    return "127.0.0.1:0"


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _split(gcs: str) -> tuple[str, int]:
    if gcs == "auto":
        gcs = _this_cluster()
    address, _, port = gcs.rpartition(":")
    return address, int(port)


ACTIONS: dict[str, Callable[..., dict | None]] = {
    "probe": probe, "network": network, "stop-ray": stop_ray, "nodes": nodes, "log": show_log,
    "wait-nodes": wait_nodes,
    "start-service": start_service, "wait-service": wait_service, "service": service, "stop-service": stop_service,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in ACTIONS:
        sys.exit(f"actions: {', '.join(ACTIONS)}")
    action, rest = ACTIONS[arguments[0]], arguments[1:]
    if rest and rest[0].startswith("{"):
        result = action(**json.loads(rest[0]))
    else:
        result = action(*rest)
    if result is not None:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
