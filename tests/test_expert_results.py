"""The page on performance and its drawing say what the benchmark's JSON holds."""

import json
import statistics
from pathlib import Path

from benchmarks import plot_experts

ROOT = Path(__file__).resolve().parent.parent
CELLS = json.loads(plot_experts.RESULT.read_text())["cells"]


def test_the_drawing_is_made_from_the_json():
    assert plot_experts.OUT.read_text() == plot_experts.draw()


def test_the_page_states_the_mean_and_every_cell():
    page = (ROOT / "docs" / "performance.md").read_text()
    assert len(CELLS) == 72 and all(cell["error"] is None for cell in CELLS)
    assert f"**Geometric mean {statistics.geometric_mean(cell['x_best'] for cell in CELLS):.3f}" in page
    assert f"{sum(cell['x_best'] <= 1 for cell in CELLS)} cells\nare at or ahead" in page
    for cell in CELLS:
        mark = "*" if cell["run"] == 1 else ""
        assert f"{cell['us']:.0f} ({cell['x_floor']:.2f}, {cell['x_best']:.2f}{mark})" in page
