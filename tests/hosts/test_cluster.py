"""`epserve cluster`: the cluster file's door, the actions on a node, the supervisor. The real thing over ssh: test_hosts.py."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from epserve.cluster import diagnosis, node
from epserve.cluster.file import load_cluster_file
from epserve.cluster.supervise import supervise
from epserve.config import parse_config
from epserve.errors import ClusterError, ConfigError

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
WAIT_S = 60  # for a process that ends in milliseconds on a machine that is not starved
FACT = {
    "host": "a", "python": "3.11.7", "skew": 0.0, "packages": {"ray": "2.60.0", "torch": "2.13.0", "epserve": "0.1.0"},
    "rsync": True, "disk_free": 100 << 30, "gpus": 0, "resolves_to": "127.0.1.1", "ray": False, "missing": [],
    "port_taken_by": "",
}  # fmt: skip


def local_file(tmp_path: Path, change=lambda data: None) -> Path:
    data = yaml.safe_load((DEPLOY / "ray-local.yaml").read_text())
    change(data)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(("name", "nodes"), [("local", 3), ("aws", 2), ("gcp", 2)])
def test_the_shipped_files_pass_rays_schema_and_our_door(name, nodes):
    file = load_cluster_file(DEPLOY / f"ray-{name}.yaml")
    assert (file.provider, file.num_nodes, file.port) == (name, nodes, 6379)
    assert file.service == DEPLOY / "service.yaml"


@pytest.mark.parametrize("name", ["local", "aws", "gcp"])
def test_the_shipped_files_notice_a_dead_node_within_ten_seconds_and_ask_for_a_token(name):
    text = (DEPLOY / f"ray-{name}.yaml").read_text()
    value = {key: int(text.split(f"RAY_health_check_{key}=")[1].split()[0].rstrip(";"))
             for key in ("initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold")}  # fmt: skip
    noticed = value["initial_delay_ms"] + value["failure_threshold"] * (value["period_ms"] + value["timeout_ms"])
    assert noticed <= 10_000
    assert "RAY_AUTH_MODE=token" in text and "~/.ray/auth_token" in text
    assert text.count("epserve.cluster.node network") == 2, "head and workers bind gloo and NCCL to the right interface"


@pytest.mark.parametrize("name", ["local", "aws", "gcp"])
@pytest.mark.parametrize("good", [1, 2, 3])
def test_a_worker_whose_ray_is_slow_to_start_is_started_once_more(tmp_path, name, good):
    """`good`: the first start that succeeds. Ray's autoscaler gives a worker up after one."""
    ray, python = tmp_path / "ray", tmp_path / "python3"
    ray.write_text(f"#!/bin/sh\necho $1 >> $0.calls\n[ $1 = stop ] || [ $(grep -c start $0.calls) -ge {good} ]\n")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for script in (ray, python):
        script.chmod(0o755)
    command = yaml.safe_load((DEPLOY / f"ray-{name}.yaml").read_text())["worker_start_ray_commands"][-1]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "127.0.0.77"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (good <= 2), done.stdout + done.stderr
    assert (tmp_path / "ray.calls").read_text().count("start") == min(good, 2)


WRONG = [
    (lambda d: d.update(colour=1), "colour"),  # Ray's schema refuses unknown keys
    (lambda d: d["provider"].update(worker_ips=["10.88.0.11", "10.88.0.11"]), "10.88.0.11 is listed twice"),
    (lambda d: d["auth"].pop("ssh_private_key"), "auth.ssh_private_key"),
    (lambda d: d.update(min_workers=1), "min_workers must be 2"),  # ray starts fewer workers and says nothing
    (lambda d: d["file_mounts"].pop("~/.ray/auth_token"), "runs any code that its network sends"),
    (lambda d: d["metadata"]["epserve"].update(servcie="x"), "metadata.epserve.servcie"),
    (lambda d: d["metadata"]["epserve"].update(join_timeout_s=-1), "join_timeout_s"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        load_cluster_file(local_file(tmp_path, change))


def test_authentication_may_be_turned_off_only_in_words(tmp_path):
    def change(data):
        data["file_mounts"].pop("~/.ray/auth_token")
        data["setup_commands"] = ["echo 'export RAY_AUTH_MODE=disabled' >> ~/.bashrc"]

    assert load_cluster_file(local_file(tmp_path, change)).token_file is None


BAD_FACTS = [
    ({"skew": -7.2}, "7 s behind"),
    ({"skew": 90.0}, "90 s ahead"),
    ({"disk_free": 1 << 30}, "1.0 GiB free"),
    ({"rsync": False}, "rsync is missing"),
    ({"port_taken_by": "process 12 (nginx)"}, "port 6379 is taken by process 12"),
    ({"missing": ["/models/mixtral"]}, "/models/mixtral does not exist"),
    ({"python": "3.12.1"}, "Python 3.12, but 3.11 on the head"),
    ({"packages": {"ray": "2.50.0", "torch": "2.13.0", "epserve": "0.1.0"}}, "ray 2.50.0, but 2.60.0 on the head"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_FACTS)
def test_every_reason_against_a_node_names_the_node(tmp_path, bad, message):
    file = load_cluster_file(local_file(tmp_path))
    facts = {file.head_ip: FACT, "10.88.0.11": FACT, "10.88.0.12": {**FACT, **bad}}
    (problem,) = diagnosis.check_nodes(facts, file)
    assert problem.startswith("10.88.0.12: ") and message in problem


def test_a_node_without_ray_is_not_skewed_since_setup_installs_it(tmp_path):
    file = load_cluster_file(local_file(tmp_path))
    bare = {**FACT, "python": "3.8.10", "packages": {"ray": "", "torch": "", "epserve": ""}}
    assert diagnosis.check_nodes({file.head_ip: FACT, "10.88.0.11": bare}, file) == []


ROOM = [
    # device, placement, gpus of each node, ranks, does it fit
    ("cuda", "PACK", (8, 8), 16, True),
    ("cuda", "PACK", (8, 7), 16, False),  # a node with fewer GPUs than asked
    ("cuda", "STRICT_PACK", (8, 8), 9, False),
    ("cuda", "STRICT_SPREAD", (8, 8), 3, False),
    ("cpu", "PACK", (0, 0), 40, True),
    ("cpu", "PACK", (0, 0), 41, False),
]


@pytest.mark.parametrize(("device", "placement", "gpus", "ranks", "fits"), ROOM)
def test_ranks_that_do_not_fit_are_refused_with_what_each_node_offers(device, placement, gpus, ranks, fits):
    engine = {"ranks": ranks, "device": device}
    cluster = {"placement": placement, "cpus_per_rank": 0.1}
    config = parse_config({"model": {"path": "/m"}, "engine": engine, "cluster": cluster})
    nodes = {f"10.0.0.{i}": {"alive": True, "cpus": 2, "gpus": count} for i, count in enumerate(gpus)}
    if fits:
        diagnosis.check_resources(config, nodes)
        return
    with pytest.raises(ClusterError, match=f"asks for {ranks} ranks") as error:
        diagnosis.check_resources(config, nodes)
    assert all(host in str(error.value) for host in nodes)


def test_equal_keys_in_a_cluster_file_are_named(tmp_path):
    path = local_file(tmp_path)
    text = path.read_text()
    path.write_text(text + "max_workers: 7\nmax_workers: 8\n")
    with pytest.raises(ConfigError, match=r"cluster file .*the key 'max_workers' is in line \d+ already"):
        load_cluster_file(path)


def sleeper(*arguments: str) -> subprocess.Popen:
    """A process that looks like Ray's, with a child of its own."""
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); print('up', flush=True); time.sleep(300)"
    process = subprocess.Popen([sys.executable, "-c", code, "ray", *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_stop_ray_ends_one_clusters_processes_and_their_children_only():
    gcs = f"10.255.0.1:{os.getpid()}"  # of this run alone
    ours, theirs = sleeper(f"--gcs-address={gcs}"), sleeper(f"--gcs-address={gcs}0")
    try:
        assert len(node.own_ray(gcs)) == 2
        found = node.stop_ray(gcs)
        assert found == {"stopped": 2, "left": []}
        assert ours.wait(WAIT_S) == -signal.SIGTERM
        assert theirs.poll() is None
    finally:
        assert node.stop_ray(f"{gcs}0")["left"] == []
        theirs.wait(WAIT_S)


def test_stop_ray_ends_the_ssh_connections_that_one_clusters_autoscaler_left_open():
    def master(name: str) -> subprocess.Popen:
        folder = hashlib.sha256(name.encode()).hexdigest()[:10]
        return subprocess.Popen(["bash", "-c", f"exec -a 'ssh: /tmp/ray_ssh_48134/{folder}/7a67 [mux]' sleep 300"])

    one, two = f"one-{os.getpid()}", f"two-{os.getpid()}"
    ours, theirs = master(one), master(two)
    try:
        deadline = time.monotonic() + WAIT_S
        while not (node.ssh_masters(one) and node.ssh_masters(two)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert node.stop_ray("10.255.0.9:6379", one) == {"stopped": 0, "left": []}
        assert ours.wait(WAIT_S) == -signal.SIGTERM and theirs.poll() is None
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait(WAIT_S)


def test_network_names_the_interface_that_leads_to_a_peer():
    done = subprocess.run(
        [sys.executable, "-m", "epserve.cluster.node", "network", "127.0.0.1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo\n"


def test_node_runs_alone_from_standard_input():
    """As ssh sends it: nothing of this package is importable there."""
    source = Path(node.__file__).read_text()
    words = [sys.executable, "-I", "-", "probe", json.dumps({"gcs": "10.255.0.1:6379", "paths": ["/nowhere"]})]
    done = subprocess.run(words, input=source, capture_output=True, text=True, check=True, cwd="/")
    assert json.loads(done.stdout)["missing"] == ["/nowhere"]


def test_probe_names_who_has_the_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = node.probe(f"127.0.0.1:{server.getsockname()[1]}")
    assert f"process {os.getpid()}" in facts["port_taken_by"]


def run_supervisor(tmp_path: Path, script: str, monkeypatch) -> int:
    monkeypatch.setattr("epserve.cluster.supervise.FIRST_DELAY_S", 0.05)
    return supervise(tmp_path, [sys.executable, "-c", script, str(tmp_path / "count")])


@pytest.fixture
def signals():
    """The supervisor sets handlers; the test process gets its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


COUNTING = (
    "import pathlib, sys; p = pathlib.Path(sys.argv[1]); n = len(p.read_text()) if p.exists() else 0;"
    "p.write_text('x' * (n + 1)); "
)


def test_a_service_that_dies_is_started_again(tmp_path, monkeypatch, signals):
    assert run_supervisor(tmp_path, COUNTING + "sys.exit(9 if n < 2 else 0)", monkeypatch) == 0
    assert (tmp_path / "count").read_text() == "xxx"
    assert json.loads((tmp_path / "state.json").read_text())["restarts"] == 2


def test_a_wrong_configuration_is_not_tried_again(tmp_path, monkeypatch, signals):
    assert run_supervisor(tmp_path, COUNTING + "sys.exit(2)", monkeypatch) == 2
    assert (tmp_path / "count").read_text() == "x"
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "refused"


def test_start_and_stop_of_the_service_on_a_node(tmp_path, monkeypatch):
    """The configuration is wrong on purpose: the supervisor must end by itself and leave the reason in the log."""
    folder = str(tmp_path / "service")
    assert node.start_service(folder, "model: {}\n")["started"]
    found = node.wait_service(folder, 120)
    assert not found["running"] and not found["ready"] and found["state"]["state"] == "refused"
    assert "model.path" in found["tail"]
    assert node.stop_service(folder, 1.0) == {"stopped": 0}


def test_stop_service_ends_the_whole_tree_of_a_service_that_ignores_signals(tmp_path, monkeypatch):
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
    )
    code = (
        "import sys; from epserve.cluster import supervise as s;"
        "sys.exit(s.supervise(s.Path(sys.argv[1]), [sys.executable, '-c', sys.argv[2]]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"deaf\n"
    monkeypatch.setattr(node, "_supervisor", lambda base: process.pid if process.poll() is None else None)
    assert node.stop_service(str(tmp_path), 0.5)["stopped"] == 2
    process.wait(WAIT_S)  # far less than the 300 s that it sleeps


def test_a_slow_start_of_ray_is_tried_again_without_what_it_left_and_other_failures_are_not(monkeypatch, tmp_path):
    import ray

    from epserve.pool.own_ray import OwnRay

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))

    calls, left, failures = [], [], ["The current node timed out during startup. This could", "no space left on device"]

    def init(**options):
        calls.append(options)
        left.append(subprocess.Popen(["sleep", "300"]))
        raise Exception(failures[len(calls) - 1])

    monkeypatch.setattr(ray, "init", init)
    before = subprocess.Popen(["sleep", "300"])
    own = OwnRay()
    try:
        with pytest.raises(Exception, match="no space left"):
            own.start(num_cpus=1)
        own.close()
        assert calls == [{"address": "local", "num_cpus": 1, "_temp_dir": str(own.folder / "ray")}] * 2
        assert left[0].wait(WAIT_S) == -signal.SIGTERM and before.poll() is None
    finally:
        for process in (before, *left):
            process.kill()
            process.wait(WAIT_S)


@pytest.mark.parametrize("command", ["up", "status", "logs", "down"])
@pytest.mark.parametrize("lacks", ["key", "ssh", "HOME"])
def test_what_ssh_needs_here_is_looked_for_before_ssh_runs(tmp_path, command, lacks):
    programs, key, home = tmp_path / "bin", tmp_path / "key", tmp_path / "home"
    programs.mkdir()
    (programs / "ssh").write_text(f"#!/bin/sh\necho called >> {tmp_path / 'called'}\n")
    (programs / "ssh").chmod(0o755)
    key.touch()
    path = local_file(tmp_path, lambda data: data["auth"].update(ssh_private_key=str(key)))
    if lacks == "HOME":
        home.touch()  # a file: no folder can be made below it, by any user
    (tmp_path / {"key": "key", "ssh": "bin/ssh", "HOME": "nothing"}[lacks]).unlink(missing_ok=True)
    environment = {**os.environ, "PATH": str(programs), "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "epserve", "cluster", command, str(path)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    told = {
        "key": f"auth.ssh_private_key {key} cannot be read: No such file",
        "ssh": "ssh is not installed here",
        "HOME": f"{home}/.epserve/",
    }[lacks]
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "called").exists()
