"""The benchmarks on CPU ranks: what they measure is checked, failures are told apart, and their conclusions are the numbers'."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import drawing, ep_layer, layer, overlap, peer_times, plot_scaling, scaling
from benchmarks.all2all import LEFT_OUT, UNAVAILABLE, Unavailable, supervise
from epserve import all2all
from epserve.cli.layer.synthetic import LayerSizes, SyntheticLayer
from epserve.modular_kernel import Entry, ExpertWeights, PrepareFinalizeOptions
from tests.all2all.test_deepep import manager_on_cpu
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent
SMALL = LayerSizes(hidden=256, intermediate=128, num_experts=8, top_k=2, shared=64)


class Gathering:
    """What benchmarks call `Ranks`, on a pool's ranks."""

    def __init__(self, ranks):
        self.rank, self.world, self.device, self.group = ranks.rank, ranks.world_size, ranks.device, ranks.group

    def gather(self, value):
        values = [None] * self.world
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values


class Peer:
    """In place of torch's grouped products, whose small kernels are Triton's: one slot after the other, in float32."""

    def __init__(self, weights: ExpertWeights, topk: int):
        self.weights = weights

    def run(self, inputs):
        out = torch.zeros(inputs.x.shape, dtype=torch.float32)
        for token, slot in (inputs.ids_local >= 0).nonzero().tolist():
            expert = inputs.ids_local[token, slot]
            gate, up = (self.weights.w13_eNK[expert].float() @ inputs.x[token].float()).chunk(2)
            y = self.weights.w2_eKN[expert].float() @ (torch.nn.functional.silu(gate) * up)
            out[token] += inputs.weights[token, slot] * y
        return out.bfloat16()


def eager(call, ranks):
    """In place of a CUDA graph."""
    start = time.perf_counter()
    out = call()
    return (time.perf_counter() - start) * 1e6, out


def on_peer(fused, prepared, made):
    """In place of our experts that reduce, which are Triton's."""
    routing = prepared.routing
    inputs = SimpleNamespace(x=prepared.x, ids_local=routing.ids_Mt, weights=routing.weights_Mt)
    return lambda: Peer(made.raw_weights, routing.ids_Mt.shape[1]).run(inputs)


def bare_calls(ranks, name: str) -> list[dict]:
    """`layer.bare` over the stand-in of DeepEP."""
    manager = manager_on_cpu(name, ranks)
    on_cpu = type(manager)
    on_cpu.unavailable = classmethod(lambda cls: None)
    entries = {name: Entry(name=name, summary="", load=lambda: on_cpu)}
    sizes = dataclasses.replace(SMALL, hidden=2048 if name == "deepep_ll" else 256)
    with (
        mock.patch.dict(all2all.REGISTRY._entries, entries),
        mock.patch.multiple(layer, time_graph=eager, TorchGroupedMM=Peer, apply=on_peer),
    ):
        made = SyntheticLayer(
            ranks, sizes, all2all_name=name, experts_name="batched_loop" if name == "deepep_ll" else "loop",
            options=PrepareFinalizeOptions(max_tokens_per_rank=8), manager=manager,
        )  # fmt: skip
        x = made.tokens(5)
        routing = made.gate(x)
        error = made.error(x, routing, made.routed(x, routing, (5,) * ranks.world_size))
        cells = list(layer.bare(name, Gathering(ranks), made, 5))
        manager.destroy()
    return [{"error": error}, *cells]


@pytest.mark.parametrize("name", ["deepep_ht", "deepep_ll"])
def test_bare_deepep_runs_on_our_buffer_and_its_results_are_checked(name):
    first, second = run_ranks(bare_calls, 2, name)
    assert first[0]["error"] < 1e-2
    assert [cell["backend"] for cell in first[1:]] == [f"bare_{name}", "peer_torch"][: 2 if name == "deepep_ht" else 1]
    bare = first[1]
    assert bare["dispatch_us"] > 0 and bare["combine_us"] > 0 and bare["error"] < 1e-2
    assert [cell["us"] for cell in first[1:]] == [cell["us"] for cell in second[1:]], (
        "the slowest rank's, on every rank"
    )


def job(name: str, ranks, options):
    """Of `supervise`: each kind of end that a job can have."""
    if name == "unavailable":
        raise Unavailable("no such device")
    yield {"name": name, "pid": os.getpid()}
    if name == "fails" and ranks.rank == 1:
        raise ValueError("wrong output")
    if name == "dies" and ranks.rank == 1:
        os._exit(3)
    if name == "sleeps":
        time.sleep(300)


@pytest.mark.slow
def test_a_jobs_end_is_told_and_the_others_go_on():
    options = SimpleNamespace(world=2, cpu=True, limit_s=100, json=None)
    names = ["first", "unavailable", "second", "fails", "third", "dies", "fourth"]
    cells, failures = supervise(names, options, job)
    by_name = {cell["name"]: cell["pid"] for cell in cells}
    assert set(by_name) == set(names) - {"unavailable"}
    assert by_name["first"] == by_name["second"] == by_name["fails"], "an unavailable one costs no new processes"
    assert len({by_name[name] for name in ("first", "third", "fourth")}) == 3, (
        "a failure may have damaged the processes"
    )
    assert failures["unavailable"] == UNAVAILABLE + "no such device"
    assert "wrong output" in failures["fails"]
    assert "exit code 3" in failures["dies"] or "did not answer" in failures["dies"]
    assert set(failures) == {"unavailable", "fails", "dies"}


class Counting:
    """Options whose limit is read at the start and at each report."""

    world, cpu, json, times_read = 2, True, None, 0

    @property
    def limit_s(self) -> float:
        self.times_read += 1
        return 250


@pytest.mark.slow
def test_what_has_not_ended_in_time_is_left_out_with_its_results_so_far(monkeypatch):
    """The clock passes the limit when the sleeper's first result has come, however long the processes took to start."""
    options, real = Counting(), time.monotonic

    def clock() -> float:
        return real() + 1e6 * (options.times_read >= 4)  # the start, a result, that job's end, the sleeper's result

    monkeypatch.setattr("benchmarks.all2all.time", SimpleNamespace(monotonic=clock))
    cells, failures = supervise(["first", "sleeps", "never"], options, job, stop=real() + 1e5)
    assert [cell["name"] for cell in cells] == ["first", "sleeps"]
    assert failures["sleeps"] == f"{LEFT_OUT}, stopped in the middle"
    assert failures["never"] == f"{LEFT_OUT}, not begun"


def program(*words: str, timeout: float = 280) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.slow
def test_scaling_writes_one_json_and_a_drawing_of_it(tmp_path):
    done = program("benchmarks.scaling", "--ranks", "2", "--cpu", "--budget-s", "240", "--out", str(tmp_path))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    report = json.loads((tmp_path / "scaling_cpux2.json").read_text())
    assert report["combinations"] and all(cell["right"] for cell in report["combinations"])
    assert {"all_to_all", "all_to_all_fp8", "allgather_reducescatter"} <= {
        cell["backend"] for cell in report["all2all"]
    }
    layers = {(cell["backend"], cell["world"]) for cell in report["layers"]}
    assert {("replicas", 1), ("replicas", 2), ("all_to_all", 2), ("allgather_reducescatter", 2)} <= layers
    assert all(text.startswith((UNAVAILABLE, LEFT_OUT)) for text in report["failures"].values())
    assert "layers@2/nvlink" in report["failures"], "what does not run here is said"
    assert drawing.is_of(tmp_path / "scaling_cpux2.svg", *plot_scaling.picture(report))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "rows"), [("layer", "cells"), ("overlap", "cells")])
def test_the_other_programs_run_on_cpu_ranks(tmp_path, module, rows):
    done = program(f"benchmarks.{module}", "--cpu", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    report = json.loads((tmp_path / "out.json").read_text())
    assert any(cell["backend"] == "all_to_all" for cell in report[rows])


@pytest.mark.slow
def test_a_rank_over_published_layouts_computes_what_its_experts_alone_do(tmp_path):
    sizes = ("--cpu", "--scale", "16", "--tokens", "1", "9")
    done = program("benchmarks.stored_layers", *sizes, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert {cell["model"] for cell in cells} == {"gpt-oss-120b", "kimi-k2_ep8", "deepseek-v3_ep8"}
    assert all(cell["difference"] == 0 for cell in cells)


@pytest.mark.slow
def test_regions_on_made_up_gpus_are_measured_and_the_parts_of_a_call_add_up(tmp_path):
    sizes = (
        "--hidden",
        "64",
        "--intermediate",
        "32",
        "--experts",
        "8",
        "--top-k",
        "2",
        "--tokens",
        "32",
        "--small",
        "8",
    )
    more = ("--seconds", "1", "--repeats", "20", "--json", str(tmp_path / "out.json"))
    done = program("benchmarks.cuda_regions", "--cpu", *sizes, *more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    for way in ("cuda", "system"):
        rate, latency = row["service"][way]["throughput"], row["service"][way]["latency"]
        assert rate["steps"] > 0
        assert row["throughput_over_kernel"][way] == rate["tokens_per_s"] / row["kernel"]["tokens_per_s"]
        assert abs(sum(latency["mean_parts_us"].values()) - latency["mean_us"]) < 1
    assert row["service"]["cuda"]["latency"]["mean_parts_us"]["rank: copy out"] > 0


@pytest.mark.slow
def test_lanes_on_a_made_up_gpu_are_measured_beside_the_graphs(tmp_path):
    sizes = (
        "--hidden",
        "64",
        "--intermediate",
        "32",
        "--experts",
        "8",
        "--top-k",
        "2",
        "--calls",
        "5",
        "--repeats",
        "2",
    )
    done = program("benchmarks.gpu_lanes", "--cpu", *sizes, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result = json.loads((tmp_path / "out.json").read_text())
    for way in ("graph", "in process", "two processes", "one", "region"):
        assert set(result["us"][way]) == {"1", "16", "128"}
        assert min(result["us"][way].values()) > 0
    for tokens, us in result["us"]["two processes"].items():
        assert result["beyond_the_graph_us"]["two processes"][tokens] == pytest.approx(
            us - result["us"]["graph"][tokens], abs=0.2
        )


@pytest.mark.slow
def test_random_steps_of_a_backend():
    for backend, scheme in (("all_to_all", "none"), ("all_to_all_batched", "fp8_block")):
        done = program("tests.all2all.a2a_steps", "--backend", backend, "--scheme", scheme, "--steps", "150")
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        result = json.loads(done.stdout.splitlines()[-1])
        assert [each["steps"] for each in result["ranks"]] == [150, 150]
        assert all(each["samples"] > 0 for each in result["ranks"])


def layer_cell(backend: str, world: int, tokens: int, us: float) -> dict:
    return {"backend": backend, "world": world, "tokens": tokens, "us": us}


def test_scalings_conclusions_are_the_numbers():
    cells = [layer_cell("replicas", 1, t, us) for t, us in ((1, 90.0), (128, 400.0))]
    cells += [layer_cell("nvlink", 2, t, us) for t, us in ((1, 80.0), (128, 420.0))]
    cells += [layer_cell("nvlink", 8, t, us) for t, us in ((1, 100.0), (128, 500.0))]
    cells += [layer_cell("allgather_reducescatter", 8, 128, 1000.0), layer_cell("replicas", 8, 1, 95.0)]
    cells += [layer_cell("replicas", 8, 128, 1000.0)]
    dispatch = {"dispatch": {"us": 30.0, "gbps": 300.0}, "combine": {"us": 60.0, "gbps": 330.0}}
    a2a = [{"backend": "nvlink", "tokens": t, **dispatch} for t in (128, 4096)]
    a2a.append({"backend": "deepep_ht_bf16", "tokens": 4096, "dispatch": {"gbps": 999.0}, "combine": {"gbps": 999.0}})
    found = scaling.conclude({"layers": cells, "all2all": a2a}, 8)
    rows = {(row["backend"], row["world"], row["tokens"]): row for row in found["efficiency"]}
    assert rows["nvlink", 8, 128]["from_1"] == 400 / 500 and rows["nvlink", 8, 128]["from_2"] == 420 / 500
    assert rows["replicas", 1, 1]["from_1"] == 1.0 and rows["replicas", 1, 1]["from_2"] is None
    assert [row["best_over_replicas"] for row in found["against_replicas"]] == [100 / 95, 0.5]
    assert found["against_replicas"][1]["best_over_allgather"] == 0.5
    assert found["ep_wins_from_tokens_per_rank"] == 128
    anchors = {(row["what"], row["unit"]): (row["ours"], row["backend"]) for row in found["anchors"]}
    assert anchors["dispatch", "GB/s"] == (300.0, "nvlink"), "a library's bare call is not ours"
    assert anchors["combine", "us"] == (60.0, "nvlink")


def test_the_layers_ratios_are_ours_over_each_baseline():
    def cell(backend, us, **more):
        return {"backend": backend, "scheme": "none", "tokens": 128, "us": us, **more}

    cells = [cell("shared", 20.0), cell("gate", 5.0), cell("nvlink", 700.0), cell("deepep_ht", 1000.0),
             cell("deepep_ll", 800.0), cell("bare_deepep_ll", 80.0), cell("peer_torch", 900.0, chain_us=1200.0),
             cell("nvlink", 1.0) | {"tokens": 1}]  # fmt: skip
    row = layer.compare(cells, "none", 128)
    assert row["nvlink_over_better_deepep"] == 700 / 800
    stored = row["baselines"]["bare_deepep_ll + stored"]
    assert stored["experts"] == {"peer": "deepgemm_masked", "us": 724.4, "how": "stored"}
    assert stored["us"] == pytest.approx(80 + 724.4 + 20)
    assert row["ratios"]["nvlink"]["bare_deepep_ll + torch"] == pytest.approx(700 / (80 + 900 + 20))
    assert not any(name.startswith("bare_deepep_ht") for name in row["baselines"]), "what was not measured is left out"


def test_peers_times_between_and_beyond_the_stored_sizes():
    known = peer_times.best_peer("bf16", 1024)
    assert (known["peer"], known["us"], known["how"]) == ("deepgemm_masked", 724.4, "stored")
    between = peer_times.best_peer("fp8_block", 8)
    assert peer_times.best_peer("fp8_block", 4)["us"] < between["us"] < peer_times.best_peer("fp8_block", 16)["us"]
    beyond = peer_times.best_peer("bf16", 32768)
    assert beyond["us"] == pytest.approx(2678.0 + (2678.0 - 1085.0) / 12288 * 16384)
    assert "extrapolated" in beyond["how"]
    for dtype in ("bf16", "fp8_block"):
        rate = peer_times.best_rate(dtype, 32768)
        assert rate is not None and peer_times.best_rate(dtype, 1024) is None
        assert peer_times.floor_us(dtype, 32768) <= rate["us"] <= peer_times.best_peer(dtype, 32768)["us"]


def test_a_wrong_layer_is_no_measurement():
    ranks = SimpleNamespace(gather=lambda value: [value, float("nan")])
    layer_like = SimpleNamespace(error=lambda *_: 1e-3, sizes=SMALL)
    with pytest.raises(ValueError, match="wrong output"):
        ep_layer.check(ranks, layer_like, None, None, None)


@pytest.mark.parametrize("text", ["nvlink", "nvlnk:4096", "nvlink:many", "nvlink:128:int4"])
def test_overlaps_cases_are_checked(text):
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        overlap.Case.of(text)
    assert overlap.Case.of("nvlink:128:fp8") == overlap.Case(backend="nvlink", tokens=128, fp8=True)
