"""Layers, tiles and measurements that tests of tuned tiles share."""

import dataclasses
import json

import torch

from epserve.experts.tiles.cache import Layer, Machine, Times, Tuned, path_of, write
from epserve.experts.tiles.candidates import First, Options, joined
from epserve.experts.tiles.sizes import GemmTiles, Tiles
from epserve.experts.tiles.table import Problem
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    LayerSpec,
    QuantConfig,
)


def spec_of(problem: Problem, **options) -> LayerSpec:
    shape = ExpertShape(hidden=problem.hidden, intermediate=problem.intermediate, num_experts=problem.num_experts,
                        top_k=problem.top_k, dtype=torch.bfloat16)  # fmt: skip
    layout = ExpertLayout.even(problem.num_experts, problem.num_experts // problem.local_experts)
    quant = QuantConfig(scheme=problem.scheme, **({"group": 128} if problem.scheme == "int4" else {}))
    return LayerSpec(shape=shape, layout=layout, device="cpu", quant=quant, **options)


SMALL = Problem(scheme="none", hidden=256, intermediate=256, local_experts=4, num_experts=4, top_k=2)
BLOCK = dataclasses.replace(SMALL, scheme="fp8_block", hidden=512)
LARGE = [
    Problem(scheme=scheme, hidden=7168, intermediate=2048, local_experts=32, num_experts=256, top_k=8)
    for scheme in ("none", "fp8_tensor", "fp8_block", "fp8_channel", "int8_channel", "int4", "mxfp4", "nvfp4")
]
HERE = Machine(gpu="cpu", driver="1.0", triton="3.6.0", epserve="1")
PLAIN = Tiles(bm=64, gate_up=GemmTiles(bn=64, bk=64), down=GemmTiles(bn=64, bk=64))
OTHER = Tiles(
    bm=16, gate_up=GemmTiles(bn=64, bk=128, swap=True, split=2, stages=3), down=GemmTiles(bn=128, bk=64, swap=True)
)


class FakeBench:
    """Times from a table; a clock that runs one second a measurement."""

    def __init__(self, us=None, layers=(100.0, 90.0, None), fails=()):
        self.us, self.layers, self.fails, self.now = us or {}, layers, fails, 0.0
        self.seen: list[tuple] = []
        self.compared: list[tuple[Tiles, Tiles]] = []

    def clock(self) -> float:
        return self.now

    def compile(self, options: Options, deadline: float) -> Options:
        return options

    def time(self, which, bm, option, partner):
        self.now += 1.0
        self.seen.append((which, bm, option, partner))
        later = 50.0 - 1e-3 * len(self.seen)  # a little faster each time, so that what would serve does not win
        return None if option in self.fails else self.us.get((bm, option), later)

    def compare(self, old, new):
        self.compared.append((old, new))
        before, us, wrong = self.layers
        return (before, before, None) if old == new else (before, us, wrong)


FIRSTS = tuple(First(GemmTiles(bn=bn, bk=64)) for bn in (32, 64, 128))
SECONDS = tuple(GemmTiles(bn=bn, bk=128) for bn in (32, 64, 128))
CHOICE = [Options(bm=16, first=FIRSTS, second=SECONDS), Options(bm=32, first=FIRSTS, second=SECONDS)]
CURRENT = joined(16, First(GemmTiles(bn=16, bk=64), expand=True), GemmTiles(bn=16, bk=64))


def tuned_cells(problem: Problem, tiles: Tiles = OTHER, buckets=(16, 64)) -> Tuned:
    tuned = Tuned()
    for bucket in buckets:
        tuned.add(problem.key, bucket, tiles, "tuned here on 2026-01-02", Times(us=9.0, before_us=10.0))
    return tuned


def saved(folder, problem=SMALL, machine=HERE, **change):
    layer = Layer.of(spec_of(problem), problem.local_experts, every_row=True)
    path = path_of(folder, machine, layer)
    assert write(path, machine, layer, tuned_cells(problem)) is None
    if change:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return path
