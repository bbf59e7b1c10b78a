"""A service of this machine alone: its sockets are on loopback, its files are this user's, and nothing is left when it ends."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from epserve.client import Client
from epserve.cluster import node
from epserve.models.demo import write_demo_checkpoint
from epserve.pool.own_ray import LOCK

START_S = 200
LISTENS = "0A"  # state TCP_LISTEN in /proc/net/tcp


class Service:
    """`epserve serve` with two ranks, without a home and with an empty folder for temporary files."""

    def __init__(self, base: Path):
        self.tmp = Path("/tmp") / f"t{os.getpid()}"  # Ray's sockets need a short path
        self.tmp.mkdir(mode=0o755)
        config, ready = base / "service.yaml", base / "ready.json"
        write_demo_checkpoint("mixtral", base / "mixtral")
        config.write_text(json.dumps({
            "model": {"path": str(base / "mixtral")},
            "engine": {"device": "cpu", "ranks": 2, "spares": 1},
            "server": {"port": 0, "metrics_port": 0},
        }))  # fmt: skip
        folder = base / "folder"
        folder.mkdir()
        for name in ("experts", "all2all", "ray", "grpc", "torch", "numpy", "json", "yaml", "transformers", "tempfile"):
            (folder / f"{name}.py").write_text("raise SystemExit('a file of the working folder was imported')\n")
        unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "epserve", "serve", str(config), "--front-ends", "2", "--ready-file", str(ready)],
            env=unset | {"HOME": "/proc/no", "RAY_TMPDIR": str(self.tmp)}, stderr=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip
        self.ready = ready
        end = time.monotonic() + START_S
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < end, self.process.communicate(timeout=5)
            time.sleep(0.1)

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=START_S)
        return self.process.returncode, log


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    service = Service(tmp_path_factory.mktemp("local"))
    yield service
    if service.process.poll() is None:
        service.stop()
    shutil.rmtree(service.tmp)


def test_nothing_listens_beyond_loopback(service):
    found = listening(node.descendants({service.process.pid}) | {service.process.pid})
    assert len(found) > 5, "it has a server, ranks and Ray's processes"
    assert [each for each in found if not each.startswith(("127.", "::ffff:127.", "::1 "))] == []


def test_only_this_user_reads_what_it_writes(service):
    (folder,) = service.tmp.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "auth_token").stat().st_mode) == 0o600
    assert (folder / "ray" / "session_latest" / "logs").is_dir()


def test_files_of_the_working_folder_are_not_imported(service):
    """Processes of all kinds started beside them: this one, two front ends, ranks and a spare."""
    port = json.loads(service.ready.read_text())["port"]
    with Client(f"127.0.0.1:{port}") as client:
        model = client.model()
        x = torch.randn(3, model.hidden)
        assert client.forward(model.layers[0], x).shape == x.shape


def test_nothing_is_left_when_it_ends(service):
    """The last test of this file. A folder of a process that was killed goes with the next start."""
    for name, locked in (("epserve-killed01", True), ("epserve-foreign1", False)):
        (service.tmp / name).mkdir()
        (service.tmp / name / (LOCK if locked else "file")).touch()
    code, log = service.stop()
    assert code == 0, log
    assert {each.name for each in service.tmp.iterdir()} == {"epserve-killed01", "epserve-foreign1"}
    sweep = "from epserve.pool.own_ray import OwnRay; OwnRay().close()"
    subprocess.run([sys.executable, "-c", sweep], env={**os.environ, "RAY_TMPDIR": str(service.tmp)}, check=True)
    assert [each.name for each in service.tmp.iterdir()] == ["epserve-foreign1"], "it is not ours"


def listening(pids: set[int]) -> list[str]:
    """address port command, of each TCP socket on which one of these processes listens."""
    sockets = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                address, port = fields[1].split(":")
                words = struct.unpack(f"<{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f">{len(words)}I", *words)
                sockets[fields[9]] = f"{socket.inet_ntop(family, packed)} {int(port, 16)}"
    found = []
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            if match and match[1] in sockets:
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                found.append(f"{sockets[match[1]]} {command[:80]}")
    return sorted(found)
