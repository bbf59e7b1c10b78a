"""Reads and writes results: JSON with one line for each cell, so that a change of one figure is a change of one line."""

import json
from pathlib import Path
from typing import Any

__all__ = ["save", "text"]

WIDTH = 400  # characters. A shorter value stays on the line of its key


def text(report: dict[str, Any]) -> str:
    """Returns `report` as JSON. Each key has a line. Each item of a value that is longer than `WIDTH` has a line too."""
    lines = ",\n".join(f"{json.dumps(key)}: {value_text(value)}" for key, value in report.items())
    return f"{{\n{lines}\n}}\n"


def value_text(value: Any) -> str:
    line = json.dumps(value)
    if len(line) <= WIDTH or not isinstance(value, (dict, list)):
        return line
    if isinstance(value, list):
        return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"


def save(path: Path, report: dict[str, Any]) -> None:
    path.write_text(text(report))
