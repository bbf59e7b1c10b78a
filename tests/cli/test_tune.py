"""`epserve tune` fills the file of times that a start then reads, and says why when there is nothing to measure."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from epserve.cli.commands import app
from epserve.cli.tuning import tune
from epserve.client import AsyncClient
from epserve.config import parse_config
from epserve.errors import ConfigError
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.measured.selection import MeasuredExperts
from epserve.rank.setup import plan as rank_plan
from epserve.rank.step import StepPlan
from epserve.rank.worker import Worker
from epserve.service.run import running
from tests.support.checkpoints import LAYER, write


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write("mixtral", tmp_path_factory.mktemp("tune") / "model", dtype=torch.float32, num_experts=5)


def config_for(path, times, **engine):
    # A budget that a starved machine keeps: what it does not reach would not be measured.
    options = {
        "device": "cpu",
        "max_tokens_per_rank": 32,
        "experts_times": str(times),
        "experts_timing_s": 100,
        **engine,
    }
    return parse_config({"model": {"path": str(path)}, "engine": options})


def test_each_kind_of_rank_once_and_the_start_measures_nothing(checkpoint, tmp_path, monkeypatch):
    config = config_for(checkpoint, tmp_path / "times.json", ranks=2)
    tuned = list(tune(config))
    assert [(each.ranks, each.num_experts) for each in tuned] == [((1,), 2), ((0,), 3)]
    stored = json.loads((tmp_path / "times.json").read_text())
    assert len(stored) == 2 and all("local rows" in key for key in stored), "all_to_all sends needed rows only"
    for each in tuned:
        assert [choice.rows for choice in each.choices] == [1, 4, 16, 64]
        assert all({"grouped_mm", "loop"} <= set(choice.seconds) for choice in each.choices)
        assert all(choice.backend in choice.seconds for choice in each.choices)
    monkeypatch.setattr(MeasuredExperts, "_measure", lambda *_: pytest.fail("measured again"))
    assert [each.choices for each in tune(config)] == [each.choices for each in tuned]
    monkeypatch.undo()
    assert len(list(tune(config, again=True))) == 2


def test_a_start_reads_what_tune_wrote(checkpoint, tmp_path, monkeypatch):
    config = config_for(checkpoint, tmp_path / "times.json")
    (tuned,) = tune(config)
    monkeypatch.setattr(MeasuredExperts, "_measure", lambda *_: pytest.fail("measured again"))
    worker = Worker(config, RankContext())
    worker.load()
    worker.warm_up()
    assert worker.experts_choices() == tuned.choices
    assert worker.explain()[0].startswith("experts for about 1 rows (0.4 an expert): ")
    x = torch.randn((7, 64), generator=torch.Generator().manual_seed(1))
    plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=(7,))
    measured = worker.step(plan, x, None, None)
    named = Worker(config_for(checkpoint, tmp_path / "none.json", experts="loop"), RankContext())
    named.load()
    named.warm_up()
    assert named.experts_choices() == () and not (tmp_path / "none.json").exists(), "a name is not measured"
    torch.testing.assert_close(measured, named.step(plan, x, None, None), rtol=1e-4, atol=1e-5)


def test_ranks_that_share_experts_by_slices(checkpoint, tmp_path):
    config = config_for(checkpoint, tmp_path / "times.json", ranks=4, tensor_parallel=2)
    tuned = list(tune(config))
    assert [(each.ranks, each.num_experts) for each in tuned] == [((2, 3), 2), ((0, 1), 3)]
    (key,) = [key for key in json.loads((tmp_path / "times.json").read_text()) if "e3" in key]
    assert "N16" in key, "half of the intermediate size"


def test_batched_format(checkpoint, tmp_path):
    config = config_for(checkpoint, tmp_path / "times.json", ranks=2, all2all="all_to_all_batched")
    tuned = list(tune(config))
    assert [[choice.rows for choice in each.choices] for each in tuned] == [[64], [64]], (
        "32 tokens of each of two ranks"
    )
    assert all(set(each.choices[0].seconds) == {"batched_loop", "batched_mm"} for each in tuned)


def test_nothing_else_fits(tmp_path):
    path = write("mixtral", tmp_path / "model", dtype=torch.float32, intermediate=36)
    with pytest.raises(ConfigError, match="only 'loop' fits this layer on cpu and can run here"):
        list(tune(config_for(path, tmp_path / "times.json")))


def test_no_budget_and_no_file(checkpoint, tmp_path):
    worker = Worker(config_for(checkpoint, tmp_path / "times.json", experts_timing_s=0), RankContext())
    worker.load()
    worker.warm_up()
    assert worker.experts_choices() == () and not (tmp_path / "times.json").exists()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"experts": "loop"}, "'loop': a named backend is not measured"),
        ({"combine_order": "slot", "ranks": 2}, "slot promises the same bits"),
    ],
)
def test_nothing_to_measure(checkpoint, tmp_path, engine, message):
    with pytest.raises(ConfigError, match=message):
        list(tune(config_for(checkpoint, tmp_path / "times.json", **engine)))


def test_times_that_cannot_be_kept_are_an_error_before_anything_is_measured(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(Worker, "load", lambda self: pytest.fail("it measured"))
    for times in ("/proc/nope/times.json", "/proc/version", tmp_path):
        with pytest.raises(ConfigError, match=f"experts_times: {times} cannot be written.*--times"):
            next(tune(config_for(checkpoint, times)))


def test_the_command(checkpoint, tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text(f"model: {{path: {checkpoint}}}\nengine: {{ranks: 1, device: cpu, max_tokens_per_rank: 4}}\n")
    times = tmp_path / "times.json"
    done = CliRunner().invoke(
        app, ["tune", str(file), "--times", str(times), "--budget", "100"], env={"COLUMNS": "150"}
    )
    assert done.exit_code == 0, done.output
    assert "no tiles are tuned" in done.output and "on cpu there are backends to time, no tiles" in done.output
    assert "grouped_mm" in done.output and "loop" in done.output and str(times) in done.output.replace("\n", "")
    assert len(json.loads(times.read_text())) == 1


def test_explain_reads_what_is_kept_and_measures_nothing(checkpoint, tmp_path, monkeypatch):
    file, times = tmp_path / "service.yaml", tmp_path / "folder" / "times.json"
    file.write_text(f"model: {{path: {checkpoint}}}\nengine: {{ranks: 1, device: cpu, max_tokens_per_rank: 4}}\n")
    words = ["tune", str(file), "--times", str(times), "--explain"]
    none = CliRunner().invoke(app, words, env={"COLUMNS": "150"})
    assert none.exit_code == 0 and "no times are kept" in none.output and not times.parent.exists()
    assert isinstance(CliRunner().invoke(app, [*words, "--again"]).exception, ConfigError)
    CliRunner().invoke(app, [*words[:-1], "--budget", "100"])
    kept = times.read_text()
    monkeypatch.setattr(MeasuredExperts, "_measure", lambda *_: pytest.fail("measured"))
    done = CliRunner().invoke(app, words, env={"COLUMNS": "150"})
    assert done.exit_code == 0 and times.read_text() == kept
    assert "experts for about 1 rows" in done.output and "fastest: " in done.output
    assert "not local + vllm_cpu: " in done.output or "vllm_cpu, us" in done.output
    for seconds in json.loads(kept).popitem()[1].values():
        assert all(f"{value * 1e6:.0f}" in done.output for value in seconds.values())


def test_every_group_of_like_layers_is_timed(checkpoint, tmp_path, monkeypatch):
    """Two layers that are planned apart, as layers of different schemes are: each has kernels and times."""
    real = rank_plan.kinds_of
    monkeypatch.setattr(
        rank_plan, "kinds_of", lambda info, layers: [(kind, [layer]) for kind, of in real(info, layers) for layer in of]
    )
    config = config_for(checkpoint, tmp_path / "times.json")
    assert [len(each.choices) for each in tune(config)] == [3, 3]


async def test_the_status_of_a_service_says_what_each_rank_chose(checkpoint, tmp_path):
    config = config_for(checkpoint, tmp_path / "times.json", ranks=2)
    config = config.model_copy(update={"server": config.server.model_copy(update={"port": 0})})
    async with running(config) as (_, server), AsyncClient(f"127.0.0.1:{server.port}") as client:
        status = await client.status(timeout=60)
    assert "experts grouped_mm (each rank times it against loop)" in status.backends
    assert "experts for about 1 rows" in status.backends
    for rank in status.ranks:
        assert [choice.rows for choice in rank.experts_choices] == [1, 4, 16, 64]
        for choice in rank.experts_choices:
            assert set(choice.microseconds) == {"grouped_mm", "loop"} and choice.backend in choice.microseconds
            assert min(choice.microseconds.values()) > 0
    assert len(json.loads((tmp_path / "times.json").read_text())) == 2, "three experts on one rank, two on the other"
