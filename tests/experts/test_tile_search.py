"""Tiles that are measured on the machine that serves: which are tried and kept, which files are believed."""

import dataclasses
import json

import pytest
import torch

from epserve.errors import ConfigError
from epserve.experts.tiles.cache import Layer, Times, Tuned, path_of, read_folder, read_named, write
from epserve.experts.tiles.candidates import First, joined
from epserve.experts.tiles.limits import Limits
from epserve.experts.tiles.search import GAIN, search
from tests.experts.tiles import (
    BLOCK,
    CHOICE,
    CURRENT,
    FIRSTS,
    HERE,
    OTHER,
    SECONDS,
    SMALL,
    FakeBench,
    saved,
    spec_of,
    tuned_cells,
)

torch.set_num_threads(1)


def test_each_gemm_is_chosen_by_itself_and_the_token_tile_by_both():
    bench = FakeBench({(16, FIRSTS[1]): 10.0, (16, SECONDS[2]): 11.0, (32, FIRSTS[2]): 1.0, (32, SECONDS[0]): 15.0})
    found = search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock)
    assert found is not None and found.tiles == joined(32, FIRSTS[2], SECONDS[0])
    assert found.times == Times(us=90.0, before_us=100.0) and bench.compared == [(CURRENT, found.tiles)]
    assert bench.seen[0][2] == First(CURRENT.gate_up, expand=True), "what would serve is timed first"
    assert found.timed == 4 + 4 + 3 + 3
    partners = {partner for which, bm, _, partner in bench.seen if (which, bm) == ("down", 32)}
    assert partners == {FIRSTS[2]}, "the second GEMM reads the winner's rows"


@pytest.mark.parametrize(
    ("layers", "note"),
    [((100.0, 100.0 * (1 - GAIN / 2), None), ""), ((100.0, 10.0, "results differ by 0.5"), "results differ by 0.5")],
)
def test_what_would_serve_stays(layers, note):
    """Noise does not decide, and what is wrong is not taken however fast."""
    bench = FakeBench({(32, FIRSTS[0]): 1.0}, layers)
    found = search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock)
    assert found is not None and (found.tiles, found.note) == (CURRENT, note)
    assert found.times == Times(us=100.0, before_us=100.0)


def test_candidates_that_fail_are_dropped():
    bench = FakeBench(fails=(FIRSTS[0], SECONDS[0]))
    found = search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock)
    assert found is not None and FIRSTS[0].tiles not in (found.tiles.gate_up, found.tiles.down)
    bench = FakeBench(fails=(*FIRSTS, *SECONDS, First(CURRENT.gate_up, expand=True), CURRENT.down))
    assert search(bench, CURRENT, CHOICE, deadline=1e9, clock=bench.clock) is None and not bench.compared


def test_the_deadline_ends_the_search():
    bench = FakeBench()
    found = search(bench, CURRENT, CHOICE, deadline=6.0, clock=bench.clock)
    assert found is not None and bench.now <= 8.0 and {which for which, *_ in bench.seen} == {"gate_up", "down"}


def read(folder, problem=SMALL, machine=HERE, every_row=True) -> Tuned:
    spec = spec_of(problem)
    return read_folder(folder, machine, spec, Limits.of(spec), every_row=every_row)


def test_a_table_comes_back_as_it_was_written(tmp_path):
    path = saved(tmp_path / "new")
    found = read(tmp_path / "new")
    assert found.table == {SMALL.key: {16: OTHER, 64: OTHER}} and not found.notes
    assert found.times[SMALL.key, 16] == Times(us=9.0, before_us=10.0)
    assert found.origins[SMALL.key, 64].startswith("tuned here on 20")
    assert [each.name for each in (tmp_path / "new").iterdir()] == [path.name] and path.name.startswith(
        "cpu_none_k256_n256_e4of4"
    )
    assert read_named(path, spec_of(SMALL), Limits.of(spec_of(SMALL))).table == found.table
    assert json.loads(path.read_text())["cells"][SMALL.key]["16"] == OTHER.to_json(), "as in the shipped table"


@pytest.mark.parametrize("field", ["gpu", "driver", "triton", "epserve"])
def test_another_machines_table_is_left_aside(tmp_path, field):
    path = saved(tmp_path, machine=dataclasses.replace(HERE, **{field: "another"}))
    found = read(tmp_path)
    assert not found.table and len(found.notes) == 1
    assert (
        str(path) in found.notes[0]
        and f"made with {field} another" in found.notes[0]
        and "epserve tune" in found.notes[0]
    )
    saved(tmp_path)
    assert read(tmp_path).table and not read(tmp_path).notes, "with a new one nobody asks for the old one"


BAD = {
    "truncated": (lambda text: text[:-40], "cannot be read"),
    "not text": (lambda text: "\x00\x00", "cannot be read"),
    "a list": (lambda text: "[]", "it is not a table of tiles"),
    "no cells": (lambda text: text.replace('"cells"', '"cell"'), "it is not a table of tiles"),
    "a layer that is none": (lambda text: text.replace(SMALL.key, "none K1"), "'none K1' is not a layer"),
    "a bucket that is none": (lambda text: text.replace('"16": {\n', '"17": {\n'), "17 is not a bucket of tokens"),
    "a field that is none": (lambda text: text.replace('"split"', '"splits"'), "is not a configuration of tiles"),
    "a number that is none": (lambda text: text.replace('"stages": 3', '"stages": null'), "stages None is not an integer"),
    "tiles that no kernel takes": (lambda text: text.replace('"bn": 64', '"bn": 100'), "gate_up: bn 100, one of"),
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_a_bad_file_is_left_aside_with_one_line_and_an_error_where_it_was_named(tmp_path, why):
    spoil, reason = BAD[why]
    path = saved(tmp_path)
    before = path.read_text()
    path.write_text(spoil(before))
    assert path.read_text() != before
    found = read(tmp_path)
    assert not found.table and len(found.notes) == 1 and reason in found.notes[0] and "\n" not in found.notes[0]
    with pytest.raises(ConfigError, match=r"engine\.experts_tiles: ") as raised:
        read_named(path, spec_of(SMALL), Limits.of(spec_of(SMALL)))
    assert reason in str(raised.value)


def test_what_is_about_another_layer_says_nothing(tmp_path):
    saved(tmp_path, BLOCK)
    saved(tmp_path, dtype="float16")
    assert read(tmp_path, every_row=False) == Tuned() == read(tmp_path) == read(tmp_path / "none")
    assert path_of(tmp_path, HERE, Layer.of(spec_of(SMALL), 4, every_row=True)) != path_of(
        tmp_path, HERE, Layer.of(spec_of(SMALL), 4, every_row=False)
    )
    with pytest.raises(ConfigError, match="has no cell for none with hidden 256 and intermediate 256"):
        read_named(saved(tmp_path, BLOCK), spec_of(SMALL), Limits.of(spec_of(SMALL)))
    with pytest.raises(ConfigError, match="no such file"):
        read_named(tmp_path / "none.json", spec_of(SMALL), Limits.of(spec_of(SMALL)))


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    layer = Layer.of(spec_of(SMALL), 4, every_row=True)
    assert "cannot be written" in (write(tmp_path / "file" / "a.json", HERE, layer, tuned_cells(SMALL)) or "")
