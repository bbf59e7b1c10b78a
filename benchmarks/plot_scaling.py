"""Draws a scaling run: weak-scaling efficiency of the layer, its time against replicas, GB/s of dispatch and combine.

    python -m benchmarks.plot_scaling scaling_h200x8.json [--out docs/images/scaling.svg] [--check]

--check: exit status 1 when the drawing is not what the JSON gives. `benchmarks/scaling.py` draws its own run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import drawing
from benchmarks.drawing import Panel


def picture(report: dict) -> tuple[str, list[Panel]]:
    """Returns the title and the panels of one run."""
    meta = report["meta"]
    where = f"{meta['ranks']} x {meta['gpu']}" if meta["gpu"] else f"{meta['ranks']} CPU ranks on {meta['cores']} cores"
    return f"Expert parallelism on {where}, {meta['date']}", _panels(report)


def _panels(report: dict) -> list[Panel]:
    rows, panels, ranks = report.get("efficiency", []), [], report["meta"]["ranks"]
    tokens = sorted({row["tokens"] for row in rows})
    for shown in [each for each in tokens if each in (128, 4096)] or tokens[-1:]:
        for reference in ("from_1", "from_2"):
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if row["tokens"] == shown and row[reference] is not None and ranks > 2 * (reference == "from_2"):
                    lines.setdefault(row["backend"], []).append((row["world"], row[reference]))
            title = f"Weak scaling of the layer {reference.replace('_', ' ')}, {shown} tokens a rank"
            panels.append(Panel(title=title, unit="ranks", lines=lines, top=1.2))
    lines = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        if row["world"] == ranks:
            lines.setdefault(row["backend"], []).append((row["tokens"], row["us"]))
    panels.append(Panel(title=f"The layer on {ranks} ranks, us", unit="tokens a rank", lines=lines, logarithmic=True))
    for phase in ("dispatch", "combine"):
        lines = {}
        for cell in report["all2all"]:
            if cell["backend"] in drawing.COLOURS:
                lines.setdefault(cell["backend"], []).append((cell["tokens"], cell[phase]["gbps"]))
        panels.append(Panel(title=f"{phase} on {ranks} ranks, GB/s a rank", unit="tokens a rank", lines=lines))
    return panels


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the JSON")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    out = options.out or options.report.with_suffix(".svg")
    shown = picture(json.loads(options.report.read_text()))
    if options.check:
        return 0 if drawing.is_of(out, *shown) else 1
    drawing.save(out, *shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
