"""Times that a process knows beside the file: what it measured for an earlier arrangement of the ranks, what other ranks told.

A layer's kernels are made anew for another number of ranks, while requests wait. What was measured is not measured again then:
the same key gives the same times, and a key that differs in its numbers of experts alone gives times of which the order holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .crossover import Crossover


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTable:
    """One measurement of the experts backends. `key`: everything that times depend on; `kin`: the same without how many experts
    there are, on the rank and in all. `num_experts`: of the rank. `times`: bucket -> candidate -> seconds; `left_out`:
    candidate -> why it serves nothing."""

    key: str
    kin: str
    num_experts: int
    times: Mapping[int, Mapping[str, float]]
    left_out: Mapping[str, str] = field(default_factory=dict)


class KnownTimes:
    """Of one process. Empty at the start of a service, so that a start measures."""

    def __init__(self) -> None:
        self.started = False
        """Whether the service has run: then requests wait for whatever is measured."""
        self._tables: dict[str, KnownTable] = {}
        self._crossovers: dict[int, Crossover] = {}

    @property
    def tables(self) -> tuple[KnownTable, ...]:
        return tuple(self._tables.values())

    def add(self, tables: Iterable[KnownTable]) -> None:
        self._tables |= {table.key: table for table in tables}

    def find(self, key: str, kin: str, num_experts: int) -> KnownTable | None:
        """Of this key, else of the same kin with the most similar number of experts."""
        if key in self._tables:
            return self._tables[key]
        alike = [table for table in self._tables.values() if table.kin == kin]
        return min(alike, key=lambda table: abs(table.num_experts - num_experts), default=None)

    def add_crossover(self, table: Crossover) -> None:
        self._crossovers[table.num_ranks] = table

    def crossover(self, num_ranks: int) -> Crossover | None:
        """That of so many ranks, else of the most similar number."""
        nearest = min(self._crossovers, key=lambda known: abs(known - num_ranks), default=None)
        return None if nearest is None else self._crossovers[nearest]
