"""Configures how an experts backend with several variants of its kernels chooses among them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Configures measured variants (tiles) of one backend. `selection` times whole backends against each other."""

    folder: Path | None = None
    """The folder of tables that were tuned on this machine, read before the shipped one and written to. None: neither."""
    file: Path | None = None
    """A named table, in place of the folder's. It must be correct, and an entry that it lacks is not measured."""
    budget_s: float = 0.0
    """Seconds that `tune` may take for entries that no table of this machine has, with compiling. 0: nothing is timed."""
    thorough: bool = False
    """All candidates are measured, as `epserve tune` does. Otherwise few are, as a start does."""
    again: bool = False
    """Entries are measured even if the folder has them."""
    every_row: bool = True
    """Batches have rows without a local expert, too. Otherwise every row has at least one."""
