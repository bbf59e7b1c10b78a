"""Tile sizes of the Triton experts: the key of a table, the shipped tables of measured tiles, and the rule without them.

`benchmarks/tune_experts.py` writes a table, `tuned/DEVICE.json`. A cell of a table is one (shape, quantisation, bucket of
tokens). `epserve tune` writes tables of this machine in the same form: see `cache`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

from epserve.modular_kernel import LayerSpec
from epserve.modular_kernel.measured.buckets import bucket_of

from .memory import HOPPER, Gpu, bytes_of
from .sizes import GemmTiles, Tiles

ALIKE = math.log(2.9)
"""Measured cells are a factor of 4 apart, so the nearest is at most 2 away where the range covers it."""
THICK = 128
"""Rows of a tile from which on thicker batches take the same tiles, and only more of them."""

Table = dict[str, dict[int, Tiles]]
"""Problem key -> bucket -> configuration."""

PACKED = ("int4", "mxfp4", "nvfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Holds the key of a table's row. The bucket of tokens selects the cell in the row."""

    scheme: str
    hidden: int
    intermediate: int
    local_experts: int
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, spec: LayerSpec, local_experts: int) -> Problem:
        s = spec.shape
        scheme = spec.quant.scheme
        return cls(scheme=scheme, hidden=s.hidden, intermediate=s.intermediate, local_experts=local_experts,
                   num_experts=s.num_experts, top_k=s.top_k)  # fmt: skip

    @property
    def key(self) -> str:
        return (
            f"{self.scheme} K{self.hidden} N{self.intermediate} E{self.local_experts}/{self.num_experts} t{self.top_k}"
        )

    @classmethod
    def parse(cls, key: str) -> Problem:
        scheme, hidden, intermediate, experts, top_k = key.split()
        local, total = experts[1:].split("/")
        return cls(scheme=scheme, hidden=int(hidden[1:]), intermediate=int(intermediate[1:]), local_experts=int(local),
                   num_experts=int(total), top_k=int(top_k[1:]))  # fmt: skip

    def rows_per_expert(self, num_tokens: int) -> float:
        """Returns the expected rows of an expert, with every token of all ranks in the batch and even routing."""
        return num_tokens * self.top_k / self.num_experts


def read_cells(cells: dict) -> Table:
    """Returns the table in the `cells` of a file. Raises AttributeError, KeyError, TypeError or ValueError for other content."""
    return {key: {int(b): Tiles.from_json(cell) for b, cell in rows.items()} for key, rows in cells.items()}


@functools.cache
def shipped(device_name: str) -> Table:
    """Returns the table of a device from `tuned/`. It is empty for a device that was not measured."""
    file = resources.files("epserve.experts") / "tuned" / (device_name.lower().replace(" ", "_") + ".json")
    return read_cells(json.loads(file.read_text(encoding="utf-8"))["cells"]) if file.is_file() else {}


class Picked(NamedTuple):
    """Holds the tiles for a batch, a text on their source, and the table's cell (problem key, bucket), or None for the rule."""

    tiles: Tiles
    why: str
    cell: tuple[str, int] | None


def choose(
    problem: Problem, num_tokens: int, table: Table, *, specialised: bool, gpu: Gpu = HOPPER
) -> tuple[Tiles, str]:
    """Returns the tiles for a batch of `num_tokens` and their source. specialised: warp-specialised kernels can run here."""
    picked = pick(problem, num_tokens, table, specialised=specialised, gpu=gpu)
    return picked.tiles, picked.why


def pick(problem: Problem, num_tokens: int, table: Table, *, specialised: bool, gpu: Gpu = HOPPER) -> Picked:
    """Returns the same tiles as `choose`, with their cell."""
    bucket = bucket_of(num_tokens)
    measured = table.get(problem.key, {}).get(bucket)
    if measured is not None and (specialised or not measured.specialised):
        return Picked(measured, f"measured for this shape, {bucket} tokens", (problem.key, bucket))
    alike = _alike(problem, bucket, table)
    if alike is not None and (specialised or not alike.tiles.specialised):
        return alike
    tiles = default_tiles(problem, bucket, specialised=specialised, gpu=gpu)
    return Picked(tiles, "the rule for shapes that were not measured", None)


def _alike(problem: Problem, num_tokens: int, table: Table) -> Picked | None:
    """Returns tiles measured for the same matrices over another number of ranks or another top-k, or None.

    Each local expert must get about as many rows: within a factor of 2.9, or more than in the largest measured batch if the
    tiles of that batch are thick.
    """
    rows, best = problem.rows_per_expert(num_tokens), None
    for key, cells in table.items():
        other = Problem.parse(key)
        if (other.scheme, other.hidden, other.intermediate) != (problem.scheme, problem.hidden, problem.intermediate):
            continue
        for tokens, tiles in cells.items():
            theirs = other.rows_per_expert(tokens)
            far = abs(math.log(theirs / rows))
            beyond = tokens == max(cells) and theirs < rows and tiles.bm >= THICK
            if (far < ALIKE or beyond) and (best is None or far < best[0]):
                why = f"measured for {key}, {tokens} tokens: as many rows an expert"
                best = far, Picked(tiles, why, (key, tokens))
    return None if best is None else best[1]


def all_have_steps(split: int, steps: int) -> bool:
    """Returns whether each of `split` programs gets at least one step. A kernel loads its first step's scales in any case."""
    return (split - 1) * -(-steps // split) < steps


def default_tiles(problem: Problem, num_tokens: int, *, specialised: bool = False, gpu: Gpu = HOPPER) -> Tiles:
    """Guesses tiles from the tokens per expert, smaller on a GPU with less shared memory than compute capability 9.0 has."""
    tiles, scheme = _guess(problem, num_tokens, specialised=specialised), problem.scheme
    first = _shrunk(tiles.gate_up, tiles.bm, scheme=scheme, gated=True, gpu=gpu)
    second = _shrunk(tiles.down, tiles.bm, scheme=scheme, gated=False, gpu=gpu)
    return dataclasses.replace(tiles, gate_up=first, down=second)


def _shrunk(c: GemmTiles, bm: int, *, scheme: str, gated: bool, gpu: Gpu) -> GemmTiles:
    """Shrinks tiles until the buffers fit: fewer stages, then shorter steps, then one load ahead, then fewer columns."""
    block, packed = scheme == "fp8_block", scheme in PACKED
    bk = c.bk if block or packed else 64  # blocks and groups of scales are whole
    steps = [("stages", 3), ("bk", bk), ("stages", 2), ("bn", c.bn if block and gated else 64)]
    for name, least in steps:
        while getattr(c, name) > least and not gpu.fits(bytes_of(c, bm, scheme=scheme, gated=gated, gpu=gpu)):
            value = getattr(c, name)
            c = dataclasses.replace(c, **{name: value - 1 if name == "stages" else value // 2})
    return c


def _guess(problem: Problem, num_tokens: int, *, specialised: bool) -> Tiles:
    """Guesses tiles. Thin tiles swap the operands, and few tiles split the inner dimension over programs."""
    rows = problem.rows_per_expert(num_tokens)
    block, half = problem.scheme == "fp8_block", problem.scheme == "none"
    if (
        problem.scheme in PACKED
    ):  # widening in registers needs small tiles, and thin tiles leave the weights on WGMMA's wide side
        swap = rows <= 24
        gemm = GemmTiles(bn=64, bk=128, swap=swap, group=1 if swap else 4, warps=4, stages=3)
        return Tiles(bm=16 if rows <= 8 else 32 if swap else 64, gate_up=gemm, down=gemm)
    bm = 16 if rows <= 8 or num_tokens <= 16 else 32 if rows <= 24 else 64 if rows <= 48 else 128
    bk = 64 if half else 128
    if bm <= 32:
        pairs = num_tokens * problem.top_k * problem.local_experts / problem.num_experts
        active = min(problem.local_experts, max(1, round(pairs)))
        bn = 128 if block else 64
        split = 1
        few = num_tokens <= 16
        while few and active * (problem.intermediate // bn) * split < 264 and split < 8:
            if not all_have_steps(2 * split, -(-problem.hidden // 128)):
                break
            split *= 2
        first = GemmTiles(bn=bn, bk=128, swap=True, split=split, stages=4 if not half else 3)
        return Tiles(bm=bm, gate_up=first, down=GemmTiles(bn=64, bk=128, swap=True, stages=4))
    if bm == 64:
        first = GemmTiles(bn=128 if block else 64, bk=bk, group=2, warps=8 if block else 4)
        return Tiles(bm=bm, gate_up=first, down=GemmTiles(bn=128, bk=bk, group=2, warps=8 if block else 4))
    if specialised and block:
        gemm = GemmTiles(bn=128, bk=128, group=8, specialised=True)
        return Tiles(bm=bm, expand=True, gate_up=gemm, down=gemm)
    first = GemmTiles(bn=128, bk=bk, group=8, warps=8, wide=not block)
    return Tiles(bm=bm, gate_up=first, down=GemmTiles(bn=128 if block else 256, bk=bk, group=8, warps=8))
