"""Draws `docs/images/experts_h200.svg` from the benchmark's own JSON and the peers' table: time against tokens, nine panels.

python -m benchmarks.plot_experts [--check]      --check: exit status 1 when the drawing is not what the JSON gives
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "experts_h200_uniform.json"
PEERS = HERE / "peers" / "h200.csv"
OUT = HERE.parent / "docs" / "images" / "experts_h200.svg"
LINES = {"vllm_triton": "#c58b2a", "sglang_triton": "#b8a5d6", "triton_kernels": "#3b8ea5", "deepgemm_masked": "#7aa874",
         "deepgemm_contig": "#4d7c4a", "torch_gmm": "#b0b0b0"}  # fmt: skip
OURS, FLOOR = "#c0392b", "#555555"
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 270, 190, 60, 70, 60, 62
LOW, HIGH = 10.0, 30000.0  # us


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    drawing = draw()
    if parser.parse_args().check:
        return 0 if OUT.exists() and OUT.read_text() == drawing else 1
    OUT.write_text(drawing)
    return 0


def draw() -> str:
    report = json.loads(RESULT.read_text())
    cells = {(c["shape"], c["dtype"], c["M"]): c for c in report["cells"]}
    with open(PEERS, newline="") as file:
        peers = {(row["shape"], row["dtype"], int(row["M"])): row for row in csv.DictReader(file)}
    shapes, dtypes = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    tokens = sorted({key[2] for key in cells})
    total_w = LEFT + len(dtypes) * (WIDTH + GAP_X)
    total_h = TOP + len(shapes) * (HEIGHT + GAP_Y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w} {total_h}" font-family="sans-serif">',
        f'<rect width="{total_w}" height="{total_h}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">Fused-MoE experts on one {report["gpu"]}: microseconds against tokens'
        " (both logarithmic), lower is better</text>",
        _legend(),
    ]
    for row, shape in enumerate(shapes):
        for column, dtype in enumerate(dtypes):
            x0, y0 = LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y)
            parts += _panel(x0, y0, f"{shape} {dtype}", tokens)
            for name, colour in LINES.items():
                points = [(m, float(peers[shape, dtype, m][name])) for m in tokens if peers[shape, dtype, m][name]]
                parts.append(_line(x0, y0, points, tokens, colour, 1.2))
            floor = [(m, cells[shape, dtype, m]["floor_us"]) for m in tokens]
            parts.append(_line(x0, y0, floor, tokens, FLOOR, 1.0, dash="3 3"))
            ours = [(m, cells[shape, dtype, m]["us"]) for m in tokens]
            parts.append(_line(x0, y0, ours, tokens, OURS, 2.2))
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> str:
    names = {"epserve": OURS, **LINES, "floor": FLOOR}
    parts = []
    for i, (name, colour) in enumerate(names.items()):
        x = LEFT + i * 115
        parts.append(f'<line x1="{x}" y1="38" x2="{x + 18}" y2="38" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 22}" y="42" font-size="11">{name}</text>')
    return "\n".join(parts)


def _y(y0: float, us: float) -> float:
    us = min(max(us, LOW), HIGH)
    return y0 + HEIGHT * (1 - math.log(us / LOW) / math.log(HIGH / LOW))


def _panel(x0: float, y0: float, title: str, tokens: list[int]) -> list[str]:
    parts = [
        f'<rect x="{x0}" y="{y0}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{x0}" y="{y0 - 6}" font-size="12">{title}</text>',
    ]
    for us in (10, 100, 1000, 10000):
        y = _y(y0, us)
        parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + WIDTH}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x0 - 4}" y="{y + 4:.1f}" font-size="10" text-anchor="end">{us}</text>')
    for i, m in enumerate(tokens):
        x = x0 + WIDTH * i / (len(tokens) - 1)
        parts.append(f'<text x="{x:.1f}" y="{y0 + HEIGHT + 14}" font-size="10" text-anchor="middle">{m}</text>')
    return parts


def _line(x0, y0, points, tokens, colour: str, width: float, dash: str = "") -> str:
    step = WIDTH / (len(tokens) - 1)
    path = " ".join(f"{x0 + tokens.index(m) * step:.1f},{_y(y0, us):.1f}" for m, us in points)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{style}/>'


if __name__ == "__main__":
    sys.exit(main())
