"""Comments, docstrings and pages are plain technical English: full sentences with the subject first, one thought a sentence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.prose import above_limit, pieces

ROOT = Path(__file__).parents[2]
ALL = ("epserve", "all2all", "experts", "benchmarks", "docs", "README.md", "CONTRIBUTING.md")
OWN = (file.parent for file in sorted(ROOT.glob("epserve/*/__init__.py")))
ROOMS = (*(f"epserve/{folder.name}" for folder in OWN if not folder.is_symlink()), *ALL[1:5])


def written(*paths: str) -> list[Path]:
    out = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *paths], cwd=ROOT, capture_output=True, text=True
    )
    files = [ROOT / line for line in out.stdout.splitlines() if line.endswith((".py", ".md")) and "_pb2" not in line]
    assert files
    return [file for file in files if file.is_file()]


@pytest.mark.parametrize("room", ROOMS)
def test_a_rooms_english_is_plain(room):
    assert above_limit(written(room)) == []


def test_the_english_of_all_is_plain():
    assert above_limit(written(*ALL)) == []


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("Returns the ranks that serve.", []),
        ("Whoever asks gets what is there.", ["a clause as a noun", "a person for a thing"]),
        ("Of one pool.", ["a sentence without its subject first"]),
        ("A step ends. As the last one did.", ["a sentence without its subject first"]),
        ("One thought; another.", ["a semicolon"]),
    ],
)
def test_marks_are_found(tmp_path, text, marks):
    comment, docstring, page = (tmp_path / name for name in ("comment.py", "docstring.py", "page.md"))
    comment.write_text(f"x = 1  # {text}\n")
    docstring.write_text(f'def f():\n    """{text}"""\n')
    page.write_text(f"# Of a title; no prose\n\n{text}\n\n```\nOf code;\n```\n")
    for path in (comment, docstring, page):
        assert [found.mark for found in above_limit([path])] == marks, path
        assert [piece for _, piece in pieces(path)] == [text]
