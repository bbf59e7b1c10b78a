"""Draws the benchmarks' pictures by matplotlib: panels of lines under one legend, as SVG.

A drawing names the data that it was made from by a digest. `is_of` compares the digest, so a check does not depend on
matplotlib's version or on fonts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Panel", "is_of", "save"]

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "epserve",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "figure.facecolor": "white",  # readable on a dark page too
}
COLOURS = {
    "epserve": "#c0392b", "floor": "#444444", "bound": "#444444", "replicas": "#111111",
    "nvlink": "#c0392b", "nvlink_fp8": "#e8836b", "nvlink_batched": "#f0b27a", "nvlink_batched_fp8": "#d68910",
    "nvlink_spaced": "#7b241c", "nvlink_copied": "#641e16",
    "deepep_ht": "#0b3c6f", "deepep_ht_bf16": "#1f77b4", "deepep_ht_fp8": "#7fb3d5",
    "deepep_ll": "#0f5132", "deepep_ll_bf16": "#2e8b57", "deepep_ll_fp8": "#82c99d",
    "ours_deepep_ht_bf16": "#5dade2", "ours_deepep_ll_bf16": "#58d68d",
    "all_to_all": "#8e44ad", "all_to_all_fp8": "#a569bd", "all_to_all_batched": "#c39bd3", "all_to_all_batched_fp8": "#5b2c6f",
    "allgather_reducescatter": "#b7950b", "allgather_reducescatter_fp8": "#d4ac0d", "nvshmem": "#117a65",
    "nccl_a2a": "#808080", "nccl_ag_rs": "#b3b3b3",
    "vllm_triton": "#b9770e", "sglang_triton": "#a569bd", "triton_kernels": "#2471a3", "deepgemm_masked": "#82c99d",
    "deepgemm_contig": "#1e8449", "torch_gmm": "#909497", "hpc_ops": "#d81b60", "deepgemm_psum": "#0b5345",
}  # fmt: skip
"""A backend has one colour in all drawings, and no two lines of one drawing share a colour."""
OTHERS = ("#17becf", "#9c755f", "#6b6ecf", "#bcbd22", "#e377c2")
MARKERS = "osv^D<>PXh*p"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines by name: points (x, y). The x axis has one place for each value that occurs.

    top: the y axis reaches at least so far.
    dashed: names of lines that are bounds and no measurements.
    """

    title: str
    unit: str
    lines: dict[str, list[tuple[float, float]]]
    logarithmic: bool = False
    top: float | None = None
    dashed: tuple[str, ...] = ("floor", "bound")


def save(path: Path, title: str, panels: list[Panel]) -> None:
    """Writes the panels that have lines, three in a row, with one legend below the title."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    shown = [panel for panel in panels if panel.lines]
    names = list(dict.fromkeys(name for panel in shown for name in panel.lines))
    columns, rows = min(3, max(1, len(shown))), max(1, -(-len(shown) // 3))
    per_row = max(2, columns * 2)
    height = 2.7 * rows + 0.55 + 0.2 * -(-len(names) // per_row)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.9 * columns, height), layout="constrained")
        FigureCanvasSVG(figure)
        looks = {name: look(name, names) for name in names}
        handles: dict[str, Any] = {}
        for number, panel in enumerate(shown):
            axes = figure.add_subplot(rows, columns, number + 1)
            handles = {**fill(axes, panel, looks), **handles}
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.legend(
            [handles[name] for name in names], names, loc="outside lower left", ncols=per_row, frameon=False, fontsize=9
        )
        figure.savefig(path, format="svg", metadata={"Date": None, "Source": digest(title, panels)})


def look(name: str, names: list[str]) -> dict[str, Any]:
    unknown = [each for each in names if each not in COLOURS]
    colour = COLOURS[name] if name in COLOURS else OTHERS[unknown.index(name) % len(OTHERS)]
    return {"color": colour, "marker": MARKERS[names.index(name) % len(MARKERS)]}


def fill(axes: Any, panel: Panel, looks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Draws one panel. Returns the line of each name, for the legend."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    places = sorted({x for points in panel.lines.values() for x, _ in points})
    handles = {}
    for name, points in panel.lines.items():
        ordered = sorted(points)
        kind = {"linestyle": "--", "linewidth": 1.0} if name in panel.dashed else {"linewidth": 1.5}
        wide = {"linewidth": 2.2} if name == "epserve" else {}
        handles[name] = axes.plot(
            [places.index(x) for x, _ in ordered],
            [y for _, y in ordered],
            markersize=3.5,
            label=name,
            **{**looks[name], **kind, **wide},
        )[0]
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.unit)
    axes.set_xticks(range(len(places)), [f"{place:g}" for place in places])
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0, top=max([panel.top or 0.0, *(1.05 * y for p in panel.lines.values() for _, y in p)]))
    return handles


def digest(title: str, panels: list[Panel]) -> str:
    data = json.dumps([title, [asdict(panel) for panel in panels]])
    return "sha256:" + hashlib.sha256(data.encode()).hexdigest()


def is_of(path: Path, title: str, panels: list[Panel]) -> bool:
    """Whether the drawing at `path` was made from these panels."""
    return path.exists() and digest(title, panels) in path.read_text()
