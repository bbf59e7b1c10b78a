"""The sizes of tiles of one layer's two GEMMs, as data and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTiles:
    """Holds the sizes of one GEMM: `bn` output columns (of gate and of up, in the first) and `bk` inner columns a step."""

    bn: int
    bk: int
    swap: bool = False
    """The weights take the 64-row operand of WGMMA: for thin token tiles."""
    split: int = 1
    """Programs that share one tile's inner dimension."""
    group: int = 1
    """Token tiles that pass over a column block before the next: keeps weights in the L2 cache."""
    by_expert: bool = False
    """Groups end with the expert: `group` is then the most, and an expert's tiles are shared evenly among its groups."""
    fly: bool = False
    """First GEMM only: quantise activations inside it."""
    wide: bool = False
    """First GEMM only: gate and up in one accumulator of 2 * bn columns."""
    flat: bool = False
    """Fuse the loop over work items with the loop over the inner dimension: loads run ahead across work items."""
    specialised: bool = False
    """The warp-specialised kernel of compute capability 9.0: bm 128 (without block scales also 192, of both GEMMs), bn 128,
    rows that lie expert by expert."""
    narrow: bool = False
    """Specialised, block scales only: products of 64 columns instead of 128, so that one runs while one is scaled."""
    lag: int = 0
    """Specialised only: a warpgroup starts when the one before has finished so many products of an item."""
    full_grid: bool = False
    """One program a work item, instead of as many as fit on the device at once."""
    warps: int = 4
    stages: int = 4

    @property
    def runs(self) -> int:
        """Returns `group` in the kernels' form: negative when groups end with the expert."""
        return -self.group if self.by_expert else self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Holds one configuration of the whole layer: `bm` rows a tile."""

    bm: int
    gate_up: GemmTiles
    down: GemmTiles
    expand: bool = False
    """Copy (and quantise) rows expert by expert first, so that the first GEMM takes them by TMA and need not gather."""

    @property
    def specialised(self) -> bool:
        return self.gate_up.specialised or self.down.specialised

    @classmethod
    def from_json(cls, cell: dict) -> Tiles:
        parts = {name: GemmTiles(**cell[name]) for name in ("gate_up", "down")}
        return cls(bm=cell["bm"], expand=cell.get("expand", False), **parts)

    def to_json(self) -> dict:
        """Returns the fields without those that have their default."""
        return {"bm": self.bm, **({"expand": True} if self.expand else {})} | {
            name: {
                f.name: getattr(part, f.name) for f in dataclasses.fields(part) if getattr(part, f.name) != f.default
            }
            for name, part in (("gate_up", self.gate_up), ("down", self.down))
        }
