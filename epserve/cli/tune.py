"""The command `epserve tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .tuning import Tuned


def tune(
    config: Annotated[Path, typer.Argument(help="YAML file of the service; see docs/configuration.md.")],
    ranks: Annotated[int | None, typer.Option(help="In place of engine.ranks.", min=1)] = None,
    times: Annotated[Path | None, typer.Option(help="In place of engine.experts_times: the file to fill.")] = None,
    budget: Annotated[float, typer.Option(help="Most seconds to time backends, per kind of rank.", min=0.1)] = 60.0,
    tiles_budget: Annotated[
        float, typer.Option(help="Most seconds to time the Triton kernels' tiles, per kind of rank. 0: none.", min=0)
    ] = 180.0,
    tiles_folder: Annotated[Path | None, typer.Option(help="In place of engine.experts_tiles_folder.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again even what the file already has.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Measure nothing: show the times that a start would find, and who wins.")
    ] = False,
) -> None:
    """Time tiles and experts backends on this machine for the ranks of a service, so that its start measures nothing."""
    from epserve.config import load_config
    from epserve.errors import ConfigError

    from .tuning import tune as measure
    from .tuning import why_no_tiles

    if explain and again:
        raise ConfigError("--explain measures nothing, --again measures: choose one")
    overrides: dict[str, Any] = {"engine.experts_timing_s": 0.0 if explain else budget}
    if load_config(config).engine.experts_tiles == "auto":
        overrides["engine.experts_tiles_timing_s"] = 0.0 if explain else tiles_budget
    if tiles_folder is not None:
        overrides["engine.experts_tiles_folder"] = str(tiles_folder)
    if ranks is not None:
        overrides["engine.ranks"] = ranks
    if times is not None:
        overrides["engine.experts_times"] = str(times)
    loaded = load_config(config, overrides)
    if loaded.engine.experts_times is None:
        raise ConfigError("engine.experts_times is null: name a file for the times with --times")
    console = Console()
    no_tiles = why_no_tiles(loaded)
    if no_tiles is not None and not explain:
        console.print(f"no tiles are tuned: {no_tiles}", style="yellow", highlight=False, soft_wrap=True)
    for each in measure(loaded, again=again):
        _show(each, console, explain=explain)
    kept = "read from" if explain else "kept in"
    console.print(f"{kept} {loaded.engine.experts_times.expanduser()}", highlight=False, soft_wrap=True)
    if no_tiles is None:
        console.print(f"tiles in {loaded.engine.experts_tiles_folder.expanduser()}", highlight=False, soft_wrap=True)


def _show(each: Tuned, console: Console, *, explain: bool) -> None:
    """Prints the times of one kind of rank and group of layers. With `explain` also the reasons of every choice."""
    who = f"rank {each.ranks[0]}" if len(each.ranks) == 1 else f"{len(each.ranks)} ranks"
    who += f" with {each.num_experts} experts" + (f" in {each.scheme}" if each.scheme != "none" else "")
    names = list(each.choices[0].seconds) if each.choices else []
    if names:
        table = Table("rows", "backend", *(f"{name}, us" for name in names), box=None, title=who, title_justify="left")
        for choice in each.choices:
            seen = (f"{choice.seconds[name] * 1e6:.0f}" if name in choice.seconds else "–" for name in names)
            table.add_row(str(choice.rows), choice.backend, *seen)
        console.print(table)
    elif explain:
        console.print(
            f"{who}: no times are kept, so the start measures or takes the first backend that fits", soft_wrap=True
        )
    else:
        console.print(f"{who}: one backend fits, only its tiles were timed")
    for line in each.lines:
        if explain or "tiles" in line:
            console.print(line, highlight=False, soft_wrap=True)
        elif "left out" in line or "were spent" in line:
            console.print(line, style="yellow", highlight=False)
    if explain:
        for reason in each.passed_over:
            console.print(f"not {reason}", highlight=False, soft_wrap=True)
