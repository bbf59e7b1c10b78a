"""Keeps measured times in the process: from an earlier arrangement of the ranks, and from other ranks.

A layer's kernels are made anew for another number of ranks, while requests wait. Measured times are then used again: the same
key gives the same times. A key that differs only in its numbers of experts gives times whose order holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .crossover import Crossover


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTable:
    """Holds one measurement of the experts backends.

    Args:
        key: everything that times depend on.
        kin: the same without the numbers of experts, on the rank and in all.
        num_experts: the experts of the rank.
        times: bucket -> candidate -> seconds.
        left_out: candidate -> the reason why it serves nothing.
    """

    key: str
    kin: str
    num_experts: int
    times: Mapping[int, Mapping[str, float]]
    left_out: Mapping[str, str] = field(default_factory=dict)


class KnownTimes:
    """Collects the tables of one process. It is empty at the start of a service, so that a start measures."""

    def __init__(self) -> None:
        self.started = False
        """The service has run. From then on, requests wait during each measurement."""
        self._tables: dict[str, KnownTable] = {}
        self._crossovers: dict[int, Crossover] = {}

    @property
    def tables(self) -> tuple[KnownTable, ...]:
        return tuple(self._tables.values())

    def add(self, tables: Iterable[KnownTable]) -> None:
        self._tables |= {table.key: table for table in tables}

    def find(self, key: str, kin: str, num_experts: int) -> KnownTable | None:
        """Returns the table of this key, otherwise the table of the same kin with the most similar number of experts."""
        if key in self._tables:
            return self._tables[key]
        alike = [table for table in self._tables.values() if table.kin == kin]
        return min(alike, key=lambda table: abs(table.num_experts - num_experts), default=None)

    def add_crossover(self, table: Crossover) -> None:
        self._crossovers[table.num_ranks] = table

    def crossover(self, num_ranks: int) -> Crossover | None:
        """Returns the table of `num_ranks` ranks, otherwise the table of the most similar number."""
        nearest = min(self._crossovers, key=lambda known: abs(known - num_ranks), default=None)
        return None if nearest is None else self._crossovers[nearest]
