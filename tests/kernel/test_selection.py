"""Measured selection: the fastest candidate serves each bucket, the file spares a second measurement, and results do not
change.
"""

import json
import logging
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from epserve.errors import ConfigError
from epserve.experts.batched_loop import BatchedLoopExperts
from epserve.experts.batched_mm import BatchedMMExperts
from epserve.experts.grouped_mm import GroupedMMExperts
from epserve.experts.loop import LoopExperts, expert_mlp
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
from epserve.modular_kernel.measured import selection, timers, times_cache
from epserve.modular_kernel.measured.buckets import BUCKETS, bucket_of
from epserve.modular_kernel.measured.selection import MARGIN, MeasuredExperts, Measuring, example_batch
from epserve.modular_kernel.measured.selection_batched import MeasuredBatchedExperts
from epserve.modular_kernel.measured.summed import SummedExperts
from epserve.modular_kernel.measured.times_cache import TimesCache

SPEC = LayerSpec(
    shape=ExpertShape(hidden=32, intermediate=16, num_experts=4, top_k=2, dtype=torch.float32),
    layout=ExpertLayout.even(4, 1),
)


LONG = 1e9
"""Seconds: the clock below says seconds where microseconds went by."""


class OtherGroupedMM(GroupedMMExperts):
    """The same numbers, another name."""


class WrongExperts(GroupedMMExperts):
    def apply(self, output, prepared, *, weights, workspace):
        return super().apply(output, prepared, weights=weights, workspace=workspace).mul_(1.3)


class NanExperts(GroupedMMExperts):
    def apply(self, output, prepared, *, weights, workspace):
        return output.fill_(float("nan"))


class ThrowingExperts(GroupedMMExperts):
    def apply(self, output, prepared, *, weights, workspace):
        raise ValueError("not for so many")


class FullExperts(GroupedMMExperts):
    """No memory for more than 16 rows."""

    def apply(self, output, prepared, *, weights, workspace):
        if prepared.x.shape[0] > 16:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return super().apply(output, prepared, weights=weights, workspace=workspace)


class FailingExperts(GroupedMMExperts):
    def warm_up(self, weights, max_rows):
        raise RuntimeError("no compiler on this machine\nand more")


def weights():
    g = torch.Generator().manual_seed(1)
    return ExpertWeights(w13_eNK=torch.randn((4, 32, 32), generator=g), w2_eKN=torch.randn((4, 32, 16), generator=g))


def batch(num_tokens):
    g = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand((num_tokens, 4), generator=g).topk(2, 1).indices.int()
    ids[::3, 1] = -1
    routing = Routing(ids_Mt=ids, weights_Mt=torch.rand((num_tokens, 2), generator=g))
    x = torch.randn((num_tokens, 32), generator=g)
    return Prepared(x=x, routing=routing, handle=DispatchHandle(HandleBook("test"), None))


class Clock:
    """Thin batches: the first candidate is faster; from 64 tokens on the second one is. Candidates are timed in turn."""

    def __init__(self, first=(1.0, 3.0), second=2.0):
        self.calls, self.first, self.second = 0, first, second

    def __call__(self, run):
        out = run()
        self.calls += 1
        return self.first[out.shape[0] >= 64] if self.calls % 2 else self.second


def measured(clock, *, timer=None, **options):
    candidates = {"a": GroupedMMExperts(SPEC), "b": OtherGroupedMM(SPEC)}
    return MeasuredExperts(SPEC, candidates, timer=clock, measuring=Measuring(**{"budget_s": LONG, **options}))


def run(experts, prepared, spaces=None):
    spaces = spaces or Workspaces("cpu")
    spaces.reserve(experts.workspace_shapes(prepared.x.shape[0], 2, 4))
    spaces.poison()
    workspace = spaces.carve(experts.workspace_shapes(prepared.x.shape[0], 2, 4))
    return experts.apply(workspace.output, prepared, weights=weights(), workspace=workspace).clone()


def test_each_bucket_takes_the_fastest():
    experts = measured(Clock())
    assert experts.choice(1000) == "a", "before warm-up the first one serves"
    experts.warm_up(weights(), 300)
    assert [experts.choice(tokens) for tokens in (1, 4, 20, 33, 64, 300)] == ["a", "a", "a", "b", "b", "b"]
    assert experts.choice(5000) == "b", "more than was measured: as the largest bucket"
    assert experts.explain()[3] == "experts for about 64 rows (32 an expert): b (fastest: b 2000000 us, a 3000000 us)"


def test_a_little_faster_is_not_enough_against_the_preferred_one():
    experts = measured(Clock(first=(2.0 * MARGIN, 2.0 * MARGIN * 1.01)))
    experts.warm_up(weights(), 64)
    assert experts.choice(1) == "a" and experts.choice(64) == "b"
    assert "a (preferred, within 5 % of the fastest: b 2000000 us, a 2100000 us)" in experts.explain()[0]


def test_the_second_start_measures_nothing(tmp_path):
    cache, clock = tmp_path / "cache" / "times.json", Clock()
    measured(clock, cache=cache).warm_up(weights(), 64)
    assert clock.calls == 4 * 2 * 5
    again = measured(clock, cache=cache)
    again.warm_up(weights(), 64)
    assert clock.calls == 4 * 2 * 5
    assert again.choice(64) == "b" and again.choice(1) == "a"
    (key,) = json.loads(cache.read_text())
    assert f"torch {torch.__version__} epserve" in key and "threads" in key and "K32 N16" in key
    again.warm_up(weights(), 64)  # after a failure, in another group
    assert clock.calls == 4 * 2 * 5
    again.warm_up(weights(), 256)  # a longer range measures only what is new
    assert clock.calls == 5 * 2 * 5
    measured(clock, cache=cache, again=True).warm_up(weights(), 1)
    assert clock.calls == 6 * 2 * 5


@pytest.mark.parametrize("broken", ["{ not json", "[1]", None])
def test_another_key_or_a_broken_file_is_measured_again(tmp_path, broken):
    cache, clock = tmp_path / "times.json", Clock()
    measured(clock, cache=cache).warm_up(weights(), 1)
    stored = json.loads(cache.read_text())
    cache.write_text(json.dumps({key.replace("torch", "older torch"): value for key, value in stored.items()}))
    measured(clock, cache=cache).warm_up(weights(), 1)
    assert clock.calls == 20 and len(json.loads(cache.read_text())) == 2
    cache.write_text(json.dumps(dict.fromkeys(stored, "times?")) if broken is None else broken)
    measured(clock, cache=cache).warm_up(weights(), 1)
    assert clock.calls == 30 and json.loads(cache.read_text()) == stored


def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    experts = measured(Clock(), cache=tmp_path / "file" / "times.json")
    experts.warm_up(weights(), 64)
    assert experts.choice(64) == "b"
    assert any("cannot be written" in record.message for record in caplog.records if record.levelno == logging.WARNING)


def test_a_file_that_may_not_be_looked_at_and_no_home(tmp_path, monkeypatch, caplog):
    def forbidden(self, *args, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", forbidden)
    monkeypatch.setattr(Path, "mkdir", forbidden)
    cache = TimesCache(tmp_path / "times.json", "key")
    assert cache.read() == {}
    cache.write({1: {"a": 1.0}})
    assert "cannot be read" in caplog.text and "cannot be written" in caplog.text
    homeless = TimesCache(Path("~nobody-of-this-name/times.json"), "key")
    homeless.write({1: {"a": 1.0}})
    assert homeless.read() == {} and "times are not kept" in caplog.text


def _write_many(path: Path, name: str) -> None:
    times_cache.LOCK_S = (
        200  # in a process of its own; whoever does not get the lock within the usual 2 s loses an entry
    )
    for index in range(20):
        TimesCache(path, f"{name}{index}").write({1: {name: 1.0}})


def test_writers_of_one_file_lose_nothing(tmp_path):
    path, context = tmp_path / "times.json", multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in ("x", "y")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(200)
        assert writer.exitcode == 0
    assert len(json.loads(path.read_text())) == 40


def test_overrides_are_not_measured():
    clock = Clock()
    experts = measured(clock, overrides={1: "b", 4: "b"})
    experts.warm_up(weights(), 4)
    assert clock.calls == 0 and experts.choice(1) == experts.choice(4) == "b"
    assert experts.explain()[0] == "experts for about 1 rows (0.5 an expert): b (set by hand)"
    with pytest.raises(ConfigError, match="candidates a, b"):
        measured(clock, overrides={1: "c"})


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 100])
def test_results_are_the_candidates_own(num_tokens):
    experts = measured(Clock())
    experts.warm_up(weights(), 256)
    assert torch.equal(run(experts, batch(num_tokens)), run(GroupedMMExperts(SPEC), batch(num_tokens)))


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 100])
@pytest.mark.parametrize("slot_bytes", [64 << 20, 2 * 32 * 4 * 3])
def test_one_that_sums_and_one_that_leaves_slots_stand_side_by_side(num_tokens, slot_bytes, monkeypatch):
    """A small `slot_bytes`: pieces of three tokens."""
    monkeypatch.setattr("epserve.modular_kernel.measured.summed.SLOT_BYTES", slot_bytes)
    candidates = {"grouped_mm": GroupedMMExperts(SPEC), "loop": LoopExperts(SPEC)}
    clock, measuring = Clock(first=(3.0, 3.0)), Measuring(budget_s=LONG)
    experts = MeasuredExperts(SPEC, candidates, timer=clock, measuring=measuring)
    experts.warm_up(weights(), 256)
    assert experts.choice(num_tokens) == "loop" and not experts.left_out
    got, want = run(experts, batch(num_tokens)), run(GroupedMMExperts(SPEC), batch(num_tokens))
    assert got.shape == want.shape == (num_tokens, 32)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    small = SummedExperts(LoopExperts(SPEC)).workspace_shapes(1_000_000, 2, 4)
    assert small.workspace2[0] <= slot_bytes + 256


def test_two_batches_in_flight():
    """No state of a batch in the object: the second one may start before the first one's result is read."""
    experts = measured(Clock())
    experts.warm_up(weights(), 256)
    spaces, batches = [Workspaces("cpu") for _ in range(2)], [batch(3), batch(100)]
    outs = []
    for space, prepared in zip(spaces, batches, strict=True):
        workspace = space.carve(experts.workspace_shapes(prepared.x.shape[0], 2, 4))
        outs.append(experts.apply(workspace.output, prepared, weights=weights(), workspace=workspace))
    for out, prepared in zip(outs, batches, strict=True):
        assert torch.equal(out, run(GroupedMMExperts(SPEC), prepared))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (WrongExperts, "differs from that of a by 0.3"),
        (NanExperts, "differs from that of a by nan"),
        (FailingExperts, "RuntimeError: no compiler on this machine"),
        (ThrowingExperts, "for about 1 rows (0.5 an expert): ValueError: not for so many"),
    ],
)
def test_a_broken_candidate_serves_nothing(broken, reason):
    candidates = {"a": GroupedMMExperts(SPEC), "b": broken(SPEC)}
    clock, measuring = Clock(first=(9.0, 9.0)), Measuring(budget_s=LONG)
    experts = MeasuredExperts(SPEC, candidates, timer=clock, measuring=measuring)
    experts.warm_up(weights(), 256)
    assert {experts.choice(rows) for rows in BUCKETS} == {"a"}
    (line,) = [line for line in experts.explain() if "left out" in line]
    assert line.startswith("experts b left out:") and reason in line and "\n" not in line
    assert torch.equal(run(experts, batch(100)), run(GroupedMMExperts(SPEC), batch(100)))


def test_without_memory_larger_batches_are_not_timed(caplog):
    candidates = {"a": GroupedMMExperts(SPEC), "b": FullExperts(SPEC)}
    experts = MeasuredExperts(SPEC, candidates, measuring=Measuring(budget_s=LONG))
    experts.warm_up(weights(), 256)
    assert [choice.rows for choice in experts.choices()] == [1, 4, 16] and not experts.left_out
    assert experts.choice(64) == experts.choice(5000) == "a", "its memory is reserved anyway"
    assert "experts for 64 rows and more are not timed: tried to allocate 9 GiB" in caplog.text


def test_the_first_candidate_and_those_set_by_hand_must_work():
    with pytest.raises(RuntimeError, match="no compiler"):
        MeasuredExperts(SPEC, {"a": FailingExperts(SPEC), "b": GroupedMMExperts(SPEC)}).warm_up(weights(), 4)
    by_hand = Measuring(overrides={1: "b"})
    candidates = {"a": GroupedMMExperts(SPEC), "b": FailingExperts(SPEC)}
    with pytest.raises(RuntimeError, match="no compiler"):
        MeasuredExperts(SPEC, candidates, measuring=by_hand).warm_up(weights(), 4)


class Spent:
    """A clock that only the experts below move: what a starved machine does meanwhile counts nowhere."""

    now = 0.0

    def __init__(self, monkeypatch):
        monkeypatch.setattr(Spent, "now", 0.0)
        for module in (selection, timers):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: Spent.now))


@pytest.fixture
def spent(monkeypatch):
    return Spent(monkeypatch)


class SlowExperts(GroupedMMExperts):
    """A millisecond a row."""

    def apply(self, output, prepared, *, weights, workspace):
        Spent.now += 1e-3 * prepared.x.shape[0]
        return super().apply(output, prepared, weights=weights, workspace=workspace)


def test_the_budget_ends_the_timing(tmp_path, spent):
    """Both need 1, 4, 16 ms a run and more: a tenth of a second ends before 16 rows."""

    def slow(budget_s):
        measuring = Measuring(budget_s=budget_s, cache=tmp_path / "times.json")
        return MeasuredExperts(SPEC, {"a": SlowExperts(SPEC), "b": SlowExperts(SPEC)}, measuring=measuring)

    experts = slow(0.1)
    experts.warm_up(weights(), 4096)
    assert [choice.rows for choice in experts.choices()] == [1, 4] and experts.choice(4096) == experts.choice(4)
    assert Spent.now < 0.1
    assert any("rows and more: as for fewer; 0.1 s were spent on timing" in line for line in experts.explain())
    again = slow(0.1)
    again._measure = lambda *_: pytest.fail("what was too long before is tried again")
    again.warm_up(weights(), 4096)
    assert again.times == experts.times and again.explain() == experts.explain()
    longer = slow(10)
    longer.warm_up(weights(), 64)
    assert [choice.rows for choice in longer.choices()] == [1, 4, 16, 64], "a larger budget goes on"
    off = slow(0)
    off.measuring = Measuring(budget_s=0)
    off.warm_up(weights(), 4096)
    assert off.times == {} and off.choice(1) == "a"


def test_candidates_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match="Standard format here, which 'b' does not take"):
        MeasuredExperts(SPEC, {"a": GroupedMMExperts(SPEC), "b": BatchedLoopExperts(SPEC)})
    with pytest.raises(ConfigError, match="at least one"):
        MeasuredExperts(SPEC, {})


class SlowBatched(BatchedMMExperts):
    def apply(self, output, prepared, *, weights, workspace):
        Spent.now += 0.02
        return super().apply(output, prepared, weights=weights, workspace=workspace)


class WrongBatched(BatchedMMExperts):
    def apply(self, output, prepared, *, weights, workspace):
        return super().apply(output, prepared, weights=weights, workspace=workspace).mul_(2)


@pytest.mark.parametrize("slow", ["batched_loop", "batched_mm"])
def test_batched_format_has_one_choice_for_all(tmp_path, slow, spent):
    def make():
        candidates = {"batched_loop": BatchedLoopExperts(SPEC), "batched_mm": BatchedMMExperts(SPEC)}
        candidates[slow] = SlowBatched(SPEC)
        measuring = Measuring(budget_s=60, cache=tmp_path / "times.json")
        return MeasuredBatchedExperts(SPEC, candidates, measuring=measuring)

    experts, other = make(), "batched_mm" if slow == "batched_loop" else "batched_loop"
    experts.warm_up(weights(), 24)
    assert not experts.left_out
    assert experts.choice(1) == experts.choice(24) == experts.choice(1000) == other
    assert experts.explain()[0].startswith(f"experts for blocks of 24 rows, about 3 of them filled: {other} (")
    (choice,) = experts.choices()
    assert choice.rows == 24 and set(choice.seconds) == {"batched_loop", "batched_mm"}
    measured(Clock(), cache=tmp_path / "times.json").warm_up(weights(), 1)  # another format's times in the same file
    again = make()
    again._measure = lambda *_: pytest.fail("measured again")
    again.warm_up(weights(), 24)
    assert again.choices() == experts.choices()
    prepared = experts._filled(24, weights(), 5)
    spaces = Workspaces("cpu")
    spaces.reserve(experts.workspace_shapes(0, 2, 4, 24))
    spaces.poison()
    workspace = spaces.carve(experts.workspace_shapes(0, 2, 4, 24))
    got = experts.apply(workspace.output, prepared, weights=weights(), workspace=workspace)
    for expert, count in enumerate(prepared.expert_num_tokens.tolist()):
        want = expert_mlp(prepared.x[expert, :count], weights(), expert)
        torch.testing.assert_close(got[expert, :count], want, rtol=1e-4, atol=1e-3)


def test_whole_blocks_that_might_take_too_long_are_not_tried(spent):
    candidates = {"batched_loop": SlowBatched(SPEC), "batched_mm": WrongBatched(SPEC)}
    experts = MeasuredBatchedExperts(SPEC, candidates, measuring=Measuring(budget_s=1.0))
    experts.warm_up(weights(), 4000)  # 20 ms for 500 filled rows: 4,000 might take 0.16 s
    assert experts.choices() and experts.left_out
    experts = MeasuredBatchedExperts(SPEC, candidates, measuring=Measuring(budget_s=0.1))
    experts.warm_up(weights(), 4000)
    assert experts.choices() == () and not experts.left_out and experts.choice(4000) == "batched_loop"
    assert experts.explain() == [
        "experts for blocks of 4000 rows: not timed, whole blocks might take longer than 0.1 s"
    ]


def test_a_broken_candidate_of_the_batched_format_serves_nothing():
    candidates = {"batched_loop": BatchedLoopExperts(SPEC), "batched_mm": WrongBatched(SPEC)}
    experts = MeasuredBatchedExperts(SPEC, candidates, measuring=Measuring(budget_s=60))
    experts.warm_up(weights(), 24)
    assert (
        experts.choice(24) == "batched_loop"
        and "differs from that of batched_loop by 1" in experts.left_out["batched_mm"]
    )


def test_a_rank_without_experts_measures_nothing():
    none = ExpertWeights(w13_eNK=torch.empty((0, 32, 32)), w2_eKN=torch.empty((0, 32, 16)))
    clock = Clock()
    measured(clock).warm_up(none, 64)
    assert clock.calls == 0


@pytest.mark.parametrize(("every_row", "least"), [(True, 0), (False, 1)])
def test_examples_are_as_dense_as_what_prepare_delivers(every_row, least):
    """One rank of sixteen: of all rows some 12 % have a local slot, of the rows that were sent here all have."""
    shape = ExpertShape(hidden=8, intermediate=8, num_experts=64, top_k=2, dtype=torch.float32)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(64, 16))
    four = ExpertWeights(w13_eNK=torch.empty((4, 16, 8)), w2_eKN=torch.empty((4, 8, 8)))
    for rows in (1, 1000):
        slots = (example_batch(spec, rows, four, 0, every_row).routing.ids_Mt >= 0).sum(1)
        assert int(slots.min()) >= least
    assert 0.08 < float((slots > 0).float().mean()) < 0.17 or not every_row


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
