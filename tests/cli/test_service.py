"""The service process around its parts: signals, the ready file, an orderly end. The parts are stand-ins."""

import asyncio
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch

from epserve.cluster import node
from epserve.models.demo import write_demo_checkpoint
from epserve.process import service_manager
from epserve.process.lifetime import write_ready
from epserve.service import run as service
from tests.support.grpc_calls import until

CONFIG = SimpleNamespace(engine=SimpleNamespace(ranks=2), server=SimpleNamespace(host="127.0.0.1"))


class Parts:
    """What `service.running` makes; `history` tells what happened to it."""

    def __init__(self, loading_s: float = 0.0):
        self.loading_s = loading_s
        self.loading = False
        self.history: list[str] = []

    @asynccontextmanager
    async def running(self, config, others):
        self.loading = True
        try:
            await asyncio.sleep(self.loading_s)
            reload = lambda: self.history.append("reload")  # noqa: E731
            yield (
                SimpleNamespace(info=SimpleNamespace(name="m")),
                SimpleNamespace(port=7, metrics_port=0, reload=reload),
            )
        finally:
            await asyncio.sleep(0.05)  # a drain; a cancel that arrives late would cut it short
            self.history.append("closed")


@pytest.fixture
def parts(monkeypatch):
    parts = Parts()
    monkeypatch.setattr(service, "running", parts.running)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield parts
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_service_after_its_drain(parts, tmp_path, number):
    ready = tmp_path / "ready.json"
    task = asyncio.create_task(service.serve(CONFIG, ready_file=ready))
    await until(ready.exists)
    assert json.loads(ready.read_text()) == {"host": "127.0.0.1", "port": 7, "pid": os.getpid()}
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: parts.history == ["reload"])
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(task, 30) == 0
    assert parts.history == ["reload", "closed"]
    assert not ready.exists()


async def test_a_signal_while_the_ranks_load_ends_it_too(parts, tmp_path):
    parts.loading_s = 60
    ready = tmp_path / "ready.json"
    task = asyncio.create_task(service.serve(CONFIG, ready_file=ready))
    await until(lambda: parts.loading)  # with handlers: a signal without would end this process
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, 30) == 128 + signal.SIGTERM
    assert parts.history == ["closed"]
    assert not ready.exists()


async def test_a_ready_file_that_cannot_be_written_is_tried_again_and_the_service_goes_on(
    tmp_path, monkeypatch, caplog
):
    """As on a full disk. A service that worked was thrown away."""
    monkeypatch.setattr("epserve.process.lifetime.AGAIN_S", 0.05)
    ready, taken = tmp_path / "ready", tmp_path / "ready.tmp"
    taken.mkdir()  # no file can be written there, by any user
    with write_ready(ready, {"port": 1}):
        assert not ready.exists()
        assert f"ready file {ready} cannot be written: Is a directory; the service goes on" in caplog.text
        taken.rmdir()
        await until(ready.exists)
        assert json.loads(ready.read_text()) == {"port": 1}
    assert not ready.exists()


STUCK = """
import asyncio, subprocess, sys, time
from epserve.process.lifetime import until_signalled

async def work(listen):
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    try:
        await asyncio.to_thread(time.sleep, 300)  # a start that cannot be cancelled
    finally:
        print("cancelled", flush=True)

asyncio.run(until_signalled(work))
"""


async def test_a_second_signal_ends_a_start_at_once_and_what_it_started():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    child = int(await asyncio.to_thread(process.stdout.readline))
    process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(process.stdout.readline) == "cancelled\n", "two signals that are pending are one"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(process.wait, 60) == 128 + signal.SIGINT
    await until(lambda: not alive(child))
    process.stdout.close()


async def test_a_start_that_cannot_be_broken_off_ends_with_the_process():
    limit = "from epserve.process import lifetime as process\nprocess.START_STOP_S = 0.3\n"
    code = limit + STUCK.replace("until_signalled(work)", "until_signalled(work, own_process=True)")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(await asyncio.to_thread(process.stdout.readline))
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 128 + signal.SIGTERM
    await until(lambda: not alive(child))
    process.stdout.close()


BROKEN_OFF = """
import asyncio, subprocess, sys, time
from epserve.process import lifetime as process

process.START_STOP_S = 0.3

def start(child):  # as Ray's: in a thread, and over with an error once its processes are gone
    child.wait()
    raise RuntimeError("failed to connect to all addresses")

async def work(listen):
    child = subprocess.Popen(["sleep", "600"])
    starting = asyncio.ensure_future(asyncio.to_thread(start, child))
    print(child.pid, flush=True)
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        if "at once" in sys.argv:
            raise RuntimeError("what it was about to use is gone")
        await starting

told = asyncio.run(process.until_signalled(work, own_process=True, farewell=lambda: time.sleep(2)))
sys.exit(told)
"""


@pytest.mark.parametrize("when", ["at once", "when its processes are gone"])
async def test_errors_of_a_start_that_was_broken_off_are_not_told(when):
    """Ray's own start, in a thread, found its processes killed: its RpcError was printed as a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN_OFF, when], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child = int(await asyncio.to_thread(process.stdout.readline))
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    await until(lambda: not alive(child))


INTERRUPTED_IMPORT = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background

class Finder:
    def find_spec(self, name, *rest):
        if name == "{module}":
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Finder())
sys.argv = ["epserve", "{argument}"]
from epserve.cli.entry import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("argument", "module"), [("--version", "typer"), ("doctor", "torch")])
def test_a_signal_during_the_imports_is_one_line(argument, module, number):
    code = INTERRUPTED_IMPORT.format(number=number.name, argument=argument, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"epserve: {number.name}: stopped\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "front_ends"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
async def test_a_signal_while_ray_starts_leaves_nothing(tmp_path, number, front_ends):
    """SIGINT as from a terminal, to all processes of the group: further front ends, which import torch then, are not in it."""
    write_demo_checkpoint(
        "mixtral",
        tmp_path / "m",
        dtype=torch.float32,
        hidden=32,
        intermediate=16,
        num_experts=4,
        top_k=2,
        num_layers=1,
        seed=1,
    )
    config = tmp_path / "c.yaml"
    server = f"server: {{port: 0, front_ends: {front_ends}}}"
    config.write_text(f"model: {{path: {tmp_path / 'm'}}}\nengine: {{device: cpu}}\n{server}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "epserve", "serve", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while "stopped -> starting" not in (line := await asyncio.to_thread(process.stdout.readline)):
            assert line, "it has ended"
        await until(lambda: len(node.descendants({process.pid})) >= front_ends)
        await asyncio.sleep(0.5 if front_ends > 1 else 0)
        started = node.descendants({process.pid})
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        shown, _ = await asyncio.to_thread(process.communicate, timeout=60)
    finally:
        node.end(node.descendants({process.pid}) | {process.pid}, 0.0)
    assert process.returncode == 128 + number
    assert f"{number.name}: stopping before every rank was ready" in shown
    assert "Traceback" not in shown and "***" not in shown and "raylet" not in shown
    assert not any(map(alive, started))


def alive(pid):
    """A zombie waits for its parent only."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestServiceManager:
    """What systemd is told (`Type=notify`), over the socket that it names."""

    @pytest.fixture(params=["path", "abstract"])
    def manager(self, request, tmp_path, monkeypatch):
        address = str(tmp_path / "notify") if request.param == "path" else f"@epserve-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            heard.bind(address if request.param == "path" else "\0" + address[1:])
            heard.setblocking(False)
            monkeypatch.setenv("NOTIFY_SOCKET", address)
            yield heard

    def test_it_hears_of_the_start_and_of_the_stop(self, manager, tmp_path):
        with write_ready(None, {"port": 7}):
            assert manager.recv(500).decode().split("\n") == ["READY=1", "STATUS=serving on port 7"]
        assert manager.recv(500).decode().split("\n")[0] == "STOPPING=1"

    @pytest.mark.parametrize("address", ["", "not/absolute", "/nowhere/at/all"])
    def test_one_that_does_not_listen_changes_nothing(self, address, monkeypatch, tmp_path):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        with write_ready(tmp_path / "ready", {"port": 7}):
            assert (tmp_path / "ready").exists()
        assert not (tmp_path / "ready").exists()

    def test_one_whose_queue_is_full_does_not_stop_the_service(self, manager):
        while service_manager.notify("STATUS=x"):
            pass
        with write_ready(None, {"port": 7}):
            pass

    def test_the_unit_starts_the_command_and_waits_for_it(self):
        unit = (pathlib.Path(__file__).parent.parent.parent / "deploy" / "systemd" / "epserve.service").read_text()
        lines = unit.splitlines()
        assert {"Type=notify", "KillMode=mixed", "WantedBy=multi-user.target", "RestartPreventExitStatus=2"} <= set(
            lines
        )
