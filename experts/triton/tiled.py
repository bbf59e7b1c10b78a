"""What the search for tiles asks of the experts whose tiles it looks for."""

from __future__ import annotations

from abc import abstractmethod

import torch

from epserve.experts.tiles.cache import Tuned
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import Table
from epserve.modular_kernel import ExpertWeights, FusedMoEExpertsModular, Prepared, Tuning

from .launch import Buffers, Carver, Launcher


class TiledExperts(FusedMoEExpertsModular):
    """Experts of two grouped GEMMs whose tiles come from a table, and whose steps can be run one by one."""

    def __init__(self, spec):
        super().__init__(spec)
        self.table: Table | None = None
        """None: what was tuned here, as `use` says, then what is shipped for the device."""
        self.tuning = Tuning()
        self.tuned = Tuned()
        """Those cells of the table that are not shipped, and what was left aside."""
        self.searched: set[int] = set()
        """Buckets whose tiles were looked for by this object."""
        self.served: dict[int, int] = {}
        """Local experts -> most rows of a batch, for which tiles were asked."""

    @abstractmethod
    def launcher(self) -> Launcher:
        """The launches on this object's device. The first call reads the tables of tiles."""

    @abstractmethod
    def take(self, table: Table) -> None:
        """Serve with this table from now on. Not after workspaces were reserved."""

    @abstractmethod
    def tiles(self, num_tokens: int, num_experts: int, top_k: int) -> tuple[Tiles, str]:
        """The sizes for a batch of `num_tokens`, and where they come from."""

    @abstractmethod
    def carve(
        self, r13: Carver, r2: Carver, num_rows: int, top_k: int, num_experts: int, tiles: Tiles
    ) -> tuple[Buffers, bool]:
        """The buffers of a batch, and whether the programs find their tiles in the ids themselves."""

    @abstractmethod
    def route(self, b: Buffers, prepared: Prepared, tiles: Tiles, num_experts: int, direct: bool) -> None:
        """Which rows are whose. direct: the programs find it in the ids themselves."""

    @abstractmethod
    def first_half(self, b: Buffers, prepared: Prepared, weights: ExpertWeights, tiles: Tiles, direct: bool) -> None:
        """Copy or quantise rows, multiply by W13, and what makes the rows that W2 reads."""

    @abstractmethod
    def second_half(
        self, b: Buffers, prepared: Prepared, weights: ExpertWeights, tiles: Tiles, direct: bool, output: torch.Tensor
    ) -> None:
        """Multiply by W2, weight and sum into `output` (M, K)."""
