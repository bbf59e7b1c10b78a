"""Draws `docs/images/all2all_h200x2.svg` and prints the tables of docs/all2all.md, from the benchmarks' own JSON.

python -m benchmarks.plot_all2all [--check]      --check: exit status 1 when the drawing is not what the JSON gives
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import drawing

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
OUT = HERE.parent / "docs" / "images" / "all2all_h200x2.svg"
SHAPE = (7168, 256)
LINES = ("nvlink", "nvlink_fp8", "nccl_a2a", "deepep_ht_bf16", "deepep_ll_bf16")
"""The lines of the drawing. Our classes over DeepEP are left out because they lie on DeepEP's own lines, or below."""
COLUMNS = ("floor", "nvlink", "nvlink_fp8", "nccl_a2a", "deepep_ll_bf16", "ours_deepep_ll_bf16", "deepep_ht_bf16",
           "ours_deepep_ht_bf16")  # fmt: skip


def panels(cells: list[dict], layer: list[dict], gpu: str) -> tuple[str, list[drawing.Panel]]:
    """Returns the title and the panels: round trips, and the whole layer in each scheme."""
    round_trip: dict[str, list[tuple[float, float]]] = {
        name: [(cell["tokens"], cell["round trip"]["us"]) for cell in cells if cell["backend"] == name]
        for name in LINES
    }
    round_trip["floor"] = sorted(
        {(cell["tokens"], cell["round trip"]["floor_us"]) for cell in cells if cell["backend"] == "nvlink"}
    )
    found = [
        drawing.Panel(title="dispatch + combine, bf16, us", unit="tokens a rank", lines=round_trip, logarithmic=True)
    ]
    for scheme in dict.fromkeys(cell["scheme"] for cell in layer):
        lines: dict[str, list[tuple[float, float]]] = {}
        for cell in layer:
            if cell["scheme"] == scheme and cell["backend"] in ("nvlink", "nvlink_batched", "deepep_ht", "deepep_ll"):
                lines.setdefault(cell["backend"], []).append((cell["tokens"], cell["us"]))
        title = f"whole layer, {'bf16' if scheme == 'none' else scheme}, us"
        found.append(drawing.Panel(title=title, unit="tokens a rank", lines=lines, logarithmic=True))
    return f"All-to-all and a DeepSeek-V3 layer on two {gpu}s, lower is better", found


def table(cells: list[dict]) -> str:
    """Round trips of every number of tokens, us."""
    found: dict[int, dict[str, float]] = {}
    for cell in cells:
        row = found.setdefault(cell["tokens"], {})
        row[cell["backend"]] = cell["round trip"]["us"]
        if cell["backend"] == "nvlink":
            row["floor"] = cell["round trip"]["floor_us"]
    lines = ["| T | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for tokens in sorted(found):
        values = [f"{found[tokens][name]:.3g}" if name in found[tokens] else "-" for name in COLUMNS]
        lines.append(f"| {tokens:,} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    report = json.loads((RESULTS / "all2all_h200x2.json").read_text())
    layer = json.loads((RESULTS / "layer_h200x2.json").read_text())
    cells = [cell for cell in report["cells"] if (cell["hidden"], cell["experts"]) == SHAPE]
    picture = panels(cells, layer["cells"], "NVIDIA H200")
    if options.check:
        return 0 if drawing.is_of(OUT, *picture) else 1
    drawing.save(OUT, *picture)
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
