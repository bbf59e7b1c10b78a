"""`epserve demo` and signals: one line, no traceback, nothing left, whatever it was doing."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from epserve.cli.commands import app
from epserve.cluster import node
from epserve.errors import ConfigError
from epserve.models import open_checkpoint
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
        elif stage != "ask for":  # the answers come within that time
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


def test_a_small_checkpoint_to_try_things_with(tmp_path):
    """It is written once, its tokenizer gives text back, and mistakes are one line each."""
    folder = tmp_path / "new" / "moe"
    words = ["demo", "--write", str(folder)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and f"epserve serve {folder}" in done.output.replace("\n", "")
    assert open_checkpoint(folder).info.num_experts == 8
    tokens = AutoTokenizer.from_pretrained(folder)
    assert tokens.decode(tokens("Why is it so?").input_ids) == "why is it so?"
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(**tokens("why", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert len(tokens.decode(made[0])) >= len("why")
    for wrong, text in ((words, "has a model already"), ([*words, "--family", "nosuch"], "'nosuch' has no demo checkpoint"),
                        (["demo", "--write", "/proc/nowhere/moe"], "cannot be written")):  # fmt: skip
        error = CliRunner().invoke(app, wrong).exception
        assert isinstance(error, ConfigError) and text in str(error)
