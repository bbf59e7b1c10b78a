"""`epserve config`: what a key takes, or a whole configuration with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epserve.errors import ConfigError


def config(
    target: Annotated[
        str | None,
        typer.Argument(help="YAML file, model folder, or name of a downloaded model, as for `epserve serve`."),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="A key such as engine.ranks, or a section such as engine.")
    ] = None,
) -> None:
    """Explain the values and the meaning of a configuration key, or print a configuration with all its defaults."""
    from . import config_reference
    from .config_target import load_target

    if (target is None) == (explain is None):
        raise ConfigError("epserve config takes either a file or model, or --explain KEY")
    if explain is not None:
        print(config_reference.explain(explain))
    else:
        print(config_reference.dump(load_target(str(target))[0]), end="")


def save(path: Path, text: str) -> None:
    """Writes a configuration. Raises ConfigError when the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-config {path}: cannot be written: {error.strerror}") from None
