"""The deployment pages: messages they quote are messages we print, files and options they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from epserve.cluster.file import Settings

ROOT = Path(__file__).parent.parent.parent
PAGES = ("quickstart", "deploy", "operations", "security", "troubleshooting")
FOREIGN = {
    "InvalidToken", "InvalidAuthToken", "ray status", "ray up", "uv run", "epserve serve",
    "Version mismatch: The cluster was started with",
}  # fmt: skip
"""Words of Ray and uv, and commands."""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def source() -> str:
    """All string literals as they are printed: adjacent literals joined, placeholders left in."""
    files = (path for package in ("epserve", "all2all", "experts") for path in (ROOT / package).rglob("*.py"))
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)


def quoted() -> list[str]:
    headings = [line for line in page("troubleshooting").splitlines() if line.startswith("### ")]
    return [fragment for line in headings for fragment in re.findall(r"`([^`]+)`", line) if fragment not in FOREIGN]


@pytest.mark.parametrize("fragment", quoted())
def test_every_quoted_message_is_one_that_we_print(fragment):
    text = source()
    for piece in fragment.split("…"):
        assert piece.strip() in text, f"no source prints {piece.strip()!r}"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "docs").glob("*.md")))
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", page(name)):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("name", PAGES)
def test_paths_of_the_repository_exist(name):
    folders = "deploy|docker|docs|examples|requirements|tests"
    for path in set(re.findall(rf"(?<![\w./~-])((?:{folders})/[\w./-]*\w)", page(name))):
        if "/secrets" not in path:
            assert (ROOT / path).exists(), path


def test_settings_of_the_cluster_file_are_documented_with_their_defaults():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", page("deploy"), re.MULTILINE))
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert rows == {name: "none" if value is None else f"{value:g}" for name, value in defaults.items()}


@pytest.mark.parametrize(
    "command", ["cluster up", "cluster down", "cluster status", "cluster logs", "plan", "call", "serve"]
)
def test_options_that_the_pages_use_exist(command):
    words = [sys.executable, "-m", "epserve", *command.split(), "--help"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"}
    )
    every = "\n".join(map(page, PAGES))
    for line in re.findall(rf"epserve {command} [^\n`]*", every):
        for option in re.findall(r"(?<!\S)(--[a-z-]+)", line):
            assert option in done.stdout, f"{line}: {option}"
