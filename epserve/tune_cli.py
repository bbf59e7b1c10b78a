"""The command `epserve tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def tune(
    config: Annotated[Path, typer.Argument(help="YAML file of the service; see docs/configuration.md.")],
    ranks: Annotated[int | None, typer.Option(help="In place of engine.ranks.", min=1)] = None,
    times: Annotated[Path | None, typer.Option(help="In place of engine.experts_times: the file to fill.")] = None,
    budget: Annotated[float, typer.Option(help="Most seconds for each kind of rank.", min=0.1)] = 60.0,
    again: Annotated[bool, typer.Option("--again", help="Measure what the file has already, too.")] = False,
) -> None:
    """Time the experts backends on this machine for the ranks of a service, so that its start need not."""
    from epserve.config import load_config
    from epserve.errors import ConfigError
    from epserve.tune import tune as measure

    overrides: dict[str, Any] = {"engine.experts_timing_s": budget}
    if ranks is not None:
        overrides["engine.ranks"] = ranks
    if times is not None:
        overrides["engine.experts_times"] = str(times)
    loaded = load_config(config, overrides)
    if loaded.engine.experts_times is None:
        raise ConfigError("engine.experts_times is null: name a file for the times with --times")
    console = Console()
    for each in measure(loaded, again=again):
        names = list(each.choices[0].seconds) if each.choices else []
        who = f"rank {each.ranks[0]}" if len(each.ranks) == 1 else f"{len(each.ranks)} ranks"
        table = Table("rows", "backend", *(f"{name}, us" for name in names), box=None,
                      title=f"{who} with {each.num_experts} experts", title_justify="left")  # fmt: skip
        for choice in each.choices:
            seen = (f"{choice.seconds[name] * 1e6:.0f}" if name in choice.seconds else "–" for name in names)
            table.add_row(str(choice.rows), choice.backend, *seen)
        console.print(table)
        for line in each.lines:
            if "left out" in line or "were spent" in line:
                console.print(line, style="yellow", highlight=False)
    console.print(f"kept in {loaded.engine.experts_times.expanduser()}", highlight=False, soft_wrap=True)
