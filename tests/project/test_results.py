"""The raw results of benchmarks are short to read, and each stands behind a figure of a page or a test."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import reports

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
MOST_LINES = 2000


def test_the_results_are_few_lines():
    assert RESULTS
    assert sum(file.read_text().count("\n") for file in RESULTS) < MOST_LINES


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_has_a_line_for_each_cell_and_is_named(file):
    text = file.read_text()
    assert text == reports.text(json.loads(text)), "written with benchmarks.reports.save"
    places = ["docs/*.md", "README.md", "tests", "benchmarks/*.py"]
    words = ["git", "grep", "-l", "--untracked", "-F", file.name, "--", *places]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout


def test_pages_name_results_that_are_there():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {name for page in pages for name in re.findall(r"benchmarks/results/([a-z]\w*\.json)", page.read_text())}
    assert named and named <= {file.name for file in RESULTS}
