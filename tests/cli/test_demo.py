"""`epserve demo` and signals: one line, no traceback, nothing left, whatever it was doing."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from epserve.cluster import node
from tests.cli.test_service import alive
from tests.support.grpc_calls import until

STAGES = {
    "importing": "epserve: {}: stopped",
    "writing the checkpoint": "epserve: {}: stopped",
    "starting Ray": "INFO epserve.process.lifetime: {}: stopping before every rank was ready",
    "ask for": "INFO epserve.process.lifetime: {}: draining",
}


@pytest.fixture
def folder():
    """A short one: Ray's sockets lie there too, and their paths have 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as made:
        yield Path(made)


async def interrupted(folder: Path, stage: str, number: signal.Signals) -> tuple[int, str]:
    """Exit code and output of a demo that gets the signal in the stage with these words; what it started is gone."""
    process = subprocess.Popen(
        # Python's own handler of SIGINT: where the tests run in the background it starts ignored.
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
         "import sys; sys.argv = ['epserve', 'demo', '--ranks', '2', '--clients', '2']\n"
         "from epserve.cli.entry import main; main()"],
        env=os.environ | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        shown = ""
        while stage not in shown:
            line = await asyncio.to_thread(process.stdout.readline)
            assert line, f"it has ended: {shown}"
            shown += line
        if stage == "starting Ray":
            await until(lambda: node.descendants({process.pid}))
        else:
            await asyncio.sleep(0.2)
        started = node.descendants({process.pid})
        process.send_signal(number)
        rest, _ = await asyncio.to_thread(process.communicate, timeout=100)
    finally:
        node.end(node.descendants({process.pid}) | {process.pid}, 0.0)
    assert not any(map(alive, started))
    assert not list(folder.glob("epserve-demo-*"))
    return process.returncode, shown + rest


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("importing", signal.SIGINT),
        ("writing the checkpoint", signal.SIGINT),
        ("writing the checkpoint", signal.SIGTERM),
        pytest.param("starting Ray", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("starting Ray", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("ask for", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
async def test_a_signal_is_one_line_and_leaves_nothing(folder, stage, number):
    code, shown = await interrupted(folder, stage, number)
    assert STAGES[stage].format(number.name) in shown
    assert "Traceback" not in shown and "***" not in shown, shown
    assert code == 128 + number, shown
