"""`epserve profile` and `epserve bench` on CPU ranks: the trace, the table, and what is refused before a process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from epserve.cli import profile as profile_cli
from epserve.cli.commands import app
from epserve.cli.compat import pairs
from epserve.cli.layer import profile as layer_profile
from epserve.cli.layer.profile import PHASES, PhaseTime, ProfileRequest, ProfileResult, profile_layer
from epserve.cli.layer.synthetic import TOLERANCE, LayerSizes, SyntheticLayer, expert_weights
from epserve.errors import ConfigError, Incompatible, InternalError, RankFailed
from epserve.experts.dequantised import matrices
from epserve.modular_kernel import PrepareFinalizeOptions, QuantConfig, RankContext

ROOT = Path(__file__).parent.parent.parent
SMALL = LayerSizes(hidden=128, intermediate=128, num_experts=16, top_k=4, shared=64)
WEIGHTS = LayerSizes(hidden=256, intermediate=128, num_experts=8, top_k=2, scheme="fp8_block")


def epserve(*arguments: str, cwd: Path = ROOT, timeout: float = 400) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    words = [sys.executable, "-m", "epserve", *arguments]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def test_a_trace_of_the_chosen_rank_and_a_table_of_phases(tmp_path):
    trace = tmp_path / "trace.json"
    done = epserve(
        "profile", "--pf-type", "all_to_all", "--experts-type", "loop", "--rank", "1", "--trace", str(trace),
        "--tokens", "9", "--repeats", "3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(phase in done.stdout for phase in (*PHASES, "forward", "relative L2 error"))
    content = json.loads(trace.read_text())
    ranges = [event for event in content["traceEvents"] if str(event.get("name")).startswith("epserve::")]
    names = [each["name"].removeprefix("epserve::") for each in sorted(ranges, key=lambda event: event["ts"])]
    halves = ["dispatch", "shared", "dispatch", "experts", "combine", "shared", "combine"]
    assert names == ["gate", *halves], "one forward, in order"
    assert content["distributedInfo"]["rank"] == 1 and content["distributedInfo"]["world_size"] == 2


def test_batched_experts_take_rounds_and_no_shared_expert_is_no_phase(tmp_path):
    request = ProfileRequest(
        all2all="all_to_all_batched", experts="batched_mm", trace=tmp_path / "t.json", tokens=140, repeats=2,
        sizes=LayerSizes(hidden=64, intermediate=32, num_experts=4, top_k=2, shared=0),
    )  # fmt: skip
    result = profile_layer(request)
    assert [phase.phase for phase in result.phases] == ["gate", "dispatch", "experts", "combine"]
    assert all(0 < phase.us <= phase.slowest_us for phase in result.phases)
    assert result.total_us == pytest.approx(sum(phase.us for phase in result.phases))
    assert 0 < result.error < 1e-2 and result.trace.exists()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"all2all": "nvlnk"}, ConfigError, "did you mean 'nvlink'"),
        ({"experts": "lop"}, ConfigError, "did you mean 'loop'"),
        ({"experts": "batched_mm"}, Incompatible, "prepare delivers Standard"),
        ({"all2all": "nvlink"}, Incompatible, "runs on cuda, not on cpu"),
        ({"all2all": "local"}, Incompatible, "2 ranks, at most 1"),
        ({"rank": 2}, ConfigError, "rank 2 is outside 0..1"),
        ({"world_size": 0}, ConfigError, "world_size must be at least 1, got 0"),
        ({"tokens": -1}, ConfigError, "tokens must be at least 0, got -1"),
        ({"device": "tpu"}, ConfigError, "'tpu' is not cpu or cuda"),
        ({"trace": Path("/nowhere/t.json")}, ConfigError, "no folder /nowhere"),
        ({"sizes": LayerSizes(scheme="fp8_block")}, Incompatible, "quantisation fp8_block"),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else "-".join(value),
)
def test_what_cannot_run_is_refused_at_the_door(monkeypatch, tmp_path, change, error, text):
    monkeypatch.setattr(layer_profile.multiprocessing, "get_context", lambda _: pytest.fail("a process was started"))
    given = {"all2all": "all_to_all", "experts": "loop", "trace": tmp_path / "t.json", "sizes": SMALL}
    with pytest.raises(error, match=text):
        profile_layer(ProfileRequest(**given | change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"scheme": "int3"}, "'int3' is not one of none, fp8_tensor"),
        ({"scheme": "mxfp4", "intermediate": 100}, "intermediate 100 is not a multiple of 32, which mxfp4 needs"),
        ({"scheme": "fp8_block", "intermediate": 100}, "intermediate 100 is not a multiple of 128"),
        ({"shared": -1}, "shared must be at least 0, got -1"),
        ({"top_k": 9, "num_experts": 8}, "top_k 9 is more than the 8 experts"),
    ],
)
def test_impossible_sizes_name_the_field_and_both_numbers(change, text):
    with pytest.raises(ConfigError, match=text):
        LayerSizes(**change)


def test_a_rank_that_is_late_is_named(tmp_path):
    request = ProfileRequest(
        all2all="all_to_all", experts="loop", trace=tmp_path / "t.json", sizes=SMALL, timeout_s=0.5
    )
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] had not answered after 0.5 s"):
        profile_layer(request)


def test_a_wrong_result_is_an_error_not_a_profile(monkeypatch, tmp_path):
    answers = [({"gate": 1.0}, 1e-3), ({"gate": 1.0}, 0.3)]
    monkeypatch.setattr(layer_profile, "_collect", lambda *_: answers)
    request = ProfileRequest(all2all="all_to_all", experts="loop", trace=tmp_path / "t.json", sizes=SMALL)
    with pytest.raises(InternalError, match=r"relative L2 error 0\.3, at most 0\.015"):
        profile_layer(request)


def test_a_message_of_another_rank_is_kept(tmp_path):
    class Inbox:
        answers = [(1, RankFailed("no answer of rank 0")), (0, ConfigError("too little memory"))]

        def get(self, timeout):
            return self.answers.pop(0)

    request = ProfileRequest(all2all="all_to_all", experts="loop", trace=tmp_path / "t.json", sizes=SMALL)
    with pytest.raises(ConfigError, match="too little memory"):  # the cause, not its consequence on the other rank
        layer_profile._collect(request, [None, None], Inbox())


def test_every_rank_can_work_out_any_experts_weights():
    """Whole blocks of fp8, the same weights whichever rank makes them, and the layer's own check sees a wrong one."""
    cpu = torch.device("cpu")
    every, last = expert_weights(WEIGHTS, range(8), cpu), expert_weights(WEIGHTS, range(6, 8), cpu)
    assert torch.equal(every.w13_eNK[6:].float(), last.w13_eNK.float()) and torch.equal(every.s2[6:], last.s2)
    assert every.s13.shape == (8, 2, 2) and every.s2.shape == (8, 2, 1) and every.w2_eKN.dtype == torch.float8_e4m3fn
    layer = SyntheticLayer(
        RankContext(),
        SMALL,
        all2all_name="local",
        experts_name="loop",
        options=PrepareFinalizeOptions(max_tokens_per_rank=8),
    )
    x = layer.tokens(6)
    routing = layer.gate(x)
    out = layer.routed(x, routing, (6,))
    assert layer.error(x, routing, out, num_rows=6) < 1e-2
    layer.weights.w2_eKN[int(routing.ids_Mt[3, 0])] *= 1.5
    assert layer.error(x, routing, layer.routed(x, routing, (6,)), num_rows=6) > 2e-2
    layer.close()


@pytest.mark.parametrize("scheme", QuantConfig.SCHEMES)
def test_weights_of_every_scheme_have_the_size_that_keeps_rows_in_range(scheme):
    """Experts that multiply out what is stored agree with the layer's own float32, and a wrong scale is seen."""
    sizes = LayerSizes(hidden=256, intermediate=128, num_experts=4, top_k=2, shared=0, scheme=scheme)
    weights = expert_weights(sizes, range(4), torch.device("cpu"))
    w13, w2 = matrices(weights, 3, sizes.quant, torch.float32)
    for plain, columns in ((w13, 256), (w2, 128)):
        assert plain.shape[1] == columns and 0.6 < plain.float().std() * columns**0.5 < 1.6
    plain = replace(sizes, scheme="none")
    layer = SyntheticLayer(
        RankContext(), plain, all2all_name="local", experts_name="loop", options=PrepareFinalizeOptions(max_tokens_per_rank=8)
    )  # fmt: skip
    layer.sizes = sizes  # its reference reads the scheme, its experts the values
    for expert in range(4):
        w13, w2 = matrices(weights, expert, sizes.quant, plain.dtype)
        layer.weights.w13_eNK[expert], layer.weights.w2_eKN[expert] = w13, w2
    x = layer.tokens(6)
    routing = layer.gate(x)
    assert layer.error(x, routing, layer.routed(x, routing, (6,)), num_rows=6) < TOLERANCE["none"]
    layer.weights.w13_eNK[int(routing.ids_Mt[3, 0])] *= 1.5
    assert layer.error(x, routing, layer.routed(x, routing, (6,)), num_rows=6) > TOLERANCE[scheme]
    layer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", QuantConfig.SCHEMES)
def test_every_scheme_is_profiled_on_a_gpu(scheme, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch sees none here")
    sizes = LayerSizes(hidden=1024, intermediate=512, num_experts=16, top_k=4, shared=0, scheme=scheme)
    request = ProfileRequest(
        all2all="local", experts="triton", trace=tmp_path / "t.json", sizes=sizes, world_size=1, device="cuda",
        tokens=64, repeats=2,
    )  # fmt: skip
    assert 0 < profile_layer(request).error < TOLERANCE[scheme]


def test_bench_lists_the_programs_and_passes_their_options_on():
    listed = epserve("bench")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in ("all2all", "layer", "experts", "serving", "scaling", "overlap"))
    assert "expert_inputs" not in listed.stdout, "no program"
    done = epserve("bench", "overlap", "--cpu", "--cases", "nonsense:1")
    assert done.returncode == 2 and "'nonsense' is not one of" in done.stderr
    asked = epserve("bench", "scaling", "--", "--help")
    assert asked.returncode == 0 and "--ranks" in asked.stdout
    unknown = epserve("bench", "layr")
    assert unknown.returncode == 2 and "did you mean 'layer'" in unknown.stderr and "Traceback" not in unknown.stderr


def test_bench_without_a_source_tree_says_where_the_benchmarks_are(monkeypatch, tmp_path):
    monkeypatch.setattr(profile_cli, "__file__", str(tmp_path / "site-packages" / "epserve" / "cli" / "profile.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="in the source tree, not in the installed package"):
        profile_cli.source_tree()
    monkeypatch.chdir(ROOT)
    assert profile_cli.source_tree() == ROOT


@pytest.mark.parametrize(
    ("arguments", "known", "refused"),
    [
        (("--list",), "deepep_ht + triton  (DeepEPHTPrepareAndFinalize + TritonExperts)", "local + batched_loop"),
        (("--pf-type", "AllToAllPrepareAndFinalise", "--experts-type", "loop"), "did you mean 'AllToAllPrepareAndFinalize'", ""),
        (("--pf-type", "all_to_all"), "--list prints them", ""),
        (("--all", "--pf-type", "nvshmem"), "no such pair can run this layer here", ""),
    ],
)  # fmt: skip
def test_pairs_are_listed_and_named_by_their_classes(arguments, known, refused):
    done = CliRunner().invoke(app, ["profile", *arguments])
    said = done.stdout + str(done.exception or "")
    assert known in said and (done.exit_code == 0) == (arguments == ("--list",))
    assert not refused or refused not in said


def test_all_pairs_of_a_backend_have_a_trace_each(monkeypatch, tmp_path):
    """Every pair that runs here, one that fails among them: the table has all of them, and the failure is the exit's."""
    asked = []

    def profiled(request):
        asked.append((request.all2all, request.experts))
        if request.experts == "grouped_mm":
            raise RankFailed("rank 1 is late")
        request.trace.write_text("{}")
        return ProfileResult(phases=(PhaseTime(phase="gate", us=1.5, slowest_us=2.0),), error=1e-3, trace=request.trace)

    monkeypatch.setattr(layer_profile, "profile_layer", profiled)
    trace = tmp_path / "trace.json"
    words = ["profile", "--all", "--pf-type", "AllToAllPrepareAndFinalize", "--trace", str(trace)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    usable = [(pair.all2all, pair.experts) for pair in pairs(LayerSizes(**profile_cli.SIZES["cpu"]).spec(2, "cpu"))
              if pair.usable and pair.all2all == "all_to_all"]  # fmt: skip
    assert asked == usable and ("all_to_all", "loop") in asked
    assert (tmp_path / "trace_all_to_all_loop.json").exists() and "trace_all_to_all_loop.json" in done.stdout
    assert isinstance(done.exception, RankFailed) and "failed" in done.stdout
