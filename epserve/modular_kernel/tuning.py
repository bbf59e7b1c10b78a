"""How an experts backend that has several variants of its kernels gets its choice of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Measured variants (tiles) of one backend. Whole backends are timed against each other by `selection`."""

    folder: Path | None = None
    """Tables that were tuned on this machine, read before the shipped one and written to; None: neither."""
    file: Path | None = None
    """A table that was named, in place of the folder's: it must be right, and what it has not is not measured."""
    budget_s: float = 0.0
    """Seconds that `tune` may take for what no table of this machine has, compiling included; 0: nothing is timed."""
    thorough: bool = False
    """All candidates, as `epserve tune` does; else few, as a start does."""
    again: bool = False
    """Measure even what the folder has."""
    every_row: bool = True
    """Batches have rows without a local expert, too; else only rows with one at least."""
