"""The real thing: three hosts with sshd, `ray up` through our wrapper, ranks over three nodes, a cut cable, and `down`.

The hosts are network namespaces of this machine (tests/hosts); the operator, who also sends the batches, is a fourth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from epserve.models.demo import reference_block, write_demo_checkpoint
from tests.hosts import Hosts, fake_hosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs here"),
    pytest.mark.timeout(1500),
]

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
ASK = """
import sys, time, torch
from epserve.client import Client, ClientOptions, RetryPolicy
target, source, result, seconds = sys.argv[1:5]
x, deadline = torch.load(source), time.monotonic() + float(seconds)
while True:
    try:
        with Client(target, ClientOptions(retry=RetryPolicy(attempts=1))) as client:
            torch.save(client.forward(0, x, timeout=5), result)
        break
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        if time.monotonic() > deadline:
            sys.exit(1)
        time.sleep(0.5)
"""
HEALTH = """
import sys, time, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
target, wanted, seconds = sys.argv[1:4]
deadline = time.monotonic() + float(seconds)
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(target))
while True:
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status)
    if state == wanted:
        break
    if time.monotonic() > deadline:
        sys.exit(f"{state} instead of {wanted}")
    time.sleep(0.2)
"""


NOTHING: dict[int, list[str]] = {0: [], 1: [], 2: []}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with fake_hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.float32, hidden=128, intermediate=64, num_experts=8, top_k=2,
                          num_layers=1, seed=3)  # fmt: skip
    return path


def cluster_file(hosts: Hosts, model: Path, name: str, change=lambda data: None) -> Path:
    """deploy/ray-local.yaml as shipped, but for the choices it names: addresses, key, and nothing to install."""
    data = yaml.safe_load((DEPLOY / "ray-local.yaml").read_text())
    data["cluster_name"] = f"{hosts.tag}-{name}"
    data["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    data["file_mounts"] = {"~/.ray/auth_token": str(hosts.folder / "token")}
    export = f"export PATH={Path(sys.executable).parent}:$PATH RAY_AUTH_MODE=token"
    data["setup_commands"] = [
        "chmod 600 ~/.ray/auth_token", f"grep -q RAY_AUTH_MODE ~/.bashrc 2> /dev/null || echo '{export}' >> ~/.bashrc"
    ]  # fmt: skip
    data["metadata"]["epserve"] = {"service": f"{name}.service.yaml", "join_timeout_s": 420, "min_free_disk_gib": 0.1}
    change(data)
    service = {
        "model": {"path": str(model)},
        "engine": {"ranks": 3, "device": "cpu", "max_tokens_per_rank": 64},
        "cluster": {"placement": "STRICT_SPREAD", "start_timeout_s": 240},
        "scheduler": {"step_timeout_s": 10},
        "server": {"host": "0.0.0.0", "allow_insecure": True},
    }
    (hosts.folder / f"{name}.service.yaml").write_text(yaml.safe_dump(service))
    path = hosts.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def cluster_up(hosts: Hosts, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Where it fails, with what the autoscaler on the head says of it."""
    try:
        return hosts.epserve("cluster", "up", *options, str(file), timeout=700)
    except AssertionError as error:
        for log in sorted((hosts.folder / "host0" / "ray").glob("session_2*/logs/monitor.*")):
            error.add_note(f"{log.name}:\n{log.read_text()[-4000:]}")
        raise


def refused(hosts: Hosts, file: Path) -> str:
    done = hosts.epserve("cluster", "up", str(file), timeout=240, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert hosts.left() == NOTHING, "refused before anything is started"
    return " ".join(done.stderr.split())  # the console wraps lines


def test_an_unreachable_node_is_named(hosts, model):
    def change(data):
        data["provider"]["worker_ips"][1] = "10.88.0.99"

    text = refused(hosts, cluster_file(hosts, model, "unreachable", change))
    assert "10.88.0.99: no" in text and "10.88.0.11:" not in text


def test_a_wrong_key_is_named(hosts, model, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)

    def change(data):
        data["auth"]["ssh_private_key"] = str(tmp_path / "other")

    text = refused(hosts, cluster_file(hosts, model, "key", change))
    assert all(f"{host}: it refuses the key; check auth.ssh_user" in text for host in hosts.addresses)


def test_a_taken_port_a_missing_checkpoint_a_full_disk_and_version_skew_are_named(hosts, model):
    def change(data):
        data["metadata"]["epserve"]["min_free_disk_gib"] = 1e6

    ours = hosts.folder / "host1" / "home"
    skewed = ours / "skewed" / "ray-2.50.0.dist-info"
    skewed.mkdir(parents=True)
    (skewed / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.50.0\n")
    python = Path(sys.executable).parent
    for number in (0, 1):
        home = hosts.folder / f"host{number}" / "home"
        extra = "export PYTHONPATH=$HOME/skewed\n" if number == 1 else ""
        (home / ".bashrc").write_text(f"export PATH={python}:$PATH\n{extra}")
    listener = "import socket, time; s = socket.create_server(('0.0.0.0', 6379)); time.sleep(600)"
    taken = subprocess.Popen(["ip", "netns", "exec", f"{hosts.tag}-0", sys.executable, "-c", listener])
    try:
        text = refused(hosts, cluster_file(hosts, model / "nowhere", "many", change))
    finally:
        taken.kill()
        taken.wait(60)
        for number in (0, 1):
            (hosts.folder / f"host{number}" / "home" / ".bashrc").unlink()
    assert "10.88.0.10: port 6379 is taken by" in text
    assert "10.88.0.11: ray 2.50.0, but" in text
    assert "10.88.0.12:" in text and "nowhere does not exist" in text
    assert "GiB free, metadata.epserve.min_free_disk_gib asks for 1e+06" in text


def test_three_hosts_from_nothing_to_an_answer_a_cut_cable_and_back_to_nothing(hosts, model, capsys):
    file = cluster_file(hosts, model, "real")
    target, source, result = "10.88.0.10:50051", hosts.folder / "x.pt", hosts.folder / "y.pt"
    x = torch.randn((100, 128), generator=torch.Generator().manual_seed(1))
    torch.save(x, source)
    want = reference_block(model, 0)(x)

    def ask(seconds: float) -> None:
        result.unlink(missing_ok=True)
        hosts.operator(sys.executable, "-c", ASK, target, str(source), str(result), str(seconds), timeout=seconds + 60)
        torch.testing.assert_close(torch.load(result), want, rtol=1e-5, atol=1e-5)

    def health(wanted: str, seconds: float) -> float:
        start = time.monotonic()
        hosts.operator(sys.executable, "-c", HEALTH, target, wanted, str(seconds), timeout=seconds + 30)
        return time.monotonic() - start

    took = {}
    start = time.monotonic()
    up = cluster_up(hosts, file)
    assert "3 nodes joined" in up.stdout and "ready: grpc on 10.88.0.10:50051" in up.stdout
    ask(60)
    took["first answer"] = time.monotonic() - start
    assert (hosts.folder / "token").stat().st_mode & 0o777 == 0o600

    before = json.loads(hosts.epserve("cluster", "status", "--json", str(file), timeout=200).stdout)
    assert before["good"] and [node["alive"] for node in before["nodes"].values()] == [True] * 3
    for number in range(3):
        ranks = [line for line in hosts.processes(number) if "RankActor" in line]
        assert len(ranks) in (1, 2), f"host {number} runs {ranks}"  # a rank, and a standby once that has started

    ssh = (
        "ssh",
        "-i",
        str(hosts.key),
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "root@10.88.0.10",
    )
    waiting = "source ~/.bashrc; python3 -m epserve.cluster.node wait-nodes {} 1"
    hosts.operator(*ssh, waiting.format(3), timeout=150)  # what the container images' heads wait with
    assert hosts.operator(*ssh, waiting.format(4), timeout=150, check=False).returncode == 1

    again = hosts.epserve("cluster", "up", str(file), timeout=300)
    assert "its actors are left alone" in again.stdout and "the service already runs" in again.stdout
    after = json.loads(hosts.epserve("cluster", "status", "--json", str(file), timeout=200).stdout)
    assert after["service"]["ready"]["pid"] == before["service"]["ready"]["pid"]

    hosts.cable(2, plugged=False)
    took["cut noticed"] = health("NOT_SERVING", 120)
    cut = hosts.epserve("cluster", "status", str(file), timeout=200, check=False)
    assert cut.returncode == 1 and "10.88.0.12: no" in " ".join(cut.stdout.split())
    hosts.cable(2, plugged=True)
    start = time.monotonic()
    ask(300)
    took["healed"] = time.monotonic() - start
    health("SERVING", 60)

    start = time.monotonic()
    hosts.epserve("cluster", "down", str(file), timeout=200)
    took["down"] = time.monotonic() - start
    assert hosts.left() == NOTHING
    with capsys.disabled():
        print(f"\nthree hosts: {', '.join(f'{what} {seconds:.1f} s' for what, seconds in took.items())}")


def test_plain_ssh_starts_what_ray_up_starts_and_only_what_is_missing(hosts, model):
    def change(data):
        data["metadata"]["epserve"].pop("service")

    file = cluster_file(hosts, model, "direct", change)
    first = cluster_up(hosts, file, "--direct")
    assert "3 nodes joined" in first.stdout and "ray up" not in first.stdout
    gcs = [line for line in hosts.processes(0) if "gcs_server" in line]
    hosts.inside(1, "pkill", "-KILL", "raylet")
    cluster_up(hosts, file, "--direct")
    assert [line for line in hosts.processes(0) if "gcs_server" in line] == gcs, "the head was left alone"
    assert hosts.epserve("cluster", "status", str(file), timeout=200).returncode == 0
    hosts.epserve("cluster", "down", str(file), timeout=200)
    assert hosts.left() == NOTHING
