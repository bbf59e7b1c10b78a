"""What the Triton experts refuse is refused from their record, before any weight is read; and which tiles serve what."""

import dataclasses

import pytest
import torch

from epserve.all2all.local import LocalPrepareAndFinalize
from epserve.errors import Incompatible
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import Problem, choose, default_tiles, shipped
from epserve.experts.triton.experts import TritonExperts
from epserve.experts.triton.launch import Numerics
from epserve.modular_kernel import Activation, ExpertLayout, ExpertShape, LayerSpec, QuantConfig, why_not
from epserve.modular_kernel.measured.buckets import BUCKETS, bucket_of


def spec(hidden=256, intermediate=256, dtype=torch.bfloat16, scheme="none", **options):
    shape = ExpertShape(hidden=hidden, intermediate=intermediate, num_experts=8, top_k=2, dtype=dtype)
    return LayerSpec(
        shape=shape, layout=ExpertLayout.even(8, 1), device="cuda", quant=QuantConfig(scheme=scheme), **options
    )


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (spec(hidden=7169), "hidden size 7169 is not a multiple of 16"),
        (spec(intermediate=1000), "intermediate size 1000 is not a multiple of 16"),
        (spec(hidden=2880, scheme="fp8_block"), "hidden 2880 and intermediate 256 must be multiples of 128"),
        (spec(dtype=torch.float32), "compute in bfloat16, float16, not float32"),
        (spec(activation=Activation(kind="silu", gated=False)), "no ungated form"),
    ],
    ids=["T4: odd hidden", "intermediate", "partial fp8 blocks", "float32", "ungated"],
)
def test_refused(layer, reason):
    reasons = why_not(LocalPrepareAndFinalize.capability, TritonExperts.capability, layer)
    assert len(reasons) == 1 and reason in reasons[0]


@pytest.mark.parametrize(
    "layer",
    [spec(hidden=2880, intermediate=2880), spec(hidden=3584), spec(hidden=1536), spec(dtype=torch.float16), spec(bias=True),
     spec(scheme="int8_channel"), spec(hidden=2880, intermediate=2880, scheme="mxfp4")],
)  # fmt: skip
def test_accepted(layer):
    assert why_not(LocalPrepareAndFinalize.capability, TritonExperts.capability, layer) == ()


def test_groups_must_divide_the_sizes():
    from epserve.experts.triton.launch import Launcher

    with pytest.raises(Incompatible, match="multiples of the group 128"):
        Launcher(spec(hidden=144, scheme="int4"), torch.device("cpu"))


def test_every_scheme_of_the_record_has_numerics():
    for scheme in TritonExperts.capability.quant_schemes:
        assert Numerics.of(spec(scheme=scheme)) is not None


def test_tables_hold_what_the_json_says():
    table = shipped("NVIDIA H200")
    assert len(table) == 9 and all(set(cells) == set(BUCKETS) for cells in table.values())
    for cells in table.values():
        for tiles in cells.values():
            assert Tiles.from_json(tiles.to_json()) == tiles
            assert not tiles.gate_up.specialised or (tiles.expand and tiles.bm == 128)
    assert shipped("no such device") == {}


def test_tiles_follow_tokens_per_expert():
    problem = Problem(scheme="none", hidden=512, intermediate=256, local_experts=8, num_experts=8, top_k=2)
    assert [default_tiles(problem, tokens).bm for tokens in (1, 16, 64, 128, 4096)] == [16, 16, 32, 64, 128]
    assert default_tiles(problem, 1).gate_up.swap and not default_tiles(problem, 4096).gate_up.swap
    tiles, why = choose(problem, 40, {}, specialised=False)
    assert tiles == default_tiles(problem, 64) and "not measured" in why
    assert [bucket_of(tokens) for tokens in (1, 2, 3, 33, 100000)] == [1, 1, 4, 64, 16384]


def test_another_number_of_ranks_takes_what_was_measured_for_as_many_rows_an_expert():
    table = shipped("NVIDIA H200")
    measured = table["fp8_block K7168 N2048 E32/256 t8"]
    over_two = Problem(scheme="fp8_block", hidden=7168, intermediate=2048, local_experts=32, num_experts=64, top_k=8)
    for tokens, theirs in ((1, 4), (4, 16), (16, 64), (1024, 4096), (4096, 16384), (16384, 16384)):
        tiles, why = choose(over_two, tokens, table, specialised=True)
        assert tiles == measured[theirs] and f"{theirs} tokens" in why
    tiles, why = choose(dataclasses.replace(over_two, intermediate=1024), 16, table, specialised=True)
    assert "not measured" in why, "other matrices"
    thin = dataclasses.replace(over_two, num_experts=4096)
    assert "not measured" in choose(thin, 1, table, specialised=True)[1], "fewer rows than were ever measured"


@pytest.mark.parametrize("table", [{}, shipped("NVIDIA H200")], ids=["rule", "shipped"])
@pytest.mark.parametrize(
    ("scheme", "hidden", "intermediate", "local", "total", "top_k"),
    [
        ("none", 7168, 2048, 32, 64, 8),
        ("fp8_block", 7168, 2048, 32, 64, 8),
        ("fp8_tensor", 4096, 14336, 8, 8, 2),
        ("none", 1024, 512, 4, 4, 3),
    ],
)
def test_what_is_reserved_for_the_largest_batch_holds_every_smaller_one(
    table, scheme, hidden, intermediate, local, total, top_k
):
    """A smaller batch may split its sums more, and so take more."""
    shape = ExpertShape(hidden=hidden, intermediate=intermediate, num_experts=total, top_k=top_k, dtype=torch.bfloat16)
    layout = ExpertLayout.even(total, total // local)
    experts = TritonExperts(LayerSpec(shape=shape, layout=layout, device="cpu", quant=QuantConfig(scheme=scheme)))
    experts.table = table
    for cap in (16, 48, 100, 512, 5000):
        most = experts.workspace_shapes(cap, top_k, local)
        for rows in range(1, cap + 1, max(1, cap // 150)):
            needed = experts._measure(rows, top_k, local)
            assert needed[0] <= most.workspace13[0] and needed[1] <= most.workspace2[0], (cap, rows)
