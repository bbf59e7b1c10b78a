"""The rooms of the code: how large they are, what they say of themselves, and that no imports go in a circle."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 16
PACKAGES = ("epserve", "all2all", "experts", "tests")
AT_THE_TOP = {"__init__", "__main__", "errors", "config", "probe", "front_end", "sglang", "transformers", "vllm"}
"""Modules that users import or run by name; everything else has a room."""


def modules() -> list[Path]:
    words = ["git", "ls-files", "-co", "--exclude-standard", "--", *(f"{name}/*.py" for name in PACKAGES)]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in out.splitlines() if (ROOT / line).is_file()]


def rooms() -> list[str]:
    found = {
        path.parent
        for path in modules()
        if path.parts[0] != "tests" and len(path.parts) > 2 - (path.parts[0] != "epserve")
    }
    return sorted(map(str, found))


def test_no_folder_has_too_many_modules():
    sizes = Counter(path.parent for path in modules() if path.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > MOST} == {}


def test_the_top_holds_what_users_name():
    assert {path.stem for path in modules() if path.parent == Path("epserve")} == AT_THE_TOP


@pytest.mark.parametrize("room", rooms())
def test_a_room_says_what_it_is_for(room):
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert text is not None and len(text.split()) >= 5


def test_the_map_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tops = {room for room in rooms() if room.count("/") == (1 if room.startswith("epserve/") else 0)}
    assert {room for room in tops if f"{room.removeprefix('epserve/')}/" not in text} == set()


@pytest.mark.parametrize("name", ["all2all", "experts"])
def test_one_package_whose_folders_may_lie_beside_it(name):
    assert os.readlink(ROOT / "epserve" / name) == f"../{name}"
    code = f"import epserve.{name}, sys; print(epserve.{name}.__file__); print('{name}' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    file, other = done.stdout.split()
    assert Path(file).samefile(ROOT / name / "__init__.py") and other == "False"


@pytest.mark.parametrize(
    ("first", "second", "circle"),
    [
        ("from a import b", "", False),
        ("from a import b", "from a import a", True),
        ("from a import b", "def f():\n    from a import a\n", True),
        ("from a import b", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import a\n", True),
    ],
)
def test_circles_are_found_wherever_the_import_stands(tmp_path, monkeypatch, first, second, circle):
    grimp = pytest.importorskip("grimp", reason="import-linter, of the extra dev, is not installed")
    from tests.project.circles import circles

    name = f"circle_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    for module, text in (("a", first), ("b", second), ("c", "from a import a")):
        (folder / f"{module}.py").write_text(text.replace("from a", f"from {name}"))
    monkeypatch.syspath_prepend(tmp_path)
    graph = grimp.build_graph(name, exclude_type_checking_imports=False, cache_dir=None)
    assert set(circles(graph)) == ({f"{name}.a", f"{name}.b"} if circle else set())
