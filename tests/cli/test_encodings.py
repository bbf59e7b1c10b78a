"""Text is UTF-8, whatever the locale says: a service is started by hand, by cron, in a container and over ssh."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import write

ROOT = Path(__file__).parent.parent.parent
TEXT = ("read_text", "write_text")


def test_every_text_file_is_read_and_written_with_an_encoding():
    files = [file for package in ("epserve", "all2all", "experts") for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    calls = [
        (file.relative_to(ROOT), node.lineno, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT
    ]
    assert len(calls) > 20
    assert not [
        f"{file}:{line}" for file, line, call in calls if "encoding" not in {word.arg for word in call.keywords}
    ]


NOT_UTF8 = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Python's own rescue for the locales C and POSIX, which PYTHONUTF8=0 takes away, does not help with others, such as
ISO-8859-1."""


def epserve(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "epserve", *words],
        env=os.environ | NOT_UTF8, capture_output=True, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip


def test_a_name_beyond_the_locales_alphabet_can_be_printed(tmp_path):
    done = epserve("plan", str(write("mixtral", tmp_path / "größe")), "--device", "cpu", "--memory-gib", "1")
    assert done.returncode == 0 and "fits:" in done.stdout, done.stderr


def test_a_configuration_in_utf8_is_read_under_a_locale_that_is_not(tmp_path):
    model = write("mixtral", tmp_path / "model")
    config = tmp_path / "c.yaml"
    text = f"# größer\nmodel: {{path: {model}}}\nengine: {{ranks: 2, experts: schön}}\nserver: {{port: 0}}\n"
    config.write_text(text, encoding="utf-8")
    done = epserve("serve", str(config))
    assert done.returncode == 2 and r"experts backend 'sch\xf6n' is unknown" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
