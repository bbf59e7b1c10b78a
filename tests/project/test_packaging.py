"""The wheel and the sdist: complete, and usable in a clean environment, and one package."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("all2all", "epserve", "experts")
pytestmark = pytest.mark.slow


def tracked(*patterns: str) -> set[str]:
    words = ["git", "ls-files", "--", *patterns]
    return set(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Both, the wheel from the sdist: what `python -m build` does for a release."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, ROOT], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def test_the_wheel_holds_one_package_and_nothing_else(built):
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"epserve"}
    tracked_files = {name if name.startswith("epserve/") else f"epserve/{name}" for name in tracked(*FOLDERS)}
    links = {"epserve/all2all", "epserve/experts"}
    data = {name for name in tracked_files - links if not name.endswith((".md", ".txt"))}
    assert data - names == set(), "tracked files of the packages that the wheel lacks"


def test_the_metadata_names_licence_version_and_extras(built):
    wheel = zipfile.ZipFile(built["wheel"])
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Version"] == project["version"]
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    page, place = metadata.get_payload(), f"{project['urls']['Repository']}/"
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", page)
    assert all(target.startswith(("https://", "#")) for _, target in links), (
        "a link that the index's page cannot follow"
    )
    shown = [target for image, target in links if image]
    assert shown and all(
        (ROOT / target.removeprefix(f"{place}raw/v{project['version']}/")).is_file() for target in shown
    )


def test_the_changelog_and_the_package_have_the_projects_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f'__version__ = "{version}"' in (ROOT / "epserve" / "__init__.py").read_text()


def test_the_sdist_can_be_built_from(built):
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "epserve/__init__.py", "epserve/experts/__init__.py"} <= names


def test_a_clean_environment_runs_it(built, tmp_path):
    """Our wheel is installed for real; what it depends on is lent by this interpreter's packages, without their .pth files."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", built["wheel"]],
        check=True, timeout=120,
    )  # fmt: skip
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    version = subprocess.run([folder / "bin" / "epserve", "--version"], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"epserve \d+\.\d+\.\d+\n", version.stdout), version.stdout + version.stderr
    code = "import epserve.all2all as a, epserve as b, epserve.experts as c; print(*(m.__path__[0] for m in (a, b, c)))"
    places = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert [Path(line) for line in places.stdout.split()] == [
        site / name for name in ("epserve/all2all", "epserve", "epserve/experts")
    ]
    compat = subprocess.run(
        [folder / "bin" / "epserve", "compat"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert compat.returncode == 0 and "grouped_mm" in compat.stdout, compat.stderr
