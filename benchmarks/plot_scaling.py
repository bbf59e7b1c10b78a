"""Draws a scaling run: weak-scaling efficiency of the layer, its time against replicas, GB/s of dispatch and combine.

    python -m benchmarks.plot_scaling scaling_h200x8.json [--out docs/images/scaling.svg] [--check]

--check: exit status 1 when the drawing is not what the JSON gives. `benchmarks/scaling.py` draws its own run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

COLOURS = {"nvlink": "#c0392b", "nvlink_fp8": "#e59866", "replicas": "#555555", "deepep_ht": "#3b8ea5", "deepep_ll": "#7aa874",
           "allgather_reducescatter": "#c58b2a", "nvlink_batched": "#e08283",
           "all_to_all": "#8e6bbf", "all_to_all_batched": "#b8a5d6",
           "deepep_ht_bf16": "#3b8ea5", "deepep_ll_bf16": "#7aa874", "nccl_a2a": "#8c8c8c"}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 300, 210, 64, 84, 66, 66


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines by name: points (x, y). The x axis has one place for each value that occurs."""

    title: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    logarithmic: bool = False
    top: float | None = None


def draw(report: dict) -> str:
    meta = report["meta"]
    where = f"{meta['ranks']} x {meta['gpu']}" if meta["gpu"] else f"{meta['ranks']} CPU ranks on {meta['cores']} cores"
    return page(f"Expert parallelism on {where}, {meta['date']}", _panels(report))


def page(title: str, panels: list[Panel]) -> str:
    """The panels that have lines, three in a row, under one legend."""
    panels = [panel for panel in panels if panel.lines]
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    total_w, total_h = LEFT + columns * (WIDTH + GAP_X), TOP + rows * (HEIGHT + GAP_Y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w} {total_h}" font-family="sans-serif">',
        f'<rect width="{total_w}" height="{total_h}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>',
    ]
    for i, name in enumerate(names):
        x, y = LEFT + i % 6 * 178, 40 + i // 6 * 15
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 18}" y2="{y}" stroke="{_colour(name)}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 22}" y="{y + 4}" font-size="11">{name}</text>')
    for i, panel in enumerate(panels):
        parts += _draw_panel(LEFT + i % columns * (WIDTH + GAP_X), TOP + i // columns * (HEIGHT + GAP_Y), panel)
    return "\n".join([*parts, "</svg>", ""])


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
            if cell["backend"] in COLOURS:
                lines.setdefault(cell["backend"], []).append((cell["tokens"], cell[phase]["gbps"]))
        panels.append(Panel(title=f"{phase} on {ranks} ranks, GB/s a rank", unit="tokens a rank", lines=lines))
    return panels


def _nice(value: float) -> float:
    """The next of 1, 1.2, 1.6, 2, 3, 4, 6, 8 times a power of ten: its quarters are short numbers."""
    unit = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(each * unit for each in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if each * unit >= value * 0.9999)


def _colour(name: str) -> str:
    return COLOURS.get(name, "#999999")


def _draw_panel(x0: float, y0: float, panel: Panel) -> list[str]:
    places = sorted({x for points in panel.lines.values() for x, _ in points})
    values = [y for points in panel.lines.values() for _, y in points]
    low, high = (0.0, _nice(max([*values, panel.top or 0.0]))) if not panel.logarithmic else (min(values), max(values))
    if panel.logarithmic:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.001))

    def at(x: float, y: float) -> tuple[float, float]:
        share = math.log(y / low) / math.log(high / low) if panel.logarithmic else (y - low) / (high - low or 1)
        return x0 + WIDTH * (places.index(x) + 0.5) / len(places), y0 + HEIGHT * (1 - share)

    parts = [
        f'<rect x="{x0}" y="{y0}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{x0}" y="{y0 - 6}" font-size="12">{panel.title}</text>',
    ]
    if panel.logarithmic:
        ticks = [10.0**k for k in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    else:
        ticks = [high * k / 4 for k in range(5)]
    for tick in ticks:
        _, y = at(places[0], tick)
        parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + WIDTH}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x0 - 4}" y="{y + 4:.1f}" font-size="10" text-anchor="end">{tick:.4g}</text>')
    for place in places:
        x, _ = at(place, high)
        parts.append(f'<text x="{x:.1f}" y="{y0 + HEIGHT + 14}" font-size="10" text-anchor="middle">{place:g}</text>')
    middle = x0 + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{y0 + HEIGHT + 28}" font-size="10" text-anchor="middle">{panel.unit}</text>')
    for name, points in panel.lines.items():
        spots = [at(*point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(name)}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{_colour(name)}"/>' for x, y in spots]
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the JSON")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    out = options.out or options.report.with_suffix(".svg")
    drawing = draw(json.loads(options.report.read_text()))
    if options.check:
        return 0 if out.exists() and out.read_text() == drawing else 1
    out.write_text(drawing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
