"""Every Python block of the README and the docs runs as it stands there, page by page, against a served checkpoint.

Only addresses and folders are put in place. A block that cannot run here says so in a comment above it, with its reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from epserve.config import parse_config
from epserve.models.demo import write_demo_checkpoint

ROOT = Path(__file__).parent.parent.parent
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCK = re.compile(
    r"(?:<!-- not run by the tests: needs (?P<needs>[^>]+) -->\n)?```(?P<kind>python|yaml)\n(?P<code>.*?)```", re.DOTALL
)
MISSING = {"a GPU", "vLLM"}


def blocks(page: Path, kind: str) -> list[re.Match]:
    return [each for each in BLOCK.finditer(page.read_text()) if each["kind"] == kind]


@contextlib.contextmanager
def serving(folder: Path, *settings: str):
    """A service of its own process; yields its port."""
    ready = folder / f"ready-{len(settings)}.json"
    words = [sys.executable, "-m", "epserve", "serve", str(folder / "moe"), "--ready-file", str(ready)]
    sets = [word for each in ("server.port=0", "engine.standbys=0", *settings) for word in ("--set", each)]
    with open(folder / f"log-{len(settings)}", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*words, *sets], stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 240
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, (
                folder / f"log-{len(settings)}"
            ).read_text()[-3000:]
            time.sleep(0.1)
        yield json.loads(ready.read_text())["port"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, which generation needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("snippets")
    write_demo_checkpoint("mixtral", folder / "moe", dtype=torch.float32)
    words = {"[UNK]": 0, "Experts": 1, "are": 2} | {f"w{number}": number for number in range(3, 32)}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder / "moe")
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    with serving(folder) as port:
        yield port


def placed(code: str, folder: Path, port: int) -> str:
    """The code with addresses and folders of this machine in place of the page's."""
    for address in ("127.0.0.1:50051", "10.0.0.10:50051", "10.0.0.5:50051"):
        code = code.replace(address, f"127.0.0.1:{port}")
    code = code.replace("ipv4:10.0.0.1:50051,10.0.0.2:50051", f"ipv4:127.0.0.1:{port}")
    for path in ("/models/deepseek-v3", "/checkpoints/Qwen3-30B-A3B"):
        code = code.replace(path, str(folder / "moe"))
    return code


def run(code: str, folder: Path) -> None:
    script = folder / "snippet.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_block_is_left_out_for_a_known_reason_only():
    needs = {each["needs"] for page in PAGES.values() for each in blocks(page, "python")} - {None}
    assert needs <= MISSING
    for page in PAGES.values():
        assert len(re.findall(r"^```python", page.read_text(), re.MULTILINE)) == len(blocks(page, "python")), page.name


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page, "python")])
def test_python_blocks_are_python(name):
    for each in blocks(PAGES[name], "python"):
        compile(each["code"], name, "exec")


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page, "yaml")])
def test_yaml_blocks_are_configurations(name, tmp_path):
    for each in blocks(PAGES[name], "yaml"):
        data = yaml.safe_load(each["code"])
        parse_config({"model": {"path": "."}} | data)


WITH_CODE = [name for name, page in PAGES.items() if any(not each["needs"] for each in blocks(page, "python"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE)
def test_the_blocks_of_a_page_run_one_after_the_other(name, folder, plain):
    codes = [each["code"] for each in blocks(PAGES[name], "python") if not each["needs"] and "Tls(" not in each["code"]]
    run(placed("\n".join(codes), folder, plain), folder)


@pytest.mark.slow
def test_the_block_with_tls_runs_against_a_service_with_tls(folder, certificates):
    (code,) = [each["code"] for each in blocks(PAGES["clients.md"], "python") if "Tls(" in each["code"]]
    shutil.copy(certificates / "ca.pem", folder)
    (folder / "tokens").write_text("a-secret-word name=somebody\n")
    settings = [f"server.tls_cert={certificates / 'server.pem'}", f"server.tls_key={certificates / 'server.key'}",
                f"server.tokens_file={folder / 'tokens'}"]  # fmt: skip
    with serving(folder, *settings) as port:
        run("from epserve.client import Client\n" + code.replace("moe.example.org:50051", f"localhost:{port}"), folder)
