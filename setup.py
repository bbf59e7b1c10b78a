"""Gives the package index the README with whole addresses: that page has no files beside it. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def whole(found: re.Match[str]) -> str:
    kind = "raw" if found[1] else "blob"
    return f"{found[1]}[{found[2]}]({PROJECT['urls']['Repository']}/{kind}/v{PROJECT['version']}/{found[3]})"


setup(
    long_description=LINK.sub(whole, (ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
