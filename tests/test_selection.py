"""Measured selection: the fastest candidate serves each bucket, the file spares a second measurement, and results do not
change.
"""

import json

import pytest
import torch

from epserve.errors import ConfigError
from epserve.modular_kernel import (
    DispatchHandle,
    ExpertLayout,
    ExpertShape,
    ExpertWeights,
    HandleBook,
    LayerSpec,
    Prepared,
    Routing,
    Workspaces,
)
from epserve.modular_kernel.selection import BUCKETS, MeasuredExperts, bucket_of
from experts.grouped_mm import GroupedMMExperts
from experts.loop import LoopExperts

SPEC = LayerSpec(
    shape=ExpertShape(hidden=32, intermediate=16, num_experts=4, top_k=2, dtype=torch.float32),
    layout=ExpertLayout.even(4, 1),
)


class OtherGroupedMM(GroupedMMExperts):
    """The same numbers, another name."""


def weights():
    g = torch.Generator().manual_seed(1)
    return ExpertWeights(w13_eNK=torch.randn((4, 32, 32), generator=g), w2_eKN=torch.randn((4, 32, 16), generator=g))


def batch(num_tokens):
    g = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand((num_tokens, 4), generator=g).topk(2, 1).indices.int()
    routing = Routing(ids_Mt=ids, weights_Mt=torch.rand((num_tokens, 2), generator=g))
    x = torch.randn((num_tokens, 32), generator=g)
    return Prepared(x=x, routing=routing, handle=DispatchHandle(HandleBook("test"), None))


class Clock:
    """Thin batches: the first candidate is faster; from 64 tokens on the second one is."""

    def __init__(self):
        self.calls = 0

    def __call__(self, run):
        out = run()
        self.calls += 1
        first = (self.calls - 1) // 5 % 2 == 0
        return (1.0 if out.shape[0] < 64 else 3.0) if first else 2.0


def measured(clock, **options):
    return MeasuredExperts(SPEC, {"a": GroupedMMExperts(SPEC), "b": OtherGroupedMM(SPEC)}, timer=clock, **options)


def run(experts, prepared):
    spaces = Workspaces("cpu")
    workspace = spaces.carve(experts.workspace_shapes(prepared.x.shape[0], 2, 4))
    return experts.apply(workspace.output, prepared, weights=weights(), workspace=workspace).clone()


def test_each_bucket_takes_the_fastest():
    experts = measured(Clock())
    assert experts.choice(1000) == "a", "before warm-up the first one serves"
    experts.warm_up(weights(), 300)
    assert [experts.choice(tokens) for tokens in (1, 4, 20, 33, 64, 300)] == ["a", "a", "a", "b", "b", "b"]
    assert experts.explain()[64] == "b (fastest: b 2000000 us, a 3000000 us)"


def test_the_second_start_measures_nothing(tmp_path):
    cache, clock = tmp_path / "cache" / "times.json", Clock()
    measured(clock, cache=cache).warm_up(weights(), 64)
    assert clock.calls == 4 * 2 * 5
    again = measured(clock, cache=cache)
    again.warm_up(weights(), 64)
    assert clock.calls == 4 * 2 * 5
    assert again.choice(64) == "b" and again.choice(1) == "a"
    (key,) = json.loads(cache.read_text())
    assert torch.__version__ in key and "triton" in key and "K32 N16" in key
    again.warm_up(weights(), 256)  # a longer range measures only what is new
    assert clock.calls == 5 * 2 * 5


def test_another_key_or_a_broken_file_is_measured_again(tmp_path):
    cache, clock = tmp_path / "times.json", Clock()
    measured(clock, cache=cache).warm_up(weights(), 1)
    stored = json.loads(cache.read_text())
    cache.write_text(json.dumps({key.replace("torch", "older torch"): value for key, value in stored.items()}))
    measured(clock, cache=cache).warm_up(weights(), 1)
    assert clock.calls == 20 and len(json.loads(cache.read_text())) == 2
    cache.write_text("{ not json")
    measured(clock, cache=cache).warm_up(weights(), 1)
    assert clock.calls == 30 and len(json.loads(cache.read_text())) == 1


def test_overrides_are_not_measured():
    clock = Clock()
    experts = measured(clock, overrides={1: "b", 4: "b"})
    experts.warm_up(weights(), 4)
    assert clock.calls == 0 and experts.choice(1) == experts.choice(4) == "b"
    assert experts.explain() == {1: "b (set by hand)", 4: "b (set by hand)"}
    with pytest.raises(ConfigError, match="candidates a, b"):
        measured(clock, overrides={1: "c"})


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 100])
def test_results_are_the_candidates_own(num_tokens):
    experts = measured(Clock())
    experts.warm_up(weights(), 256)
    assert torch.equal(run(experts, batch(num_tokens)), run(GroupedMMExperts(SPEC), batch(num_tokens)))


def test_candidates_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match="different work to finalize"):
        MeasuredExperts(SPEC, {"a": GroupedMMExperts(SPEC), "loop": LoopExperts(SPEC)})


def test_buckets_are_nearest():
    assert [bucket_of(tokens) for tokens in (0, 1, 2, 3, 8, 9, 32, 33, 10**6)] == [
        1,
        1,
        1,
        4,
        4,
        16,
        16,
        64,
        BUCKETS[-1],
    ]
