"""Computes the gain of measured selection: each cell of our own experts goes to the fastest backend that was timed there.

    python -m benchmarks.experts_best_of results/ours.json results/cutlass.json [results/deepgemm.json]

Each file comes from `python -m benchmarks.experts --json`, on one machine. The first file's cells count. If another file has the
same cell, right and more than 5 % faster (the margin of `epserve.modular_kernel.measured.selection`), the cell takes that time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from epserve.modular_kernel.measured.selection import MARGIN

Cell = tuple[str, str, int]


def times(path: Path) -> tuple[str, dict[Cell, dict]]:
    """The backend's name, and its right cells by shape, dtype and tokens."""
    report = json.loads(path.read_text())
    cells = {
        (cell["shape"], cell["dtype"], cell["M"]): cell for cell in report["cells"] if not cell["error"] and cell["us"]
    }
    return report.get("experts", "triton"), cells


def best_of(ours: dict[Cell, dict], others: dict[str, dict[Cell, dict]]) -> dict[Cell, tuple[str, float]]:
    """Each of our cells: who serves it, in how many us. Ours is preferred, as it is at run time."""
    chosen = {}
    for key, cell in ours.items():
        name, us = "triton", cell["us"]
        for other, cells in others.items():
            theirs = cells[key]["us"] if key in cells else None
            if theirs is not None and theirs * MARGIN < cell["us"] and theirs < us:
                name, us = other, theirs
        chosen[key] = name, us
    return chosen


def summary(ours: dict[Cell, dict], chosen: dict[Cell, tuple[str, float]]) -> list[str]:
    """One line a cell that was handed over, then the geometric means with and without."""
    lines = []
    for (shape, dtype, tokens), (name, us) in chosen.items():
        cell = ours[shape, dtype, tokens]
        if name != "triton":
            lines.append(f"{shape:10} {dtype:10} {tokens:5d}: {name} {us:.1f} us, ours {cell['us']:.1f} us")
    for ratio, base in (("x_best", "best_us"), ("x_floor", "floor_us")):
        known = [key for key, cell in ours.items() if cell[base]]
        if known:
            alone = statistics.geometric_mean(ours[key]["us"] / ours[key][base] for key in known)
            handed = statistics.geometric_mean(chosen[key][1] / ours[key][base] for key in known)
            worst = max(chosen[key][1] / ours[key][base] for key in known)
            lines.append(
                f"{ratio} over {len(known)} cells: ours alone {alone:.3f}, handed over {handed:.3f} (worst {worst:.3f})"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    options = parser.parse_args()
    _, ours = times(options.ours)
    print(*summary(ours, best_of(ours, dict(map(times, options.others)))), sep="\n")


if __name__ == "__main__":
    main()
