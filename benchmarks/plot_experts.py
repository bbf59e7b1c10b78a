"""Draws `docs/images/experts_h200.svg` from the benchmark's own JSON and the peers' table: time against tokens, nine panels.

python -m benchmarks.plot_experts [--check]      --check: exit status 1 when the drawing is not what the JSON gives
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from benchmarks import drawing

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "experts_h200_in_turn.json"
PEERS = HERE / "peers" / "h200.csv"
OUT = HERE.parent / "docs" / "images" / "experts_h200.svg"
LINES = ("vllm_triton", "sglang_triton", "triton_kernels", "deepgemm_masked", "deepgemm_contig", "torch_gmm", "hpc_ops")


def panels() -> tuple[str, list[drawing.Panel]]:
    """Returns the title and a panel for each model shape and dtype."""
    report = json.loads(RESULT.read_text())
    cells = {(c["shape"], c["dtype"], c["M"]): c for c in report["cells"]}
    with open(PEERS, newline="") as file:
        peers = {(row["shape"], row["dtype"], int(row["M"])): row for row in csv.DictReader(file)}
    shapes, dtypes = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    tokens = sorted({key[2] for key in cells})
    found = []
    for shape in shapes:
        for dtype in dtypes:
            lines = {"epserve": [(m, cells[shape, dtype, m]["us"]["triton"]["warm"]) for m in tokens]}
            for name in LINES:
                points = [(m, float(peers[shape, dtype, m][name])) for m in tokens if peers[shape, dtype, m][name]]
                lines |= {name: points} if points else {}
            lines["floor"] = [(m, cells[shape, dtype, m]["floor_us"]) for m in tokens]
            found.append(drawing.Panel(title=f"{shape} {dtype}", unit="tokens", lines=lines, logarithmic=True))
    return f"Fused-MoE experts on one {report['gpu']}: microseconds against tokens, lower is better", found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return 0 if drawing.is_of(OUT, *panels()) else 1
    drawing.save(OUT, *panels())
    return 0


if __name__ == "__main__":
    sys.exit(main())
