"""The page on performance and its drawing say what the benchmark's JSON holds."""

import json
import statistics
from pathlib import Path

from benchmarks import drawing, experts_best_of, plot_all2all, plot_experts

ROOT = Path(__file__).resolve().parent.parent.parent
CELLS = json.loads(plot_experts.RESULT.read_text())["cells"]


def test_the_drawing_is_made_from_the_json():
    assert drawing.is_of(plot_experts.OUT, *plot_experts.panels())


def test_the_page_states_the_means_and_every_cell():
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    assert len(CELLS) == 72 and all(cell["us"]["triton"] for cell in CELLS)
    cool, warm = ([cell["us"]["triton"][end] / cell["best_us"] for cell in CELLS] for end in ("cool", "warm"))
    means = [statistics.geometric_mean(ratios) for ratios in (cool, warm)]
    assert f"**The geometric mean over the best peer is {means[0]:.3f} cool and {means[1]:.3f} warm**" in page
    assert f"Cool, {sum(ratio <= 1 for ratio in cool)} cells are at or ahead" in page
    assert f"Warm, {sum(ratio <= 1 for ratio in warm)} cells are at or ahead" in page
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert (
        f"**{means[0]:.3f} times** the best peer library in each cell on a cool chip and {means[1]:.3f} times" in readme
    )
    assert (
        f"Cool, {sum(r <= 1 for r in cool)} cells are at or ahead of the best peer. Warm, {sum(r <= 1 for r in warm)} cells"
        in readme
    )
    assert f"the worst is {max(warm) - 1:.0%} behind" in readme.replace(" %", "%")
    for cell, ratio in zip(CELLS, warm, strict=True):
        ours, theirs = cell["us"]["triton"], cell["us"].get("deepgemm")
        assert f"{ours['cool']:,.0f}, {ours['warm']:,.0f} ({ratio:.2f})" in page
        if theirs and cell["M"] >= 1024:
            every = (ours["cool"], theirs["cool"], ours["warm"], theirs["warm"])
            assert f"| {cell['M']:,} | " + " | ".join(f"{us:,.0f}" for us in every) in page


def test_cells_are_handed_to_whoever_is_clearly_faster(tmp_path):
    def file(name, experts, times):
        cells = [
            {"shape": "s", "dtype": "bf16", "M": tokens, "us": us, "error": None, "best_us": 10.0, "floor_us": 5.0}
            for tokens, us in times.items()
        ]
        path = tmp_path / name
        path.write_text(json.dumps({"experts": experts, "cells": cells}))
        return path

    _, ours = experts_best_of.times(file("ours.json", "triton", {1: 10.0, 4: 10.0, 16: 10.0}))
    name, theirs = experts_best_of.times(file("cutlass.json", "cutlass", {4: 9.8, 16: 8.0, 64: 1.0}))
    theirs[("s", "bf16", 16)]["best_us"] = None  # only our file says who is best elsewhere
    chosen = experts_best_of.best_of(ours, {name: theirs})
    assert {key[2]: value for key, value in chosen.items()} == {
        1: ("triton", 10.0),
        4: ("triton", 10.0),
        16: ("cutlass", 8.0),
    }
    *handed, best, floor = experts_best_of.summary(ours, chosen)
    assert handed == ["s          bf16          16: cutlass 8.0 us, ours 10.0 us"]
    assert best == "x_best over 3 cells: ours alone 1.000, handed over 0.928 (worst 1.000)"
    assert floor == "x_floor over 3 cells: ours alone 2.000, handed over 1.857 (worst 2.000)"


def test_the_all_to_all_drawing_and_table_are_made_from_the_json():
    report = json.loads((plot_all2all.RESULTS / "all2all_h200x2.json").read_text())
    layer = json.loads((plot_all2all.RESULTS / "layer_h200x2.json").read_text())
    cells = [cell for cell in report["cells"] if (cell["hidden"], cell["experts"]) == plot_all2all.SHAPE]
    assert drawing.is_of(plot_all2all.OUT, *plot_all2all.panels(cells, layer["cells"], "NVIDIA H200"))
    page = (ROOT / "docs" / "all2all.md").read_text()
    for tokens in (1, 128, 1024, 4096):
        ours = next(c["round trip"]["us"] for c in cells if (c["backend"], c["tokens"]) == ("nvlink", tokens))
        assert f"| {tokens:,} | " in page and f" | {ours:{'.1f' if ours < 100 else '.0f'}} | " in page
