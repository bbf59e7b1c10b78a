"""Interface between the search for tiles and the experts that use the tiles."""

from __future__ import annotations

from abc import abstractmethod

import torch

from epserve.experts.tiles.cache import Tuned
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import Table
from epserve.modular_kernel import ExpertWeights, FusedMoEExpertsModular, Prepared, Tuning

from .launch import Buffers, Carver, Launcher


class TiledExperts(FusedMoEExpertsModular):
    """Base of experts of two grouped GEMMs that take tiles from a table and can run their steps one by one."""

    def __init__(self, spec):
        super().__init__(spec)
        self.table: Table | None = None
        """Table of tiles. None: cells tuned on this machine (see `use`), then cells shipped for the device."""
        self.tuning = Tuning()
        self.tuned = Tuned()
        """Cells of the table that are not shipped, and notes on files left aside."""
        self.searched: set[int] = set()
        """Buckets whose tiles this object has searched."""
        self.served: dict[int, int] = {}
        """Local experts -> most rows of a batch that tiles were asked for."""

    @abstractmethod
    def launcher(self) -> Launcher:
        """Returns the launcher on this object's device. The first call reads the tables of tiles."""

    @abstractmethod
    def take(self, table: Table) -> None:
        """Serves with this table from now on. The caller must not call it after workspaces were reserved."""

    @abstractmethod
    def tiles(self, num_tokens: int, num_experts: int, top_k: int) -> tuple[Tiles, str]:
        """Returns the tiles for a batch of `num_tokens`, and a text on their source."""

    @abstractmethod
    def carve(
        self, r13: Carver, r2: Carver, num_rows: int, top_k: int, num_experts: int, tiles: Tiles
    ) -> tuple[Buffers, bool]:
        """Returns the buffers of a batch, and whether the programs find their tiles in the ids themselves."""

    @abstractmethod
    def route(self, b: Buffers, prepared: Prepared, tiles: Tiles, num_experts: int, direct: bool) -> None:
        """Sorts the rows by expert. direct: the programs find their rows in the ids themselves."""

    @abstractmethod
    def first_half(self, b: Buffers, prepared: Prepared, weights: ExpertWeights, tiles: Tiles, direct: bool) -> None:
        """Copies or quantises rows, multiplies by W13, and makes the rows that W2 reads."""

    @abstractmethod
    def second_half(
        self, b: Buffers, prepared: Prepared, weights: ExpertWeights, tiles: Tiles, direct: bool, output: torch.Tensor
    ) -> None:
        """Multiplies by W2, weights and sums into `output` (M, K)."""
